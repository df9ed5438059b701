"""Work in several threads: what they inherit, how errors end it, what is reported of progress."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from lightning_d9d.state.progress import Progress
from lightning_d9d.state.threads import in_threads, uncollected

SMALL, LARGE = 10, 2**23


class Counting(Progress):
    def __init__(self) -> None:
        super().__init__(False, "", 0)
        self.num_bytes = 0

    def add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes


def test_all_is_done_once_and_told() -> None:
    sizes = {str(i): SMALL if i % 3 else LARGE for i in range(50)}
    done: list[str] = []
    progress = Counting()
    in_threads(done.append, sizes, progress)
    assert sorted(done) == sorted(sizes)
    assert progress.num_bytes == sum(sizes.values())
    in_threads(done.append, {}, progress)


def test_two_wait_for_each_other() -> None:
    together = threading.Barrier(2, timeout=60)
    in_threads(lambda name: together.wait(), {"a": LARGE, "b": LARGE}, Counting())


def test_the_first_error_is_raised_and_what_has_not_begun_is_not() -> None:
    begun = []

    def fail(name: str) -> None:
        begun.append(name)
        raise ValueError(name)

    with pytest.raises(ValueError, match=r"^0$"):
        in_threads(fail, {str(i): LARGE for i in range(1000)}, Counting())
    assert len(begun) < 1000


def test_the_largest_come_first() -> None:
    order: list[str] = []
    is_done = threading.Event()

    def note(name: str) -> None:
        order.append(name)
        if name != "large":
            assert is_done.wait(60)
        else:
            is_done.set()

    in_threads(note, dict.fromkeys(map(str, range(9)), LARGE) | {"large": 100 * LARGE}, Counting())
    assert "large" in order[:2]


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_rests_and_is_as_before(was_enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == was_enabled
        with pytest.raises(ZeroDivisionError), uncollected():
            _ = 1 / 0
        assert gc.isenabled() == was_enabled
    finally:
        (gc.enable if before else gc.disable)()


@pytest.mark.parametrize("inference", [False, True])
def test_tensors_change_in_place(inference: bool) -> None:
    """Leaves that require gradients, and tensors that were made in inference mode."""
    with torch.inference_mode(inference):
        leaf = torch.zeros(3, requires_grad=True)
        in_threads(lambda name: leaf.fill_(1.0), {"leaf": LARGE}, Counting())
        assert leaf.sum() == 3
