"""Checkpoints of trained parameters alone: small, and a run that goes on from one is the run itself."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_d9d import CheckpointConfig, D9DStrategy, MeshConfig
from lightning_d9d.checkpoint import MODEL, is_directory, open_directory
from lightning_d9d.errors import StateError
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoePretraining, save_huggingface
from lightning_d9d.peft import LoRA, Stack, inject
from lightning_d9d.strategy.trained_only import BASE
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.meshes.cases import LAYERS
from tests.meshes.equality import CONFIG
from tests.peft.test_training import DATA, NET
from tests.strategy.plain import Plain, loader, trainer
from tests.test_convert import refused

MODES = ["sharded", "consolidated"]


def fit(folder: Path, mode: str, mesh: dict[str, int], seed: int = 1, ckpt: Path | None = None, **options: Any) -> Any:
    """Six steps; a checkpoint after the third."""
    L.seed_everything(seed, verbose=False)
    options = {"peft": LAYERS, **options}
    module = Qwen3MoePretraining(CONFIG, learning_rate=0.01, warmup_steps=0, **options)
    config = CheckpointConfig(mode=mode, trainable_only=True)  # type: ignore[arg-type]
    run = trainer(
        D9DStrategy(mesh=MeshConfig(**mesh), checkpoint=config),
        MeshConfig(**mesh).world_size,
        max_epochs=3,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)] if ckpt is None else [],
        enable_checkpointing=ckpt is None,
        use_distributed_sampler=False,
    )
    run.fit(module, DataLoader(DATA, batch_size=2), ckpt_path=ckpt)
    return module


def names_in(path: Path) -> set[str]:
    if is_directory(path):
        return {name.removeprefix(MODEL) for name in open_directory(path, alone=True).tensors if name.startswith(MODEL)}
    return {*torch.load(path, weights_only=True)["state_dict"]}


def base_in(path: Path) -> Any:
    values = open_directory(path, alone=True).values if is_directory(path) else torch.load(path, weights_only=True)
    return values[BASE]


@pytest.mark.parametrize("mode", MODES)
def test_a_run_goes_on_exactly(tmp_path: Path, mode: str) -> None:
    straight = fit(tmp_path, mode, {})
    saved = tmp_path / "step=3.ckpt"
    parameters = dict(straight.named_parameters())
    kept = {name for name in names_in(saved) if not name.startswith(("val_", "test_"))}
    assert kept == {name.split(".", 2)[2] for name, each in parameters.items() if each.requires_grad}
    assert base_in(saved) == {"pretrained": None, "seed": 1}
    resumed = fit(tmp_path, mode, {}, ckpt=saved)
    for name, value in straight.state_dict().items():
        assert_bitwise_equal(name, resumed.state_dict()[name], value)
    torch.manual_seed(1)
    alone = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "step=6.ckpt")
    for name, value in straight.state_dict().items():
        assert_bitwise_equal(name, alone.state_dict()[name], value)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "mode"),
    [
        ({"data_parallel_shard": 2}, "sharded"),
        pytest.param({"data_parallel_shard": 2}, "consolidated", marks=pytest.mark.meshes),
        pytest.param({"pipeline_parallel": 2}, "sharded", marks=pytest.mark.meshes),
        ({"pipeline_parallel": 2}, "consolidated"),
    ],
    ids=str,
)
def test_ranks_go_on_exactly(rank: RankContext, tmp_path: Path, mode: str, mesh: dict[str, int]) -> None:
    folder = Path(rank.all_gather_object(str(tmp_path))[0])
    straight = fit(folder, mode, mesh)
    resumed = fit(folder, mode, mesh, ckpt=folder / "step=3.ckpt")
    for name, value in straight.state_dict().items():
        assert_bitwise_equal(name, resumed.state_dict()[name], value)
    assert not any(name.endswith("q_proj.weight") for name in names_in(folder / "step=3.ckpt"))


@pytest.mark.parametrize("mode", MODES)
def test_another_base_is_refused(tmp_path: Path, mode: str, monkeypatch: Any, capsys: Any) -> None:
    fit(tmp_path, mode, {})
    saved = tmp_path / "step=3.ckpt"
    with pytest.raises(StateError, match=r"weights of seed 1, but this run has seed 2. Set --seed_everything 1, or"):
        fit(tmp_path, mode, {}, seed=2, ckpt=saved)
    torch.manual_seed(2)
    with pytest.raises(StateError, match="initial weights of seed 1"):
        Qwen3MoePretraining.load_from_checkpoint(saved)
    assert "has only trained parameters" in refused(monkeypatch, capsys, saved, tmp_path / "merged")

    torch.manual_seed(5)
    save_huggingface(Qwen3MoeForCausalLM(CONFIG), tmp_path / "base")
    with pytest.raises(StateError, match="on initial weights; leave out pretrained of the model"):
        fit(tmp_path, mode, {}, ckpt=saved, pretrained=str(tmp_path / "base"))
    straight = fit(tmp_path / "second", mode, {}, pretrained=str(tmp_path / "base"))
    saved = tmp_path / "second" / "step=3.ckpt"
    with pytest.raises(StateError, match=r"on the base .*; set --model\.pretrained .*/base, or "):
        fit(tmp_path, mode, {}, ckpt=saved)
    alone = Qwen3MoePretraining.load_from_checkpoint(saved.with_name("step=6.ckpt"), pretrained=str(tmp_path / "base"))
    for name, value in straight.state_dict().items():
        assert_bitwise_equal(name, alone.state_dict()[name], value)
    # The base says all, whatever the seed.
    resumed = fit(tmp_path, mode, {}, seed=7, ckpt=saved, pretrained=str(tmp_path / "base"))
    for name, value in straight.state_dict().items():
        assert_bitwise_equal(name, resumed.state_dict()[name], value)


@pytest.mark.parametrize("mode", MODES)
def test_another_scale_of_adapters_is_refused(tmp_path: Path, mode: str) -> None:
    """The matrices alone would fit, and compute otherwise."""
    fit(tmp_path, mode, {})
    saved = tmp_path / "step=3.ckpt"
    for change in ({"alpha": 12.0}, {"rslora": True}):
        other = dataclasses.replace(LAYERS, **change)
        torch.manual_seed(1)
        with pytest.raises(StateError, match=r"q_proj has scale 1.5, but that of the model has .*set LoRA's alpha and"):
            Qwen3MoePretraining.load_from_checkpoint(saved, peft=other)
        with pytest.raises(StateError, match=r"q_proj has scale 1.5, but that of the model has .*set LoRA's alpha and"):
            fit(tmp_path, mode, {}, ckpt=saved, peft=other)
    torch.manual_seed(1)
    equal = dataclasses.replace(LAYERS, dropout=0.5)
    assert Qwen3MoePretraining.load_from_checkpoint(saved, peft=equal).peft == equal


@pytest.mark.ranks(2)
def test_another_scale_in_one_stage_is_refused_on_both_ranks(rank: RankContext, tmp_path: Path) -> None:
    folder, mesh = Path(rank.all_gather_object(str(tmp_path))[0]), {"pipeline_parallel": 2}
    first, last = LoRA(4, 6.0, [r"layers\.0\..*q_proj"]), LoRA(4, 6.0, [r"layers\.3\..*q_proj"])
    fit(folder, "sharded", mesh, peft=Stack([first, last]))
    other = Stack([first, dataclasses.replace(last, alpha=12.0)])
    with pytest.raises(StateError, match=r"layers\.3\.self_attn\.q_proj has scale 1.5, but that of the model has 3;"):
        fit(folder, "sharded", mesh, ckpt=folder / "step=3.ckpt", peft=other)


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_module_with_another_scale_is_refused(tmp_path: Path, mode: str) -> None:
    """The module itself saves no method."""
    for alpha in (4.0, 6.0):
        module = Plain("adamw", batch_norm=False)
        inject(module, dataclasses.replace(NET, alpha=alpha))
        run = trainer(D9DStrategy(checkpoint=CheckpointConfig(mode=mode)), max_epochs=1)  # type: ignore[arg-type]
        if alpha == 4.0:
            run.fit(module, loader(8))
            run.save_checkpoint(tmp_path / "saved.ckpt")
        else:
            with pytest.raises(StateError, match=r"has scale 2, but that of the model has 3; set LoRA's alpha and"):
                run.fit(module, loader(8), ckpt_path=tmp_path / "saved.ckpt")


@pytest.mark.parametrize("mode", MODES)
def test_a_plain_module(tmp_path: Path, mode: str) -> None:
    states = []
    for ckpt in (None, tmp_path / "saved.ckpt"):
        L.seed_everything(1, verbose=False)
        module = Plain("adamw", batch_norm=False)
        inject(module, NET)
        config = CheckpointConfig(mode=mode, trainable_only=True)  # type: ignore[arg-type]
        run = trainer(D9DStrategy(checkpoint=config), max_epochs=2 if ckpt else 1)
        run.fit(module, loader(8), ckpt_path=ckpt)
        if ckpt is None:
            run.save_checkpoint(tmp_path / "saved.ckpt")
            run.fit_loop.max_epochs = 2
            run.fit(module, loader(8), ckpt_path=tmp_path / "saved.ckpt")
        states.append(module.state_dict())
    assert all("lora" in name for name in names_in(tmp_path / "saved.ckpt"))
    for name, value in states[0].items():
        assert_bitwise_equal(name, states[1][name], value)
