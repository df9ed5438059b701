"""Numbers that ranks of one host write into each other's memory, to tell how far they are."""

from __future__ import annotations

import time

from torch import Tensor

from lightning_d9d.ops.backend import runs_triton


def tell(word: Tensor, number: int, late: Tensor) -> None:
    """Write a number into the memory of a rank, after all that this stream has written there. Local.

    Args:
        word: Int32 `[1]`, mapped here.
        number: The number, larger than the last one.
        late: As for `hear`. If it is not 0, nothing is written, so that the other rank's wait ends late, too.
    """
    if runs_triton(word):
        from lightning_d9d.ops.kernels import peer_words as kernels

        kernels.tell(word, number, late)
    elif not int(late):
        word.fill_(number)


def hear(word: Tensor, number: int, late: Tensor, mark: int, timeout_s: float) -> None:
    """Wait until another rank has written this number or a larger one. On CUDA the stream waits, else the host.

    Args:
        word: Int32 `[1]` in this rank's memory.
        number: The number.
        late: Int32 `[1]`. It becomes `mark` if the number does not come in time. If it is not 0, no wait takes place.
        mark: A number that is not 0.
        timeout_s: The time limit, in seconds.
    """
    if runs_triton(word):
        from lightning_d9d.ops.kernels import peer_words as kernels

        kernels.hear(word, number, late, mark, timeout_s)
    elif not int(late) and not have_reached(word, number, timeout_s):
        late.fill_(mark)


def have_reached(words: Tensor, number: int, timeout_s: float) -> bool:
    """Wait on the host until all words have at least this number; return False if that takes too long. Local."""
    end = time.monotonic() + timeout_s
    while bool((words < number).any()):
        if time.monotonic() > end:
            return False
        time.sleep(1e-4)
    return True
