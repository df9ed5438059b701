"""Weights from and to directories that transformers writes and reads."""

import dataclasses
import errno
import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3ForCausalLM
from transformers import Qwen3MoeForCausalLM as Reference

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    load_huggingface,
    save_huggingface,
)
from lightning_d9d.modules import BalanceConfig
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind

BASE = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=40,
    moe_intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    mlp_only_layers=(1,),
    initializer_range=0.2,
    eos_token_id=[7, 9],
)
SHARED = {"shared_expert_intermediate_size": 12}
DENSE = {"num_experts": 0, "mlp_only_layers": ()}
DENSE_TIED = {**DENSE, "tie_word_embeddings": True}
VARIANTS = [
    *({}, {"tie_word_embeddings": True}, {"vocab_splits": {"text": 90, "special": 6}}, {"attention_bias": True}),
    *(DENSE, DENSE_TIED, {**DENSE, "attention_bias": True}),
]
IDS = torch.arange(40).view(2, 20)


def make_model(seed=0, config=BASE, **changes):
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(dataclasses.replace(config, **changes))


def assert_same_weights(actual, expected):
    expected = expected.state_dict()
    assert actual.state_dict().keys() == expected.keys()
    for name, tensor in actual.state_dict().items():
        assert_bitwise_equal(name, tensor, expected[name])


@pytest.fixture
def saved(tmp_path):
    """A directory in one file."""
    save_huggingface(make_model(), tmp_path / "saved")
    return tmp_path / "saved"


@pytest.fixture
def sharded(tmp_path):
    """A directory in several files."""
    save_huggingface(make_model(), tmp_path / "sharded", max_shard_bytes=20_000)
    return tmp_path / "sharded"


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_loads_what_we_save(tmp_path, changes, max_shard_bytes):
    model = make_model(**changes)
    directory = tmp_path / "new" / "saved"
    save_huggingface(model, directory, max_shard_bytes=max_shard_bytes)
    reference, info = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert type(reference) is (Qwen3ForCausalLM if model.config.num_experts == 0 else Reference)
    assert reference.config.architectures == [type(reference).__name__]
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert reference.dtype == torch.float32
    assert reference.generation_config.eos_token_id == [7, 9]
    assert_close_named("logits", model(IDS).logits, reference(IDS).logits, kind=Kind.OUTPUT)

    files = sorted(path.name for path in directory.glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 10**9)
    other = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json(directory))
    load_huggingface(other, directory)
    assert_same_weights(other, model)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, DENSE, DENSE_TIED], ids=str)
@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_we_load_what_transformers_saves(tmp_path, changes, max_shard_size):
    save_huggingface(make_model(**changes), tmp_path / "ours")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.normal_(std=0.3)
    reference.save_pretrained(tmp_path / "theirs", max_shard_size=max_shard_size)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json(tmp_path / "theirs"))
    load_huggingface(model, tmp_path / "theirs")
    assert_close_named("logits", model(IDS).logits, reference(IDS).logits, kind=Kind.OUTPUT)


def test_a_shared_expert_comes_and_goes_in_the_names_of_qwen2(tmp_path):
    model = make_model(**SHARED)
    save_huggingface(model, tmp_path / "saved")
    tensors = load_file(tmp_path / "saved" / "model.safetensors")
    assert tensors["model.layers.0.mlp.shared_expert.down_proj.weight"].shape == (32, 12)
    assert tensors["model.layers.0.mlp.shared_expert_gate.weight"].shape == (1, 32)
    other = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json(tmp_path / "saved"))
    load_huggingface(other, tmp_path / "saved")
    assert_same_weights(other, model)


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_of_experts_is_left_out_with_a_warning(tmp_path, caplog, value):
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(BASE, balance=BalanceConfig(bias_rate=0.1))
    model.model.layers["0"].mlp.gate.balance.bias[2] = value
    save_huggingface(model, tmp_path / "saved")
    assert ("bias of the choice of experts in 1 layers" in caplog.text) == (value != 0)
    other = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json(tmp_path / "saved"))
    load_huggingface(other, tmp_path / "saved")
    bias = model.state_dict().keys() - other.state_dict().keys()
    assert bias == {"model.layers.0.mlp.gate.balance.bias"}
    load_huggingface(model, tmp_path / "saved")
    assert model.model.layers["0"].mlp.gate.balance.bias[2] == value


