"""`LossCurve` draws the losses of a fit as a picture."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn

from lightning_d9d.callbacks.export import make_folder
from lightning_d9d.errors import ConfigError


class LossCurve(L.Callback):
    """Draws `train_loss` and `val_loss` over optimizer steps into a PNG file when `fit` ends.

    Training points are taken every `log_every_n_steps` of the Trainer. A checkpoint contains the points: the picture of
    a resumed run begins with the first step. If the data module has a `unigram_entropy`, as `TokenDataModule` has, a
    line marks it. A model gets below this line as soon as it uses preceding tokens. Needs matplotlib (extra `viz`).

    Args:
        path: The picture; its folder is made.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.training: list[tuple[int, float]] = []
        """Pairs of step and loss in nats per token; so is `validation`."""
        self.validation: list[tuple[int, float]] = []

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Raise `ConfigError` before the training if the picture could not be drawn after it."""
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError(
                f"LossCurve(path={str(self.path)!r}) needs matplotlib, which is not installed: "
                "pip install 'lightning-d9d[viz]', or leave the callback out."
            )
        make_folder(trainer, self.path.parent, f"LossCurve(path={str(self.path)!r})")

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Take a point if the batch completed a step that the Trainer logs."""
        step = trainer.global_step
        is_new = not self.training or self.training[-1][0] != step
        if is_new and step % trainer.log_every_n_steps == 0 and "train_loss" in trainer.callback_metrics:  # type: ignore[attr-defined]
            self.training.append((step, trainer.callback_metrics["train_loss"].item()))

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take a point of a validation inside `fit`."""
        if (
            trainer.state.fn == TrainerFn.FITTING
            and not trainer.sanity_checking
            and "val_loss" in trainer.callback_metrics
        ):
            self.validation.append((trainer.global_step, trainer.callback_metrics["val_loss"].item()))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Draw the picture, on rank 0."""
        if not trainer.is_global_zero:
            return
        from matplotlib.figure import Figure  # no pyplot: the same with and without a display, and inside a notebook

        figure = Figure(figsize=(7, 4), layout="constrained")
        axes = figure.subplots()
        for points, label, marker in ((self.training, "training", ""), (self.validation, "validation", "o")):
            axes.plot([step for step, _ in points], [loss for _, loss in points], marker=marker, label=label)
        entropy = getattr(getattr(trainer, "datamodule", None), "unigram_entropy", None)
        if entropy is not None:
            axes.axhline(entropy, color="grey", linestyle="--", label=f"unigram entropy {entropy:.2f}")
        axes.set(xlabel="optimizer step", ylabel="loss (nats per token)")
        axes.legend()
        figure.savefig(self.path, dpi=120)

    def state_dict(self) -> dict[str, Any]:
        """Return the points so far."""
        return {"training": self.training, "validation": self.validation}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue after the points of a checkpoint."""
        self.training, self.validation = state_dict["training"], state_dict["validation"]
