"""Triton kernel of `ranks_once`."""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from lightning_d9d.ops.kernels.compiling import jit
from lightning_d9d.ops.rows import ceil_div, next_power_of_2

_ELEMENTS = 1024
"""Number of experts that a program reads: eight for each thread."""
_NUM_WARPS = 4


def ranks_once(experts: Tensor, num_local: int, num_ranks: int, ranks: Tensor) -> None:
    """Write the last tensor."""
    num_tokens, top_k = experts.shape
    if ranks.numel() == 0:
        return
    ks = next_power_of_2(top_k)
    tokens = max(1, _ELEMENTS // ks)
    _ranks_once[(ceil_div(num_tokens, tokens),)](
        experts, ranks, num_tokens, num_local, num_ranks, TOP_K=top_k, KS=ks, TOKENS=tokens, num_warps=_NUM_WARPS
    )


@jit(do_not_specialize=["num_tokens"])
def _ranks_once(
    experts, ranks, num_tokens, num_local, num_ranks, TOP_K: tl.constexpr, KS: tl.constexpr, TOKENS: tl.constexpr
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    ks = tl.arange(0, KS)[None, :]
    places = tokens[:, None] * TOP_K + ks
    mask = (tokens < num_tokens)[:, None] & (ks < TOP_K)
    own = tl.load(experts + places, mask=mask, other=0).to(tl.int32) // num_local
    is_repeated = tl.zeros([TOKENS, KS], tl.int32)
    for k in range(TOP_K - 1):
        earlier = tl.load(experts + tokens * TOP_K + k, mask=tokens < num_tokens, other=0).to(tl.int32) // num_local
        is_repeated |= ((own == earlier[:, None]) & (ks > k)).to(tl.int32)
    tl.store(ranks + places, tl.where(is_repeated != 0, num_ranks, own), mask=mask)
