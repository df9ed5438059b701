"""`WeightAverages` keeps averages of the weights over optimizer steps, on any mesh."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_d9d.callbacks.export import DirectoryExport
from lightning_d9d.checkpoint import AVERAGES
from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.mesh.sharding import local
from lightning_d9d.ops.stochastic import round_stochastic_
from lightning_d9d.strategy.optimizers import first_names
from lightning_d9d.strategy.weights import shard_like

Dtype = Literal["float32", "weights"]


class WeightAverages(L.Callback):
    """Keeps averages of the trained weights over optimizer steps, validates with them, and saves them.

    Averages are sharded like their weights: a rank averages its own shard, without a message. The averaged parameters
    are those trained when a fit begins, each once. Buffers and frozen parameters have no averages. The first average is
    the weights themselves. After that `average = decay * average + (1 - decay) * weight` (Polyak and Juditsky, 1992).

    A checkpoint has them beside the weights, and a resumed fit loads them, on any mesh. During validation the rank
    holds its weights twice.

    Args:
        decay: Decay, from 0 to below 1. None takes the plain mean of the weights at all updates.
        every_n_steps: Optimizer steps from one update to the next.
        start_step: The optimizer step after which averages begin, counted from 1 as in `Trainer.global_step`.
        dtype: "float32", or float64 for such weights; "weights" means the dtype of each weight. Averages in bfloat16
            are rounded stochastically, so that small changes are not lost.
        validate: Whether validation inside of `fit` uses the averages in place of the weights.
        keep: Whether the averages take the weights' place when `fit` ends. Exports that are listed after this callback
            write them. Checkpoints saved earlier contain the weights.

    Raises:
        ConfigError: A value is out of range. At the start of a fit: nothing is trained, or an export is listed before
            this callback.
    """

    averages_weights = True
    """Marks callbacks that average weights, which replicas that mix their weights refuse."""

    def __init__(
        self,
        decay: float | None = 0.999,
        every_n_steps: int = 1,
        start_step: int = 1,
        dtype: Dtype = "float32",
        validate: bool = True,
        keep: bool = False,
    ) -> None:
        limits = {
            "decay": (decay is None or 0 <= decay < 1, "from 0 to below 1, or None for the plain mean"),
            "every_n_steps": (every_n_steps >= 1, "at least 1"),
            "start_step": (start_step >= 1, "at least 1"),
            "dtype": (dtype in get_args(Dtype), "'float32' or 'weights'"),
        }
        for name, (is_good, limit) in limits.items():
            if not is_good:
                raise ConfigError(f"WeightAverages({name}={locals()[name]!r}) must be {limit}")
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.dtype = dtype
        self.validate = validate
        self.keep = keep
        self.averages: dict[str, Tensor] = {}
        """This rank's averages by name of the parameter, as DTensors where weights are; empty before the first."""
        self.num_updates = 0
        """The number of weights in an average."""
        self._weights: dict[str, nn.Parameter] = {}
        self._aside: dict[str, Tensor] = {}
        """The weights, while averages are in their place."""
        self._step = 0
        self._saved: Mapping[str, Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the number of updates; `on_save_checkpoint` adds the averages."""
        return {"num_updates": self.num_updates}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the result of `state_dict`."""
        self.num_updates = state_dict["num_updates"]

    def on_save_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Add this rank's averages, which the strategy saves like weights. Local.

        Raises:
            StateError: The averages are in the weights' place.
        """
        if self._aside:
            raise StateError(
                "a checkpoint is saved while WeightAverages validates, so it would have the averages as weights; save "
                "it after the validation, or set validate=False"
            )
        if self.averages:
            checkpoint[AVERAGES] = dict(self.averages)

    def on_load_checkpoint(self, trainer: L.Trainer, pl_module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take a checkpoint's averages for the resumed fit. Local."""
        self._saved = checkpoint.get(AVERAGES)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Find the parameters to average, and load the averages of a checkpoint. Collective.

        Raises:
            ConfigError: No rank trains anything, or an export would write the weights where `keep` promises averages.
            StateError: The averages of the checkpoint are those of other parameters, or in a wider dtype.
        """
        callbacks: list[L.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        for callback in callbacks[: callbacks.index(self)]:
            if self.keep and isinstance(callback, DirectoryExport):
                raise ConfigError(
                    f"{type(callback).__name__} before WeightAverages(keep=True) would write the weights instead of "
                    "their averages; list it after WeightAverages, or leave keep out"
                )
        names = first_names(pl_module.state_dict(keep_vars=True))
        self._weights = {name: weight for weight, name in names.items() if weight.requires_grad}
        if not any(Ranks().all_gather(bool(self._weights))):
            raise ConfigError(
                f"WeightAverages has nothing to average: no parameter of {type(pl_module).__name__} is trained; leave "
                "the callback out"
            )
        saved, self._saved = self._saved, None
        self.averages = {}
        if not any(Ranks().all_gather(bool(saved))):
            self.num_updates = 0
            return
        with Ranks().agreed("averages of weights cannot be taken up"):
            self.averages = {name: self._taken(name, weight, saved or {}) for name, weight in self._weights.items()}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Remember the number of steps before a resume. Local."""
        self._step = trainer.global_step
        if self._step >= self.start_step and not self.num_updates:
            rank_zero_warn("there are no averages of the steps before: those of WeightAverages begin again")

    def _taken(self, name: str, weight: nn.Parameter, saved: Mapping[str, Tensor]) -> Tensor:
        if name not in saved or saved[name].shape != weight.shape:
            problem = f"shape {list(saved[name].shape)}" if name in saved else f"only {first_of([*saved])}"
            raise StateError(
                f"the checkpoint has none of {name}, {list(weight.shape)}: {problem}; train the parameters that it "
                "trained"
            )
        average, theirs = self._room(weight), shard_like(saved[name], weight)
        if torch.promote_types(average.dtype, theirs.dtype) != average.dtype:
            raise StateError(
                f"the average of {name} was saved as {theirs.dtype}, and would lose digits as {average.dtype}; set "
                f"WeightAverages(dtype={'float32' if self.dtype == 'weights' else 'weights'!r})"
            )
        local(average).copy_(local(theirs))
        return average

    def _room(self, weight: nn.Parameter) -> Tensor:
        wide = self.dtype == "float32"
        dtype = torch.promote_types(weight.dtype, torch.float32) if wide else weight.dtype
        return torch.empty_like(weight.detach(), dtype=dtype)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any) -> None:
        """Update the averages if an optimizer has stepped, and this step is an update step. Local."""
        step, before = trainer.global_step, self._step
        self._step = step
        if step == before or step < self.start_step or (step - self.start_step) % self.every_n_steps:
            return
        if not self.num_updates:
            self.averages = {name: self._room(weight) for name, weight in self._weights.items()}
        self.num_updates += 1
        share = 1 / self.num_updates if self.decay is None or self.num_updates == 1 else 1 - self.decay
        for name, average in self.averages.items():
            _move(local(average), local(self._weights[name]), share, zlib.crc32(name.encode()) << 31 ^ self.num_updates)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the averages in the weights' place, inside of `fit`. Local."""
        if self.validate and trainer.state.fn == TrainerFn.FITTING:
            self._aside = {name: local(self._weights[name]).detach().clone() for name in self.averages}
            self._overwrite(self.averages)

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Put the weights back. Local."""
        self._put_back()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Put the weights back if validation had the averages. Local."""
        self._put_back()

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Leave the averages in the weights' place, with `keep`. Local."""
        if self.keep:
            self._overwrite(self.averages)

    def _put_back(self) -> None:
        aside, self._aside = self._aside, {}
        self._overwrite(aside)

    @torch.no_grad()
    def _overwrite(self, values: Mapping[str, Tensor]) -> None:
        for name, value in values.items():
            local(self._weights[name]).copy_(local(value))


def _move(average: Tensor, weight: Tensor, share: float, seed: int) -> None:
    """Move an average towards a weight. Local.

    Args:
        average: Overwritten.
        weight: The weight, of the same shape.
        share: Fraction of the way: 1 makes them equal.
        seed: Generator for the rounding of averages in bfloat16.
    """
    if share == 1:
        average.copy_(weight)
    elif average.dtype == torch.bfloat16:
        round_stochastic_(average, torch.lerp(average.float(), weight.float(), share), seed)
    else:
        average.lerp_(weight.to(average.dtype), share)
