"""The layout of adapters in the files of Hugging Face's `peft`, and their layout in this package.

[Note: adapters in files] A layer `q_proj` has `q_proj.lora_A.weight` `[rank, in]` and `q_proj.lora_B.weight`
`[out, rank]`. Experts have one of two layouts.

- "experts": an expert's matrices are separate layers, such as `experts.3.gate_proj.lora_A.weight`.
- "fused": the matrices of all experts of a layer are in one. Rows of `lora_A` `[experts * rank, in]` come expert by
  expert: row `expert * rank + i`. Columns of `lora_B` `[out, rank * experts]` come rank by rank: column
  `i * experts + expert`. There, gate and up projection have one adapter for both. So their adapter has twice the rank,
  and a `lora_B` that is zero where a part meets the other part's `lora_A`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9d.modules.adapters import Adapter, EmbeddingAdapter
from lightning_d9d.peft.sites import Site

PREFIX = "base_model.model."
EXPERT_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The layers of an expert in files, for each weight of experts."""
_OF_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_KEY = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?")


class FileKey(NamedTuple):
    """The name of a tensor of an adapter file, in parts."""

    module: str
    """The layer with the adapter."""
    matrix: str
    """`A` or `B`."""

    @classmethod
    def of(cls, name: str) -> FileKey | None:
        """Parse a name; None if it is not the name of an adapter's tensor."""
        match = _KEY.fullmatch(name.removeprefix(PREFIX))
        return None if match is None or (match[2] is None) != (match[4] is not None) else cls(match[1], match[3])

    @property
    def expert(self) -> tuple[str, int, str] | None:
        """The path of the experts, the number and the layer of one expert; None if it is not the layer of an expert."""
        match = _OF_EXPERT.fullmatch(self.module)
        return None if match is None else (match[1], int(match[2]), match[3])


def file_tensors(site: Site, adapter: Adapter, factor: float, layout: str, *, wraps: bool) -> dict[str, Tensor]:
    """Return the tensors of a file for an adapter with whole matrices. Local.

    Args:
        site: The adapter's.
        adapter: Adapter with whole matrices.
        factor: Factor of `b`.
        layout: Layout of experts, "experts" or "fused".
        wraps: Whether both weights of these experts have adapters; the fused layout then nests one in the other.
    """
    a, b = adapter.a.detach(), adapter.b.detach() * factor
    if not site.is_of_experts:
        kind, end = ("lora_embedding_", "") if isinstance(adapter, EmbeddingAdapter) else ("lora_", ".weight")
        return {f"{PREFIX}{site.name}.{kind}A{end}": a, f"{PREFIX}{site.name}.{kind}B{end}": b}
    experts = site.name.rpartition(".")[0]
    if layout == "fused":
        owner = f"{experts}.base_layer" if wraps and site.weight_name == "gate_up_proj" else experts
        wide = torch.stack([_blocks(each, adapter.num_parts) for each in b])
        return {
            f"{PREFIX}{owner}.lora_A.weight": a.flatten(0, 1),
            f"{PREFIX}{owner}.lora_B.weight": wide.permute(1, 2, 0).flatten(1),
        }
    tensors: dict[str, Tensor] = {}
    parts = EXPERT_PARTS[site.weight_name]
    for expert, (of_a, of_b) in enumerate(zip(a, b, strict=True)):
        for part, part_a, part_b in zip(parts, of_a.chunk(len(parts)), of_b.chunk(len(parts)), strict=True):
            name = f"{PREFIX}{experts}.{expert}.{part}"
            tensors |= {f"{name}.lora_A.weight": part_a, f"{name}.lora_B.weight": part_b}
    return tensors


def from_fused(a: Tensor, b: Tensor, num_experts: int, num_parts: int) -> tuple[Tensor, Tensor]:
    """Return the matrices of an adapter of experts, from those of the fused layout. Local.

    Args:
        a: `lora_A`, shape `[experts * rank, in]`.
        b: `lora_B`, shape `[out, rank * experts]`.
        num_experts: The name of the layer.
        num_parts: Number of parts of the weight's rows. Two parts that share a rank both get it, unless they share
            nothing.
    """
    a = a.unflatten(0, (num_experts, -1))
    b = b.unflatten(1, (-1, num_experts)).permute(2, 0, 1)
    if num_parts == 1:
        return a, b
    rank, rows = a.shape[1], b.shape[1] // 2
    half = rank // 2
    if rank % 2 == 0 and not b[:, :rows, half:].any() and not b[:, rows:, :half].any():
        return a, torch.cat([b[:, :rows, :half], b[:, rows:, half:]], 1)
    return torch.cat([a, a], 1), b


def _blocks(b: Tensor, num_parts: int) -> Tensor:
    return torch.block_diag(*b.chunk(num_parts))
