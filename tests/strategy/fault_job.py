"""What `test_faults.py` injects, and the fit it injects it into.

A fault is a callback that acts on one rank at one moment, so that it works for any module (`MODULES`), on the ranks of
a pool or on processes of their own.
"""

from __future__ import annotations

import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import D9DStrategy, TimeoutConfig
from tests.strategy.plain import Plain, rows, trainer
from tests.strategy.staged import Staged, staged_rows

INIT_SECONDS = 4.0
STEP_SECONDS = 2.0
SHUTDOWN_SECONDS = 2.0
TIMEOUTS = TimeoutConfig(init_seconds=INIT_SECONDS, step_seconds=STEP_SECONDS, shutdown_seconds=SHUTDOWN_SECONDS)
SLOW_SECONDS = 0.6

NUM_STEPS = 6
SAVE_EVERY = 2
AT_STEP = 3  # forwards and backwards go wrong here, saving right after
BEFORE = "before"  # the run from whose first checkpoint the phase "load" goes on
MAX_FILE_BYTES = 2**18
PADDING_BYTES = 2**20


@dataclass(frozen=True)
class Kind:
    """A kind of module, and the rows it takes."""

    make: Callable[[], L.LightningModule]
    rows: Callable[[int], Any]


MODULES = {"plain": Kind(Plain, rows), "staged": Kind(Staged, lambda count: staged_rows(count, ignored_every=None))}


class Fault(L.Callback):
    """Calls `act`, once, on one rank in one phase.

    Args:
        phase: "setup" is the hook of this name. "forward" and "backward" are inside of the module's, in step `AT_STEP`.
            "save" and "load" are while the checkpoint is a dictionary. "teardown" is after the last batch, when the
            other ranks begin to tear down.
        rank: Where.
        act: Gets the module, the first layer's inputs, the last layer's gradient or the checkpoint; in "forward" and
            "backward" what it returns is taken instead, unless it is None.
    """

    def __init__(self, phase: str, rank: int, act: Callable[[Any], Any]) -> None:
        self._phase, self._rank, self._act = phase, rank, act
        self._trainer: L.Trainer | None = None
        self.has_acted = False

    def _reach(self, phase: str, value: Any) -> Any:
        trainer = self._trainer
        assert trainer is not None
        if phase != self._phase or trainer.global_rank != self._rank or self.has_acted:
            return None
        if phase in ("forward", "backward", "save") and trainer.global_step < AT_STEP:
            return None
        self.has_acted = True
        return self._act(value)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._reach("setup", pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        layers = [layer for layer in pl_module.modules() if isinstance(layer, nn.Linear)]
        layers[0].register_forward_pre_hook(lambda _, inputs: self._reach("forward", inputs))
        layers[-1].weight.register_hook(lambda gradient: self._reach("backward", gradient))

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._reach("save", checkpoint)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._reach("load", checkpoint)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reach("teardown", None)


def kill(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_disk(checkpoint: dict[str, Any]) -> None:
    """From here on files of this process may not grow: the system call that writes the checkpoint fails."""
    checkpoint["padding"] = torch.zeros(PADDING_BYTES, dtype=torch.uint8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))  # Python ignores SIGXFSZ


def kill_in_write(checkpoint: dict[str, Any]) -> None:
    """As `fill_disk`, but the kernel kills the process inside the system call."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    fill_disk(checkpoint)


def be_slow(_: Any) -> None:
    time.sleep(SLOW_SECONDS)


def spoil(tensors: Tensor | tuple[Tensor, ...]) -> Tensor | tuple[Tensor, ...]:
    return tensors * float("nan") if isinstance(tensors, Tensor) else tuple(t * float("nan") for t in tensors)


def spoil_weights(module: L.LightningModule) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(float("nan"))


@dataclass(frozen=True)
class Fitted:
    """What `fit` leaves."""

    trainer: L.Trainer
    strategy: D9DStrategy
    weights: Tensor
    """All of them, one after the other."""


def fit(
    directory: Path,
    devices: int = 2,
    device: str = "cpu",
    *,
    kind: str = "plain",
    fault: Fault | None = None,
    checkpoint: Path | None = None,
    timeouts: TimeoutConfig = TIMEOUTS,
    skip_nonfinite: bool = False,
    **checkpoint_options: Any,
) -> Fitted:
    """`NUM_STEPS` steps; every second one is saved in DIRECTORY/saved."""
    torch.manual_seed(1)
    strategy = D9DStrategy(timeouts=timeouts, skip_nonfinite=skip_nonfinite)
    options = {"every_n_train_steps": SAVE_EVERY, "save_top_k": -1, "filename": "{step}", **checkpoint_options}
    callbacks = [ModelCheckpoint(directory / "saved", **options), *([fault] if fault else [])]
    run = trainer(strategy, devices, device, enable_checkpointing=True, callbacks=callbacks, max_epochs=1)
    module = MODULES[kind].make()
    data = DataLoader(MODULES[kind].rows(4 * devices * NUM_STEPS), batch_size=4)
    run.fit(module, data, ckpt_path=checkpoint)
    return Fitted(run, strategy, torch.cat([p.detach().reshape(-1).cpu() for p in module.parameters()]))


def saved(directory: Path, step: int) -> Path:
    """A checkpoint that `fit` wrote."""
    return directory / "saved" / f"step={step}.ckpt"


def run_rank(
    directory: Path, number: int, port: int, kind: str, phase: str, rank: int, act: Callable[[Any], Any]
) -> None:
    """One of two processes, as torchrun would start it. Output goes to DIRECTORY/NUMBER.txt.

    Args:
        directory: For checkpoints, `acted` with the time of the fault, and what Lightning leaves of unfinished files.
        number: This rank.
        port: For the store.
        kind: One of `MODULES`.
        phase: Of the fault.
        rank: Where it happens.
        act: What happens.
    """
    with (directory / f"{number}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    tempfile.tempdir = str(directory)
    os.environ.update(
        {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        RANK=str(number),
        LOCAL_RANK=str(number),
        GROUP_RANK="0",
    )

    def act_and_tell(value: Any) -> Any:
        (directory / "acted").write_text(str(time.monotonic()))
        return act(value)

    checkpoint = saved(directory / BEFORE, SAVE_EVERY) if phase == "load" else None
    fit(directory, kind=kind, fault=Fault(phase, rank, act_and_tell), checkpoint=checkpoint)
