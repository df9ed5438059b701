"""Corrects Lightning's progress bar and model summary in the terminal for a `D9DStrategy`.

The Trainer makes these objects before its strategy sees them. So the objects stay, and get a class with corrected
methods; objects of a user's own class are left alone.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Collection, Iterable
from typing import Any, cast

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.callbacks import (
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.callbacks.progress.tqdm_progress import Tqdm
from lightning.pytorch.utilities.model_summary.model_summary import _format_summary_table
from torch import Tensor, nn

from lightning_d9d.loop.patches import Patches
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.mesh.sharding import local

_DEPRECATIONS = (r"`isinstance\(treespec, LeafSpec\)` is deprecated",)
"""Warnings of torch that are addressed to Lightning."""
_ORDER_OF_STEPS = r"Detected call of `lr_scheduler\.step\(\)` before"
_NO_LOADER = "You defined a `validation_step` but have no `val_dataloader`"


def describe_run(
    mesh: MeshDomains,
    parameters: Iterable[nn.Parameter],
    tied: Collection[str],
    accumulated_batches: int,
    num_tokens: int,
    bucket_bytes: int,
) -> str:
    """Describe the mesh and this rank's part of the model. Local.

    Args:
        mesh: The mesh of the run.
        parameters: This rank's parameters.
        tied: The names of parameters that other pipeline ranks hold, too.
        accumulated_batches: The number of batches of an optimizer step.
        num_tokens: The number of tokens of a batch on this rank; 0 if it is unknown.
        bucket_bytes: The size of the gradient buckets.
    """
    weights = sum(local(each).numel() * each.element_size() for each in parameters)
    shared = {"on several stages": first_of(list(tied))} if tied else {}
    return mesh.describe(
        {
            **shared,
            "tokens per step": num_tokens * accumulated_batches * mesh.dp_size or "unknown",
            "GiB per rank": f"{weights / 2**30:.3f} weights, {bucket_bytes / 2**30:.3f} gradient buckets",
        }
    )


def adapt_display(patches: Patches, trainer: L.Trainer) -> None:
    """Correct the Trainer's progress bar and model summary for this run. Local."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if type(callback) in _CORRECTED:
            patches.replace(callback, "__class__", _CORRECTED[type(callback)])


def say(trainer: L.Trainer, text: str) -> None:
    """Log a text on rank 0, on separate lines if a progress bar is shown. Local."""
    bar = trainer.progress_bar_callback
    rich: Any = bar.progress if isinstance(bar, RichProgressBar) else None
    if bar is not None and rich is not None and rich.live.is_started and rich.console.is_terminal:
        bar.print(text)  # which rich puts above the bar; it does not know of what goes to a log
        return
    with Tqdm.external_write_mode():
        sys.stdout.flush()
        rank_zero_info(text)


# Messages that are not for users


class _NoTips(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith("💡 Tip")


_no_tips = _NoTips()


def silence() -> None:
    """Hide messages that users cannot act on: advertisements, and torch's warnings to Lightning. Local."""
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_no_tips)
    for message in _DEPRECATIONS:
        warnings.filterwarnings("ignore", message)


def silence_hooks() -> None:
    """Hide warnings of a `D9DModule` about hooks and an order of calls that the user did not write. Local.

    A scheduler also steps when an optimizer step is skipped, which is reported separately.
    """
    for message in (_NO_LOADER, _ORDER_OF_STEPS):
        warnings.filterwarnings("ignore", message)


# Progress bars


class _Bar(ProgressBar):
    """A bar that knows where an epoch begins and how long it is; Lightning's bars do not after a resume."""

    _first_batch = 0

    @property
    def total_train_batches(self) -> int | float:
        """Number of batches of this epoch, up to the batch with the last step."""
        trainer = self.trainer
        if trainer.max_steps == -1 or not trainer.lightning_module.automatic_optimization:
            return trainer.num_training_batches
        window = trainer.accumulate_grad_batches
        left = (trainer.max_steps - trainer.global_step) * window - self._first_batch % window
        return min(trainer.num_training_batches, self._first_batch + left)

    def resume(self, num_batches: int) -> None:
        """Begin an epoch in which an earlier run did these batches, which took no time in this run."""
        if self.is_enabled:  # type: ignore[attr-defined]
            self._first_batch = num_batches
            self.on_train_epoch_start(self.trainer, self.trainer.lightning_module)
            self._skip(num_batches)
            del self._first_batch  # that of the class is 0

    def _skip(self, num_batches: int) -> None:
        raise NotImplementedError


