"""What the ranks of `test_shutdown.py` run: `python shutdown_job.py DIRECTORY CASE...`, one fit a case.

Rank r appends to DIRECTORY/r.jsonl, one list a line: [case, "train" or "validate", batch] when a batch begins,
[case, "acts", time] when the case's accident happens, [case, "end", what fit raised, what it left] at the end of a fit.
Only the last case may end the process.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import LearningRateFinder
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9d import D9DStrategy, TimeoutConfig
from lightning_d9d.coordination.watchdog import RankWatch
from lightning_d9d.errors import ConfigError

SHUTDOWN_SECONDS = 2.0


def rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))


def on_rank(which: int, batch: int, act: Callable[[], Any]) -> Callable[[int], None]:
    """`act` on one rank at one batch."""

    def hook(current: int) -> None:
        if rank() == which and current == batch:
            record("acts", time.time())
            act()

    return hook


def fail() -> None:
    raise ValueError(f"bad row on rank {rank()}")


def fail_as_configured() -> None:
    raise ConfigError("field=3 must be 4")


def answer_slowly(_: int) -> None:
    """The watchdog of rank 1 looks into the store twice a second, as on a busy machine."""
    if rank() == 1:
        RankWatch._sleep = lambda self, seconds: time.sleep(0.5)  # type: ignore[method-assign]
    fail_as_configured()


def live_longer_than_the_store(_: int) -> None:
    if rank() == 0:
        os._exit(1)
    time.sleep(1.0)


def send(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def nothing(_: int = 0) -> None:
    pass


@dataclass
class Case:
    setup: Callable[[int], None] = nothing
    load: Callable[[int], None] = nothing
    train: Callable[[int], None] = nothing
    validate: Callable[[int], None] = nothing
    trainer: dict[str, Any] = field(default_factory=dict)
    callback: Callable[[], L.Callback] | None = None
    num_validation_batches: int | None = 0
    """The number of validation batches; None means 2 on rank 0, and no end on rank 1."""
    num_train_batches: tuple[float, float] = (float("inf"), float("inf"))
    """The number of training batches on each rank."""
    after: Callable[[int], None] = nothing
    """A function that is called when the fit has raised."""
    shutdown_seconds: float = SHUTDOWN_SECONDS


class BlocksOnException(L.Callback):
    """Waits for the other ranks when there was an exception, as one that saves a sharded checkpoint would."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        dist.barrier()


class SavesOnException(L.Callback):
    """A collective at the end: works only if every rank is here."""

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        steps: list[Any] = [None, None]
        dist.all_gather_object(steps, trainer.global_step)
        record("saved", steps, trainer.received_sigterm)


class FitsInside(L.Callback):
    """Runs another Trainer inside the first batch."""

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == 0:
            fit(CASES["normal"])


class TakesLong:
    """Keeps the thread that lets go of it busy, for longer than the interpreter needs to end."""

    def __del__(self) -> None:
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            pass


class LeavesAThreadBusy(L.Callback):
    """Drops the last reference to a tensor before its collective begins, so that gloo's thread has it."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        tensor = torch.ones(4)
        tensor.takes_long = TakesLong()  # type: ignore[attr-defined]
        dist.all_reduce(tensor, async_op=True)
        del tensor
        dist.barrier()
        record("left")


class FindsLearningRate(LearningRateFinder):
    """Lightning's, which runs the fit loop inside, and loads what it had saved however that ends."""

    def __init__(self) -> None:
        super().__init__(num_training_steps=10, attr_name="learning_rate", early_stop_threshold=None)


def block_alone() -> None:
    """Enter a collective that the other rank never joins, and send SIGTERM once inside."""
    main = threading.get_ident()

    def send_when_blocked() -> None:
        while sys._current_frames()[main].f_code.co_name != "barrier":
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=send_when_blocked, daemon=True).start()
    dist.barrier()


