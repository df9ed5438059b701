"""One optimizer step of a `D9DModule`, from top to bottom.

Lightning drives a batch in this order (`accumulate_grad_batches` batches make a window, and the last one steps). In a
window's last batch `strategy.optimizer_step` gets a closure that runs everything before the step. Earlier batches
neither clip nor step.

    strategy.training_step -> TrainStep.run        forward and backward of all microbatches; gradients set aside
    on_before_zero_grad, optimizer_zero_grad       (first batch of a window; finds nothing to clear)
    strategy.backward      -> TrainStep.restore    gradients put back; on the last batch divided, once
    on_before_optimizer_step, gradient clipping -> TrainStep.clip
    strategy.optimizer_step -> TrainStep.step      gradients cast to what the optimizer takes; the step, or a skip

[Note: gradients are sums] Backward runs on value sums. Gradients add up over microbatches, accumulated batches and
ranks, and are divided once by the total weight of the window. A loss that is a mean counts each batch equally, as stock
Lightning does. It is scaled by rows / (rows of the batch) / (accumulated batches) before backward, and divided by the
number of ranks. A weight that is known beforehand scales the losses instead: see `loss_scale.py`.

[Note: pipelines] All ranks of a pipeline read the same batch and run their part of one program. Loss and metrics are
computed on the ranks of the last stage and are 0 elsewhere. A sum over the pipeline, then over ranks with other tokens,
makes them equal everywhere.

[Note: dummy batches] A rank without data for a batch of other ranks runs dummy microbatches. They add nothing to loss,
weight or gradients. A loss that is a mean is averaged over the ranks with data.

[Note: one factor] Some optimizers multiply gradients by a factor as they read them (torch's fused ones). If all do so,
and nothing reads gradients between backward and step, division and clipping become that factor. They then cost no pass
over the gradients.

[Note: step in backward] With `in_backward` most parameters are updated while `run` computes gradients of others, and
their gradients are freed. So the division comes first: means are scaled by 1 / ranks, too, and the weight of the window
is known when its last batch begins. `restore`, `norm` and `step` process the remaining gradients.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_d9d.coordination.ahead import NOTHING_AGREED, BatchPlan
from lightning_d9d.mesh.sharding import local
from lightning_d9d.pipeline.executor import Executor, LossScale, SplitBatch
from lightning_d9d.pipeline.totals import BatchTotals, weighted_mean
from lightning_d9d.strategy.batches import BatchSplitter
from lightning_d9d.strategy.fit_memory import FitMemory
from lightning_d9d.strategy.gradient_sync import GradientSync
from lightning_d9d.strategy.loss_scale import LossScaling
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.optimizer_step import OptimizerStep
from lightning_d9d.strategy.reports import Reports
from lightning_d9d.strategy.sequence_check import SequenceCheck
from lightning_d9d.strategy.step_checks import StepChecks
from lightning_d9d.strategy.step_in_backward import StepInBackward
from lightning_d9d.strategy.window import Window, cast_gradients, inverse, scale_gradients
from lightning_d9d.sync.norm import clip_factor, clip_gradients_by_norm
from lightning_d9d.waits import waiting


class TrainStep:
    """The phases of an optimizer step: `run`, `restore`, `clip` and `step`.

    Args:
        module: The module with its stages built and on their device.
        executor: Runs programs over these stages.
        splitter: Splits batches.
        gradient_sync: Gathers parameters and sums gradients over ranks.
        optimizer_step: Steps or skips, and counts skipped steps.
        sequences: Checks in the first batch that stages support parts of sequences.
        memory: Checks that the first batch fits into memory.
        in_backward: Updates parameters inside `run`; None leaves all to `step`. See [Note: step in backward].
    """

    def __init__(
        self,
        module: D9DModule,
        executor: Executor,
        splitter: BatchSplitter,
        gradient_sync: GradientSync,
        optimizer_step: OptimizerStep,
        sequences: SequenceCheck,
        memory: FitMemory,
        in_backward: StepInBackward | None = None,
    ) -> None:
        self.module = module
        self.executor = executor
        self.splitter = splitter
        self.gradient_sync = gradient_sync
        self.optimizer_step = optimizer_step
        self.checks = StepChecks(module, gradient_sync, sequences, memory)
        self.pipeline = module.pipeline
        self.parameters = gradient_sync.parameters
        self.group = self.pipeline.token_group
        """Ranks over which tokens are split; None for one process."""
        self.in_backward = in_backward
        divides_means = in_backward is not None
        self.scaling = LossScaling(module, self.group, divides_means=divides_means)
        num_ranks = 1 if self.group is None or divides_means else dist.get_world_size(self.group)
        self.window = Window(self.parameters, num_ranks)
        self.defers = False
        """True if division and clipping are left to the optimizer. [Note: one factor]."""
        self.factor: Tensor | None = None
        """The factor by which gradients are still to be multiplied: float32 on the device. None: no factor."""
        self.pipeline.batch_report.skipped = optimizer_step.skipped
        self._reports = Reports("train", self.pipeline, self.group)

    def run(
        self, batch: Any, batch_index: int, accumulated_batches: int, is_last: bool, plan: BatchPlan = NOTHING_AGREED
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Run forward and backward of one batch. Collective.

        Data ranks have different batches. The ranks that share a model's stages, tensors or sequences have the same
        batch.

        Args:
            batch: This rank's rows.
            batch_index: The index of the batch in its epoch.
            accumulated_batches: Number of batches of a full window.
            is_last: Whether the optimizer steps after this batch; the gradients are then reduced.
            plan: Agreement of the data ranks about this batch.

        Returns:
            The batch's loss and metrics over all ranks, detached and equal on every rank.
        """
        is_first = self.window.begin_batch(batch_index, accumulated_batches)
        self.window.is_idle = plan.is_idle and (is_first or self.window.is_idle)
        if batch_index == 0 or self.checks.is_first_batch:
            self._begin_epoch()
        must_split_evenly = self.checks.batch(batch, batch_index)
        split = self.splitter.split(batch, plan, check=must_split_evenly, trains=True)
        self.checks.split(split, self.executor.forward_context)
        in_backward = self.in_backward if is_last else None
        asks = is_last and (is_first or in_backward is not None)
        weight = self.scaling.known_weight(split) if asks else None
        self.window.is_scaled = is_first and weight is not None
        scale = self.scaling.scale(split, accumulated_batches, plan, weight if is_first else None)
        if in_backward is not None:
            scale = scale if weight is not None else LossScale(scale.of_mean, None)
            in_backward.begin(*self._skip_and_factor(weight, is_first))
        totals = self._run_schedule(split, scale, is_first, is_last)
        if is_last:
            self.checks.whole_gradients()
        loss, metrics = self._reduce(totals, plan)
        self.window.set_aside()
        return loss, metrics

    def restore(self, is_last: bool) -> None:
        """Put the gradients back; on the last batch of the window divide them by its total weight."""
        self.window.restore(is_last)
        if not is_last:
            return
        if self.window.weight is not None and not self.window.is_idle:
            self.optimizer_step.empty.add_window(self.window.weight)
        self.factor = None
        divisor = self.window.divisor
        if isinstance(divisor, Tensor) or divisor != 1.0:
            factor = inverse(divisor) if isinstance(divisor, Tensor) else 1 / divisor
            if self.defers:
                self.factor = self._on_device(factor)
            elif gradients := [local(p.grad) for p in self.parameters if p.grad is not None]:
                scale_gradients(gradients, factor)  # a pipeline rank may have frozen stages only

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """Return the norm of the gradients as the optimizer will use them, except for clipping. Collective."""
        norm = self.gradient_sync.norm(parameters, None if self.in_backward is None else self.in_backward.gone)
        return norm if self.factor is None else norm * self.factor

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip by the norm over all ranks now, or multiply `factor` by it. Return the norm. Collective."""
        parameters = list(parameters)
        norm = self.norm(parameters)
        if not self.defers:
            return clip_gradients_by_norm(parameters, max_norm, norm=norm)
        factor = clip_factor(norm, max_norm).float()
        self.factor = factor if self.factor is None else self.factor * factor
        return norm

    def step(self, optimizer: Optimizer, norm: Tensor | None = None, **kwargs: Any) -> None:
        """Step the optimizer, or skip the step of a window whose total weight is zero; then call the module's hook.

        Args:
            optimizer: The only optimizer.
            norm: Norm of the gradients; the step is also skipped if it is not finite.
            kwargs: For `optimizer.step`.
        """
        if self.gradient_sync.data_parallel is not None:
            cast_gradients(self.parameters, optimizer)  # buckets and sharded units keep wide ones
        if self.in_backward is not None:
            self.optimizer_step(optimizer, self.in_backward.decision, **kwargs)
            self.in_backward.torn.end()
            self.module.on_after_optimizer_step(self.in_backward.skip)
            return
        weight = self.window.weight
        skip = None if weight is None else weight == 0  # None: a loss that is a mean always has rows
        if norm is not None:
            skip = ~norm.isfinite() if skip is None else skip | ~norm.isfinite()
        factor, self.factor = self.factor, None
        self.optimizer_step(optimizer, skip, factor, **kwargs)
        self.module.on_after_optimizer_step(skip)

    def leave_out(self) -> None:
        """End a window in which only other replicas have data. Local."""
        self.factor = None
        self.module.on_after_optimizer_step(torch.ones((), dtype=torch.bool, device=self.pipeline.device))

    def _begin_epoch(self) -> None:
        self.checks.frozen_alike()
        self.optimizer_step.empty.end_epoch()
        self.pipeline.begin_epoch()

    def _skip_and_factor(self, weight: Tensor | None, is_first: bool) -> tuple[Tensor | None, Tensor | None]:
        """Return whether a window whose last batch has this weight skips its step, and a factor of gradients."""
        if weight is None or (not is_first and self.window.weight is None):  # means
            return None, None
        if is_first or self.window.weight is None:
            return weight == 0, None
        total = self.window.weight + weight
        return total == 0, inverse(total)

    def _run_schedule(self, split: SplitBatch, scale: LossScale, is_first: bool, is_last: bool) -> BatchTotals:
        """Run this rank's part of the program, including its reductions of gradients. Collective."""
        num_microbatches = len(split.microbatches)
        data_parallel = self.gradient_sync.data_parallel
        if data_parallel is not None:
            data_parallel.begin(
                is_first=is_first, reduces=is_last, splits_backward=self.pipeline.splits_backward(num_microbatches)
            )
        with self.module.schedule_running():
            try:
                totals = self.executor.train(self.pipeline.program(num_microbatches), split, scale, data_parallel)
            except BaseException as error:
                if data_parallel is not None:
                    data_parallel.drop()
                if self.in_backward is not None:
                    self.in_backward.fail(error)
                raise
        if data_parallel is not None:
            data_parallel.finish()
        return totals

    def _reduce(self, totals: BatchTotals, plan: BatchPlan) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum loss and metrics over the pipeline, then over the token group; divide each by its weight. Collective."""
        schema, values = self._reports.of(totals)
        if schema.loss_is_mean and totals.loss is not None:  # each rank's mean counts equally, as in DDP
            values[0] = torch.stack([values[0, 0] / values[0, 1], values.new_ones(())])
        report = self.pipeline.batch_report
        message = self.pipeline.sum(report.attach(values))
        if self.group is not None:
            with waiting():
                dist.all_reduce(message, group=report.group_or(self.group))
        sums = report.detach(message, values.shape[0], not schema.loss_is_mean)
        self.window.add(None if schema.loss_is_mean else sums[0, 1])
        if not (schema.loss_is_mean or plan.is_idle):
            self.optimizer_step.empty.add_batch(sums[0, 1])
        loss, *metrics = weighted_mean(*sums.unbind(1)).to(schema.dtype).unbind()
        return loss, dict(zip(schema.metrics, metrics, strict=True))

    def _on_device(self, factor: Tensor | float) -> Tensor:
        device = self.pipeline.device
        if isinstance(factor, Tensor):
            return factor.to(device, torch.float32)
        return torch.full((), factor, dtype=torch.float32, device=device)  # without waiting, unlike a copy
