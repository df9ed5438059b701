"""Saves that finish while training continues."""

from __future__ import annotations

import copy
import os
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from lightning_d9d.checkpoint.directory import prepare_save

if TYPE_CHECKING:  # functions import it, as metadata.py says
    from lightning_d9d.checkpoint.tensors import PiecesToSave

K = TypeVar("K")
THREAD_NAME = "lightning_d9d_checkpoint"
_BLOCK_BYTES = 2**32
"""Bytes of pinned memory that are allocated at once, unless there is less to copy or a tensor is larger."""
_ALIGNMENT = 64


class _Pending(NamedTuple):
    """A queued action, and whether a checkpoint is under the path afterwards."""

    future: Future[None]
    path: str
    exists: bool


class BackgroundSaver:
    """A saver that copies the state and writes it in a thread, one save after the other.

    Tensors are copied to the CPU, from a GPU to pinned memory, which is kept for the next save. There is one copy: a
    save of other tensors first waits for earlier saves. Another save of the same, unchanged tensors (such as to
    `last.ckpt`) uses the existing copy.

    A failure is the same on all ranks. After a failure, queued actions are dropped, so an older checkpoint stays where
    a newer one failed. The next save, or `wait`, raises it.

    Args:
        group: The ranks that save, in a group for the CPU that nothing else uses; None for this process alone.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self._copies = HostCopies()
        self._executor = ThreadPoolExecutor(1, THREAD_NAME)
        self._pending: deque[_Pending] = deque()
        self._copied: tuple[Any, PiecesToSave] | None = None

    def save_directory(
        self,
        path: str | Path,
        tensors: Mapping[str, Tensor],
        values: Mapping[str, Any],
        *,
        named_values: Mapping[str, Any],
        version: object = None,
    ) -> None:
        """Save like `save_directory`, but leave errors of writing files to `wait`. Collective.

        Args:
            path: As for `save_directory`.
            tensors: As for `save_directory`; they may change as soon as this returns.
            values: As for `save_directory`.
            named_values: As for `save_directory`.
            version: A value that changes if the tensors may have changed in ways that torch does not count.

        Raises:
            StateError: An earlier save has failed, or values cannot be saved. Every rank raises it.
            ConfigError: The path is a URL.
        """

        def pieces() -> PiecesToSave:
            return self._copied_pieces(tensors, version)

        rest = prepare_save(path, pieces, values, named_values=named_values, later_group=self.group, copy=True)
        self.submit(rest, path, exists=True)

    def copied(self, content: dict[str, Any]) -> dict[str, Any]:
        """Return a deep copy with its tensors on the CPU, after waiting for all saves like `wait`.

        The copy is valid until the next copy is made.
        """
        self.wait()
        leaves, form = tree_flatten(content)
        tensors = self._copies.of({i: leaf.detach() for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)})
        return tree_unflatten([tensors[i] if i in tensors else copy.deepcopy(v) for i, v in enumerate(leaves)], form)

    def submit(self, action: Callable[[], object], path: str | Path, *, exists: bool) -> None:
        """Queue an action; it runs after all queued ones unless one of them fails. Local.

        Args:
            action: An action that fails on all ranks or on none: a rank that failed alone would miss later collectives.
            path: Path at which it saves or removes a checkpoint.
            exists: If True, a checkpoint is there afterwards.
        """
        before = self._pending[-1].future if self._pending else None

        def act() -> None:
            if before is None or before.exception() is None:
                action()
            else:
                before.result()

        while self._pending and (first := self._pending[0].future).done() and first.exception() is None:
            self._pending.popleft()
        self._pending.append(_Pending(self._executor.submit(act), os.path.abspath(path), exists))

    def will_exist(self, path: str | Path) -> bool | None:
        """Return True if the queued actions leave a checkpoint under a path; None if none is for that path. Local."""
        of_path = [each for each in self._pending if each.path == os.path.abspath(path)]
        return of_path[-1].exists if of_path and not of_path[-1].future.done() else None

    def wait(self) -> None:
        """Wait until all queued actions have ended. Local; a save that failed on one rank fails on all.

        Raises:
            StateError: The first failure of a save.
        """
        pending, self._pending, self._copied = self._pending, deque(), None
        for each in pending:
            each.future.exception()
        for each in pending:
            each.future.result()

    def close(self) -> None:
        """Wait, then free thread and memory. It raises like `wait`."""
        try:
            self.wait()
        finally:
            self._executor.shutdown()
            self._copies = HostCopies()

    def _copied_pieces(self, tensors: Mapping[str, Tensor], version: object) -> PiecesToSave:
        from lightning_d9d.checkpoint.tensors import PiecesToSave

        pieces = PiecesToSave(tensors)
        key = (version, pieces.version)
        if (
            self._copied is not None
            and self._copied[0] == key
            and self._pending
            and not self._pending[-1].future.done()
        ):
            return self._copied[1]
        self.wait()
        pieces.pieces = self._copies.of(pieces.pieces)
        self._copied = (key, pieces)
        return pieces


class HostCopies:
    """Host memory for copies of tensors, kept for later copies of tensors with the same names and shapes.

    For tensors of a GPU it is pinned, in the blocks of `placed`.
    """

    def __init__(self) -> None:
        self._copies: dict[Any, Tensor] = {}

    def of(self, tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
        """Return copies, which the next call overwrites. The host waits for them."""
        described = {key: (tensor.shape, tensor.dtype) for key, tensor in tensors.items()}
        if described != {key: (tensor.shape, tensor.dtype) for key, tensor in self._copies.items()}:
            self._copies = {}
            self._copies = _rooms(tensors)
        for key, tensor in tensors.items():
            self._copies[key].copy_(tensor, non_blocking=True)
        for device in {tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"}:
            torch.accelerator.synchronize(device)
        return dict(self._copies)


def _rooms(tensors: Mapping[K, Tensor]) -> dict[K, Tensor]:
    """Allocate memory for the copies of all tensors."""
    sizes = {key: tensor.numel() * tensor.itemsize for key, tensor in tensors.items() if tensor.device.type != "cpu"}
    block_sizes, places = placed(sizes)
    blocks = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in block_sizes]
    rooms = {}
    for key, tensor in tensors.items():
        if key in places:
            block, start = places[key]
            room = blocks[block][start : start + sizes[key]]
            rooms[key] = room.view(tensor.dtype).view(tensor.shape)
        else:
            rooms[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return rooms


def placed(sizes: Mapping[K, int]) -> tuple[list[int], dict[K, tuple[int, int]]]:
    """Place tensors in blocks of pinned memory. Local.

    Torch rounds pinned allocations up to powers of two, so blocks have such sizes. Tensors are placed from the largest
    to the smallest, each in the first block where it fits.

    Args:
        sizes: Bytes of each tensor.

    Returns:
        The bytes of each block; for each tensor the index of its block and its offset there.
    """
    blocks, ends, places = list[int](), list[int](), dict[K, tuple[int, int]]()
    rest = sum(sizes.values())
    for key in sorted(sizes, key=lambda key: -sizes[key]):
        size = -(-sizes[key] // _ALIGNMENT) * _ALIGNMENT
        block = next((i for i, end in enumerate(ends) if end + size <= blocks[i]), len(blocks))
        if block == len(blocks):
            blocks.append(max(_power_of_two(size), _power_of_two(min(rest, _BLOCK_BYTES) + 1) // 2))
            ends.append(0)
        places[key] = block, ends[block]
        ends[block] += size
        rest -= sizes[key]
    return blocks, places


def _power_of_two(number: int) -> int:
    """Return the smallest power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()
