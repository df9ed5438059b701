"""A D9DModule of eight layers for pipelines, and the step it should take, in plain torch."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_d9d import D9DModule, StageInfo, StageInputs, WeightedLoss

NUM_LAYERS, WIDTH, VOCAB = 8, 6, 11


@dataclass
class Hidden:
    """What travels between stages."""

    x: Tensor
    positions: Tensor
    """Integers: without gradient, in a dtype of their own."""
    skip: Tensor | None = None
    """A tensor that exists from the fourth layer on; the last layer adds it."""


class Output(NamedTuple):
    logits: Tensor


class Layer(nn.Module):
    """Two products, one of them twice with `shared`; a norm, whose weights are no product's."""

    def __init__(self, shared: bool, recompute: bool) -> None:
        super().__init__()
        self.shared, self.recompute = shared, recompute
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self._run, x, use_reentrant=False) if self.recompute else self._run(x)

    def _run(self, x: Tensor) -> Tensor:
        gate, up = self.up(self.norm(x)).chunk(2, dim=-1)
        x = x + self.down(gate.sigmoid() * up)
        return self.down(x.tanh()) if self.shared else x


class Part(nn.Module):
    """One stage."""

    def __init__(self, stage: StageInfo, tied: bool, shared: bool, recompute: bool) -> None:
        super().__init__()
        self.stage = stage
        per_stage, rest = divmod(NUM_LAYERS, stage.num_stages)
        assert not rest
        if stage.is_first or (tied and stage.is_last):
            self.embedding = nn.Embedding(VOCAB, WIDTH)
        first = stage.index * per_stage
        self.layers = nn.ModuleDict({str(i): Layer(shared, recompute) for i in range(first, first + per_stage)})
        if stage.is_last and not tied:
            self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, hidden: Any, scale: Tensor) -> Any:
        if self.stage.is_first:
            hidden = Hidden(self.embedding(hidden), torch.arange(hidden.shape[1], device=hidden.device))
        x, skip = hidden.x, hidden.skip
        for index, layer in self.layers.items():
            x = layer(x) * scale.unsqueeze(-1)
            if index == "3":
                skip = x * 0.5
        if not self.stage.is_last:
            return Hidden(x, hidden.positions, skip)
        x = x + skip + hidden.positions.unsqueeze(-1).to(x.dtype) * 0.01
        weight = self.head.weight if hasattr(self, "head") else self.embedding.weight
        return Output(nn.functional.linear(x, weight))


