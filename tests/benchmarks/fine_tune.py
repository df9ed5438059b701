"""Steps of LoRA on one Qwen3-MoE and one GPU, against transformers with peft.

All contenders have equal frozen weights, in bf16 on a GPU, and take the same tokens: forward, loss, backward, AdamW of
the adapters. All recompute each block. Transformers has its grouped products (`grouped_mm`) and SDPA. The learning rate
is 0, so the adapters change no loss, and losses are compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_d9d import ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.peft import LoRA, inject
from tests.benchmarks.frame import Case
from tests.benchmarks.train_step import Loop, Work, table, transformers_of

__all__ = ["cases", "table"]

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
RANK = 16
LEAST_OF_PEER = 1.5
"""Tokens/s of ours with adapters of attention and experts, of the best peer's, whatever that adapts."""


@dataclass(frozen=True)
class Adapters:
    """What is trained, and how."""

    rank_of_experts: int = 0
    """0: experts have none."""
    compiles: bool = False

    def __str__(self) -> str:
        experts = f" and experts at rank {self.rank_of_experts}" if self.rank_of_experts else ""
        return f"attention{experts}{', compiled' if self.compiles else ''}"


def cases(device_type: str, quick: bool) -> list[Case]:
    """Some layers of the 30b-a3b geometry, with each peer."""
    if quick or device_type == "cpu":
        work = Work(config=Qwen3MoeConfig.preset("tiny"), dtype=torch.float32, num_rows=2, sequence_length=32)
        rounds: dict[str, Any] = dict(warmup_steps=2, block_steps=1, repeats=2 if quick else 12)
        return [case("small model", work, Adapters(), [Adapters(2)], None, **rounds)]
    config = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=8)
    work = Work(config=config, dtype=torch.bfloat16, num_rows=4, sequence_length=4096)
    rounds = dict(warmup_steps=3, block_steps=2, repeats=8)
    of_ours = [Adapters(), Adapters(RANK), Adapters(2)]
    return [
        case("peft on attention", work, Adapters(), of_ours, 1 / LEAST_OF_PEER, **rounds),
        case("peft on attention, compiled", work, Adapters(compiles=True), of_ours, 1 / LEAST_OF_PEER, **rounds),
        case("peft on experts, too", work, Adapters(2), of_ours[-1:], 1 / LEAST_OF_PEER, **rounds),
    ]


def case(
    name: str, work: Work, peer: Adapters, of_ours: Sequence[Adapters], limit: float | None, **rounds: Any
) -> Case:
    """A peer, and ours with several adapters, of which the last may take `limit` times as long at most."""
    theirs = f"transformers and peft, {peer}"
    return Case(
        name=name,
        contenders={
            theirs: partial(Theirs, work, peer),
            **{f"ours, {adapters}": partial(Ours, work, adapters) for adapters in of_ours},
        },
        peer=theirs,
        limits={} if limit is None else {f"ours, {of_ours[-1]}": limit},
        conditions={**work.conditions(), "rank of attention": RANK, "recomputed": "each block"},
        **rounds,
    )


class Ours(Loop):
    """`Qwen3MoeForCausalLM` with adapters."""

    def __init__(self, work: Work, adapters: Adapters, device: torch.device) -> None:
        network = work.network(device)
        targets = [*ATTENTION, *(["experts"] if adapters.rank_of_experts else [])]
        inject(network, LoRA(RANK, targets=targets, rank_of_experts=adapters.rank_of_experts or None))
        parallelize_qwen3_moe(network, None, ParallelConfig(recompute="full"))
        super().__init__(work, network, StochasticAdamW(_trained(network), lr=0.0, state_dtype=work.dtype), device)

    def mean_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.network(batch["input_ids"], labels=batch["labels"], reduction="sum").loss / self.work.num_tokens


class Theirs(Loop):
    """Transformers' model of the same weights, with peft's adapters."""

    def __init__(self, work: Work, adapters: Adapters, device: torch.device) -> None:
        from peft import LoraConfig, get_peft_model

        network: Any = transformers_of(work, device)
        network.gradient_checkpointing_enable({"use_reentrant": False})
        config = LoraConfig(
            r=RANK,
            lora_alpha=2 * RANK,
            target_modules=list(ATTENTION),
            target_parameters=list(EXPERTS) if adapters.rank_of_experts else None,
            rank_pattern=dict.fromkeys(EXPERTS, adapters.rank_of_experts) if adapters.rank_of_experts else {},
        )
        network = get_peft_model(network, config, autocast_adapter_dtype=False)
        if adapters.compiles:
            for layer in network.model.model.layers:
                layer.compile()
        super().__init__(work, network, AdamW(_trained(network), lr=0.0, fused=device.type == "cuda"), device)

    def mean_loss(self, batch: Mapping[str, Tensor]) -> Tensor:
        labels = batch["labels"]
        return self.network(input_ids=batch["input_ids"], labels=labels, shift_labels=labels, use_cache=False).loss


def _trained(network: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in network.parameters() if parameter.requires_grad]
