"""What `configure_stage` returns: the values it gives are kept on every mesh, and stages are parts of the model."""

from __future__ import annotations

import logging
from collections import OrderedDict
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DModule, D9DStrategy, MeshConfig, StageInfo, StageInputs
from lightning_d9d.pipeline import BlockSequence
from lightning_d9d.schedule import Interleaved1F1B
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer

ROWS: Any = torch.arange(32, dtype=torch.float32).view(8, 4) / 8


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.constant_(module.bias, 0.25)


class Initialized(D9DModule):
    def __init__(self) -> None:
        super().__init__()
        self.start: dict[str, Tensor] = {}

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        blocks = BlockSequence([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(4)], stage)
        blocks.apply(init_weights)
        return blocks

    def microbatch_inputs(self, microbatch: Tensor) -> StageInputs:
        return StageInputs(first={"input": microbatch})

    def microbatch_loss(self, output: Tensor, microbatch: Tensor) -> Tensor:
        return output.square().mean()

    def on_train_start(self) -> None:
        self.start = {
            name: (value.full_tensor() if hasattr(value, "full_tensor") else value).detach().clone().cpu()
            for name, value in self.state_dict().items()
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def start_of(module: Initialized, strategy: D9DStrategy, devices: int = 1, device: str = "cpu") -> dict[str, Tensor]:
    torch.manual_seed(3)
    trainer(strategy, devices, device, max_steps=1).fit(module, DataLoader(ROWS, batch_size=4))
    return module.start


def test_values_given_in_configure_stage_are_kept() -> None:
    start = start_of(Initialized(), D9DStrategy())
    assert len(start) == 16
    for i in range(4):
        assert torch.equal(start[f"{i}.0.bias"], torch.full((4,), 0.25))
        assert 0 < float(start[f"{i}.0.weight"].abs().max()) < 0.1
        assert torch.equal(start[f"{i}.1.weight"], torch.ones(4))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["pipeline_parallel", "data_parallel_shard"])
def test_they_are_those_of_one_process_on_every_mesh(rank: RankContext, axis: str) -> None:
    alone = Initialized()
    torch.manual_seed(3)
    alone.configure_model()
    start = start_of(Initialized(), D9DStrategy(mesh=MeshConfig(**{axis: 2})), 2, rank.device.type)
    assert start
    expected = alone.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in start.items())


class Exchanged(Initialized):
    def parallelize_stage(self, stage: nn.Module, mesh: Any, parallel: Any) -> None:
        with torch.device("meta"):
            cast(nn.Sequential, stage["1"])[0] = nn.Linear(4, 4, bias=False)  # type: ignore[index]
        super().parallelize_stage(stage, mesh, parallel)


def test_values_that_are_lost_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="lightning_d9d"):
        start_of(Exchanged(), D9DStrategy())
    lost = [record.getMessage() for record in caplog.records if "is lost" in record.getMessage()]
    assert len(lost) == 1
    assert "Exchanged.parallelize_stage has exchanged 1.0.bias" in lost[0]
    assert "reset_parameters()" in lost[0]


class Whole(Initialized):
    """Takes no notice of the stage."""

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return super().configure_stage(StageInfo(0, 1))


WHOLE = r"each of the {} stages has the whole model, on the pipeline ranks 0 to {}\. .*0.0.bias.*stage.num_stages"


@pytest.mark.ranks(2)
def test_the_whole_model_on_every_rank_of_a_pipeline_is_refused(rank: RankContext) -> None:
    run = trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type, max_steps=1)
    with pytest.raises(ConfigError, match=WHOLE.format(2, 1)):
        run.fit(Whole(), DataLoader(ROWS, batch_size=4))
    assert run.global_step == 0


def test_the_whole_model_in_every_stage_of_one_rank_is_refused() -> None:
    with pytest.raises(ConfigError, match=WHOLE.format(2, 0)):
        start_of(Whole(), D9DStrategy(schedule=Interleaved1F1B(stages_per_rank=2), microbatch_size=2))


class Local(Initialized):
    """Numbers the layers of each stage from 0."""

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        num_layers = 5 // stage.num_stages + (stage.is_last and stage.num_stages > 1)
        return nn.Sequential(*(nn.Linear(4, 4) for _ in range(num_layers)))


class Lacking(Initialized):
    """Forgets its third layer where there are two stages."""

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        layers = {str(i): nn.Linear(4, 4) for i in range(5) if stage.num_stages == 1 or (i < 2, i > 2)[stage.index]}
        return nn.Sequential(OrderedDict(layers))


class Added(Lacking):
    """A module with one more layer in the last of several stages."""

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        layers = {str(i): nn.Linear(4, 4) for i in range(5) if stage.num_stages == 1 or (i < 2, i >= 2)[stage.index]}
        if stage.num_stages > 1 and stage.is_last:
            layers["head"] = nn.Linear(4, 4)
        return nn.Sequential(OrderedDict(layers))


OTHER_STAGES = {
    "local": (
        Local,
        r"No stage has 3.bias; 3.weight; 4.bias; and 1 more. Several stages have 0.bias; .* Let configure",
    ),
    "lacking": (Lacking, r"No stage has 2.bias; 2.weight. Let configure"),
    "added": (Added, r"It does not have head.bias; head.weight. Let configure"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", OTHER_STAGES)
def test_stages_that_together_are_another_model_are_refused(rank: RankContext, name: str) -> None:
    module, message = OTHER_STAGES[name]
    run = trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type, max_steps=1)
    with pytest.raises(ConfigError, match=f"the 2 stages together differ from the model .* as one stage. {message}"):
        run.fit(module(), DataLoader(ROWS, batch_size=4))
    assert run.global_step == 0


class Tail(nn.Module):
    """The last stage: nothing but the matrix of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("0", nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("0")(x)


class TiedHead(Initialized):
    def configure_stage(self, stage: StageInfo) -> nn.Module:
        if stage.num_stages > 1 and stage.is_last:
            return Tail()
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


@pytest.mark.ranks(2)
def test_a_stage_of_tied_parameters_alone_trains(rank: RankContext) -> None:
    module = TiedHead()
    start_of(module, D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type)
    first, last = rank.all_gather_object({name: value.clone() for name, value in module.state_dict().items()})
    assert {*last} == {"0.weight", "0.bias"}
    assert all(torch.equal(first[name], value) for name, value in last.items())
