"""Packages of flash attention (https://arxiv.org/abs/2307.08691), versions 2 to 4, each called in its own way."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError

_MODULES = ("flash_attn.cute.interface", "flash_attn_interface", "flash_attn.flash_attn_interface")
"""Of versions 4, 3 and 2, the newest first."""


@cache
def flash_attention_package() -> ModuleType | None:
    """The newest one that is installed."""
    for name in _MODULES:
        try:
            return import_module(name)
        except ImportError:
            continue
    return None


def flash_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    """Causal attention on the package that is installed, arguments and result as in `lightning_d9d.ops.attention`.

    Its backward adds with atomics in some versions, so two runs may differ in their last bits. With documents the host
    waits for the device, since the package has to know how many there are.

    Raises:
        ConfigError: A document is not in one piece.
    """
    package = flash_attention_package()
    assert package is not None
    if not q.numel():
        return torch.empty_like(q)
    options: dict[str, Any] = {"causal": True}
    if window is not None:
        options["window_size"] = (window - 1, 0)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    if documents is None:
        return _first(package.flash_attn_func(q, k, v, **options)).transpose(1, 2)
    borders, longest = _borders(documents)
    options |= {"cu_seqlens_q": borders, "cu_seqlens_k": borders, "max_seqlen_q": longest, "max_seqlen_k": longest}
    out = _first(package.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), **options))
    return out.unflatten(0, q.shape[:2]).transpose(1, 2)


def _first(result: Tensor | tuple[Tensor, ...]) -> Tensor:
    """Some versions return logarithms as well."""
    return result[0] if isinstance(result, tuple) else result


def _borders(documents: Tensor) -> tuple[Tensor, int]:
    """Where runs of equal ids begin in all rows one after the other, and after the last; how long the longest is."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    runs = torch.stack([starts // documents.shape[1], documents.flatten()[starts].long()], dim=1)
    if len(runs.unique(dim=0)) < len(runs):
        raise ConfigError(
            "documents have an id that comes again after another one; kernel='flash-attn' takes documents in one "
            "piece: give each piece an id of its own, or take kernel='auto'"
        )
    borders = torch.cat([starts, starts.new_tensor([documents.numel()])]).int()
    return borders, int(borders.diff().max())