class Pipelined(D9DModule):
    """Token losses of ids `[batch, seq]`, weighted by what is not -100. Gradients, norms and losses stay on the CPU."""

    def __init__(
        self, tied: bool = False, shared: bool = False, recompute: bool = False, frozen: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.tied, self.shared, self.recompute, self.frozen = tied, shared, recompute, frozen
        self.gradients: list[dict[str, Tensor]] = []
        self.losses: list[Tensor] = []
        self.norms: list[Tensor] = []

    def configure_stage(self, stage: StageInfo) -> nn.Module:
        return Part(stage, self.tied, self.shared, self.recompute)

    def on_stages_built(self) -> None:
        self.double()
        for name, parameter in self.stages.named_parameters():
            if name.split(".", 1)[1].startswith(self.frozen) and self.frozen:
                parameter.requires_grad_(False)

    def microbatch_inputs(self, microbatch: Mapping[str, Tensor]) -> StageInputs:
        return StageInputs(first={"hidden": microbatch["ids"]}, shared={"scale": microbatch["scale"]})

    def microbatch_loss(self, output: Output, microbatch: Mapping[str, Tensor]) -> Tensor | WeightedLoss:
        logits, labels = output.logits.flatten(0, 1), microbatch["labels"].flatten()
        return WeightedLoss(nn.functional.cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum())

    def microbatch_metrics(self, output: Output, microbatch: Mapping[str, Tensor]) -> dict[str, WeightedLoss]:
        labels = microbatch["labels"]
        hits = (output.logits.argmax(-1) == labels).sum()
        return {"accuracy": WeightedLoss(hits.double(), (labels != -100).sum())}

    def predict_output(self, output: Output) -> Tensor:
        return output.logits

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients.append(
            {global_name(n): p.grad.clone().cpu() for n, p in self.named_parameters() if p.grad is not None}
        )

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(outputs["loss"].cpu())
        if "grad_norm" in self.trainer.callback_metrics:
            self.norms.append(self.trainer.callback_metrics["grad_norm"].cpu())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class KnownWeight(Pipelined):
    """Tells the weight of a microbatch before it is run."""

    def microbatch_weight(self, microbatch: Mapping[str, Tensor]) -> Tensor:
        return (microbatch["labels"] != -100).sum()


class Mean(Pipelined):
    """A mean over rows for its loss."""

    def microbatch_loss(self, output: Output, microbatch: Mapping[str, Tensor]) -> Tensor:
        loss = super().microbatch_loss(output, microbatch)
        assert isinstance(loss, WeightedLoss)
        return loss.value_sum / len(microbatch["labels"])


def global_name(name: str) -> str:
    """Return a name without the stage."""
    return name.split(".", 2)[2]


def token_rows(count: int, lengths: tuple[int, ...] = (5,)) -> list[dict[str, Tensor]]:
    """Rows of token ids, some labels ignored; row i has the i-th length, round and round."""
    generator = torch.Generator().manual_seed(3)
    rows = []
    for i in range(count):
        length = lengths[i % len(lengths)]
        ids = torch.randint(VOCAB, (length,), generator=generator)
        labels = torch.where(torch.rand(length, generator=generator) < 0.3, -100, ids.roll(-1))
        scale = 1 + 0.1 * torch.randn(length, generator=generator, dtype=torch.float64)
        rows.append({"ids": ids, "labels": labels, "scale": scale})
    return rows


class Steps(NamedTuple):
    gradients: list[dict[str, Tensor]]
    losses: list[Tensor]
    norms: list[Tensor]
    weights: dict[str, Tensor]


def plain_steps(
    module: Pipelined,
    windows: list[list[list[dict[str, Tensor]]]],
    clip: float,
    frozen: Sequence[tuple[str, ...]] | None = None,
) -> Steps:
    """Clipped SGD in plain torch on one stage that is the whole model.

    Args:
        module: Its configuration.
        windows: For each step the batches it is made of, each a list of rows.
        clip: Of the norm.
        frozen: For each step the beginnings of the names that are frozen; by default the module's.
    """
    alone = type(module)(module.tied, module.shared, module.recompute, module.frozen)
    alone.configure_model()
    (stage,) = alone.stages
    steps = Steps([], [], [], {})
    for batches, names in zip(windows, frozen or [module.frozen] * len(windows), strict=True):
        stage.zero_grad()
        for name, parameter in stage.named_parameters():
            parameter.requires_grad_(not (names and name.startswith(names)))
        window = torch.zeros((), dtype=torch.float64)
        for batch in batches:
            total, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
            for row in batch:
                row = {key: value.unsqueeze(0) for key, value in row.items()}
                loss = alone.microbatch_loss(stage(row["ids"], row["scale"]), row)
                value, weight = (loss, torch.ones(())) if isinstance(loss, Tensor) else (loss.value_sum, loss.weight)
                value.backward()
                total, count = total + value.detach(), count + weight
            steps.losses.append(total / count.clamp(min=1))
            window = window + count
        gradients = {n: p.grad / window.clamp(min=1) for n, p in stage.named_parameters() if p.grad is not None}
        norm = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients.values()]))
        factor = (clip / (norm + 1e-6)).clamp(max=1)
        steps.gradients.append(gradients)
        steps.norms.append(norm)
        with torch.no_grad():
            for name, parameter in stage.named_parameters():
                if name in gradients:
                    parameter -= 0.1 * factor * gradients[name]
    return steps._replace(weights=copy.deepcopy(stage.state_dict()))
