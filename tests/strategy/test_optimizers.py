"""Optimizers and schedules as settings of a D9DModule: groups, steps of the run, what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.cli import ReduceLROnPlateau
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Rprop
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR
from torch.utils.data import DataLoader

from lightning_d9d import D9DModule, D9DStrategy, StageInfo, StageInputs
from lightning_d9d.errors import ConfigError
from lightning_d9d.optim import OptimizerSettings, ParameterGroup, Phase, PiecewiseLR
from lightning_d9d.optim.settings import NamedParameters
from tests.harness.ranks import RankContext
from tests.strategy.staged import Staged, staged_rows

NUM_ROWS = 10
FALLING = partial(PiecewiseLR, phases=[Phase(0.0)], initial=1.0)
"""A schedule that falls linearly to 0 over the whole run, so the learning rate tells how long the run is."""
SGD_FALLING: dict[str, Any] = {"optimizer": partial(SGD, lr=1e-3), "lr_scheduler": FALLING}


class Embedded(D9DModule):
    """An embedding, a norm and a head; its optimizer is a setting."""

    def __init__(self, rows: int = NUM_ROWS, stop: tuple[int, Path] | None = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.rows, self.stop = rows, stop
        self.rates: list[float] = []

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return nn.Sequential(nn.Embedding(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        return StageInputs(first={"input": microbatch["x"]})

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> Tensor:
        return output.square().mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.rates.append(optimizer.param_groups[0]["lr"])

    def on_train_batch_end(self, *_: Any) -> None:
        if self.stop is not None and self.global_step == self.stop[0] and not self.trainer.should_stop:
            self.trainer.save_checkpoint(self.stop[1])
            self.trainer.should_stop = True

    def train_dataloader(self) -> DataLoader:
        return DataLoader([{"x": torch.tensor(index % 4)} for index in range(self.rows)])  # type: ignore[arg-type]


def trainer_of(**options: Any) -> L.Trainer:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "accelerator": "cpu", "strategy": D9DStrategy()}
    return L.Trainer(**{**quiet, **options})


def groups_of(module: Embedded, **options: Any) -> list[dict[str, Any]]:
    """The groups of a module that has been fitted, with names in place of parameters."""
    trainer = trainer_of(max_steps=1, **options)
    trainer.fit(module)
    names = {parameter: name.split(".", 2)[2] for name, parameter in module.named_parameters()}
    return [
        {**group, "params": [names[each] for each in group["params"]]} for group in trainer.optimizers[0].param_groups
    ]


@pytest.mark.parametrize("epochs", [1, 2, 3])
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("resumes", [False, True])
def test_a_schedule_knows_the_steps_of_the_run(epochs: int, accumulate: int, resumes: bool, tmp_path: Path) -> None:
    """The last window of an epoch is short with accumulation. A run resumes inside of its last epoch."""
    steps = epochs * -(-NUM_ROWS // accumulate)
    expected = [1e-3 * (1 - step / steps) for step in range(steps)]
    options: dict[str, Any] = {"max_epochs": epochs, "accumulate_grad_batches": accumulate}
    rates, path = list[float](), None
    if resumes:
        path = tmp_path / "stopped.ckpt"
        first = Embedded(stop=(steps - 1, path), **SGD_FALLING)
        trainer_of(**options).fit(first)
        rates = first.rates
        assert rates == pytest.approx(expected[:-1])
    module, trainer = Embedded(**SGD_FALLING), trainer_of(**options)
    trainer.fit(module, ckpt_path=path)
    assert rates + module.rates == pytest.approx(expected)
    assert trainer.global_step == steps


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"max_steps": 7}, 7),
        ({"max_steps": 7, "max_epochs": 1, "accumulate_grad_batches": 3}, 4),
        ({"max_steps": 3, "max_epochs": 1, "accumulate_grad_batches": 3}, 3),
        ({"max_epochs": 2, "limit_train_batches": 3}, 6),
        ({"max_epochs": 3, "callbacks": [GradientAccumulationScheduler({0: 1, 1: 4})]}, 10 + 3 + 3),
    ],
    ids=str,
)
def test_other_limits_of_a_run(options: dict[str, Any], steps: int) -> None:
    module, trainer = Embedded(**SGD_FALLING), trainer_of(**options)
    trainer.fit(module)
    assert module.rates == pytest.approx([1e-3 * (1 - step / steps) for step in range(steps)])


def test_other_strategies_know_the_steps_too() -> None:
    module = Embedded(**SGD_FALLING)
    trainer_of(max_epochs=1, strategy="auto").fit(module)
    assert module.rates == pytest.approx([1e-3 * (1 - step / NUM_ROWS) for step in range(NUM_ROWS)])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self) -> Any:
        return iter([{"x": torch.tensor(1)}] * 3)


def test_data_of_unknown_length_need_max_steps() -> None:
    loader = DataLoader(Stream())
    module = Embedded(**SGD_FALLING)
    trainer_of(max_steps=3, max_epochs=1).fit(module, loader)
    assert module.rates == pytest.approx([1e-3, 1e-3 * 2 / 3, 1e-3 / 3])
    with pytest.raises(ConfigError, match=r"phase 0 .* needs the number of steps of the run; set max_steps"):
        trainer_of(max_epochs=1).fit(Embedded(**SGD_FALLING), loader)
    in_steps = partial(PiecewiseLR, phases=[Phase(1.0, steps=2)])
    module = Embedded(optimizer=SGD_FALLING["optimizer"], lr_scheduler=in_steps)
    trainer_of(max_epochs=1).fit(module, loader)
    assert module.rates == pytest.approx([0, 5e-4, 1e-3])


def uneven(rank: RankContext) -> tuple[list[float], int]:
    """One data rank has 6 batches and the other 10, so both train on 10."""
    module = Embedded(rows=6 + 4 * rank.rank, **SGD_FALLING)
    trainer = trainer_of(max_epochs=1, devices=2, use_distributed_sampler=False, barebones=False)
    trainer.fit(module)
    return module.rates, trainer.global_step


@pytest.mark.ranks(2)
def test_ranks_with_other_numbers_of_batches_have_one_schedule(rank: RankContext) -> None:
    rates, steps = uneven(rank)
    assert steps == 10
    assert rates == pytest.approx([1e-3 * (1 - step / 10) for step in range(10)])


def test_groups_by_default() -> None:
    """Matrices decay as the optimizer says; vectors and embeddings do not."""
    groups = groups_of(Embedded(optimizer=partial(AdamW, lr=1e-3, weight_decay=0.3)))
    assert [(group["params"], group["weight_decay"], group["lr"]) for group in groups] == [
        (["2.weight"], 0.3, 1e-3),
        (["0.weight", "1.weight", "1.bias", "2.bias"], 0.0, 1e-3),
    ]


def test_groups_by_pattern() -> None:
    patterns = [ParameterGroup("0.*", weight_decay=0.5), ParameterGroup("2.*", lr=0.1)]
    groups = groups_of(Embedded(optimizer=partial(AdamW, lr=1e-3), parameter_groups=patterns))
    assert [(group["params"], group["weight_decay"], group["lr"]) for group in groups] == [
        (["1.weight", "1.bias"], 0.0, 1e-3),
        (["0.weight"], 0.5, 1e-3),
        (["2.weight"], 0.01, 0.1),
        (["2.bias"], 0.0, 0.1),
    ]


def test_schedules_of_torch_are_stepped_with_the_optimizer() -> None:
    module = Embedded(optimizer=partial(SGD, lr=1e-3), lr_scheduler=partial(StepLR, step_size=2, gamma=0.5))
    trainer_of(max_steps=5).fit(module)
    assert module.rates == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4]


def test_a_schedule_that_follows_a_metric() -> None:
    plateau = partial(ReduceLROnPlateau, monitor="train_loss", patience=0, threshold=1e9, factor=0.5)
    module = Embedded(rows=2, optimizer=partial(SGD, lr=1e-3), lr_scheduler=plateau)
    trainer_of(max_epochs=3).fit(module)
    assert module.rates == [1e-3] * 2 + [5e-4] * 2 + [2.5e-4] * 2
    module = Embedded(
        optimizer=partial(SGD, lr=1e-3),
        lr_scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau,  # type: ignore[arg-type]
    )
    with pytest.raises(ConfigError, match=r"does not say which metric it follows; give lightning\.pytorch\.cli"):
        trainer_of(max_steps=1).fit(module)


@pytest.mark.parametrize("scheduler", [partial(CosineAnnealingLR, T_max=9), partial(FALLING, total_steps=9)])
def test_a_schedule_longer_than_the_run_is_refused(scheduler: Any) -> None:
    module = Embedded(optimizer=partial(SGD, lr=1e-3), lr_scheduler=scheduler)
    with pytest.raises(ConfigError, match=r"=9\) is longer than the run, which has 3 .*let the run have 9"):
        trainer_of(max_steps=3).fit(module)


class OwnOptimizer(Embedded):
    def configure_optimizers(self) -> Any:
        return SGD(self.parameters(), lr=1e-3)


class Untrained(Staged):
    configure_optimizers = D9DModule.configure_optimizers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: Embedded(lr_scheduler=FALLING),
            "`lr_scheduler` of Embedded has no effect without `optimizer`; set that",
        ),
        (
            lambda: Embedded(parameter_groups=[ParameterGroup("*", lr=1.0)]),
            "`parameter_groups` of Embedded has no effect without `optimizer`",
        ),
        (
            lambda: OwnOptimizer(optimizer=AdamW),
            "`optimizer` has no effect: OwnOptimizer.configure_optimizers makes another",
        ),
        (lambda: Embedded(optimizer="AdamW"), "optimizer='AdamW' does not make one; give a class with settings"),
        (lambda: Embedded(optimizer=AdamW, lr_scheduler="cosine"), "lr_scheduler='cosine' does not make one;"),
        (lambda: Embedded(optimizer=AdamW, parameter_groups=["*"]), r"parameter_groups has '\*'; give ParameterGroup"),
        (lambda: ParameterGroup("*"), "sets nothing; give it lr or weight_decay"),
        (lambda: ParameterGroup("*", lr=-1.0), r"lr=-1.0 of the parameter group '\*' must be at least 0"),
    ],
)
def test_what_settings_cannot_be(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("optimizer", "patterns", "message"),
    [
        (
            AdamW,
            [ParameterGroup("*.wait", lr=1.0)],
            r"pattern='\*\.wait' of parameter_groups matches none of the 5 parameters; the nearest names are "
            r"'\d\.weight', ",
        ),
        (
            AdamW,
            [ParameterGroup("0.*", lr=1.0), ParameterGroup("*.weight", lr=2.0)],
            r"pattern='\*\.weight' and pattern='0\.\*' of parameter_groups both match '0\.weight'.*; narrow one",
        ),
        (
            Rprop,
            [ParameterGroup("0.*", weight_decay=1.0)],
            r"weight_decay=1\.0 of the parameter group '0\.\*' has no effect, because Rprop does not support it;",
        ),
    ],
)
def test_what_groups_cannot_be(optimizer: Any, patterns: list[ParameterGroup], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer_of(max_steps=1).fit(Embedded(optimizer=optimizer, parameter_groups=patterns))


def test_a_module_without_an_optimizer_is_refused() -> None:
    loader = DataLoader(staged_rows(4))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Untrained has no optimizer; give `optimizer` a class with settings"):
        trainer_of(max_steps=1).fit(Untrained(), loader)


def test_nearest_names_stand_for_all_layers() -> None:
    names = [f"model.layers.{layer}.mlp.{name}.weight" for layer in range(3) for name in ("gate", "experts")]
    settings = OptimizerSettings(AdamW, parameter_groups=[ParameterGroup("model.layers.*.mlp.gat.weight", lr=1.0)])
    with pytest.raises(ConfigError, match=r"nearest names are 'model\.layers\.\*\.mlp\.gate\.weight', "):
        settings.make_optimizer(NamedParameters({}, names, []))
