"""Parameters that several ranks of a pipeline hold are one: by name, whatever their order in a stage."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import D9DModule, D9DStrategy, MeshConfig, StageInfo, StageInputs
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer


class Twice(nn.Module):
    """A stage with both matrices, which the first and the last name in another order; the first has one more."""

    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        self.stage = stage
        for name in ("up", "down") if stage.is_first else ("down", "up"):
            self.add_module(name, nn.Linear(4, 4))
        if stage.is_first:
            self.own = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        up, down = self.get_submodule("up"), self.get_submodule("down")
        if self.stage.is_first:
            x = down(up(self.own(x)).tanh())
        return up(down(x).sin()) if self.stage.is_last else x


class Tied(D9DModule):
    """Most parameters are tied: its own, too, which only the loss uses."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(3, dtype=torch.float64))
        self.start: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Twice(stage).double()

    def microbatch_inputs(self, microbatch: Tensor) -> StageInputs:
        return StageInputs(first={"x": microbatch})

    def microbatch_loss(self, output: Tensor, microbatch: Tensor) -> Tensor:
        return (output.square() * self.temperature.sum()).mean()

    def on_train_start(self) -> None:
        self.start = {name: value.clone().cpu() for name, value in self.state_dict().items()}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {name: p.grad.clone().cpu() for name, p in self.state_dict(keep_vars=True).items()}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class WiderHere(nn.Linear):
    """A layer in float64, unlike the rest of its stage."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.double()).float()


class Mixed(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.rand(3))

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        whole = Twice(stage).float()
        if stage.is_first:
            whole.register_module("extra", WiderHere(4, 4).double())
            whole.register_forward_pre_hook(
                lambda module, _, given: ((), {"x": module.get_submodule("extra")(given["x"])}), with_kwargs=True
            )
        return whole


@pytest.mark.ranks(2)
def test_ties_do_not_depend_on_the_dtypes_of_other_parameters(rank: RankContext) -> None:
    module, rows = Mixed(), torch.arange(16, dtype=torch.float32).view(4, 4) / 8
    run = trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type, max_steps=1)
    run.fit(module, DataLoader(cast(Any, rows), batch_size=4))
    theirs = rank.all_gather_object(module.gradients)
    assert_tensors_close({name: theirs[0][name] for name in theirs[1]}, theirs[1])


@pytest.mark.ranks(2)
def test_tied_parameters_start_equal_and_get_the_sum_of_their_gradients(rank: RankContext) -> None:
    """Ranks draw what is in no stage from random numbers of their own; `materialize` gives stages theirs by name."""
    torch.manual_seed(rank.rank)
    module, rows = Tied(), torch.arange(16, dtype=torch.float64).view(4, 4) / 8
    run = trainer(
        D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type, precision="64-true", max_steps=1
    )
    run.fit(module, DataLoader(cast(Any, rows), batch_size=4))
    (starts, gradients) = zip(*rank.all_gather_object((module.start, module.gradients)), strict=True)
    for of_first, of_last in (starts, gradients):
        assert_tensors_close({name: of_first[name] for name in of_last}, of_last)
    alone = Tied()
    alone.configure_model()
    alone.load_state_dict(starts[0])
    loss = alone.microbatch_loss(alone.stages[0](rows), rows)
    loss.backward()
    assert_tensors_close(gradients[0], {name: p.grad for name, p in alone.state_dict(keep_vars=True).items()})
