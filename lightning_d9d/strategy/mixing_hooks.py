"""Lightning's hooks for replicas that mix: the mean for validation, and the mean in checkpoints."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning as L
from torch import Tensor
from torch.optim import Optimizer

from lightning_d9d.errors import ConfigError
from lightning_d9d.mixing import ReplicaMixing
from lightning_d9d.strategy.mixed_replicas import MixedReplicas
from lightning_d9d.strategy.rank_hooks import RankHooks
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.strategy.tied import TiedParameters


class MixingHooks(RankHooks):
    """The hooks of `D9DStrategy(replicate_sync=...)`; they do nothing unless replicas mix.

    Args:
        ranks: The ranks of the job, with separate replicas if they mix.
        mixing: How they mix; None sums gradients over replicas.
    """

    def __init__(self, ranks: JobRanks, mixing: ReplicaMixing | None) -> None:
        super().__init__(ranks)
        self.mixed = None if mixing is None else MixedReplicas(mixing, ranks)
        """The replicas that mix their weights; None where gradients are summed over all ranks."""

    def global_average(self) -> Tensor | None:
        """Put the mean of all replicas in place of weights and buffers until `revert_global_average`.

        Collective over all ranks. Validation, checkpoints and the end of a fit do so automatically. Training must not
        continue before the other call.

        Returns:
            The distance of this replica from the mean: a float64 scalar.

        Raises:
            ConfigError: Replicas do not mix, or no fit runs.
        """
        if self.mixed is None or self.mixed.mixer is None:
            raise ConfigError(
                "global_average() is for a fit with D9DStrategy(replicate_sync=...) of replicas that mix; here all "
                "replicas have equal weights"
            )
        return self.mixed.global_average()

    def revert_global_average(self) -> None:
        """Restore each replica's own values. Local."""
        if self.mixed is not None:
            self.mixed.revert()

    def on_validation_start(self) -> None:
        """Validate with the mean of all replicas, in a fit. Collective over all ranks."""
        super().on_validation_start()
        if self.mixed is not None:
            self.mixed.global_average()

    def on_validation_end(self) -> None:
        """Continue with this replica's own values. Local."""
        super().on_validation_end()
        self.revert_global_average()

    def on_exception(self, exception: BaseException) -> None:
        """Restore this replica's own values. Local."""
        super().on_exception(exception)
        self.revert_global_average()

    def teardown(self) -> None:
        """Forget the replicas of this run. Local."""
        if self.mixed is not None:
            self.mixed.close()
        super().teardown()

    def _check_mixing(self, trainer: L.Trainer, module: L.LightningModule, *, steps_in_backward: bool) -> None:
        if self.mixed is not None:
            self.mixed.check(trainer, module, steps_in_backward=steps_in_backward)

    def _make_replicas_equal(self) -> None:
        if self.mixed is not None and self.model is not None and self.ranks.num_replicas > 1:
            self.mixed.make_equal(self.model)

    def _open_mixing(self, tied: TiedParameters, optimizers: Sequence[Optimizer]) -> None:
        if self.mixed is not None and self.model is not None:
            self.mixed.open(self.model, tied, optimizers)

    def _begin_mixing(self) -> None:
        if self.mixed is not None and self.lightning_module is not None:
            self.mixed.begin(self.lightning_module.trainer.ckpt_path)

    def _end_mixing(self) -> None:
        if self.mixed is not None:
            self.mixed.end()

    def _opened_mixing(self, checkpoint: Mapping[str, Any]) -> None:
        if self.mixed is not None:
            self.mixed.opened(checkpoint)

    def _mixing_first(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return the closure followed by the mix, before the update."""
        return closure if self.mixed is None else functools.partial(_run_and_mix, self.mixed, optimizer, closure)

    def _launch_mixing(self, norm: Tensor | None) -> None:
        """Begin the next round, after the update."""
        if self.mixed is not None and self.mixed.mixer is not None and self.lightning_module is not None:
            self.mixed.launch(self.lightning_module.trainer, self.lightning_module, norm)

    @contextmanager
    def _saving_mean(self, checkpoint: dict[str, Any], path: str | Path, *, is_deferred: bool) -> Generator[None]:
        """Save the mean inside the block. Collective over all ranks."""
        if self.mixed is None or is_deferred:
            yield
            return
        with self.mixed.mean_in_checkpoint(checkpoint, str(self.broadcast(path))):
            yield


def _run_and_mix(mixed: MixedReplicas, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
    result = closure()
    mixed.finish(optimizer)
    return result