CASES = {
    "normal": Case(trainer={"max_steps": 3}),
    "busy_at_exit": Case(trainer={"max_steps": 1}, callback=LeavesAThreadBusy),
    "nested": Case(train=on_rank(1, 5, send(signal.SIGTERM)), callback=FitsInside),
    "raise_in_train": Case(train=on_rank(1, 3, fail)),
    "raise_in_train_on_0": Case(train=on_rank(0, 3, fail)),
    "raise_in_tuner": Case(train=on_rank(1, 3, fail), callback=FindsLearningRate),
    "raise_in_setup": Case(setup=on_rank(1, 0, fail)),
    "raise_in_dataloader": Case(load=on_rank(1, 3, fail)),
    "raise_everywhere": Case(setup=lambda _: fail_as_configured()),
    "raise_everywhere_slowly": Case(setup=answer_slowly, after=live_longer_than_the_store, shutdown_seconds=20.0),
    "raise_and_block": Case(train=on_rank(1, 3, fail), callback=BlocksOnException),
    "exit": Case(train=on_rank(1, 3, lambda: os._exit(3))),
    "kill": Case(train=on_rank(1, 3, send(signal.SIGKILL))),
    "kill_0": Case(train=on_rank(0, 3, send(signal.SIGKILL))),
    "endless": Case(train=on_rank(0, 5, lambda: print("ready", flush=True)), callback=SavesOnException),
    "term": Case(train=on_rank(0, 5, send(signal.SIGTERM)), callback=SavesOnException),
    "term_on_1": Case(train=on_rank(1, 5, send(signal.SIGTERM)), callback=SavesOnException),
    "term_in_validation": Case(
        validate=on_rank(1, 5, send(signal.SIGTERM)), num_validation_batches=10**6, callback=SavesOnException
    ),
    "term_in_long_validation": Case(
        validate=on_rank(1, 5, send(signal.SIGTERM)), num_validation_batches=None, callback=SavesOnException
    ),
    "term_in_last_batch": Case(
        train=on_rank(1, 2, send(signal.SIGTERM)), trainer={"max_steps": 3}, callback=SavesOnException
    ),
    "interrupt": Case(train=on_rank(1, 5, send(signal.SIGINT)), callback=SavesOnException),
    "interrupt_ignored": Case(train=on_rank(1, 2, send(signal.SIGINT)), trainer={"max_steps": 4}),
    "interrupt_group": Case(train=on_rank(0, 5, lambda: os.killpg(0, signal.SIGINT)), callback=SavesOnException),
    "data_end": Case(
        train=on_rank(1, 2, nothing),
        num_train_batches=(2, 3),
        num_validation_batches=1,
        trainer={"val_check_interval": 1.0, "num_sanity_val_steps": 0},
    ),
    "data_end_at_validation": Case(
        validate=on_rank(1, 0, nothing),
        num_train_batches=(2, 3),
        num_validation_batches=1,
        trainer={"val_check_interval": 2, "num_sanity_val_steps": 0},
    ),
    "blocked": Case(train=on_rank(1, 3, block_alone)),
}


class Stream(IterableDataset):
    def __init__(self, load: Callable[[int], None], num_batches: float = float("inf")) -> None:
        self.load = load
        self.num_batches = num_batches

    def __iter__(self) -> Iterator[torch.Tensor]:
        number = 0
        while number < self.num_batches:
            self.load(number)
            yield torch.ones(2)
            number += 1


class Model(L.LightningModule):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case
        self.layer = torch.nn.Linear(2, 1)
        self.learning_rate = 0.01

    def setup(self, stage: str) -> None:
        self.case.setup(0)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        record("train", batch_idx)
        self.case.train(batch_idx)
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        record("validate", batch_idx)
        self.case.validate(batch_idx)
        self.log("val_loss", self.layer(batch).sum(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.learning_rate)


_current: list[Any] = []


def record(*values: Any) -> None:
    directory, case = _current
    with (directory / f"{rank()}.jsonl").open("a") as file:
        file.write(json.dumps([case, *values]) + "\n")


def leftovers() -> list[str]:
    found = [thread.name for thread in threading.enumerate() if thread.name.startswith("lightning_d9d")]
    if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        found.append("SIGTERM handler")
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        found.append("SIGINT handler")
    if signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        found.append("SIGUSR2 handler")
    if (descriptor := signal.set_wakeup_fd(-1)) != -1:
        found.append(f"wakeup descriptor {descriptor}")
    return found


def fit(case: Case) -> None:
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=D9DStrategy(timeouts=TimeoutConfig(shutdown_seconds=case.shutdown_seconds)),
        callbacks=[case.callback()] if case.callback else [],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=_current[0],
        limit_val_batches=1.0 if case.num_validation_batches is None else case.num_validation_batches,
        **{"max_steps": -1, "val_check_interval": 1, **case.trainer},
    )
    train = Stream(case.load, case.num_train_batches[rank()])
    validation = Stream(nothing, 2 if case.num_validation_batches is None and rank() == 0 else float("inf"))
    trainer.fit(Model(case), DataLoader(train, batch_size=None), DataLoader(validation, batch_size=None))


def main(directory: str, *names: str) -> None:
    global _current
    for index, name in enumerate(names, start=1):
        _current = [Path(directory), name]
        try:
            fit(CASES[name])
        except BaseException as error:
            record("end", f"{type(error).__name__}({error})", leftovers())
            CASES[name].after(0)
            if index == len(names):
                raise
        else:
            record("end", None, leftovers())


def forked_rank(number: int, directory: str, names: tuple[str, ...]) -> None:
    """`main` in a process forked from one that imported this file. Output goes to DIRECTORY/RANK.txt."""
    with (Path(directory) / f"{number}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.chdir(directory)
    os.environ.update(LOCAL_RANK=str(number), NODE_RANK="0", WORLD_SIZE="2")
    port = dist.FileStore(f"{directory}/port", 2)
    if number == 0:  # as in most jobs the store ends with rank 0
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(port.get("port")))
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    main(directory, *names)


if __name__ == "__main__":
    main(*sys.argv[1:])