def test_loads_stacked_experts(tmp_path):
    model = make_model()
    save_file(model.state_dict(), tmp_path / "model.safetensors")  # names and layout of the memory of transformers 5
    other = make_model(seed=1)
    load_huggingface(other, tmp_path)
    assert_same_weights(other, model)


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_transformers_loads_fused_experts(tmp_path, max_shard_bytes):
    model = make_model()
    save_huggingface(model, tmp_path / "fused", fused_experts=True, max_shard_bytes=max_shard_bytes)
    reference, info = Reference.from_pretrained(tmp_path / "fused", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert_close_named("logits", model(IDS).logits, reference(IDS).logits, kind=Kind.OUTPUT)
    other = make_model(seed=1)
    load_huggingface(other, tmp_path / "fused")
    assert_same_weights(other, model)


def test_split_vocabulary_loads_from_one_matrix(saved):
    splits = {"text": 90, "special": 6}
    split = make_model(seed=1, vocab_splits=splits)
    load_huggingface(split, saved)
    assert_close_named("logits", split(IDS).logits, make_model()(IDS).logits, kind=Kind.OUTPUT)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16], ids=str)
def test_dtype_of_the_files_and_of_the_model(tmp_path, dtype):
    model = make_model()
    save_huggingface(model, tmp_path / "saved", dtype=dtype)
    assert {tensor.dtype for tensor in load_file(tmp_path / "saved" / "model.safetensors").values()} == {dtype}
    name = str(dtype).removeprefix("torch.")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["torch_dtype"] == name
    other = make_model(seed=1)
    load_huggingface(other, tmp_path / "saved")
    assert_same_weights(other, model.to(dtype).float())


def test_published_layout_and_format(sharded):
    """What readers other than ours rely on: names, shapes, alignment and the metadata that transformers asks for."""
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    model = make_model()
    assert index["metadata"]["total_size"] == 4 * model.config.num_parameters
    for name, shape in {
        "model.embed_tokens.weight": [96, 32],
        "model.layers.0.mlp.gate.weight": [4, 32],
        "model.layers.0.mlp.experts.3.gate_proj.weight": [24, 32],
        "model.layers.0.mlp.experts.3.up_proj.weight": [24, 32],
        "model.layers.0.mlp.experts.3.down_proj.weight": [32, 24],
        "model.layers.1.mlp.gate_proj.weight": [40, 32],
    }.items():
        with safe_open(sharded / index["weight_map"][name], framework="pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert file.get_slice(name).get_shape() == shape, name
    for path in sharded.glob("*.safetensors"):
        assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0
        assert path.stat().st_size < 20_000 + 4096
    assert len(list(sharded.glob("*.safetensors"))) == len(set(index["weight_map"].values()))


def rewrite(directory, change):
    """Loads the tensors of the one file, lets `change` edit the dictionary, and saves them."""
    path = directory / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)


