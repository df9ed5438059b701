"""Accuracy and AUROC of a classifier, against values that were counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC

from lightning_d9d import D9DModule, D9DStrategy, MeshConfig, StageInfo, StageInputs
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer

SCORES = [0.9, 0.8, 0.7, 0.6, 0.4, 0.15, 0.2, 0.1]
LABELS = [1, 0, 1, 1, 0, 1, 0, 0]
ACCURACY = 6 / 8
"""All but 0.8 and 0.15 are on the right side of 0.5."""
AUROC = 11 / 16
"""The four with label 1 are above 4, 3, 3 and 1 of the four with label 0."""


class Scale(nn.Module):
    """Multiplies by a weight of 1."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)

    def forward(self, scores: Tensor) -> Tensor:
        return scores * self.weight


class Stages(nn.Module):
    def __init__(self, stage: StageInfo) -> None:
        super().__init__()
        each = 2 // stage.num_stages
        self.layers = nn.ModuleDict(
            {str(index): Scale() for index in range(stage.index * each, (stage.index + 1) * each)}
        )

    def forward(self, scores: Tensor) -> Tensor:
        for layer in self.layers.values():
            scores = layer(scores)
        return scores


class Scoring(D9DModule):
    """Its scores are in the data, and its learning rate is 0."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.ModuleDict({"val_auroc": BinaryAUROC(), "val_exact_accuracy": BinaryAccuracy()})

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Stages(stage)

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        return StageInputs(first={"scores": microbatch["scores"]})

    def microbatch_loss(self, output: Tensor, microbatch: Any) -> Tensor:
        return nn.functional.binary_cross_entropy(output, microbatch["label"].to(output.dtype))

    def microbatch_metrics(self, output: Tensor, microbatch: Any) -> dict[str, Tensor]:
        return {"accuracy": ((output > 0.5) == (microbatch["label"] == 1)).double().mean()}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        for metric in self.scores.values():
            metric.update(batch["scores"], batch["label"])  # type: ignore[operator]

    def on_validation_epoch_end(self) -> None:
        self.log_dict(dict(self.scores))  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def check(world_size: int, device: str = "cpu", **degrees: int) -> None:
    mesh = MeshConfig(**degrees)
    data = [
        {"scores": torch.tensor(score), "label": torch.tensor(label)}
        for score, label in zip(SCORES, LABELS, strict=True)
    ]
    batch_size = 8 // mesh.data_parallel_replicate
    run = trainer(D9DStrategy(mesh=mesh, num_microbatches=2), world_size, device, max_epochs=1)
    run.fit(Scoring(), DataLoader(data, batch_size=batch_size), DataLoader(data, batch_size=batch_size // 2))  # type: ignore[arg-type]
    values = {name: float(value) for name, value in run.callback_metrics.items()}
    assert values["train_accuracy"] == values["val_accuracy"] == values["val_exact_accuracy"] == ACCURACY
    assert values["val_auroc"] == AUROC


def test_one_process() -> None:
    check(1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("axis", ["pipeline_parallel", "data_parallel_replicate"])
def test_two_ranks(rank: RankContext, axis: str) -> None:
    check(2, rank.device.type, **{axis: 2})


@pytest.mark.ranks(4)
def test_four_ranks(rank: RankContext) -> None:
    check(4, rank.device.type, pipeline_parallel=2, data_parallel_replicate=2)
