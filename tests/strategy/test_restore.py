"""Checkpoints that are damaged, foreign or of another model end with a `StateError` that names them, on every rank."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_d9d import CheckpointConfig, D9DStrategy, StateError
from lightning_d9d.callbacks import InitialWeights
from lightning_d9d.peft import LoRA, inject
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, trainer


def saved(path: Path, devices: int = 1, device: str = "cpu") -> Path:
    run = trainer(D9DStrategy(), devices, device, max_steps=1)
    run.fit(Plain(), loader(16))
    run.save_checkpoint(path)
    return path


class Wider(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.net[3] = nn.Linear(16, 8)
        self.extra = nn.Linear(2, 2)


@pytest.mark.parametrize("damage", ["truncated", "text", "empty", "foreign"])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path: Path, damage: str) -> None:
    path = saved(tmp_path / "step.ckpt")
    if damage == "foreign":
        torch.save({"weights": torch.ones(2)}, path)
    else:
        content = path.read_bytes()
        path.write_bytes({"truncated": content[: len(content) // 2], "text": b"hello " * 100, "empty": b""}[damage])
    with pytest.raises(
        StateError, match=r"checkpoint '.*step.ckpt' (cannot be read \(.*; give another|has no 'state_d)"
    ):
        trainer(D9DStrategy()).fit(Plain(), loader(16), ckpt_path=path)


def test_a_checkpoint_of_another_model_names_what_differs(tmp_path: Path) -> None:
    path = saved(tmp_path / "step.ckpt")
    text = (
        r"step.ckpt' is of another model: net.3.weight has shape \[4, 16\] in the file, \[8, 16\] in the model; "
        r"net.3.bias .*; extra.weight is not in the file; and 1 more. Build the module as it was"
    )
    with pytest.raises(StateError, match=text):
        trainer(D9DStrategy()).fit(Wider(), loader(16), ckpt_path=path)


def test_damaged_optimizer_state_is_found_before_a_weight_has_changed(tmp_path: Path) -> None:
    def run() -> L.Trainer:
        return trainer(D9DStrategy(checkpoint=CheckpointConfig(mode="sharded")), max_epochs=1)

    first, module = run(), Plain("adamw")
    first.fit(module, loader(16))
    first.save_checkpoint(tmp_path / "step.ckpt")
    moment = first.optimizers[0].state[module.get_parameter("net.0.weight")]["exp_avg"].numpy().tobytes()
    [file] = (tmp_path / "step.ckpt").glob("data-*/*.distcp")
    content = bytearray(file.read_bytes())
    content[content.index(moment)] ^= 4
    file.write_bytes(content)
    other = Plain("adamw")
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(StateError, match=r"damaged at the place of optimizer_0\.net\.0\.weight\.exp_avg:"):
        run().fit(other, loader(16), ckpt_path=tmp_path / "step.ckpt")
    for name, value in other.state_dict().items():
        assert_bitwise_equal(name, value, before[name])
    run().validate(module, loader(16), ckpt_path=tmp_path / "step.ckpt", verbose=False)  # which needs no optimizer


class TwoGroups(Plain):
    def configure_optimizers(self) -> Any:
        first, *rest = self.parameters()
        return torch.optim.AdamW([{"params": [first]}, {"params": rest}])


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_another_optimizer_is_refused(tmp_path: Path, mode: Any) -> None:
    def run(module: L.LightningModule, path: Path | None = None) -> L.Trainer:
        run = trainer(D9DStrategy(checkpoint=CheckpointConfig(mode=mode)), max_epochs=2 if path else 1)
        run.fit(module, loader(16), ckpt_path=path)
        return run

    path = tmp_path / "step.ckpt"
    run(Plain("adamw")).save_checkpoint(path)
    text = (
        r"step.ckpt' cannot be loaded: a parameter .*, and SGD keeps momentum_buffer: another kind .* Return that one"
    )
    with pytest.raises(StateError, match=text):
        run(Plain("sgd"), path)
    if mode == "consolidated":
        with pytest.raises(StateError, match=r"step.ckpt' cannot be loaded: .*different number of parameter groups"):
            run(TwoGroups(), path)


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            LoRA(3, targets=["0"]),
            r"another rank: (model\.)?net\.0\.lora\.a has shape \[2, 8\] in the \w+, \[3, 8\] in the model;",
        ),
        (LoRA(2, targets=["3"]), r"other weights: (model\.)?net\.3\.lora\.a is not in the \w+;"),
    ],
)
def test_other_adapters_are_no_other_model(tmp_path: Path, mode: Any, other: LoRA, expected: str) -> None:
    def run(method: LoRA, path: Path | None = None) -> L.Trainer:
        module = Plain(batch_norm=False)
        inject(module, method)
        run = trainer(D9DStrategy(checkpoint=CheckpointConfig(mode=mode)), max_epochs=2 if path else 1)
        run.fit(module, loader(16), ckpt_path=path)
        return run

    run(LoRA(2, targets=["0"])).save_checkpoint(tmp_path / "step.ckpt")
    with pytest.raises(StateError, match=f"step.ckpt' .*has LoRA adapters of {expected}"):
        run(other, tmp_path / "step.ckpt")


@pytest.mark.ranks(2)
def test_all_ranks_refuse_it(rank: RankContext) -> None:
    path = saved(rank.tmp_dir / "step.ckpt", 2, str(rank.device))
    with pytest.raises(StateError, match="is of another model"):
        trainer(D9DStrategy(), 2, str(rank.device)).fit(Wider(), loader(16), ckpt_path=path)
    if rank.rank == 0:
        path.write_bytes(b"hello")
    rank.barrier()
    with pytest.raises(StateError, match="cannot be read"):
        trainer(D9DStrategy(), 2, str(rank.device)).fit(Plain(), loader(16), ckpt_path=path)


class Twins(Plain):
    """Two layers that are one if they are tied."""

    def __init__(self, tied: bool) -> None:
        super().__init__(batch_norm=False)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        if tied:
            self.two.weight = self.one.weight


@pytest.mark.parametrize("mode", ["consolidated", "sharded"])
def test_weights_that_were_not_tied_are_refused_by_a_tied_model(mode: Any, tmp_path: Path) -> None:
    """Lightning lets the last of them overwrite the others."""
    strategy = partial(D9DStrategy, checkpoint=CheckpointConfig(mode=mode))
    text = (
        "one.weight and two.weight are one parameter in this model, but have different values in the checkpoint: "
        "they were not tied"
    )
    for tied in (True, False):
        run = trainer(strategy(), max_epochs=1)
        run.fit(Twins(tied), loader(8))
        run.save_checkpoint(tmp_path / f"{tied}.ckpt")
    module = Twins(True)
    start = module.one.weight.detach().clone()
    for load in (
        lambda: trainer(strategy()).validate(module, loader(8), ckpt_path=tmp_path / "False.ckpt", verbose=False),
        lambda: trainer(strategy(), callbacks=[InitialWeights(tmp_path / "False.ckpt")]).fit(module, loader(8)),
    ):
        with pytest.raises(StateError, match=text):
            load()
        assert_bitwise_equal("one.weight", module.one.weight.detach(), start)
    trainer(strategy(), max_epochs=2).fit(Twins(True), loader(8), ckpt_path=tmp_path / "True.ckpt")
