import dataclasses
import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM


def write(tmp_path, **values):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "qwen3_moe", **values}))
    return path


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("vocab_size", 0),
        ("hidden_size", "wide"),
        ("hidden_size", 64.0),
        ("rope_theta", "1e6"),
        ("norm_topk_prob", "false"),
        ("num_hidden_layers", 0),
        ("rms_norm_eps", 0.0),
        ("num_key_value_heads", 3),
        ("head_dim", 33),
        ("num_experts", -1),
        ("shared_expert_intermediate_size", -1),
        ("shared_expert_intermediate_size", True),
        ("num_experts_per_tok", 9),
        ("num_experts_per_tok", 0),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", (4,)),
        ("vocab_splits", {"a": 100, "b": 100}),
        ("vocab_splits", {"a": 256, "b": 0}),
        ("vocab_splits", {}),
        ("vocab_splits", {"a.b": 256}),
        ("vocab_splits", {"keys": 256}),
        ("vocab_splits", {"weight": 256}),
    ],
)
def test_bad_value_is_named(field, value):
    with pytest.raises(ConfigError) as error:
        dataclasses.replace(Qwen3MoeConfig.preset("tiny"), **{field: value})
    assert f"{field}={value!r}" in str(error.value)


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    [("tiny", 0.0018, 0.0007), ("30b-a3b", 30.5, 3.4), ("235b-a22b", 235.1, 22.2)],
)
def test_preset_has_the_published_size(name, billions, active_billions):
    config = Qwen3MoeConfig.preset(name)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(dataclasses.replace(config, num_hidden_layers=min(config.num_hidden_layers, 4)))
    assert sum(parameter.numel() for parameter in model.parameters()) == model.config.num_parameters
    digits = 4 if name == "tiny" else 1
    assert round(config.num_parameters / 1e9, digits) == billions
    assert round(config.num_active_parameters / 1e9, digits) == active_billions


def test_unknown_preset_names_the_known_ones():
    with pytest.raises(ConfigError, match=r"'tiny', 'tiny-dense', '0\.6b', .*'30b-a3b', '235b-a22b'"):
        Qwen3MoeConfig.preset("7b")


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"attention_bias": True},
        {"mlp_only_layers": (1, 2), "decoder_sparse_step": 2},
        {"num_experts": 0},
        {"vocab_splits": {"a": 200, "b": 56}},
        {"shared_expert_intermediate_size": 40, "mlp_only_layers": (1,)},
    ],
    ids=str,
)
def test_number_of_parameters(changes):
    config = dataclasses.replace(Qwen3MoeConfig.preset("tiny"), **changes)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    assert sum(parameter.numel() for parameter in model.parameters()) == config.num_parameters


@pytest.mark.parametrize(("shared", "num_experts"), [(0, 8), (40, 8), (0, 0)])
@pytest.mark.parametrize("tied", [True, False])
def test_flops_are_those_that_run(tied, shared, num_experts):
    config = dataclasses.replace(
        Qwen3MoeConfig.preset("tiny"),
        tie_word_embeddings=tied,
        mlp_only_layers=(1,),
        num_experts=num_experts,
        num_experts_per_tok=8,
        shared_expert_intermediate_size=shared,
    )
    model, seq = Qwen3MoeForCausalLM(config), 32
    ids = torch.randint(config.vocab_size, (1, seq))
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    counted = sum(
        flops
        for name, flops in counter.get_flop_counts()["Global"].items()
        if "attention" not in str(name) and "grouped" not in str(name)
    )
    experts = 3 * config.hidden_size * config.moe_intermediate_size * config.num_experts * config.num_sparse_layers
    norms = config.hidden_size * (2 * config.num_hidden_layers + 1) + 2 * config.head_dim * config.num_hidden_layers
    attention = 6 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * seq
    assert config.flops_per_token(seq) == counted / seq + 6 * experts + 6 * norms + attention


def test_defaults_are_those_of_transformers():
    from transformers import Qwen3MoeConfig as Reference

    ours, theirs = Qwen3MoeConfig(), Reference()
    for field in dataclasses.fields(ours):
        if field.name in (
            "vocab_splits",
            "head_dim",
            "rope_theta",
            "shared_expert_intermediate_size",
        ):  # they have no field for these
            continue
        expected = getattr(theirs, field.name)
        assert getattr(ours, field.name) == (tuple(expected) if isinstance(expected, list) else expected), field.name
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]


def test_only_a_shared_expert_adds_a_key():
    config = Qwen3MoeConfig.preset("tiny")
    assert "shared_expert_intermediate_size" not in config.to_dict()
    config = dataclasses.replace(config, shared_expert_intermediate_size=40)
    assert Qwen3MoeConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize("version", [4, 5])
def test_reads_the_names_of_both_major_versions(tmp_path, version):
    common = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None}
    rope = (
        {"rope_theta": 5e5, "rope_scaling": None, "num_experts": 4}
        if version == 4
        else {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}, "num_local_experts": 4}
    )
    path = write(tmp_path, **common, **rope, num_experts_per_tok=2, mlp_only_layers=[0], use_cache=True)
    config = Qwen3MoeConfig.from_json(path)
    assert config == Qwen3MoeConfig.from_json(tmp_path)
    assert (config.rope_theta, config.num_experts, config.mlp_only_layers) == (5e5, 4, (0,))
    assert config.head_dim == 16  # hidden_size / num_attention_heads, where the file does not say
    assert config.num_hidden_layers == Qwen3MoeConfig().num_hidden_layers


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "qwen2"},
        {"model_type": None},
        {"hidden_act": "gelu"},
        {"use_sliding_window": True},
        {"attention_dropout": 0.1},
        {"output_router_logits": True},
        {"quantization_config": {"quant_method": "fp8"}},
        {"rope_scaling": {"type": "yarn", "factor": 4.0}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
        {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"layer_types": "sliding_attention"},
    ],
    ids=str,
)
def test_refuses_what_the_model_does_not_have(tmp_path, values):
    with pytest.raises(ConfigError, match="is not supported") as error:
        Qwen3MoeConfig.from_json(write(tmp_path, **values))
    assert "config.json" in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", '{"model_type": "qwen3_moe", "hidden_size": "wide"}', None], ids=str)
def test_unreadable_file_is_named(tmp_path, text):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        Qwen3MoeConfig.from_json(path)


def test_json_round_trip(tmp_path):
    config = dataclasses.replace(
        Qwen3MoeConfig.preset("tiny"), mlp_only_layers=(1,), eos_token_id=[1, 2], vocab_splits={"b": 200, "a": 56}
    )
    config.to_json(tmp_path / "config.json")
    read = Qwen3MoeConfig.from_json(tmp_path)
    assert read == config
    assert list(read.vocab_splits) == ["b", "a"]


def test_transformers_reads_what_we_write(tmp_path):
    from transformers import AutoConfig

    config = dataclasses.replace(Qwen3MoeConfig.preset("tiny"), rope_theta=123.0, eos_token_id=3)
    config.to_json(tmp_path / "config.json")
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.rope_parameters["rope_theta"] == 123.0
    for name in ("num_experts", "head_dim", "norm_topk_prob", "moe_intermediate_size", "eos_token_id"):
        assert getattr(theirs, name) == getattr(config, name), name
    theirs.save_pretrained(tmp_path / "theirs")
    assert Qwen3MoeConfig.from_json(tmp_path / "theirs") == config
