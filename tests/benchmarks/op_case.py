"""One op that `ops` measures: its sizes, inputs, peers, and the bytes or operations that it cannot do without."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from lightning_d9d.ops.backend import Kernels

ON_CUDA = ("compile", "Liger", "cuDNN", "flex", "torchao", "bitsandbytes", "flashoptim")
"""Peers that are left out on a CPU."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What inputs are made of."""

    batch: int = 4
    seq: int = 4096
    documents: int = 4
    """The number of documents in a row, equally long."""
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 4
    head_dim: int = 128
    experts: int = 128
    top_k: int = 8
    width: int = 768
    """The width of an expert."""
    vocab: int = 151_936
    layers: int = 8
    """The number of layers whose weights AdamW updates: 5.0 B parameters."""
    rounded: int = 2**26
    """Elements of `round_stochastic_`."""
    dtype: torch.dtype = torch.bfloat16

    def scaled(self, factor: float) -> Sizes:
        """Return sizes with as many times the tokens, layers and elements."""
        counts = {name: max(1, int(factor * getattr(self, name))) for name in ("batch", "layers", "rounded")}
        return dataclasses.replace(self, **counts)

    @property
    def tokens(self) -> int:
        """The tokens of all rows."""
        return self.batch * self.seq

    def bytes(self, *shape: int) -> int:
        """Return the bytes of a tensor of this shape."""
        return math.prod(shape) * self.dtype.itemsize


QUICK = Sizes(
    batch=1,
    seq=16,
    documents=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    head_dim=8,
    experts=4,
    top_k=2,
    width=16,
    vocab=64,
    layers=1,
    rounded=100,
    dtype=torch.float32,
)


@dataclass(frozen=True)
class Work:
    """What a pass cannot do without, and what it is held against."""

    bytes: int = 0
    flops: int = 0
    least_rate: float | None = None
    """Operations a second."""


@dataclass(frozen=True)
class Inputs:
    """Makes the inputs of a call: normal values if nothing else is said."""

    device: torch.device
    dtype: torch.dtype
    generator: torch.Generator

    def trained(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One that gets a gradient."""
        return self.fixed(*shape, dtype=dtype).requires_grad_()

    def fixed(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """One without."""
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=dtype or self.dtype)

    def below(self, bound: int, *shape: int) -> Tensor:
        """Integers."""
        return torch.randint(bound, shape, generator=self.generator, device=self.device)

    def experts(self, sizes: Sizes) -> Tensor:
        """The experts of each token, all different, `[tokens, top_k]`."""
        return self.ranks(sizes)[:, : sizes.top_k].contiguous()

    def ranks(self, sizes: Sizes) -> Tensor:
        """An order of the experts for each token."""
        return self.fixed(sizes.tokens, sizes.experts, dtype=torch.float32).argsort(1)


@dataclass(frozen=True, kw_only=True)
class OpCase:
    """An op at a size."""

    name: str
    op: str = ""
    """The name by which the op is chosen: that of the case, up to a comma."""
    scale: float = 1.0
    """The factor on the sizes."""
    dtype: torch.dtype = torch.bfloat16
    """The dtype of inputs that have no other."""
    inputs: Callable[[Inputs], dict[str, Any]]
    """Arguments of a call."""
    ours: Callable[..., Any]
    kernels: Kernels = "triton"
    """The kernels of our op; all other contenders run with torch's."""
    peers: Mapping[str, Callable[..., Any]]
    work: Mapping[str, Work]
    """The work of each measured pass: "forward", "backward" and "both", one after the other."""
    limits: Mapping[str, float] = field(default_factory=dict)
    """Peer -> the largest ratio of our time to its, where it is no peer but a ceiling."""
    most_extra: int | None = None
    """Bytes that ours may take beside inputs and results."""
    shares_inputs: bool = False
    """All contenders work on the same: they are large."""
    graphed: bool = True
    """Whether launches are recorded, so that the host's time does not count."""
    note: str = ""
    num_processes: int = 1
    repeats: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "op", self.name.partition(",")[0])


def forward_backward(forward: Work, backward: Work) -> dict[str, Work]:
    """Both passes, and one after the other."""
    both = Work(forward.bytes + backward.bytes, forward.flops + backward.flops)
    return {"forward": forward, "backward": backward, "both": both}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function for the sizes of its first call, which the other contenders know, too."""
    return torch.compile(function, dynamic=False)


def peers(op: Callable[..., Any], plain: Callable[..., Any], **others: Callable[..., Any]) -> dict[str, Any]:
    """The op on torch's kernels, and what is compiled from plain torch."""
    return {"torch": op, "compile": compiled(plain), **others}


def liger_function(module: str, name: str) -> Callable[..., Any]:
    """A function of Liger-Kernel's, which need not be installed."""
    return getattr(import_module(f"liger_kernel.ops.{module}"), name).apply
