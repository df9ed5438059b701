"""What `test_faults.py` and `test_pipeline_faults.py` inject, and the run they inject it into.

A fault is a callback that acts on one rank at one moment, so that it works for any module (`MODULES`), on the ranks of
a pool or on processes of their own.
"""

from __future__ import annotations

import functools
import os
import resource
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import D9DModule, D9DStrategy, MeshConfig, TimeoutConfig
from lightning_d9d.mixing import ReplicaMixing
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import Plain, rows, trainer
from tests.strategy.staged import Staged, staged_rows

INIT_SECONDS = 4.0
STEP_SECONDS = 4.0
SHUTDOWN_SECONDS = 2.0
TIMEOUTS = TimeoutConfig(init_seconds=INIT_SECONDS, step_seconds=STEP_SECONDS, shutdown_seconds=SHUTDOWN_SECONDS)
TIMEOUTS_OF_GPUS = replace(TIMEOUTS, init_seconds=60.0)
"""Longer limits for GPUs: CUDA and NCCL take longer to begin."""
SLOW_SECONDS = 0.6

NUM_STEPS = 6
SAVE_EVERY = 2
AT_STEP = 3  # forwards and backwards go wrong here, saving right after
BEFORE = "before"  # the run from whose first checkpoint the phase "load" goes on
MAX_FILE_BYTES = 2**18
PADDING_BYTES = 2**20


@dataclass(frozen=True)
class Kind:
    """A kind of module, the rows it takes, and how it runs."""

    make: Callable[[], L.LightningModule]
    rows: Callable[[int], Any]
    num_stages: int = 1
    """Each on a rank of its own; in one process there is one."""
    precision: Any = "32-true"
    replicate_sync: str | ReplicaMixing = "all_reduce"


class Quiet(Plain):
    """Logs nothing, so that no collective but the mix is in a step."""

    def __init__(self) -> None:
        super().__init__(batch_norm=False)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.loss(batch)


MODULES = {
    "plain": Kind(Plain, rows),
    "staged": Kind(Staged, lambda count: staged_rows(count, ignored_every=None)),
    "pipelined": Kind(Pipelined, token_rows, num_stages=2, precision="64-true"),
    "mixed": Kind(Quiet, rows, replicate_sync="one_peer_exp"),
    "mixed by copies": Kind(Quiet, rows, replicate_sync=ReplicaMixing(peer_copies=True)),
}


class Fault(L.Callback):
    """Calls `act`, once, on one rank in one phase.

    Args:
        phase: "setup" is the hook of this name. "forward" and "backward" are inside of the module's, in step `AT_STEP`
            where it trains; so are "inputs" and "loss", the hooks of a D9DModule, and "output", that of its stage.
            "save" and "load" are while the checkpoint is a dictionary. "teardown" is after the last batch, when the
            other ranks begin to tear down.
        rank: Where; None for all.
        act: Gets the module, the first layer's inputs, the last layer's gradient, the stage's output, the microbatch or
            the checkpoint; in "forward", "backward" and "output" what it returns is taken instead, unless it is None.
        skip: How often the phase is left alone before, in that step; microbatches come one by one.
    """

    def __init__(self, phase: str, rank: int | None, act: Callable[[Any], Any], skip: int = 0) -> None:
        self.phase, self.rank, self.act, self.skip = phase, rank, act, skip
        self._trainer: L.Trainer | None = None
        self.has_acted = False

    def _reach(self, phase: str, value: Any) -> Any:
        trainer = self._trainer
        assert trainer is not None
        if phase != self.phase or self.rank not in (None, trainer.global_rank) or self.has_acted:
            return None
        if phase not in ("setup", "load", "teardown") and trainer.training and trainer.global_step < AT_STEP:
            return None
        if self.skip > 0:
            self.skip -= 1
            return None
        self.has_acted = True
        return self.act(value)

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._trainer = trainer
        self._reach("setup", pl_module)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put_hooks(pl_module)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put_hooks(pl_module)

    def on_predict_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._put_hooks(pl_module)

    def _put_hooks(self, module: L.LightningModule) -> None:
        layers = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
        layers[0].register_forward_pre_hook(lambda _, inputs: self._reach("forward", inputs))
        layers[-1].weight.register_hook(lambda gradient: self._reach("backward", gradient))
        if isinstance(module, D9DModule):
            module.stages[-1].register_forward_hook(lambda _, inputs, output: self._reach("output", output))
            for phase in ("inputs", "loss"):
                hook = f"microbatch_{phase}"
                setattr(module, hook, functools.partial(self._call, phase, getattr(module, hook)))

    def _call(self, phase: str, hook: Callable[..., Any], *args: Any) -> Any:
        self._reach(phase, args[-1])
        return hook(*args)

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._reach("save", checkpoint)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        self._reach("load", checkpoint)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._reach("teardown", None)


