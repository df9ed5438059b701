"""Replaces the `forward` of blocks by a function."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

from lightning_d9d.errors import ConfigError


def replace_forwards(blocks: Iterable[nn.Module], function: Callable[..., Any], setting: str) -> None:
    """Run each block as `function(block, *args, **kwargs)` through an attribute `forward`, which copies of it keep.

    Raises:
        ConfigError: A block instance has its own `forward` beside that of its class. The error names the `setting`.
    """
    for block in dict.fromkeys(blocks):
        if "forward" in vars(block):
            raise ConfigError(
                f"{setting}: the instance of {type(block).__name__} has its own forward, {vars(block)['forward']}, "
                "instead of the forward of its class. Name other blocks in ParallelConfig.shard_blocks, or wrap the "
                "forward yourself"
            )
        block.forward = partial(function, block)


def restore_forwards(module: nn.Module, function: Callable[..., Any]) -> None:
    """Undo what `replace_forwards` did with this function, anywhere in `module`."""
    for part in module.modules():
        forward = vars(part).get("forward")
        if isinstance(forward, partial) and forward.func is function:
            del part.forward
