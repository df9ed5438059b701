"""Directories of merged weights: what ranks write is what one process merges, and what transformers computes with."""

import copy
from pathlib import Path

import lightning as L
import pytest
import torch

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.callbacks import HuggingFaceExport
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, load_huggingface, save_huggingface
from lightning_d9d.peft import inject, merge
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.meshes.cases import MATRICES
from tests.meshes.equality import CONFIG, on_mesh
from tests.peft.test_inject import ALL, IDS, model_of, with_values


def loaded(directory: Path) -> Qwen3MoeForCausalLM:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json(directory))
    load_huggingface(model, directory)
    return model


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_directory_has_what_merge_makes(tmp_path, fused, dtype):
    model = with_values(model_of()).to(dtype)
    before = copy.deepcopy(model.state_dict())
    save_huggingface(model, tmp_path / "merged", fused_experts=fused)
    for name, value in model.state_dict().items():
        assert_bitwise_equal(name, value, before[name])
    other = loaded(tmp_path / "merged")
    merge(model)
    assert other.state_dict().keys() == model.state_dict().keys()
    for name, value in other.state_dict().items():
        assert_bitwise_equal(name, value, model.state_dict()[name].float())
    save_huggingface(model, tmp_path / "again", fused_experts=fused)
    for name, value in loaded(tmp_path / "again").state_dict().items():
        assert_bitwise_equal(name, value, other.state_dict()[name])


def test_transformers_computes_with_merged_weights(tmp_path):
    from transformers import Qwen3MoeForCausalLM as Reference

    model = with_values(model_of()).float()
    save_huggingface(model, tmp_path / "merged")
    reference = Reference.from_pretrained(tmp_path / "merged")
    assert_close_named("logits", model.eval()(IDS).logits, reference(IDS).logits, kind=Kind.OUTPUT)


def test_weights_of_the_base_go_below_adapters(tmp_path):
    torch.manual_seed(7)
    base = Qwen3MoeForCausalLM(CONFIG)
    save_huggingface(base, tmp_path / "base")
    model = Qwen3MoeForCausalLM(CONFIG)
    inject(model, ALL.__class__(rank=4))
    adapters = {name: value.clone() for name, value in model.state_dict().items() if "lora" in name}
    load_huggingface(model, tmp_path / "base")
    for name, value in model.state_dict().items():
        assert_bitwise_equal(name, value, adapters[name] if name in adapters else base.state_dict()[name])
    merge(model)
    with pytest.raises(ConfigError, match="call unmerge"):
        load_huggingface(model, tmp_path / "base")


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "mesh",
    [
        {"data_parallel_shard": 2},
        {"data_parallel_shard": 2, "expert_parallel": 2},
        {"tensor_parallel": 2},
        {"pipeline_parallel": 2},
    ],
    ids=str,
)
def test_ranks_write_what_one_process_merges(rank: RankContext, tmp_path: Path, mesh: dict[str, int]) -> None:
    folder = Path(rank.all_gather_object(str(tmp_path))[0])
    L.seed_everything(1, verbose=False)
    exports = [HuggingFaceExport(folder / "ranks")]
    seen = on_mesh(rank, D9DStrategy(mesh=MeshConfig(**mesh)), steps=2, peft=MATRICES, callbacks=exports)
    weights = {name: value for each in rank.all_gather_object(seen.weights[-1]) for name, value in each.items()}
    whole = Qwen3MoeForCausalLM(CONFIG).double()
    inject(whole, MATRICES)
    whole.load_state_dict(weights)
    merge(whole)
    actual = loaded(folder / "ranks").double().state_dict()
    assert actual.keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert_bitwise_equal(name, actual[name], value.float().double())