BAD_TENSORS = {
    "missing": (lambda t: t.pop("model.norm.weight"), "1 missing in the files: model.norm.weight"),
    "unexpected": (lambda t: t.update(extra=torch.zeros(2)), "1 unexpected in the files: extra"),
    "tied elsewhere": (lambda t: t.pop("lm_head.weight"), "tie_word_embeddings=True"),
    "more experts": (
        lambda t: t.update({"model.layers.0.mlp.experts.4.up_proj.weight": torch.zeros(24, 32)}),
        "1 unexpected in the files: model.layers.0.mlp.experts.4.up_proj.weight",
    ),
    "shape": (
        lambda t: t.update({"model.layers.0.mlp.experts.3.up_proj.weight": torch.zeros(24, 33)}),
        "model.layers.0.mlp.experts.3.up_proj.weight has shape (24, 33), but the model has (24, 32)",
    ),
    "stacked shape": (
        lambda t: [
            *(t.pop(f"model.layers.0.mlp.experts.{e}.down_proj.weight") for e in range(4)),
            t.update({"model.layers.0.mlp.experts.down_proj": torch.zeros(4, 24, 32)}),
        ],
        "model.layers.0.mlp.experts.down_proj has shape (4, 24, 32), but the model has (4, 32, 24)",
    ),
    "dtype": (
        lambda t: t.update({"model.norm.weight": torch.zeros(32).to(torch.float8_e4m3fn)}),
        "model.norm.weight is F8_E4M3, not one of",
    ),
}


@pytest.mark.parametrize(("change", "message"), BAD_TENSORS.values(), ids=BAD_TENSORS.keys())
def test_wrong_tensors_are_named_and_nothing_is_loaded(saved, change, message):
    rewrite(saved, change)
    model = make_model(seed=1)
    with pytest.raises(StateError) as error:
        load_huggingface(model, saved)
    assert message in str(error.value)
    assert str(saved) in str(error.value)
    assert_same_weights(model, make_model(seed=1))


def test_weights_of_a_mixture_are_not_those_of_a_dense_model(tmp_path):
    dense, mixture = make_model(seed=1, **DENSE), make_model(seed=1)
    save_huggingface(make_model(), tmp_path / "mixture")
    save_huggingface(make_model(**DENSE), tmp_path / "dense")
    with pytest.raises(
        StateError,
        match=r"3 missing in the files: model\.layers\.0\.mlp\.down_proj\.weight.*unexpected in the files: "
        r"model\.layers\.0\.mlp\.experts\.0.*have experts, the model none: set num_experts and "
        "model_type='qwen3_moe', or build",
    ):
        load_huggingface(dense, tmp_path / "mixture")
    with pytest.raises(
        StateError,
        match=r"missing in the files: model\.layers\.0\.mlp\.experts\.0.*3 unexpected in the files: "
        r"model\.layers\.0\.mlp\.down_proj.*the model has experts, the files none: set num_experts=0 and "
        "model_type='qwen3', or build",
    ):
        load_huggingface(mixture, tmp_path / "dense")
    assert_same_weights(dense, make_model(seed=1, **DENSE))
    assert_same_weights(mixture, make_model(seed=1))


def test_a_dense_model_has_no_fused_experts(tmp_path):
    with pytest.raises(ConfigError, match=r"fused_experts=True has no effect: .*leave fused_experts out"):
        save_huggingface(make_model(**DENSE), tmp_path / "saved", fused_experts=True)
    assert not list(tmp_path.iterdir())


def test_head_of_an_untied_checkpoint_is_not_dropped(saved):
    model = make_model(seed=1, tie_word_embeddings=True)
    with pytest.raises(StateError, match="tie_word_embeddings=False"):
        load_huggingface(model, saved)
    rewrite(saved, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_huggingface(model, saved)
    assert_same_weights(model, make_model(tie_word_embeddings=True))


def test_model_on_meta_is_told_to_materialize(saved):
    with torch.device("meta"):
        model = make_model()
    with pytest.raises(StateError, match="to_empty"):
        load_huggingface(model, saved)


def truncate(path):
    os.truncate(path, path.stat().st_size - 100)


@pytest.mark.parametrize(
    "damage",
    [truncate, os.remove, lambda path: path.write_bytes(b""), lambda path: path.write_bytes(b"\xff" * 200)],
    ids=["truncated", "removed", "empty", "garbage"],
)
def test_damaged_shard_is_named_and_nothing_is_loaded(sharded, damage):
    shard = sorted(sharded.glob("*.safetensors"))[-1]
    damage(shard)
    model = make_model(seed=1)
    with pytest.raises(StateError) as error:
        load_huggingface(model, sharded)
    assert str(shard) in str(error.value)
    assert_same_weights(model, make_model(seed=1))


def test_damaged_single_file_is_named(saved):
    truncate(saved / "model.safetensors")
    with pytest.raises(StateError, match=r"model\.safetensors: cannot be read"):
        load_huggingface(make_model(), saved)


@pytest.mark.parametrize(
    "file", ["/etc/passwd", "../other.safetensors", "a/../../b.safetensors", "..\\b", "C:\\b", "C:b"]
)
def test_index_cannot_leave_its_directory(sharded, file):
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(values))
    with pytest.raises(StateError, match="outside of the directory") as error:
        load_huggingface(make_model(), sharded)
    assert repr(file) in str(error.value)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_bad_index(sharded, text):
    (sharded / "model.safetensors.index.json").write_text(text)
    with pytest.raises(StateError, match=str(sharded)):
        load_huggingface(make_model(), sharded)


