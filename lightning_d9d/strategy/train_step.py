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

[Note: pipelines] All ranks of a pipeline read the same batch and run their part of one program. Loss and metrics are
made where the last stage is and are 0 elsewhere, so that one sum over all ranks makes them equal everywhere.

[Note: fillers] A rank without data for a batch that others have runs microbatches that count nothing: it adds neither
loss nor weight, and zeros to the gradients. Of a loss that is a mean, the means of the ranks that have data count.

[Note: one factor] Where the optimizer multiplies gradients by a factor as it reads them (torch's fused ones) and nobody
looks at them between backward and step, division and clipping become that factor and cost no pass over the gradients.

[Note: windows] A window begins where Lightning zeroes gradients (every `accumulate_grad_batches`-th batch of an epoch)
and after a batch that was the last of one. So gradients that never met a step are dropped, as in stock Lightning: an
`on_train_batch_start` returned -1 inside a window, an overridden `optimizer_step` left it out, a closure ran twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import first_difference
from lightning_d9d.mesh.sharding import local
from lightning_d9d.pipeline.executor import Cut
from lightning_d9d.pipeline.totals import BatchTotals, weighted_mean
from lightning_d9d.strategy.data_parallel import DataParallelStages
from lightning_d9d.strategy.optimizer_step import OptimizerStep
from lightning_d9d.strategy.pipeline import Tie
from lightning_d9d.strategy.sequence_parts import check_parts_of_sequences
from lightning_d9d.sync.norm import clip_factor, clip_gradients_by_norm

if TYPE_CHECKING:
    from lightning_d9d.strategy.module import D9DModule


class TrainStep:
    """The state of a window and the five phases named above.

    Args:
        module: The module with its stages built and on their device.
        forward_context: The precision context of a forward.
        cuts_batches: Whether a batch may make more than one microbatch. Equal on all ranks, unlike the number that a
            batch makes: ranks decide by it whether they sum weights between forward and backward.
        optimizer_step: Steps or skips, and counts skips.
        tied: This rank's parameters that other ranks of the pipeline hold, too.
    """

    def __init__(
        self,
        module: D9DModule,
        forward_context: Callable[[], AbstractContextManager],
        cuts_batches: bool,
        optimizer_step: OptimizerStep,
        tied: Mapping[nn.Parameter, Tie],
    ) -> None:
        self.module = module
        self.pipeline = module.pipeline
        self.parameters = list(module.parameters())
        self.tied = tied
        self.data_parallel: DataParallelStages | None = None
        """Gathers parameters and sums gradients over ranks; None where there is nothing to do."""
        self.group = self.pipeline.token_group
        """Ranks over which tokens are split; None for one process."""
        self.num_ranks = 1 if self.group is None else dist.get_world_size(self.group)
        self.executor = module.executor(forward_context)
        self.cuts_batches = cuts_batches
        self.optimizer_step = optimizer_step
        self.defers = False
        """Whether division and clipping are left to the optimizer. [Note: one factor]."""
        self.factor: Tensor | None = None
        """What gradients are still to be multiplied by: float32 on the device. None: nothing."""
        self._is_first_batch = True
        self._has_checked_whole = False
        self._is_new_window = True
        self._stashed: list[tuple[nn.Parameter, Tensor]] = []
        self._window_weight: Tensor | None = None
        self._scaled_before = False
        self._loss_is_mean: bool | None = None

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
        if batch_index == 0:
            self._check_frozen_alike()
            self.optimizer_step.empty.end_epoch()
            self.pipeline.begin_epoch(self.tied)
        self.pipeline.check_same("train", batch)
        check = self._is_first_batch and batch_index == 0  # resumed, the first may be the short last one of an epoch
        cut = self.module.cut(batch, check=check, trains=True)
        check_parts_of_sequences(self.module, cut.microbatches[0], self.executor.forward_context)
        self._is_first_batch = self._is_new_window = False
        num_data_ranks = self.num_ranks // self.pipeline.tokens.cut.size
        num_counting = (self.module.filling.num_counting or num_data_ranks) * self.pipeline.tokens.cut.size
        is_whole_window = is_first and is_last
        total_weight = self._known_weight(cut) if is_whole_window else None
        weight_is_known_after_forward = is_whole_window and not self.cuts_batches

        def scale(totals: BatchTotals) -> Tensor | float:
            nonlocal total_weight
            if totals.loss_is_mean:  # `restore` divides by the number of all ranks
                num_rows = sum(filter(None, cut.rows[: cut.num_counted]))
                return self.num_ranks / (num_counting * max(num_rows, 1) * accumulated_batches)
            if total_weight is None and weight_is_known_after_forward:
                weight = torch.zeros((), device=self.module.device) if totals.loss is None else totals.loss[1]
                total_weight = self._sum_over_ranks(weight.double())
            return 1.0 if total_weight is None else _inverse(total_weight)

        num_microbatches = len(cut.microbatches)
        if self.data_parallel is not None:
            splits = self.pipeline.splits(num_microbatches)
            self.data_parallel.begin(is_first=is_first, reduces=is_last, splits=splits)
        with self.module.schedule_running():
            try:
                totals = self.executor.train(self.pipeline.program(num_microbatches), cut, scale, self.data_parallel)
            except BaseException:
                if self.data_parallel is not None:
                    self.data_parallel.drop()
                raise
        if self.data_parallel is not None:
            self.data_parallel.finish()
        if is_last:
            self._check_whole_gradients()
        self._scaled_before = weight_is_known_after_forward or total_weight is not None  # on ranks without a loss, too
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
        if self._window_weight is not None:
            self.optimizer_step.empty.add_window(self._window_weight)
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
            if self.defers:
                self.factor = self._on_device(factor, self.module.device)
            elif gradients:  # a pipeline rank may have frozen stages only
                _scale([local(gradient) for gradient in gradients], factor)

    def norm(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of the gradients as the optimizer will see them, but for clipping. Collective."""
        norm = self.pipeline.norm(parameters, self.tied)
        return norm if self.factor is None else norm * self.factor

    def clip(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Clip by the norm over all ranks, which it returns. Collective."""
        parameters = list(parameters)
        norm = self.norm(parameters)
        if not self.defers:
            return clip_gradients_by_norm(parameters, max_norm, norm=norm)
        factor = clip_factor(norm, max_norm).float()
        self.factor = factor if self.factor is None else self.factor * factor
        return norm

    def step(self, optimizer: Optimizer, norm: Tensor | None = None, **kwargs: Any) -> None:
        """Step the optimizer, or skip the step of a window whose total weight is zero; then tell the module.

        Args:
            optimizer: The only one.
            norm: Skip also where this norm of the gradients is not finite.
            kwargs: For `optimizer.step`.
        """
        if self.data_parallel is not None:
            cast_gradients(self.parameters, optimizer)
        skip = None if self._window_weight is None else self._window_weight == 0  # None: a mean of at least one row
        if norm is not None:
            skip = ~norm.isfinite() if skip is None else skip | ~norm.isfinite()
        factor, self.factor = self.factor, None
        self.optimizer_step(optimizer, skip, factor, **kwargs)
        self.module.on_after_optimizer_step(skip)

    @staticmethod
    def _on_device(factor: Tensor | float, device: torch.device) -> Tensor:
        if isinstance(factor, Tensor):
            return factor.to(device, torch.float32)
        return torch.full((), factor, dtype=torch.float32, device=device)  # without waiting, unlike a copy

    def _known_weight(self, cut: Cut) -> Tensor | None:
        """The total weight of the batch over all ranks if the module can tell it beforehand."""
        weights = [w for m in cut.microbatches if (w := self.module.microbatch_weight(m)) is not None]
        if len(weights) < len(cut.microbatches):
            return None
        of_microbatches = torch.stack([weight.detach().double().reshape(()) for weight in weights])
        return self._sum_over_ranks(of_microbatches[: cut.num_counted].sum())

    def _sum_over_ranks(self, values: Tensor) -> Tensor:
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def _reduce(self, totals: BatchTotals) -> tuple[Tensor, dict[str, Tensor]]:
        """Sum loss and metrics over ranks in one message and divide each by its weight."""
        reported, values = self.pipeline.report("train", totals, self.group)
        self._loss_is_mean = reported.loss_is_mean
        if reported.loss_is_mean and totals.loss is not None:  # each rank's mean counts equally, as in DDP
            values[0] = torch.stack([values[0, 0] / values[0, 1], values.new_ones(())])
        sums = self._sum_over_ranks(self.pipeline.sum(values))
        if not reported.loss_is_mean:
            weight = sums[0, 1]
            self.optimizer_step.empty.add_batch(weight)
            self._window_weight = weight if self._window_weight is None else self._window_weight + weight
        loss, *metrics = weighted_mean(*sums.unbind(1)).to(reported.dtype).unbind()
        return loss, dict(zip(reported.metrics, metrics, strict=True))

    def _check_frozen_alike(self) -> None:
        """At the start of an epoch: the ranks of a stage sum the gradients of the same parameters."""
        if self.pipeline.mesh is None:
            return
        lines = [f"{name} {'trained' if p.requires_grad else 'frozen'}" for name, p in self.module.named_parameters()]
        group = self.group if self.pipeline.tokens.num_slices == 1 else self.pipeline.mesh.group("dp", "cp", "tp")
        if difference := first_difference(lines, group):
            raise ConfigError(
                f"ranks with the same stages train different parameters: {difference}. Set requires_grad alike on all "
                "ranks"
            )

    def _check_whole_gradients(self) -> None:
        """In the first window that is reduced, see that tensor ranks had summands of gradients, not the whole ones."""
        has_checked, self._has_checked_whole = self._has_checked_whole, True
        if not has_checked and self.pipeline.tokens.num_slices > 1:
            with Ranks(self.pipeline.readers).agreed(f"{type(self.module).__name__} cannot train on tensor ranks"):
                if self.data_parallel is not None:  # a stage may have nothing that is not cut
                    self.data_parallel.check_whole()
        if self.data_parallel is not None:
            self.data_parallel.forget_whole()

    def _set_aside(self) -> None:
        self._stashed = []  # in an epoch of Lightning's weight averaging there is no backward to put them back
        for parameter in self.parameters:
            if parameter.grad is not None:
                self._stashed.append((parameter, parameter.grad))
                parameter.grad = None


def cast_gradients(parameters: Iterable[nn.Parameter], optimizer: Optimizer) -> None:
    """Cast gradients that are kept in a wider dtype than their parameter to that, unless the optimizer takes them."""
    if getattr(optimizer, "takes_wide_gradients", False):
        return
    for parameter in parameters:
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
            parameter.grad = parameter.grad.to(parameter.dtype)


def _scale(gradients: list[Tensor], factor: Tensor | float) -> None:
    """Multiply in place. torch would round a device scalar to a narrow gradient's dtype first: widen those."""
    by_device: dict[torch.device, list[Tensor]] = {}  # some may be kept in the host's memory
    for gradient in gradients:
        by_device.setdefault(gradient.device, []).append(gradient)
    for device, together in by_device.items():
        here = factor.to(device) if isinstance(factor, Tensor) else factor
        if isinstance(here, Tensor) and any(g.dtype.itemsize < 4 for g in together):
            for gradient in together:
                gradient.copy_(gradient * here.float() if gradient.dtype.itemsize >= 4 else gradient.float() * here)
        elif isinstance(here, Tensor):
            torch._foreach_mul_(together, here.to(together[0].dtype))
        else:
            torch._foreach_mul_(together, here)


def _inverse(weight: Tensor) -> Tensor:
    """1 / weight, and 0 where weight is 0, without asking the host."""
    return torch.where(weight == 0, 0.0, 1 / weight)
