"""The blocks of torch's caching allocator for a stream, by the rules of its `CUDACachingAllocator.cpp`.

A tensor takes the smallest free block that is large enough, the first of several by address. The rest stays a block of
its own. Without such a block there is a new segment, behind all others. A freed block joins free neighbours of its
segment. Segments are never given back.

With `expandable_segments:True` there is one segment for small blocks and one for others. Each grows at its end, so a
free block there needs only the rest. It is taken last, as it can become as large as any.
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
        block = self._fitting(size, is_small) or self._segment(size, is_small)
        self._take(block)
        rest = block.size - size
        if self._is_kept(rest, is_small):
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

    def _fitting(self, size: int, is_small: bool) -> _Block | None:
        blocks = self._free[is_small]
        place = bisect.bisect_left(blocks, (size,))
        return blocks[place][2] if place < len(blocks) else None

    def _is_kept(self, rest: int, is_small: bool) -> bool:
        return rest >= _ROUNDED if is_small else rest > _SMALL

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


class ExpandableAllocator(CachingAllocator):
    """The same with `expandable_segments:True`."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = {is_small: _Block(0, 0, is_small) for is_small in (True, False)}

    def _fitting(self, size: int, is_small: bool) -> _Block | None:
        blocks = self._free[is_small]
        place = bisect.bisect_left(blocks, (size,))
        fitting = [block for _, _, block in blocks[place : place + 2]]
        return next((block for block in fitting if block.behind is not self._ends[is_small]), next(iter(fitting), None))

    def _is_kept(self, rest: int, is_small: bool) -> bool:
        return rest >= _ROUNDED

    def _segment(self, size: int, is_small: bool) -> _Block:
        """Return a block at the end of the segment."""
        end, pages = self._ends[is_small], 2 * MIB if is_small else 20 * MIB
        last = end.before
        missing = size - last.size if last is not None and last.is_free else size
        grown = -(-missing // pages) * pages
        self.reserved += grown
        if last is None or not last.is_free:
            last = _Block(end.address, 0, is_small, last, end)
            if last.before is not None:
                last.before.behind = last
            end.before = last
        self._take(last)
        last.size += grown
        end.address += grown
        return last
