"""Packages of flash attention (https://arxiv.org/abs/2307.08691), versions 2 to 4, each with its own way of calling."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import is_at_least
from lightning_d9d.ops.packages import optional_module

_PACKAGE = "flash_attn"
_VERSION_4 = f"{_PACKAGE}.cute.interface"
_VERSION_4_CACHE = "FLASH_ATTENTION_CUTE_DSL_CACHE"
_MODULES = (_VERSION_4, "flash_attn_interface", "flash_attn.flash_attn_interface")
"""Modules of versions 4, 3 and 2, the newest first."""
_BLOCK_HEAD_DIMS = (64, 128)
"""Widths of heads for which the kernels of version 4 have been run and compared."""
_LEAST_KEYS = 2048
"""The least number of keys. With fewer the forward is slower than cuDNN's, and a call takes the host twice as long."""


def flash_attention_package() -> ModuleType | None:
    """Return the newest version that is installed, or None."""
    _keep_compiled()
    packages = ((name, optional_module(name)) for name in _MODULES)
    return next((each for name, each in packages if each and (name != _VERSION_4 or _is_version_4(each))), None)


@cache
def _keep_compiled() -> None:
    """Make version 4 keep its compiled kernels on disk, once for each machine, unless its own variables are set.

    Version 4 reads the variables when it is imported. Its default folder is a temporary one, which other users could
    fill.
    """
    if find_spec(_PACKAGE) is None:
        return
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flash_attention_cute_dsl"
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # it cannot be written, or the user has no home
        return
    os.environ.setdefault(f"{_VERSION_4_CACHE}_DIR", str(folder))
    os.environ.setdefault(f"{_VERSION_4_CACHE}_ENABLED", "1")


@cache
def _is_version_4(package: ModuleType) -> bool:
    """Return False for the draft in wheels of flash-attn 2.8, which has the same name but different arguments."""
    return "return_lse" in signature(package.flash_attn_func).parameters


def runs_blocks(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether version 4 is installed and its kernels for blocks support such tensors.

    Only Hopper counts, because these kernels were compared there. They are not used if `torch.nn.attention.sdpa_kernel`
    restricts torch's own kernels.
    """
    is_fit = q.is_cuda and q.dtype in (torch.bfloat16, torch.float16) and q.dtype == k.dtype == v.dtype
    is_plain = not any(isinstance(tensor, DTensor) for tensor in (q, k, v))
    return is_fit and is_plain and q.shape[-1] in _BLOCK_HEAD_DIMS and _has_block_kernels(q.device)


@torch.compiler.assume_constant_result
def _has_block_kernels(device: torch.device) -> bool:
    is_allowed = torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.cudnn_sdp_enabled()
    if not is_allowed or torch.cuda.get_device_capability(device) != (9, 0):
        return False  # without the seconds that an import takes
    package = flash_attention_package()
    return package is not None and package.__name__ == _VERSION_4 and hasattr(package, "_flash_attn_bwd")


def is_faster(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return whether `runs_blocks` holds, and there are enough keys to be faster than cuDNN and the Triton kernels."""
    return is_at_least(k.shape[2], _LEAST_KEYS) and runs_blocks(q, k, v)


def block(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, window: int | None) -> tuple[Tensor, Tensor]:
    """Run `attention_block` on version 4."""
    package = flash_attention_package()
    assert package is not None
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), q.new_full(q.shape[:-1], float("-inf"), dtype=torch.float32)
    sides = (None, None) if window is None else (window - 1, 0)
    q, k, v = (t.detach().transpose(1, 2) for t in (q, k, v))
    with torch.cuda.device_of(q):
        out, lse, *_ = package.flash_attn_func(q, k, v, causal=causal, window_size=sides, return_lse=True)
    return out.transpose(1, 2), lse


def block_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool, window: int | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `attention_block_backward` on version 4. Sums are atomic, except under `torch.use_deterministic_algorithms`.

    The package's own derivative belongs to its own forward, so this calls the function below it, as torch does.
    """
    package = flash_attention_package()
    assert package is not None
    if not (q.numel() and k.numel()):
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    left, right = (None, None) if window is None else (window - 1, 0)
    grad_out, q, k, v, out = (t.transpose(1, 2) for t in (grad_out, q, k, v, out))
    options = {"causal": causal, "window_size_left": left, "window_size_right": right}
    options["deterministic"] = torch.are_deterministic_algorithms_enabled()
    with torch.cuda.device_of(q):
        dq, dk, dv, *_ = package._flash_attn_bwd(q, k, v, out, grad_out, lse, **options)
    return dq.transpose(1, 2), dk.transpose(1, 2), dv.transpose(1, 2)


def flash_attention(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None, window: int | None) -> Tensor:
    """Run causal attention on the installed package, with arguments and result of `lightning_d9d.ops.attention`.

    Its backward adds with atomics in some versions, so two runs may differ in their last bits. With documents the host
    waits for the device, because the package needs their number.

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
    """Return only the output: some versions return logarithms as well."""
    return result[0] if isinstance(result, tuple) else result


def _borders(documents: Tensor) -> tuple[Tensor, int]:
    """Return the starts of runs of equal ids in all rows, then the end, and the length of the longest run."""
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    runs = torch.stack([starts // documents.shape[1], documents.flatten()[starts].long()], dim=1)
    if len(runs.unique(dim=0)) < len(runs):
        raise ConfigError(
            "documents use an id again after another id, but kernel='flash-attn' needs each document in one piece. "
            "Give each piece an id of its own, or set kernel='auto'"
        )
    borders = torch.cat([starts, starts.new_tensor([documents.numel()])]).int()
    return borders, int(borders.diff().max())
