"""One optimizer step of a `D9DModule`, from top to bottom.

Lightning drives a batch in this order (`accumulate_grad_batches` batches make a window, the last one steps):

    strategy.training_step -> TrainStep.run        forward and backward of all microbatches; gradients set aside
    on_before_zero_grad, optimizer_zero_grad       (first batch of a window; finds nothing to clear)
    strategy.backward      -> TrainStep.restore    gradients put back; on the last batch divided, once
    on_before_optimizer_step, gradient clipping -> TrainStep.clip
    strategy.optimizer_step -> TrainStep.step      gradients cast to what the optimizer takes; the step, or a skip

[Note: gradients are sums] Backward runs on value sums. Gradients add up over microbatches, accumulated batches and
ranks, and are divided once by the total weight of the window. A loss that is a mean counts each batch equally, as
stock Lightning does: it is scaled by rows / (rows of the batch) / (accumulated batches) before backward and divided by
the number of ranks. Where the total weight of a window is known before its first backward (it is one batch, and batches
are not cut or `microbatch_weight` is given), the losses are scaled by it and no pass over the gradients is needed.

[Note: one factor] Where the optimizer multiplies gradients by a factor as it reads them (torch's fused ones) and nobody
looks at them between backward and step, division and clipping become that factor and cost no pass over the gradients.

[Note: windows] A window begins where Lightning zeroes gradients (every `accumulate_grad_batches`-th batch of an epoch)
and after a batch that was the last of one. So gradients that never met a step are dropped, as in stock Lightning: an
`on_train_batch_start` returned -1 inside a window, an overridden `optimizer_step` left it out, a closure ran twice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.pipeline.executor import BatchTotals, Executor, weighted_mean
from lightning_d9d.strategy.optimizer_step import OptimizerStep
from lightning_d9d.sync.buckets import GradientBuckets
from lightning_d9d.sync.norm import clip_factor, clip_gradients_by_norm, gradient_norm

if TYPE_CHECKING:
    from lightning_d9d.schedule import Schedule
    from lightning_d9d.strategy.module import D9DModule


class TrainStep:
    """The state of a window and the five phases named above.

    Args:
        module: The module with its stages built and on their device.
        schedule: Makes a program from a number of microbatches.
        buckets: Gradient buckets, or None where nothing is reduced or accumulated.
        group: Ranks over which batches are split, None for one process.
        forward_context: The precision context of a forward.
        cuts_batches: Whether a batch may make more than one microbatch. Equal on all ranks, unlike the number that a
            batch makes: ranks decide by it whether they sum weights between forward and backward.
        optimizer_step: Steps or skips, and counts skips.
    """

    def __init__(
        self,
        module: D9DModule,
        schedule: Schedule,
        buckets: GradientBuckets | None,
        group: dist.ProcessGroup | None,
        forward_context: Callable[[], AbstractContextManager],
        cuts_batches: bool,
        optimizer_step: OptimizerStep,
    ) -> None:
        self.module = module
        self.parameters = list(module.parameters())
        self.program = functools.cache(lambda num_microbatches: schedule.program(1, num_microbatches).ranks[0])
        self.buckets = buckets
        self.group = group
        self.num_ranks = 1 if group is None else dist.get_world_size(group)
        self.executor = Executor(module.stages, module, forward_context)
        self.cuts_batches = cuts_batches
        self.optimizer_step = optimizer_step
        self.defers = False
        """Whether division and clipping are left to the optimizer. [Note: one factor]."""
        self.factor: Tensor | None = None
        """What gradients are still to be multiplied by: float32 on the device. None: nothing."""
        self._is_first_batch = True
        self._is_new_window = True
        self._stashed: list[tuple[nn.Parameter, Tensor]] = []
        self._window_weight: Tensor | None = None
        self._scaled_before = False
        self._loss_is_mean: bool | None = None
        self._reduced: tuple[bool | None, list[str]] | None = None

    def run(
        self, batch: Any, batch_index: int, accumulated_batches: int, is_last: bool
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Forward and backward of one batch. Collective: every rank calls it with its own batch.

        Args:
            batch: This rank's rows.
            batch_index: Of the batch in its epoch. [Note: windows].
            accumulated_batches: Batches a full window has.
            is_last: Whether the optimizer steps after this batch; the gradients are reduced then.

        Returns:
            The batch's loss and metrics over all ranks, detached and equal on every rank.
        """
        is_first = self._is_new_window or batch_index % accumulated_batches == 0
        if is_first:  # Lightning's own zero_grad comes after the schedule, too late
            for parameter in self.parameters:
                parameter.grad = None
            self._window_weight = self._loss_is_mean = None
        check = self._is_first_batch and batch_index == 0  # resumed, the first may be the short last one of an epoch
        microbatches = self.module.microbatches(batch, check=check)
        self._is_first_batch = self._is_new_window = False
        rows = [self.module.rows_of(m) for m in microbatches]
        is_whole_window = is_first and is_last
        total_weight = self._known_weight(microbatches) if is_whole_window else None
        weight_is_known_after_forward = is_whole_window and not self.cuts_batches

        def scale(totals: BatchTotals) -> Tensor | float:
            nonlocal total_weight
            if totals.loss_is_mean:
                return 1 / (sum(rows) * accumulated_batches)
            if total_weight is None and weight_is_known_after_forward:
                assert totals.loss is not None
                total_weight = self._sum_over_ranks(totals.loss[1].double())
            return 1.0 if total_weight is None else _inverse(total_weight)

        with self.module.schedule_running():
            totals = self.executor.run(
                self.program(len(microbatches)),
                microbatches,
                rows,
                scale,
                before_last_backward=self.buckets.start if self.buckets is not None and is_last else _nothing,
            )
        if self.buckets is not None and is_last:
            self.buckets.finish()
        self._scaled_before = total_weight is not None
        loss, metrics = self._reduce(totals)
        self._set_aside()
        return loss, metrics

    def restore(self, is_last: bool) -> None:
        """Put the gradients back; on the last batch of the window divide them by its total weight."""
        for parameter, gradient in self._stashed:
            parameter.grad = gradient
        self._stashed = []
        self._is_new_window = is_last
        if not is_last:
            return
        if self._loss_is_mean:
            divisor: Tensor | float = float(self.num_ranks)
        elif self._scaled_before:
            divisor = 1.0
        else:
            assert self._window_weight is not None
            divisor = self._window_weight
        self.factor = None
        if isinstance(divisor, Tensor) or divisor != 1.0:
            gradients = [p.grad for p in self.parameters if p.grad is not None]
            factor = _inverse(divisor) if isinstance(divisor, Tensor) else 1 / divisor
            if self.defers and gradients:
                self.factor = self._on_device(factor, gradients[0].device)
            else:
                _scale(gradients, factor)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of the gradients as the optimizer will see them, but for clipping. Collective."""
        norm = gradient_norm(parameters)
        return norm if self.factor is None else norm * self.factor

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip by the norm over all ranks, which it returns. Collective."""
        if not self.defers:
            return clip_gradients_by_norm(parameters, max_norm)
        norm = self.norm(parameters)
        factor = clip_factor(norm, max_norm).float()
        self.factor = factor if self.factor is None else self.factor * factor
        return norm

    def step(self, optimizer: Optimizer, norm: Tensor | None = None, **kwargs: Any) -> None:
        """Step the optimizer, or skip the step of a window whose total weight is zero.

        Args:
            optimizer: The only one.
            norm: Skip also where this norm of the gradients is not finite.
            kwargs: For `optimizer.step`.
        """
        if self.buckets is not None:
            cast_gradients(self.parameters)
        skip = None if self._window_weight is None else self._window_weight == 0  # None: a mean of at least one row
        if norm is not None:
            skip = ~norm.isfinite() if skip is None else skip | ~norm.isfinite()
        factor, self.factor = self.factor, None
        self.optimizer_step(optimizer, skip, factor, **kwargs)

    @staticmethod
    def _on_device(factor: Tensor | float, device: torch.device) -> Tensor:
        if isinstance(factor, Tensor):
            return factor.to(device, torch.float32)
        return torch.full((), factor, dtype=torch.float32, device=device)  # without waiting, unlike a copy

    def _known_weight(self, microbatches: list[Any]) -> Tensor | None:
        """The total weight of the batch over all ranks if the module can tell it beforehand."""
        weights = [w for m in microbatches if (w := self.module.microbatch_weight(m)) is not None]
        if len(weights) < len(microbatches):
            return None
        return self._sum_over_ranks(torch.stack([w.detach().double().reshape(()) for w in weights]).sum())

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def _reduce(self, totals: BatchTotals) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum loss and metrics over ranks in one message and divide each by its weight."""
        assert totals.loss is not None
        if self._loss_is_mean not in (None, totals.loss_is_mean):
            raise ConfigError("microbatch_loss returned a Tensor for some microbatches and a WeightedLoss for others")
        self._loss_is_mean = totals.loss_is_mean
        names = sorted(totals.metrics)
        if self.group is not None:
            self._check_equal_on_ranks(totals.loss_is_mean, names)
        pairs = [totals.loss, *(totals.metrics[name] for name in names)]
        if totals.loss_is_mean:  # each rank's mean counts equally, as in DDP
            pairs[0] = (totals.loss[0] / totals.loss[1], torch.ones_like(totals.loss[1]))
        # float64: counts of tokens stay exact beyond 2**24. Shape [names, 2].
        sums = self._sum_over_ranks(torch.stack([torch.stack([v.double(), w.double()]) for v, w in pairs]))
        if not totals.loss_is_mean:
            weight = sums[0, 1]
            self._window_weight = weight if self._window_weight is None else self._window_weight + weight
        dtype = torch.promote_types(totals.loss[0].dtype, torch.float32)
        loss, *metrics = weighted_mean(*sums.unbind(1)).to(dtype).unbind()
        return loss, dict(zip(names, metrics, strict=True))

    def _check_equal_on_ranks(self, loss_is_mean: bool | None, names: list[str]) -> None:
        """Ranks add up loss and metrics by position. The first batch is compared over ranks, others with the first."""
        ours = (loss_is_mean, names)
        of_ranks = [self._reduced, ours]
        if self._reduced is None:
            self._reduced, *_ = of_ranks = all_gather_object(ours, self.group)
        if any(of_rank != ours for of_rank in of_ranks):
            raise ConfigError(
                f"rank {dist.get_rank()}: (loss is a mean, names of microbatch_metrics) is {ours} in this batch; on "
                f"other ranks or in the first batch it was {next(o for o in of_ranks if o != ours)}. Return the same "
                "names on every rank in every batch: WeightedLoss(0, 0) where there is nothing to count"
            )

    def _set_aside(self) -> None:
        self._stashed = []  # in an epoch of Lightning's weight averaging there is no backward to put them back
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._stashed.append((parameter, parameter.grad))
                parameter.grad = None


def cast_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Cast gradients that are kept in a wider dtype than their parameter to the parameter's dtype."""
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)


def _scale(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply in place. torch would round a device scalar to a narrow gradient's dtype first: widen those."""
    if isinstance(factor, Tensor) and any(g.dtype.itemsize < 4 for g in gradients):
        for gradient in gradients:
            gradient.copy_(gradient * factor.float() if gradient.dtype.itemsize >= 4 else gradient.float() * factor)
    elif isinstance(factor, Tensor):
        torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))
    else:
        torch._foreach_mul_(gradients, factor)


def _inverse(weight: Tensor) -> Tensor:
    """1 / weight, and 0 where weight is 0, without asking the host."""
    return torch.where(weight == 0, 0.0, 1 / weight)


def _nothing() -> None:
    pass
