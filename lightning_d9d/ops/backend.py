"""Which implementation ops run on: kernels of their own, or what torch has."""

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
    """Choose for all ops of this process, until it is called again. Compiled blocks and CUDA graphs follow.

    Args:
        kernels: "auto": for tensors on CUDA Triton's, or what has been measured to be faster there; else torch's.
            "torch": torch's everywhere, to find out whether a kernel is at fault. "triton": Triton's everywhere; on the
            CPU that takes its interpreter (`TRITON_INTERPRET=1` before the first kernel is imported), which is for
            tests.

    Raises:
        ConfigError: None of these.
    """
    global _chosen
    if kernels not in get_args(Kernels):
        raise ConfigError(f"kernels={kernels!r} must be one of {', '.join(map(repr, get_args(Kernels)))}")
    _chosen = kernels


@contextmanager
def using_kernels(kernels: Kernels) -> Generator[None]:
    """`set_kernels` for a while. A backward takes the kernels of its forward."""
    before = _chosen
    set_kernels(kernels)
    try:
        yield
    finally:
        set_kernels(before)


def chosen_kernels() -> Kernels:
    """What `set_kernels` has chosen."""
    return _chosen


def is_at_least(size: int, least: int) -> bool:
    """Whether a size is so large that something else is faster; of what the compiler cannot know, it is not."""
    if not torch.compiler.is_compiling():
        return size >= least
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(size >= least)


def runs_triton(*tensors: Tensor | None, by_default: bool = True) -> bool:
    """Whether an op runs its Triton kernels on these tensors: never in float64 or on DTensors, which torch's take.

    Args:
        tensors: What the op is called with; None for what it is called without.
        by_default: Whether "auto" takes them on CUDA, where they have been measured to be the fastest.
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
