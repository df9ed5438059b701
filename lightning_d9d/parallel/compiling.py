"""Compiles blocks with `torch.compile`, one by one.

Each block gets an attribute `forward`, which calls the compiled `forward` of its class. So parameters keep their names,
and copies of a block compute with their own weights. Hooks run around the compiled call; FSDP2's are not compiled.
Blocks of one class and structure share one compilation. A block is recomputed ([Note: what is recomputed] in
`recompute`) around the compiled call.

[Note: shared compilations] Adapters and tensor parallelism give layers in a block a `forward` that is a `partial` of
the layer. Torch would compile for each such object, because it checks the object's identity. The check is left out
here: torch also checks the function and the arguments of a `partial`, on which the result depends.

[Note: experts on other ranks] The numbers of tokens that ranks exchange are read on the host, and differ at each call.
The compiler takes them as constants, and compiles for each of them, up to its limit. Through the memory of other ranks
they stay on the device, but the compiler cannot trace how that memory is found. So a mixture whose tokens travel runs
uncompiled inside of its compiled block. Its products are operators of this package, which the compiler keeps.

[Note: compiled weight gradients] In split backwards a compiled block has no weight phase. Its backward is one compiled
function, which computes all gradients in the input phase. Modules that are not compiled, such as embedding and head,
are split as usual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.modules import ExpertBalance, SparseMoE
from lightning_d9d.modules.dispatch import LocalDispatch
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.data import blocks_of, check_blocks
from lightning_d9d.parallel.forwards import replace_forwards, restore_forwards
from lightning_d9d.parallel.recompute import keep_activations

_IDENTITY = ("CLOSURE_MATCH", "ID_MATCH")


def compile_blocks(module: nn.Module, parallel: ParallelConfig, blocks: Iterable[nn.Module] | None = None) -> None:
    """Compile the blocks of a module with `torch.compile` when they are first called, in place. Local.

    Losses and gradients equal those of the uncompiled module, except for rounding. The first call of each class of
    blocks, mode (training or not) and structure waits for the compiler. A second shape compiles the block once more,
    for varying sizes where nothing in the block fixes them. After eight compilations of a class
    (`torch._dynamo.config.recompile_limit`) torch warns, and runs further shapes and structures uncompiled.

    Args:
        module: Any module.
        parallel: Blocks are compiled if `parallel.compile` is set. In any case, earlier calls and those of
            `recompute_activations` are undone: call the latter afterwards.
        blocks: Parts of the module; by default those that `blocks_of` finds with `parallel.shard_blocks`.

    Raises:
        ConfigError: The module has neither blocks nor lists of modules. A block instance has its own `forward` beside
            that of its class. Or activations are recomputed, and a router has losses over several ranks. A
            recomputation does not ask those ranks again, and the compiler may use its numbers in place of the first
            ones.
    """
    for part in module.modules():
        keep_activations(part)
    restore_forwards(module, _forward)
    if _uncompiled.cache_info().currsize:
        restore_forwards(module, _uncompiled())
    if not parallel.compile:
        return
    has_losses = any(
        isinstance(part, ExpertBalance) and (part.config.sequence_loss or part.config.global_batch_loss)
        for part in module.modules()
    )
    if has_losses and parallel.recompute != "none" and dist.is_initialized():
        raise ConfigError(
            f"ParallelConfig.compile=True with recompute={parallel.recompute!r}: routers have losses over several "
            "ranks (BalanceConfig.sequence_loss, global_batch_loss). Leave out one of the three, or use bias_rate for "
            "the balance"
        )
    blocks = list(blocks_of(module, parallel.shard_blocks) if blocks is None else blocks)
    check_blocks(module, blocks, "ParallelConfig.compile=True")
    replace_forwards(blocks, _forward, "ParallelConfig.compile=True")
    mixtures = [part for block in blocks for part in block.modules() if isinstance(part, SparseMoE)]
    if travelling := [each for each in mixtures if not isinstance(each.dispatch, LocalDispatch)]:
        replace_forwards(travelling, _uncompiled(), "ParallelConfig.compile=True")


def _forward(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _compiled(type(block).forward)(block, *args, **kwargs)


@cache
def _compiled(forward: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(forward, options={"guard_filter_fn": _checked})


@cache
def _uncompiled() -> Callable[..., Any]:
    """Return a forward that the compiler does not trace; torch's compiler is imported only when it is needed."""

    @torch.compiler.disable
    def forward(mixture: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return type(mixture).forward(mixture, *args, **kwargs)

    return forward


def _checked(guards: Sequence[Any]) -> list[bool]:
    """Return which guards are checked before a compiled block runs: all but the identity of a `partial`."""
    return [guard.guard_type not in _IDENTITY or not isinstance(guard.value, partial) for guard in guards]
