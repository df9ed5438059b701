"""A damaged or hostile `config.json` ends with a `ConfigError` or `StateError`, soon and in little memory."""

from __future__ import annotations

import json
import os
import sys
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig

MAX_SECONDS = 2.0
MAX_BYTES = 200_000_000
GOOD = {**Qwen3MoeConfig.preset("tiny").to_dict(), "vocab_splits": {"text": 200, "image": 56}}
DENSE = {**Qwen3MoeConfig.preset("tiny-dense").to_dict(), "layer_types": ["full_attention"] * 4}


def read_config(path: Path) -> None:
    """The target of the fuzzer: reads a file and takes what the model is built from."""
    config = Qwen3MoeConfig.from_json(path)
    assert config.num_parameters > 0
    assert config.flops_per_token(16) > 0
    json.dumps(config.to_dict(), allow_nan=False)


def outcome(path: Path) -> str:
    """The text of the error, "" where there is none."""
    try:
        read_config(path)
    except (ConfigError, StateError) as error:
        return str(error)
    return ""


def assert_refused_or_read(path: Path) -> str:
    """The error's text, "" where the file is read; within the limits on time and memory."""
    begin = time.process_time()
    message = outcome(path)
    seconds = time.process_time() - begin
    tracemalloc.start()
    assert outcome(path) == message
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert seconds < MAX_SECONDS
    assert peak < MAX_BYTES
    assert len(message) < 2000
    return message


_NUMBERS = st.sampled_from(
    [-1, 0, 1, 2, 3, 2**31, 2**63, 10**9, 10**400, 0.5, 1e-320, 1e308, *map(float, ("inf", "nan"))]
)
_LEAVES = st.none() | st.booleans() | _NUMBERS | st.integers() | st.floats() | st.text(max_size=20)
_ANYTHING = st.recursive(
    _LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)
_CHANGES = st.dictionaries(
    st.sampled_from([*GOOD, "rope_scaling", "num_local_experts", "layer_types"]), _ANYTHING, max_size=3
)


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """A good file of which values are others, names are gone, or bytes are changed."""
    good = draw(st.sampled_from([GOOD, DENSE]))
    values: dict[str, Any] = {**good, **draw(_CHANGES)}
    for name in draw(st.sets(st.sampled_from(list(good)), max_size=2)):
        values.pop(name)
    content = bytearray(json.dumps(values).encode())
    for place in draw(st.lists(st.integers(0, len(content) - 1), max_size=2)):
        content[place] = draw(st.integers(0, 255))
    return bytes(content[: draw(st.sampled_from([None, None, None, len(content) // 2]))])


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(content=damaged())
def test_mutations_are_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "config.json"
    path.write_bytes(content)
    assert_refused_or_read(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("num_hidden_layers", "1000000000"),
        ("num_hidden_layers", "true"),
        ("num_hidden_layers", '"4"'),
        ("num_experts", "70000"),
        ("num_experts_per_tok", '"2"'),
        ("num_experts_per_tok", "true"),
        ("hidden_size", "-8"),
        ("vocab_size", "1" + "0" * 4000),
        ("rope_theta", "Infinity"),
        ("rope_theta", "NaN"),
        ("rope_theta", "1" + "0" * 400),
        ("rope_theta", "true"),
        ("num_key_value_heads", "3"),
        ("mlp_only_layers", "1"),
        ("mlp_only_layers", '"12"'),
        ("mlp_only_layers", "[true]"),
        ("mlp_only_layers", "[" + "0," * 900_000 + "0]"),
        ("rope_parameters", "[1]"),
        ("vocab_splits", "[1]"),
        ("vocab_splits", '{"a": "b"}'),
        ("eos_token_id", '{"a": 1}'),
        ("hidden_size", '"' + "x" * 1_900_000 + '"'),
        ("hidden_size", "[" * 500 + "]" * 500),
    ],
)
def test_the_field_is_named(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / "config.json"
    values = {each: value for each, value in GOOD.items() if each not in (name, "rope_parameters", "vocab_splits")}
    path.write_text(json.dumps(values)[:-1] + f', "{name}": {text}}}')
    message = assert_refused_or_read(path)
    assert name in message
    assert str(path) in message


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 1_000_000,
        b"[]",
        b'{"hidden_size": ' + b"9" * 1_900_000 + b"}",
        b"\xff",
        json.dumps({**GOOD, "hidden_size": 2**24, "moe_intermediate_size": 2**24, "num_hidden_layers": 4000}).encode(),
    ],
    ids=["deep", "a list", "digits", "no text", "too large"],
)
def test_the_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(content)
    assert str(path) in assert_refused_or_read(path)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "not a regular file" in assert_refused_or_read(tmp_path)


def test_a_link_out_of_the_directory_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(json.dumps(GOOD))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").symlink_to("../secret")
    assert "a link out" in assert_refused_or_read(tmp_path / "model")


@pytest.mark.skipif(sys.platform != "linux", reason="names of files on Linux")
def test_a_terminal_does_not_obey_what_a_file_says(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b]0;title\x07b" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**GOOD, "model_type": "\x1b[2J\u202e"}))
    message = assert_refused_or_read(path)
    assert message.isprintable()
    assert r"a\x1b]0;title\x07b" in message