def fail(_: Any) -> None:
    raise ValueError("bad row")


def kill(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stop(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def fill_disk(checkpoint: dict[str, Any]) -> None:
    """Limit the size of files of this process from here on: the system call that writes the checkpoint fails."""
    checkpoint["padding"] = torch.zeros(PADDING_BYTES, dtype=torch.uint8)
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))  # Python ignores SIGXFSZ


def kill_in_write(checkpoint: dict[str, Any]) -> None:
    """Do the same as `fill_disk`, but the kernel kills the process inside the system call."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    fill_disk(checkpoint)


def terminate(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def interrupt(_: Any) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def widen(output: Any) -> Any:
    """A stage's output of another form than before."""
    return replace(output, x=output.x.repeat(1, 1, 2))


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
    loop: str = "fit",
    **checkpoint_options: Any,
) -> Fitted:
    """`NUM_STEPS` steps; every second one is saved in DIRECTORY/saved. Other loops: as many batches."""
    torch.manual_seed(1)
    num_stages = min(MODULES[kind].num_stages, devices)
    mesh = MeshConfig(pipeline_parallel=num_stages, data_parallel_replicate=devices // num_stages)
    sync = MODULES[kind].replicate_sync
    strategy = D9DStrategy(mesh=mesh, timeouts=timeouts, skip_nonfinite=skip_nonfinite, replicate_sync=sync)
    options = {"every_n_train_steps": SAVE_EVERY, "save_top_k": -1, "filename": "{step}", **checkpoint_options}
    callbacks = [ModelCheckpoint(directory / "saved", **options), *([fault] if fault else [])]
    run = trainer(
        strategy,
        devices,
        device,
        enable_checkpointing=True,
        default_root_dir=directory,
        callbacks=callbacks,
        max_epochs=1,
        precision=MODULES[kind].precision,
    )
    module = MODULES[kind].make()
    if isinstance(module, D9DModule):
        module.share_predictions = False
    data = DataLoader(MODULES[kind].rows(4 * devices // num_stages * NUM_STEPS), batch_size=4)
    getattr(run, loop)(module, data, ckpt_path=checkpoint)
    return Fitted(run, strategy, torch.cat([p.detach().reshape(-1).cpu() for p in module.parameters()]))


def saved(directory: Path, step: int) -> Path:
    """A checkpoint that `fit` wrote."""
    return directory / "saved" / f"step={step}.ckpt"


def run_rank(
    directory: Path,
    number: int,
    num_ranks: int,
    port: int,
    kind: str,
    fault: Fault,
    loop: str = "fit",
    device: str = "cpu",
) -> None:
    """One of several processes, as torchrun would start it. Output goes to DIRECTORY/NUMBER.txt.

    Args:
        directory: For checkpoints, `acted` with the time of the fault, and what Lightning leaves of unfinished files.
        number: This rank.
        num_ranks: All of them.
        port: For the store.
        kind: One of `MODULES`.
        fault: The same on all ranks.
        loop: The Trainer's method.
        device: "cpu" or "cuda".
    """
    be_rank(directory, number, num_ranks, port)
    act = fault.act

    def act_and_tell(value: Any) -> Any:
        (directory / "acted").write_text(str(time.monotonic()))
        return act(value)

    fault.act = act_and_tell
    checkpoint = saved(directory / BEFORE, SAVE_EVERY) if fault.phase == "load" else None
    timeouts = TIMEOUTS if device == "cpu" else TIMEOUTS_OF_GPUS
    fit(directory, num_ranks, device, kind=kind, fault=fault, checkpoint=checkpoint, timeouts=timeouts, loop=loop)


def be_rank(directory: Path, number: int, num_ranks: int, port: int) -> None:
    """Make this process a rank, as torchrun would; see `run_rank`."""
    with (directory / f"{number}.txt").open("w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    tempfile.tempdir = str(directory)
    os.environ.update(
        {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1"},
        MASTER_PORT=str(port),
        RANK=str(number),
        LOCAL_RANK=str(number),
        GROUP_RANK="0",
    )
