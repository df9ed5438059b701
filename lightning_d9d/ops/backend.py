"""The implementation that ops run on: their own kernels, or torch's operators."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError

Kernels = Literal["auto", "torch", "triton"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_chosen: Kernels = "auto"


def set_kernels(kernels: Kernels) -> None:
    """Choose the kernels of all ops of this process, until the next call.

    Compiled blocks and CUDA graphs follow the choice.

    Args:
        kernels: With "auto", tensors on CUDA use Triton's kernels, or others that were measured to be faster there;
            other tensors use torch's. With "torch" all tensors use torch's kernels, to find out whether a kernel is at
            fault. With "triton" all use Triton's. On the CPU this needs its interpreter (`TRITON_INTERPRET=1` before
            the first kernel is imported), for tests.

    Raises:
        ConfigError: The value is not one of these.
    """
    global _chosen
    if kernels not in get_args(Kernels):
        raise ConfigError(f"kernels={kernels!r} must be one of {', '.join(map(repr, get_args(Kernels)))}")
    _chosen = kernels


@contextmanager
def using_kernels(kernels: Kernels) -> Generator[None]:
    """Choose kernels like `set_kernels`, within a block. A backward uses the kernels of its forward."""
    before = _chosen
    set_kernels(kernels)
    try:
        yield
    finally:
        set_kernels(before)


def chosen_kernels() -> Kernels:
    """Return the choice of `set_kernels`."""
    return _chosen


def is_at_least(size: int, least: int) -> bool:
    """Return True if a size is at least `least`; False for a size that the compiler does not know."""
    if not torch.compiler.is_compiling():
        return size >= least
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size >= least)


def runs_triton(*tensors: Tensor | None, by_default: bool = True) -> bool:
    """Return True if an op runs its Triton kernels on these tensors: never in float64 or on DTensors.

    Args:
        tensors: Arguments of the op; None for absent ones.
        by_default: If True, "auto" uses them on CUDA, because they were measured to be the fastest.
    """
    if _chosen == "torch" or (_chosen == "auto" and not by_default):
        return False
    for tensor in tensors:
        if tensor is None:
            continue
        if isinstance(tensor, DTensor) or (tensor.dtype not in _DTYPES and tensor.is_floating_point()):
            return False
        if _chosen == "auto" and not tensor.is_cuda:
            return False
    return True