def resume_bar(trainer: L.Trainer) -> None:
    """Begin the bar in the middle of a resumed epoch. Lightning calls no hook for this. Local."""
    loop, bar = trainer.fit_loop, trainer.progress_bar_callback
    progress: Any = loop.epoch_loop.batch_progress.current
    num_batches: int = progress.processed
    if isinstance(bar, _Bar) and loop.restarted_mid_epoch and num_batches < trainer.num_training_batches:
        bar.resume(num_batches)


class _TqdmBar(_Bar, TQDMProgressBar):
    def _skip(self, num_batches: int) -> None:
        self.train_progress_bar.initial = self.train_progress_bar.n = num_batches
        self.train_progress_bar.refresh()

    def get_metrics(self, trainer: L.Trainer, pl_module: L.LightningModule) -> dict[str, Any]:
        """Return Lightning's metrics, with numbers as people write them: tqdm would print 9.01e+3 for 9012."""
        metrics = super().get_metrics(trainer, pl_module)
        return {k: readable(v) if isinstance(v, float) else v for k, v in metrics.items()}


def readable(value: float) -> str:
    """Return a number in four or more digits; with an exponent if it is very small or large."""
    size = abs(value)
    if 1e3 <= size < 1e9:
        return f"{value:.0f}"
    return f"{value:.3f}" if size == 0 or 1e-2 <= size < 1e3 else f"{value:.2e}"


class _RichBar(_Bar, RichProgressBar):
    def _skip(self, num_batches: int) -> None:
        self._update(self.train_progress_bar_id, num_batches)  # the speed is counted from the first update on

    def _get_train_description(self, current_epoch: int) -> str:
        """Leave out the number of epochs if the run has no limit, which Lightning would print as -2."""
        text = super()._get_train_description(current_epoch)
        return text.removesuffix("/-2").ljust(len(self.validation_description))


# Model summaries


class _Summary(ModelSummary):
    def _summary(self, trainer: L.Trainer, pl_module: L.LightningModule) -> Any:
        """Summarize the whole model, even if this rank has some of its stages. Collective over a pipeline."""
        strategy = cast(Any, trainer.strategy)
        if not strategy.is_pipelined:
            return super()._summary(trainer, pl_module)
        own = pl_module.state_dict(keep_vars=True)
        frozen = {name for name, value in own.items() if isinstance(value, Tensor) and not value.requires_grad}
        frozen = set().union(*all_gather_object(frozen, strategy.mesh.group(Axis.PP)))
        whole = cast(Any, pl_module).whole_on_meta()  # only D9DModules have stages
        for name, value in whole.state_dict(keep_vars=True).items():
            if name in frozen and isinstance(value, Tensor):
                value.requires_grad_(False)
        return super()._summary(trainer, whole)


def _without_flops(columns: list[tuple[str, list[str]]]) -> list[tuple[str, list[str]]]:
    return [(name, cells) for name, cells in columns if name != "FLOPs"]


def _text(columns: list[tuple[str, list[str]]], totals: tuple[Any, ...]) -> list[str]:
    """Return the lines of Lightning's table, except the last, which has the number of operations."""
    rest: Any = (*totals, 0, *columns)
    return _format_summary_table(*rest).splitlines()[:-1]


class _PlainSummary(_Summary):
    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]], *totals: Any, total_flops: int, **summarize_kwargs: Any
    ) -> None:
        """Return Lightning's summary, without the number of operations if it was not counted."""
        if total_flops:
            ModelSummary.summarize(summary_data, *totals, total_flops=total_flops, **summarize_kwargs)
        else:
            rank_zero_info("\n".join(["", *_text(_without_flops(summary_data), totals)]))


class _RichSummary(_Summary, RichModelSummary):
    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]], *totals: Any, total_flops: int, **summarize_kwargs: Any
    ) -> None:
        """Likewise."""
        if total_flops:
            RichModelSummary.summarize(summary_data, *totals, total_flops=total_flops, **summarize_kwargs)
            return
        from rich import get_console  # type: ignore[import-not-found]
        from rich.table import Table  # type: ignore[import-not-found]

        columns = _without_flops(summary_data)
        rows = list(zip(*(cells for _, cells in columns), strict=True))
        table = Table(header_style=summarize_kwargs.get("header_style", "bold magenta"))
        for name, _ in columns:
            table.add_column(name, justify="right" if name.startswith("Params") else "left")
        for row in rows:
            table.add_row(*row)
        sums = _text(columns, totals)[len(rows) + 3 :]  # after the header and two rules
        get_console().print(table, "\n".join(sums), sep="\n", highlight=False)


_CORRECTED: dict[type, type] = {
    TQDMProgressBar: _TqdmBar,
    RichProgressBar: _RichBar,
    ModelSummary: _PlainSummary,
    RichModelSummary: _RichSummary,
}
