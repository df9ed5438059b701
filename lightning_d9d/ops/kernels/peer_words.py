"""Triton kernels that write numbers into the memory of other ranks' devices, and wait for such numbers.

[Note: flags] A rank writes into the memory of another. Then, in a separate kernel, it writes a number to a word there
(release, for all devices). A reader waits for that number (acquire), and sees all that was written before. A wait has a
time limit. One kernel may do both, for what one of its programs has written: a barrier of the program's threads stands
between writes and number. The same holds for a reader and what its program reads.
"""

# pyright: reportCallIssue=false, reportArgumentType=false, reportGeneralTypeIssues=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import globaltimer

from lightning_d9d.ops.kernels.compiling import jit

_LOOKS_ON_CPU = 2_000_000
"""Number of polls of the words after which a wait ends in Triton's interpreter, which has no clock."""
_INTERPRETED = tl.constexpr(knobs.runtime.interpret)


def tell(word: Tensor, number: int, late: Tensor) -> None:
    """Write a number to a word, int32 `[1]`, unless `late` is set."""
    _tell[(1,)](word, number, late, num_warps=1)


def hear(word: Tensor, number: int, late: Tensor, mark: int, timeout_s: float) -> None:
    """Wait for a number; write `mark` to `late` if it does not come in time."""
    _hear[(1,)](word, number, late, mark, limit_of(timeout_s), num_warps=1)


def limit_of(timeout_s: float) -> int:
    """Return the limit of `polled` for a time limit in seconds."""
    return _LOOKS_ON_CPU if _INTERPRETED.value else int(timeout_s * 1e9)


@triton.jit
def now():
    """Return the time in nanoseconds; in Triton's interpreter, which has no clock, 0."""
    time = tl.zeros([], tl.int64)
    if not _INTERPRETED:
        time += globaltimer()
    return time


@triton.jit
def polled(words, is_awaited, number, is_late, limit):
    """Wait until the awaited words have at least this number; return how many do not. Not at all if it is late."""
    waited = tl.zeros([], tl.int64)
    begin = now()
    if is_late:
        waited += limit
    missing = tl.sum(is_awaited.to(tl.int32), 0)
    nothing = is_awaited.to(tl.int32) * 0
    while (missing > 0) & (waited < limit):
        seen = tl.atomic_add(words, nothing, mask=is_awaited, sem="acquire", scope="sys")
        missing = tl.sum((is_awaited & (seen - number < 0)).to(tl.int32), 0)
        if _INTERPRETED:
            waited += 1
        else:
            waited = now() - begin
    return missing


@jit(do_not_specialize=["number"])
def _tell(word, number, late):
    if tl.load(late) == 0:
        tl.atomic_xchg(word, number.to(tl.int32), sem="release", scope="sys")


@jit(do_not_specialize=["number", "mark", "limit"])
def _hear(word, number, late, mark, limit):
    place = tl.arange(0, 1)
    is_late = tl.load(late) != 0
    missing = polled(word + place, place == 0, number, is_late, limit)
    if (missing > 0) & (not is_late):
        tl.store(late, mark.to(tl.int32))
