"""Batches are copied on a stream of their own: the order of what is asked of CUDA, and what a GPU makes of it."""

from __future__ import annotations

from collections import namedtuple
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9d import D9DStrategy
from lightning_d9d.strategy import batch_copies
from lightning_d9d.strategy.batch_copies import BatchCopies, changes_first, moves_itself
from tests.strategy.plain import Plain, trainer

Pair = namedtuple("Pair", ["first", "second"])


class FakeStream:
    """Writes down what is asked of it."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def record_event(self) -> object:
        self.calls.append(f"record on {self.name}")
        return object()

    def wait_event(self, event: object) -> None:
        self.calls.append(f"{self.name} waits")


class FakeCuda:
    """What `BatchCopies` asks of `torch.cuda`, on a machine without a GPU."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.computing = FakeStream("computing", self.calls)
        self.Stream = lambda device: FakeStream("copies", self.calls)

    def current_stream(self, device: torch.device) -> FakeStream:
        return self.computing

    @contextmanager
    def stream(self, stream: FakeStream) -> Any:
        self.calls.append("begin")
        yield
        self.calls.append("end")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    """Tensors with more than one number are in pinned memory; copies are on the meta device."""
    fake = FakeCuda()
    monkeypatch.setattr(batch_copies.torch, "cuda", fake)
    monkeypatch.setattr(Tensor, "is_pinned", lambda tensor: tensor.numel() > 1)
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: fake.calls.append(f"used by {stream.name}"))
    return fake


def test_the_order_of_copies(cuda: FakeCuda) -> None:
    batch = {"ids": torch.ones(2), "pair": Pair(torch.ones(3), [torch.ones(1), "text"]), "rest": (torch.ones(4),)}
    moved = BatchCopies(torch.device("meta")).begin(batch)
    assert cuda.calls == ["begin", "record on copies", "end", "computing waits", *["used by computing"] * 3]
    assert type(moved["pair"]) is Pair
    devices = [moved["ids"], moved["pair"].first, moved["pair"].second[0], moved["rest"][0]]
    assert [tensor.device.type for tensor in devices] == ["meta", "meta", "cpu", "meta"]
    assert moved["pair"].second[1] == "text"
    assert batch["ids"].device.type == "cpu"


def test_what_is_not_pinned_stays(cuda: FakeCuda) -> None:
    batch = [torch.ones(1), torch.nn.Parameter(torch.ones(2)), {"a": 1}]
    moved = BatchCopies(torch.device("meta")).begin(batch)
    assert all(now is then for now, then in zip(moved[:2], batch[:2], strict=True))
    assert cuda.calls == []


def test_what_was_copied_ahead_is_not_copied_again(cuda: FakeCuda) -> None:
    copies, first, second = BatchCopies(torch.device("meta")), torch.ones(2), torch.ones(3)
    copies.begin_ahead([first, {"again": first, "second": second}, torch.ones(1)])
    assert cuda.calls == ["begin", "record on copies", "end"]
    cuda.calls.clear()
    first_copy, rest, small = copies.begin([first, {"again": first, "second": second}, torch.ones(1)])
    assert cuda.calls == ["computing waits", *["used by computing"] * 2]
    assert rest["again"] is first_copy
    assert [first_copy.shape, rest["second"].shape, small.device.type] == [first.shape, second.shape, "cpu"]
    cuda.calls.clear()
    copies.begin([first])  # a dummy batch comes again
    assert cuda.calls == ["begin", "record on copies", "end", "computing waits", "used by computing"]


def test_what_was_changed_since_is_copied_again(cuda: FakeCuda) -> None:
    copies, changed, kept = BatchCopies(torch.device("meta")), torch.ones(2), torch.ones(3)
    copies.begin_ahead([changed, kept])
    changed.add_(1)
    cuda.calls.clear()
    copies.begin([changed, kept])
    assert cuda.calls.count("record on copies") == 1
    assert cuda.calls.count("computing waits") == 2