def test_index_that_promises_too_much(sharded):
    index = sharded / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    files = sorted(set(values["weight_map"].values()))
    values["weight_map"]["model.norm.weight"] = files[0]
    index.write_text(json.dumps(values))
    with pytest.raises(StateError, match=r"lacks model\.norm\.weight") as error:
        load_huggingface(make_model(), sharded)
    assert files[0] in str(error.value)


def test_directory_without_weights(tmp_path):
    with pytest.raises(StateError, match=r"neither model\.safetensors nor"):
        load_huggingface(make_model(), tmp_path)


@pytest.mark.parametrize("old", [False, True], ids=["new", "over an old one"])
def test_interrupted_save_leaves_what_was_there(tmp_path, monkeypatch, old):
    target = tmp_path / "saved"
    if old:
        save_huggingface(make_model(seed=1), target)
    before = sorted(tmp_path.rglob("*"))
    synced = []

    def interrupt(descriptor):
        synced.append(descriptor)
        if len(synced) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save_huggingface(make_model(), target, max_shard_bytes=20_000, overwrite=True)
    assert len(synced) == 3
    assert sorted(tmp_path.rglob("*")) == before
    if old:
        other = make_model()
        load_huggingface(other, target)
        assert_same_weights(other, make_model(seed=1))


def test_directory_is_replaced_only_when_asked(saved):
    (saved / "stale.safetensors").touch()
    with pytest.raises(StateError, match="overwrite=True"):
        save_huggingface(make_model(seed=1), saved)
    save_huggingface(make_model(seed=1), saved, overwrite=True)
    assert not (saved / "stale.safetensors").exists()
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]
    model = make_model()
    load_huggingface(model, saved)
    assert_same_weights(model, make_model(seed=1))
    (saved.parent / "file").touch()
    with pytest.raises(StateError, match="a file, which a directory cannot replace; choose another"):
        save_huggingface(model, saved.parent / "file", overwrite=True)


def test_dtype_that_no_checkpoint_has(tmp_path):
    with pytest.raises(ConfigError, match=r"dtype=torch\.int8"):
        save_huggingface(make_model(), tmp_path / "saved", dtype=torch.int8)
    assert not list(tmp_path.iterdir())


def test_what_is_no_part_of_a_model_is_refused(saved):
    with pytest.raises(ConfigError, match="a Linear without a Qwen3MoeConfig"):
        load_huggingface(nn.Linear(3, 3), saved)
    adapted = make_model()
    adapted.model.norm.scale = nn.Parameter(torch.ones(3))
    with pytest.raises(StateError, match=r"parameter model\.norm\.scale of shape \(3,\).*expects none there"):
        load_huggingface(adapted, saved)
    resized = make_model()
    resized.lm_head.weight = nn.Parameter(torch.ones(97, 32))
    with pytest.raises(StateError, match=r"lm_head\.weight of shape \(97, 32\).*expects \(96, 32\) there"):
        save_huggingface(resized, saved.parent / "new")


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StateError, match=r"saved to .*saved': .*No space left on device; free space"):
        save_huggingface(make_model(), tmp_path / "saved")
    assert not list(tmp_path.iterdir())
