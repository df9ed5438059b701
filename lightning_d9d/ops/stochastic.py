"""Stochastic rounding from float32 to bfloat16, with random numbers that follow from an element's place."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import runs_triton
from lightning_d9d.ops.operator import define
from lightning_d9d.ops.philox import WORD, philox

_INFINITY = 0x7F800000
_LARGEST = torch.finfo(torch.bfloat16).max


def round_stochastic_(target: Tensor, source: Tensor, seed: int, offset: int = 0) -> Tensor:
    """Copy float32 values into bfloat16, each rounded to one of its two neighbours at random, without bias.

    A value `x` between neighbours `a < b` becomes `b` with probability `(x - a) / (b - a)`, to 1 in 65,536, so the mean
    over seeds is `x`. Values that bfloat16 can represent do not change, and neither do infinities and NaN (NaN becomes
    quiet). Finite values stay finite: those beyond the largest bfloat16 become the largest one.

    Element `i` in row-major order takes 16 bits of `Philox4x32(key=seed, counter=(offset + i) // 8)`. The bits depend
    on nothing else. So equal values with the same seed get the same bits on replicas, on CPU and GPU, and in parts with
    their own offsets. It is one operator, `torch.ops.lightning_d9d.round_stochastic_`, without a gradient.

    Args:
        target: Bfloat16, of any shape and strides; overwritten.
        source: Float32, of the same shape, on the same device.
        seed: Seed, from 0 to `2**63 - 1`. Use a new seed each time, or errors accumulate.
        offset: Index of the first element in the tensor of which this is a part.

    Returns:
        `target`.

    Raises:
        ConfigError: Dtypes or shapes do not fit, or seed or offset is negative.
    """
    if target.dtype != torch.bfloat16 or source.dtype != torch.float32 or target.shape != source.shape:
        raise ConfigError(
            f"target {target.dtype} {list(target.shape)} and source {source.dtype} {list(source.shape)} must be "
            "torch.bfloat16 and torch.float32 of one shape"
        )
    if seed < 0 or offset < 0:
        raise ConfigError(f"seed={seed} and offset={offset} must not be negative")
    _round_op(target, source.detach(), seed, offset)
    return target


def round_stochastic_reference(source: Tensor, seed: int, offset: int = 0) -> Tensor:
    """Return the result of `round_stochastic_` as a new tensor."""
    index = torch.arange(offset, offset + source.numel(), device=source.device)
    block = index // 8
    key = torch.tensor([seed & WORD, seed >> 32], device=source.device)
    words = torch.stack(philox((block & WORD, block >> 32, 0 * block, 0 * block), key), -1)
    words = words.gather(-1, (index % 8 // 2).unsqueeze(-1)).squeeze(-1)
    return rounded(source, (words >> index % 2 * 16).view(source.shape))


def rounded(values: Tensor, random: Tensor) -> Tensor:
    """Round float32 values to bfloat16, away from zero if the cut bits and the low 16 of `random` carry over."""
    bits = values.contiguous().view(torch.int32).long()
    sign, magnitude = bits & 0x80000000, bits & 0x7FFFFFFF
    finite = magnitude + torch.where(values.abs() <= _LARGEST, random & 0xFFFF, 0)
    special = magnitude | (magnitude > _INFINITY).long() << 22
    return ((torch.where(magnitude < _INFINITY, finite, special) | sign) >> 16).to(torch.int16).view(torch.bfloat16)


def _round(target: Tensor, source: Tensor, seed: int, offset: int) -> None:
    if not source.numel():
        return
    if not runs_triton(source):
        target.copy_(round_stochastic_reference(source, seed, offset))
        return
    from lightning_d9d.ops.kernels import stochastic as kernels

    whole = target if target.is_contiguous() else torch.empty_like(source, dtype=torch.bfloat16).contiguous()
    kernels.round_stochastic(whole, source.contiguous(), seed, offset)
    if whole is not target:
        target.copy_(whole)


_round_op = define(
    "round_stochastic_",
    "(Tensor(a!) target, Tensor source, SymInt seed, SymInt offset) -> ()",
    _round,
    lambda target, source, seed, offset: None,
)
