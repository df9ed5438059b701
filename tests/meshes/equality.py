"""The same training run on a mesh, and in plain torch on one process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining
from lightning_d9d.optim import parameter_groups
from lightning_d9d.peft import PeftMethod, trainable_parameters
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=48,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=8,
    num_experts_per_tok=2,
    initializer_range=0.3,
)
SMALL = replace(CONFIG, num_hidden_layers=2)
"""A model for tests without a pipeline, which need no layer in the middle."""
ROWS = 16
"""Rows of a batch, of all ranks together."""
LEARNING_RATE, WEIGHT_DECAY, CLIP, EPS = 0.01, 0.1, 0.5, 1e-3
"""A large eps: Adam divides what is nearly 0 by it, and rounding with it."""


class Steps(NamedTuple):
    """What is compared."""

    gradients: list[dict[str, Tensor]]
    """The gradients of each step, before clipping."""
    losses: list[Tensor]
    """The loss of each batch."""
    norms: list[Tensor]
    weights: list[dict[str, Tensor]]
    """The weights after each step."""


class Data(NamedTuple):
    """What the batches are like."""

    length: int = 6
    """Tokens of a sequence."""
    packed: bool = False
    """Whether sequences are packed with documents."""


PLAIN = Data()


def batch_of(index: int, rows: int = ROWS, data: Data = PLAIN) -> dict[str, Tensor]:
    """Rows of random ids; about a third of the labels does not count, and of the second row none does."""
    length = data.length
    generator = torch.Generator().manual_seed(index)
    ids = torch.randint(CONFIG.vocab_size, (rows, length + 1), generator=generator)
    ignored = torch.rand(rows, length, generator=generator) < torch.linspace(0.1, 0.6, rows).unsqueeze(1)
    labels = ids[:, 1:].masked_fill(ignored, -100)
    labels[1] = -100
    batch = {"input_ids": ids[:, :-1], "labels": labels}
    if data.packed:
        batch["document_ids"] = (torch.rand(rows, length, generator=generator) < 0.2).cumsum(1)
    return batch


@dataclass
class Watched(Qwen3MoePretraining):
    """Keeps what is compared, whole and on the CPU."""

    config: Qwen3MoeConfig
    num_batches: int
    dtype_of_weights: torch.dtype = torch.float64
    seen: Steps = field(default_factory=lambda: Steps([], [], [], []))
    data: Data = field(default_factory=Data)
    peft: PeftMethod | None = None

    def __post_init__(self) -> None:
        super().__init__(self.config, peft=self.peft)

    __hash__ = Qwen3MoePretraining.__hash__
    __eq__ = Qwen3MoePretraining.__eq__

    def train_dataloader(self) -> DataLoader:
        strategy = self.trainer.strategy
        assert isinstance(strategy, D9DStrategy)
        size, part = strategy.mesh.dp_size, strategy.mesh.dp_rank
        rows = ROWS // size
        data = [
            {name: value[row] for name, value in batch_of(index, data=self.data).items()}
            for index in range(self.num_batches)
            for row in range(part * rows, (part + 1) * rows)
        ]
        return DataLoader(data, rows)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        optimizer = optimizer_of(self)
        constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)  # it counts, and keeps rates by group
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": constant, "interval": "step"}}

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.gradients.append({n: whole(p.grad) for n, p in self._named() if p.grad is not None})

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.seen.norms.append(self.trainer.callback_metrics["grad_norm"].cpu())
        self.seen.weights.append({n: whole(p.detach()) for n, p in self._named()})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.seen.losses.append(outputs["loss"].cpu() * self.trainer.accumulate_grad_batches)  # Lightning divides it

    def _named(self) -> Iterator[tuple[str, Any]]:
        return ((name.split(".", 2)[2], parameter) for name, parameter in self.named_parameters())


def optimizer_of(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(module, WEIGHT_DECAY), lr=LEARNING_RATE, eps=EPS, fused=True)


def whole(tensor: Tensor) -> Tensor:
    """Collective for a DTensor, which may lie in the host's memory while its mesh is one of GPUs."""
    if not isinstance(tensor, DTensor):
        return tensor.detach().clone().cpu()
    mesh, placements = tensor.device_mesh, tensor.placements
    local = tensor.to_local().detach().to(mesh.device_type)
    shape = {"shape": tensor.shape, "stride": tensor.stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **shape).full_tensor().clone().cpu()


def on_mesh(
    rank: RankContext,
    strategy: D9DStrategy,
    config: Qwen3MoeConfig = CONFIG,
    steps: int = 2,
    data: Data = PLAIN,
    peft: PeftMethod | None = None,
    **options: Any,
) -> Steps:
    """A fit of `steps` optimizer steps."""
    accumulated = options.get("accumulate_grad_batches", 1)
    module = Watched(config, steps * accumulated, data=data, peft=peft)
    run = trainer(
        strategy,
        rank.world_size,
        rank.device.type,
        **{
            "precision": "64-true",
            "max_epochs": 1,
            "gradient_clip_val": CLIP,
            "use_distributed_sampler": False,
            **options,
        },
    )
    run.fit(module)
    return module.seen


def on_one_process(
    config: Qwen3MoeConfig = CONFIG,
    steps: int = 2,
    accumulated: int = 1,
    dtype: torch.dtype = torch.float64,
    data: Data = PLAIN,
    device: torch.device = torch.device("cpu"),  # noqa: B008
    peft: PeftMethod | None = None,
    clip: float = CLIP,
) -> Steps:
    """The same in plain torch, with the initial weights of a D9DModule.

    In bfloat16 a token with nearly equal scores may go to another one on another kind of device: then the mesh's.
    """
    module = Qwen3MoePretraining(config, peft=peft)
    torch.set_default_dtype(dtype)
    try:
        module.configure_model()
    finally:
        torch.set_default_dtype(torch.float32)
    model = module.model
    assert isinstance(model, Qwen3MoeForCausalLM)
    model.to(device)
    optimizer = optimizer_of(model)
    seen = Steps([], [], [], [])
    for step in range(steps):
        optimizer.zero_grad()
        num_tokens = 0
        for index in range(step * accumulated, (step + 1) * accumulated):
            batch = batch_of(index, data=data)
            counted = int((batch["labels"] != -100).sum())
            loss = model(**{key: value.to(device) for key, value in batch.items()}, reduction="sum").loss
            loss.backward()
            seen.losses.append(loss.detach().cpu() / counted)
            num_tokens += counted
        named = dict(model.named_parameters())
        trained = trainable_parameters(model)
        for parameter in trained.values():
            parameter.grad /= num_tokens
        seen.gradients.append({name: parameter.grad.cpu().clone() for name, parameter in trained.items()})
        seen.norms.append(torch.nn.utils.clip_grad_norm_(trained.values(), clip).cpu())
        optimizer.step()
        seen.weights.append({name: parameter.detach().cpu().clone() for name, parameter in named.items()})
    return seen
