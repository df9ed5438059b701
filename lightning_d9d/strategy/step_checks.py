"""Checks while a `D9DModule` trains: mistakes that would show as hangs or as wrong numbers."""

from __future__ import annotations

from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_warn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.mesh.collectives import first_difference
from lightning_d9d.pipeline.executor import SplitBatch
from lightning_d9d.strategy.fit_memory import BatchShape, FitMemory
from lightning_d9d.strategy.gradient_sync import GradientSync
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.same_batches import SameBatches
from lightning_d9d.strategy.sequence_check import SequenceCheck


class StepChecks:
    """Checks batches, frozen parameters and the first gradients.

    Args:
        module: The module with its stages built.
        gradients: Gradients that are summed over ranks.
        sequences: Checks that stages support parts of sequences.
        memory: Checks that the first batch fits into memory.
    """

    def __init__(self, module: D9DModule, gradients: GradientSync, sequences: SequenceCheck, memory: FitMemory) -> None:
        self._module = module
        self._gradients = gradients
        self._sequences = sequences
        self._memory = memory
        self._same_batches = SameBatches(module.pipeline.readers)
        self.is_first_batch = True
        self._has_checked_whole = False

    def batch(self, batch: Any, batch_index: int) -> bool:
        """Check that the ranks that read a batch have the same one. Collective over them, if it checks.

        Returns:
            Whether the batch must divide evenly into microbatches. After a resume, the first batch may be the short
            last one of an epoch.
        """
        self._same_batches.check("train", batch)
        return self.is_first_batch and batch_index == 0

    def split(self, split: SplitBatch, forward_context: Any) -> None:
        """Check, with the first batch, that it fits into memory and that stages support its parts. Collective."""
        if self.is_first_batch:
            self._memory.check(BatchShape.of(split))
            self._warn_of_batch_norms(split.num_counted)
        self._sequences.check(split.microbatches[0], forward_context)
        self.is_first_batch = False

    def _warn_of_batch_norms(self, num_microbatches: int) -> None:
        """Warn that the number of microbatches changes the result, if any rank has several and a batch norm.

        Collective over all ranks, which may have other batches and other numbers of microbatches.

        Args:
            num_microbatches: This rank's microbatches of the first batch, without dummies.
        """
        norms = {
            (f"{name} ({type(norm).__name__})", num_microbatches): None
            for stage in self._module.stages
            for name, norm in stage.named_modules()
            if isinstance(norm, _BatchNorm) and norm.training
        }
        if several := {name: number for name, number in sorted(Ranks().merge(norms)) if number > 1}:
            rank_zero_warn(
                f"each of the {max(several.values())} microbatches of a batch is normalized by its own statistics, not "
                f"by those of the batch, in {first_of([*several])}. So the number of microbatches changes the result; "
                "take another norm, such as GroupNorm, or one microbatch"
            )

    def frozen_alike(self) -> None:
        """Check at the beginning of an epoch that the ranks of a stage sum the gradients of the same parameters.

        Collective.

        Raises:
            ConfigError: Parameters that one rank trains are frozen on another; raised on every rank.
        """
        pipeline = self._module.pipeline
        if pipeline.mesh is None:
            return
        named = self._module.named_parameters()
        lines = [f"{name} {'trained' if p.requires_grad else 'frozen'}" for name, p in named]
        has_slices = pipeline.tokens.num_slices > 1
        group = pipeline.mesh.group(Axis.DP, Axis.CP, Axis.TP) if has_slices else pipeline.token_group
        if difference := first_difference(lines, group):
            raise ConfigError(
                f"ranks with the same stages train different parameters: {difference}. Set requires_grad to the same "
                "values on all ranks"
            )
        self._gradients.tied.check_frozen_alike()

    def whole_gradients(self) -> None:
        """Check, in the first reduced window, that tensor ranks had summands of gradients. Collective.

        Raises:
            ConfigError: Tensor ranks had whole gradients, which the sum would count several times; raised on every
                rank.
        """
        pipeline, data_parallel = self._module.pipeline, self._gradients.data_parallel
        has_checked, self._has_checked_whole = self._has_checked_whole, True
        if not has_checked and pipeline.tokens.num_slices > 1:
            with Ranks(pipeline.readers).agreed(f"{type(self._module).__name__} cannot train on tensor ranks"):
                if data_parallel is not None:  # a stage may have nothing that is not sharded
                    data_parallel.check_whole()
        if data_parallel is not None:
            data_parallel.forget_whole()
