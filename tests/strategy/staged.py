"""D9DModules for the tests: a small classifier with token weights, and its reference in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lightning_d9d import D9DModule, StageInfo, StageInputs, WeightedLoss

IGNORED = -100


class Staged(D9DModule):
    """Cross-entropy of rows whose label is not -100, as `WeightedLoss` or, with `mean`, as a plain mean of all rows."""

    def __init__(self, mean: bool = False, known_weight: bool = False, optimizer: str = "sgd") -> None:
        super().__init__()
        self.mean, self.known_weight, self.optimizer = mean, known_weight, optimizer
        self.trace: list[str] = []

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))

    def microbatch_inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        return StageInputs(first={"input": microbatch["x"].to(self.dtype)})

    def microbatch_loss(self, output: Tensor, microbatch: Mapping[str, Tensor]) -> Tensor | WeightedLoss:
        if self.mean:
            return nn.functional.cross_entropy(output, microbatch["y"].clamp(min=0))
        value = nn.functional.cross_entropy(output, microbatch["y"], ignore_index=IGNORED, reduction="sum")
        return WeightedLoss(value, (microbatch["y"] != IGNORED).sum())

    def microbatch_weight(self, microbatch: Mapping[str, Tensor]) -> Tensor | None:
        return (microbatch["y"] != IGNORED).sum() if self.known_weight else None

    def microbatch_metrics(self, output: Tensor, microbatch: Mapping[str, Tensor]) -> dict[str, Tensor | WeightedLoss]:
        right = (output.argmax(-1) == microbatch["y"]).to(output.dtype)
        return {"accuracy": right.mean(), "hits": WeightedLoss(right.sum(), (microbatch["y"] != IGNORED).sum())}

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Recorded(Staged):
    """Keeps the gradients each optimizer step saw, before clipping, by step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append({name: p.grad.clone() for name, p in self.named_parameters() if p.grad is not None})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"])


def staged_rows(count: int, ignored_every: int | None = 3) -> list[dict[str, Tensor]]:
    """Rows in float64; every n-th label is ignored, so that batches have different numbers of them."""
    generator = torch.Generator().manual_seed(5)
    rows = []
    for i in range(count):
        label = IGNORED if ignored_every is not None and (i % ignored_every == 0 or i < 3) else i % 4
        rows.append({"x": torch.randn(8, generator=generator, dtype=torch.float64), "y": torch.tensor(label)})
    return rows


def reference_gradients(
    module: Staged, windows: list[list[list[dict[str, Tensor]]]], accumulate: int, learning_rate: float = 0.1
) -> tuple[list[dict[str, Tensor]], list[Tensor]]:
    """Train `module` (its stage built) by SGD in plain torch.

    Args:
        module: Its stage has the initial weights; changed in place.
        windows: Per optimizer step the batches, each a list of rows, that it is made of.
        accumulate: Batches of a full window; a mean is divided by it also in a short last window, as in Lightning.
        learning_rate: Of SGD.

    Returns:
        The gradient of each step, and the loss of each batch.
    """
    stage, steps, losses = module.stages[0], [], []
    for batches in windows:
        stage.zero_grad()
        weight = sum(sum(int(row["y"] != IGNORED) for row in batch) for batch in batches)
        for batch in batches:
            x, y = torch.stack([row["x"] for row in batch]), torch.stack([row["y"] for row in batch])
            if module.mean:
                loss = nn.functional.cross_entropy(stage(x), y.clamp(min=0))
                (loss / accumulate).backward()
            else:
                total = nn.functional.cross_entropy(stage(x), y, ignore_index=IGNORED, reduction="sum")
                (total / max(weight, 1)).backward()
                loss = total / max(int((y != IGNORED).sum()), 1)
            losses.append(loss.detach())
        steps.append({f"stages.0.{name}": p.grad.clone() for name, p in stage.named_parameters()})
        with torch.no_grad():
            for p in stage.parameters():
                if weight or module.mean:
                    p -= learning_rate * p.grad
    return steps, losses
