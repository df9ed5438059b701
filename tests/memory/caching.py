"""The blocks of torch's caching allocator for a stream, by the rules of its `CUDACachingAllocator.cpp`.

A tensor takes the smallest free block that is large enough, the first of several by address. The rest stays a block of
its own. Without such a block there is a new segment, behind all others. A freed block joins free neighbours of its
segment. Segments are never given back.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

MIB = 2**20
_SMALL, _LARGE = MIB, 10 * MIB
"""Tensors of at most `_SMALL` bytes have segments of 2 MiB, others below `_LARGE` have those of 20 MiB."""
_ROUNDED = 512


@dataclass(eq=False)
class _Block:
    address: int
    size: int
    is_small: bool
    before: _Block | None = None
    behind: _Block | None = None
    is_free: bool = field(default=False)


class CachingAllocator:
    """Blocks of one stream; `reserved` has the bytes of all segments."""

    def __init__(self) -> None:
        self.reserved = 0
        self._free: dict[bool, list[tuple[int, int, _Block]]] = {True: [], False: []}

    def allocate(self, num_bytes: int) -> _Block:
        """Return a block for a tensor."""
        size = max(1, -(-num_bytes // _ROUNDED)) * _ROUNDED
        is_small = size <= _SMALL
        blocks = self._free[is_small]
        place = bisect.bisect_left(blocks, (size,))
        block = blocks[place][2] if place < len(blocks) else self._segment(size, is_small)
        self._take(block)
        rest = block.size - size
        if rest >= _ROUNDED if is_small else rest > _SMALL:
            behind = _Block(block.address + size, rest, is_small, block, block.behind)
            if block.behind is not None:
                block.behind.before = behind
            block.behind, block.size = behind, size
            self._give(behind)
        return block

    def free(self, block: _Block) -> None:
        """Free a block, and join it with free neighbours."""
        for first, second in ((block, block.behind), (block.before, block)):
            if first is None or second is None or not (first.is_free or second.is_free):
                continue
            self._take(second if first is block else first)
            first.size += second.size
            first.behind = second.behind
            if second.behind is not None:
                second.behind.before = first
            block = first
        self._give(block)

    def _segment(self, size: int, is_small: bool) -> _Block:
        rounded = 2 * MIB if is_small else 20 * MIB if size < _LARGE else -(-size // (2 * MIB)) * 2 * MIB
        self.reserved += rounded
        return _Block(self.reserved - rounded, rounded, is_small)

    def _give(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.is_small], (block.size, block.address, block))

    def _take(self, block: _Block) -> None:
        if block.is_free:
            block.is_free = False
            self._free[block.is_small].remove((block.size, block.address, block))
