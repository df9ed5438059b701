"""How adapters lie in the files of Hugging Face's `peft`, and how they lie here.

[Note: adapters in files] A layer `q_proj` has `q_proj.lora_A.weight` `[rank, in]` and `q_proj.lora_B.weight` `[out,
rank]`. Experts come in one of two layouts.

- "experts": an expert's matrices are layers of their own, such as `experts.3.gate_proj.lora_A.weight`.
- "fused": the matrices of all experts of a layer are in one. Rows of `lora_A` `[experts * rank, in]` come expert by
  expert: row `expert * rank + i`. Columns of `lora_B` `[out, rank * experts]` come rank by rank: column
  `i * experts + expert`. Gate and up projection have one adapter there, which reaches both. So theirs has twice the
  rank, and a `lora_B` that is zero where a part meets the other part's `lora_A`.
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
"""For each weight of experts the layers that an expert has in files."""
_OF_EXPERT = re.compile(r"(.+)\.(\d+)\.(gate_proj|up_proj|down_proj)")
_KEY = re.compile(r"(.+)\.lora_(embedding_)?([AB])(\.weight)?")


class FileKey(NamedTuple):
    """The name of a tensor of an adapter file, in parts."""

    module: str
    """The layer that has the adapter."""
    matrix: str
    """`A` or `B`."""

    @classmethod
    def of(cls, name: str) -> FileKey | None:
        """Take a name apart; None if it is not one of an adapter's tensor."""
        match = _KEY.fullmatch(name.removeprefix(PREFIX))
        return None if match is None or (match[2] is None) != (match[4] is not None) else cls(match[1], match[3])

    @property
    def expert(self) -> tuple[str, int, str] | None:
        """The path of the experts, the number and the layer of one; None if it is not the layer of an expert."""
        match = _OF_EXPERT.fullmatch(self.module)
        return None if match is None else (match[1], int(match[2]), match[3])


def file_tensors(site: Site, adapter: Adapter, factor: float, layout: str, *, wraps: bool) -> dict[str, Tensor]:
    """Return the tensors of a file for an adapter with whole matrices. Local.

    Args:
        site: The adapter's.
        adapter: With whole matrices.
        factor: What `b` is multiplied by.
        layout: Of experts, "experts" or "fused".
        wraps: Whether both weights of these experts have adapters, of which the fused layout puts one into the other.
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
        num_experts: Of the layer.
        num_parts: Of the rows of the weight. Two parts that share a rank get it each, unless they share nothing.
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
