"""Mistakes on several ranks: each rank raises the error, none waits for another, and nothing is changed."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch.distributed.fsdp import fully_shard

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, StateError
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from lightning_d9d.parallel import ParallelConfig, compile_blocks
from lightning_d9d.peft import (
    FullTune,
    LoRA,
    PeftMethod,
    Stack,
    inject,
    is_adapted,
    load_adapter,
    merge,
    save_adapter,
    unmerge,
)
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.meshes.cases import LAST_LAYER, LAYERS
from tests.meshes.equality import CONFIG, on_mesh, whole
from tests.peft.test_files import edit, with_values

PIPELINE, SHARDS, EXPERTS = (
    {"pipeline_parallel": 2},
    {"data_parallel_shard": 2},
    {"data_parallel_shard": 2, "expert_parallel": 2},
)
LAST = "base_model.model.model.layers.3"
"""The layer of the last stage: the rank with the first one knows nothing of it."""


def error_on_all(rank: RankContext, kind: type[Exception], action: Callable[[], object]) -> str:
    """Return the message of the error that an action raises on each rank, which is to be the same."""
    with pytest.raises(kind) as caught:
        action()
    messages = rank.all_gather_object(str(caught.value))
    assert len({*messages}) == 1, messages
    return messages[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [PIPELINE, SHARDS], ids=str)
@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (
            LoRA(targets=["qproj"]),
            r"'qproj'\]\) matches no name .*; the nearest are model\.layers\.0\.self_attn\.q_proj",
        ),
        (
            LoRA(rank=9, targets=[r"layers\.3\.self_attn"]),
            r"rank 9 is larger than a dim of model\.layers\.3\..*\[8, 16\].*at most 8",
        ),
        (LoRA(rank=4, rank_of_experts=9), r"LoRA\.rank_of_experts: rank 9 .*gate_up_proj.*at most 8"),
    ],
    ids=["no name", "rank", "rank of experts"],
)
def test_methods_that_do_not_fit(rank: RankContext, mesh: dict[str, int], method: PeftMethod, expected: str) -> None:
    def fit() -> None:
        on_mesh(rank, D9DStrategy(mesh=MeshConfig(**mesh)), steps=1, peft=method)

    assert re.search(expected, error_on_all(rank, ConfigError, fit), re.DOTALL)


@pytest.mark.ranks(2)
def test_targets_in_compiled_blocks(rank: RankContext) -> None:
    model = Qwen3MoeForCausalLM(CONFIG)
    compile_blocks(model.model, ParallelConfig(compile=True))
    message = error_on_all(rank, ConfigError, lambda: inject(model, LAYERS))
    assert "model.layers.0.self_attn.q_proj is in a" in message
    assert "compiled, recomputed or sharded, which would not see the adapter; call inject first" in message
    assert not is_adapted(model)


class Refusing(L.Callback):
    """Does something at the start of a fit that each rank must refuse, and compares all parameters before and after.

    Args:
        rank: This one.
        kind: Of the error.
        action: Gets the module.
    """

    def __init__(self, rank: RankContext, kind: type[Exception], action: Callable[[Any], object]) -> None:
        self.rank, self.kind, self.action = rank, kind, action
        self.message = ""

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        before = {name: whole(each) for name, each in pl_module.named_parameters()}
        self.message = error_on_all(self.rank, self.kind, lambda: self.action(pl_module))
        for name, each in pl_module.named_parameters():
            assert_bitwise_equal(name, whole(each), before[name])


def refused(
    rank: RankContext,
    mesh: dict[str, int],
    kind: type[Exception],
    action: Callable[[Any], object],
    peft: PeftMethod = LAYERS,
) -> str:
    callback = Refusing(rank, kind, action)
    on_mesh(rank, D9DStrategy(mesh=MeshConfig(**mesh)), steps=1, peft=peft, callbacks=[callback])
    return callback.message


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{LAST}.self_attn.z_proj.lora_A.weight"] = tensors.pop(f"{LAST}.self_attn.q_proj.lora_A.weight")


DAMAGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], object], tuple[str, ...]]] = {
    "shape": (
        lambda t: t.update({f"{LAST}.self_attn.q_proj.lora_A.weight": torch.zeros(4, 17)}),
        (f"{LAST}.self_attn.q_proj.lora_A.weight is", "[4, 17]", "[4, 16]", "give the adapter of this base model"),
    ),
    "shape of an expert": (
        lambda t: t.update({f"{LAST}.mlp.experts.7.down_proj.lora_B.weight": torch.zeros(15, 2)}),
        (f"{LAST}.mlp.experts.7.down_proj.lora_B.weight is", "[15, 2]", "[16, 2]"),
    ),
    "name": (rename, ("_proj.lora_", "lacks its other matrix")),
    "unknown": (
        lambda t: t.update({"model.layers.3.odd": torch.zeros(1)}),
        ("model.layers.3.odd is not a tensor of a low-rank adapter; save the adapter without it",),
    ),
}


def saved(rank: RankContext, method: PeftMethod = LAYERS) -> Path:
    """Adapters of the small model in files. Collective."""
    model = Qwen3MoeForCausalLM(CONFIG)
    inject(model, method)
    save_adapter(with_values(model), rank.tmp_dir / "adapter")
    return rank.tmp_dir / "adapter"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [PIPELINE, EXPERTS], ids=str)
@pytest.mark.parametrize("name", DAMAGES)
def test_files_of_another_base(rank: RankContext, mesh: dict[str, int], name: str) -> None:
    damage, expected = DAMAGES[name]
    folder = saved(rank)
    if rank.rank == 0:
        edit(folder, damage)
    rank.barrier()
    message = refused(rank, mesh, StateError, lambda module: load_adapter(module, folder))
    assert "adapters cannot be loaded from" in message
    for part in expected:
        assert part in message


@pytest.mark.ranks(2)
def test_files_of_other_adapters(rank: RankContext) -> None:
    folder = saved(rank, LAST_LAYER)
    message = refused(rank, PIPELINE, StateError, lambda module: load_adapter(module, folder))
    assert "lacks an adapter of model.layers.0.mlp.experts.down_proj" in message


@pytest.mark.ranks(2)
def test_what_another_stage_trains_whole_is_not_lost(rank: RankContext) -> None:
    """The last stage of a pipeline has adapters, and the first one an embedding that is trained."""
    method = Stack([LAST_LAYER, FullTune("embed_tokens")])
    message = refused(rank, PIPELINE, ConfigError, lambda module: save_adapter(module, rank.tmp_dir / "none"), method)
    assert "model.embed_tokens.weight is trained whole, which a file of adapters cannot contain;" in message
    assert not (rank.tmp_dir / "none").exists()


@pytest.mark.ranks(2)
def test_files_that_one_rank_lacks(rank: RankContext) -> None:
    folder = saved(rank)
    shutil.copytree(folder, (own := rank.tmp_dir / str(rank.rank)) / "adapter")
    if rank.rank == 1:
        (own / "adapter" / "adapter_config.json").unlink()
    with contextlib.chdir(own):
        message = refused(rank, PIPELINE, StateError, lambda module: load_adapter(module, "adapter"))
    assert "rank 1: " in message
    assert "adapter_config.json" in message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [SHARDS, EXPERTS, {"tensor_parallel": 2}], ids=str)
def test_merging_sharded_weights(rank: RankContext, mesh: dict[str, int]) -> None:
    """All ranks ask for it, then the last one alone, which waits for nobody."""
    message = refused(rank, mesh, ConfigError, merge)
    assert re.search(r"merge: .*layers\.0\..*_proj.* is sharded over ranks\. save_huggingface merges", message)

    module = torch.nn.Sequential(torch.nn.Linear(4, 4))
    inject(module, LoRA(rank=2, targets=["0"]))
    fully_shard(module)
    if rank.rank == 1:
        with pytest.raises(ConfigError, match=r"0\.weight is sharded over ranks\. save_huggingface merges"):
            merge(module)


class Merging(L.Callback):
    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        before = {name: each.detach().clone() for name, each in pl_module.named_parameters()}
        merge(pl_module.eval())
        self.has_adapters = any("lora" in name for name in before)
        self.changed = [name for name, each in pl_module.named_parameters() if not torch.equal(each, before[name])]
        unmerge(pl_module)


@pytest.mark.ranks(2)
def test_each_stage_is_merged_by_its_rank(rank: RankContext) -> None:
    """A stage without adapters is merged, too: its rank must not fail alone."""
    callback = Merging()
    mesh = MeshConfig(pipeline_parallel=2)
    on_mesh(rank, D9DStrategy(mesh=mesh), steps=2, peft=LAST_LAYER, callbacks=[callback])
    assert callback.has_adapters == bool(callback.changed) == (rank.rank == 1)
    assert all("layers.3" in name and "lora" not in name for name in callback.changed)