def test_copies_that_nobody_takes_are_few(cuda: FakeCuda) -> None:
    copies = BatchCopies(torch.device("meta"))
    batches = [[torch.ones(2)] for _ in range(9)]
    for batch in batches:
        copies.begin_ahead(batch)
    assert len(copies._ahead) == 3
    cuda.calls.clear()
    copies.begin(batches[-1])
    assert "begin" not in cuda.calls
    copies.forget()
    copies.begin(batches[-2])
    assert "begin" in cuda.calls


def test_modules_that_move_batches_themselves() -> None:
    class Own(L.LightningDataModule):
        def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
            return batch

    assert moves_itself(Plain(), Own())
    assert not moves_itself(Plain(), L.LightningDataModule())
    assert not moves_itself(None, None)
    assert changes_first(Seeing())
    assert not changes_first(Plain(), Own(), None)


class Seeing(Plain):
    """Keeps the order of hooks, and the device and sum of each batch where they see it."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.seen: list[tuple[str, str, float]] = []

    def _see(self, name: str, batch: Any) -> Any:
        self.seen.append((name, batch[0].device.type, batch[0].double().sum().item()))
        return batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._see("before", batch)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return self._see("after", batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self._see("step", batch), batch_idx)


def fit(device: str) -> list[tuple[str, str, float]]:
    """Two epochs with accumulation and validation."""
    rows = TensorDataset(torch.arange(48 * 8.0).view(48, 8), torch.zeros(48, dtype=torch.int64))
    loader = DataLoader(rows, 4, pin_memory=device == "cuda")
    module = Seeing()
    run = trainer(D9DStrategy(), 1, device, max_epochs=2, accumulate_grad_batches=3)
    run.fit(module, loader, DataLoader(rows, 8, pin_memory=device == "cuda"))
    return module.seen


def test_a_cpu_copies_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BatchCopies, "to", None)
    seen = fit("cpu")
    assert {device for _, device, _ in seen} == {"cpu"}
    assert [name for name, _, _ in seen if name == "step"] == ["step"] * 24


@pytest.mark.gpu
def test_a_gpu_has_the_batches_of_a_cpu() -> None:
    """All of them, in training and validation, and hooks see them where they should be."""
    seen = fit("cuda")
    assert [(name, total) for name, _, total in seen] == [(name, total) for name, _, total in fit("cpu")]
    assert {(name, device) for name, device, _ in seen} == {("before", "cpu"), ("after", "cuda"), ("step", "cuda")}


@pytest.mark.gpu
def test_copies_do_not_wait_for_computation_and_memory_is_not_used_early() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    copies, pinned = BatchCopies(device), [torch.full((1 << 20,), float(n)).pin_memory() for n in range(8)]

    def sums() -> list[Tensor]:
        found = []
        for each in pinned:
            (copy,) = copies.begin([each])
            found.append(copy.sum())  # behind what the stream computes; then the memory of the copy is free
            del copy
        return found

    sums()  # CUDA loads a kernel at its first launch, and waits for all others then
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(1 << 31)  # the stream that computes is busy for about a second
        busy = torch.cuda.Event()
        busy.record()
        found = sums()
        arrived = copies._stream.record_event()
        arrived.synchronize()
        assert not busy.query()  # all copies were done while the other stream had not begun to read them
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert [total.item() / (1 << 20) for total in found] == list(range(8))


class Waiting(Plain):
    """Waits for the GPU in each step, and looks whether the next batch has arrived while the GPU is busy."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)
        self.arrived_ahead: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        torch.cuda._sleep(1 << 30)
        busy = torch.cuda.Event()
        busy.record()
        copies = BatchCopies.to(batch[0].device)
        copies._stream.synchronize()
        self.arrived_ahead.append(bool(copies._ahead and any(copies._ahead)) and not busy.query())
        torch.cuda.synchronize()
        return super().training_step(batch, batch_idx)


@pytest.mark.gpu
def test_the_next_batch_is_copied_behind_a_step_that_waits() -> None:
    rows = TensorDataset(torch.arange(48 * 8.0).view(48, 8), torch.zeros(48, dtype=torch.int64))
    module = Waiting()
    loader = DataLoader(rows, 8, num_workers=2, pin_memory=True)
    trainer(D9DStrategy(), 1, "cuda", max_epochs=2).fit(module, loader)
    assert module.arrived_ahead == [True, True, True, True, True, False] * 2
