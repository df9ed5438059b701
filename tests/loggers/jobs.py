"""Jobs that log, each to be a process of its own: W&B can be used once in a process until `wandb.teardown`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import WandbLogger

from lightning_d9d import D9DStrategy
from lightning_d9d.callbacks import BackgroundLoggers, Histograms
from tests.harness import warm
from tests.strategy.plain import Plain, loader, trainer

JOB_SECONDS = 120


def run_job(logger: Any, folder: Path, max_steps: int, checkpoint: Path | None = None) -> Path:
    """Train up to so many steps, and return the checkpoint of the last one."""
    saving = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
    options: dict[str, Any] = {"enable_checkpointing": True, "max_steps": max_steps, "max_epochs": None}
    run = trainer(D9DStrategy(), logger=logger, callbacks=[BackgroundLoggers(), saving], **options)
    run.fit(Plain(), loader(16), ckpt_path=checkpoint)
    return folder / "checkpoints" / f"step={max_steps}.ckpt"


def log_steps(folder: Path, max_steps: int, checkpoint: Path | None) -> None:
    """Log steps to W&B offline."""
    run_job(_wandb_logger(folder), folder, max_steps, checkpoint)
    _end_wandb()


def log_histograms(folder: Path) -> None:
    """Log histograms of one weight to W&B offline."""
    callbacks = [Histograms(2, "net.0.weight", None)]
    run = trainer(D9DStrategy(), logger=_wandb_logger(folder), callbacks=callbacks, max_epochs=1)
    run.fit(Plain(), loader(16))
    _end_wandb()


def in_process(target: Callable[..., None], *args: Any) -> None:
    """Run it in a process of its own, and see that it ends well."""
    process = warm.context().Process(target=target, args=args)
    process.start()
    try:
        process.join(JOB_SECONDS)
        assert process.exitcode == 0
    finally:
        process.kill()


def _wandb_logger(folder: Path) -> WandbLogger:
    return WandbLogger(project="project", save_dir=folder, offline=True)


def _end_wandb() -> None:
    """Wait for the file, as Python does at its end: processes of `multiprocessing` end without that."""
    import wandb  # type: ignore[import-not-found]

    wandb.teardown()
