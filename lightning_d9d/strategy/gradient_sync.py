"""The gradients of a fit: some are summed over ranks in buckets, others by fully sharded stages."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_d9d.memory import gradient_bytes
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.parallel.data import FullySharded
from lightning_d9d.parallel.fsdp import fully_sharded
from lightning_d9d.strategy.data_parallel import DataParallelStages
from lightning_d9d.strategy.sharding import not_yet_summed
from lightning_d9d.strategy.step_in_backward import StepInBackward
from lightning_d9d.strategy.tied import TiedParameters
from lightning_d9d.sync.buckets import GradientBuckets, GradSyncConfig, bucket_dtype
from lightning_d9d.sync.norm import SquaredNorms


class GradientSync:
    """Owns the gradient buckets and the fully sharded stages of a fit.

    Args:
        parameters: This rank's parameters.
        stages: A D9DModule's stages, by index; none for a plain module.
        tied: The parameters that other pipeline ranks have, too.
        mesh: The mesh of several ranks; None for one process.
        config: Dtype and size of the buckets.
        keeps_gathered: Whether fully sharded stages stay gathered over a batch.
        summed_by_module: The parameters of a plain, sharded module that FSDP2 reduces; None if it is not sharded.
        in_backward: Receives parameters whose gradients are complete; None if nothing does.
        reduce_dtype: Dtype of the gradients of fully sharded stages; None: float32, or their parameters' own if wider.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        stages: Mapping[int, nn.Module],
        tied: TiedParameters,
        mesh: MeshDomains | None,
        config: GradSyncConfig,
        *,
        keeps_gathered: bool = False,
        summed_by_module: Collection[nn.Parameter] | None = None,
        in_backward: StepInBackward | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        self.parameters = parameters
        self.tied = tied
        self.config = config
        self.data_parallel: DataParallelStages | None = None
        """Gathers parameters and sums gradients over ranks; None where there is nothing to do."""
        self._stages = stages
        self._mesh = mesh
        self._summed_by_module = summed_by_module
        self._in_backward = in_backward
        self._unit_dtype = reduce_dtype
        self._needs: tuple[bool, list[bool]] | None = None
        reduces_each = config.reduce == "every_microbatch"
        self._sharded = {
            index: FullySharded(stage, keeps=keeps_gathered, reduces_each=reduces_each)
            for index, stage in stages.items()
            if fully_sharded(stage)
        }

    @property
    def buckets(self) -> GradientBuckets | None:
        """The buckets of this rank's replicated parameters; None if nothing is summed or accumulated in any."""
        return None if self.data_parallel is None else self.data_parallel.buckets

    @property
    def num_bucket_bytes(self) -> int:
        """The size of all buckets, in bytes."""
        return 0 if self.buckets is None else self.buckets.num_bytes

    @property
    def num_accumulated_bytes(self) -> int:
        """The size of this rank's gradients before a step's last microbatch; gathered, if FSDP2 reduces once."""
        dtype = None if self.config.dtype == "auto" else getattr(torch, self.config.dtype)
        gathered = set[nn.Parameter]()
        if self.config.reduce == "last_microbatch":
            gathered = {parameter for stage in self._stages.values() for parameter in fully_sharded(stage)}
        return gradient_bytes(self.parameters, lambda each: bucket_dtype(each, dtype, torch.float32), gathered)

    @property
    def num_bytes(self) -> int:
        """The size of this rank's gradients at the end of a step, when those of fully sharded stages are reduced."""
        sharded = {parameter for stage in self._stages.values() for parameter in fully_sharded(stage)}
        in_buckets: dict[nn.Parameter, torch.dtype] = {}
        for bucket in [] if self.buckets is None else self.buckets.buckets:
            in_buckets |= dict.fromkeys(bucket.parameters, bucket.dtype)

        def dtype_of(parameter: nn.Parameter) -> torch.dtype:
            if parameter in sharded:
                return torch.promote_types(parameter.dtype, self._unit_dtype or torch.float32)
            return in_buckets.get(parameter, parameter.dtype)

        return gradient_bytes(self.parameters, dtype_of)

    def update(self, *, accumulates: bool, window_is_open: bool) -> None:
        """Build the buckets, and rebuild them if a callback froze or unfroze layers or began to accumulate batches.

        Collective over the ranks that hold the same stages.

        Args:
            accumulates: Whether several backwards add up to a step.
            window_is_open: Whether there are gradients without an optimizer step.
        """
        if self._mesh is None and not accumulates and self._in_backward is None:
            return
        needs_gradient = [p.requires_grad for p in self.parameters]
        if window_is_open and self._needs is not None:  # a layer just frozen has a gradient to be summed
            needs_gradient = [now or before for now, before in zip(needs_gradient, self._needs[1], strict=True)]
        needs = (accumulates, needs_gradient)
        if needs == self._needs:
            return
        self._needs = needs
        if self.data_parallel is not None:
            self.data_parallel.remove()
        self.data_parallel = None
        trained = list(itertools.compress(self.parameters, needs_gradient))
        if self._summed_by_module is not None and self._mesh is not None:
            trained = not_yet_summed(trained, self._mesh, {*self._summed_by_module})
        data_parallel = DataParallelStages.build(
            trained,
            self._stages,
            self.tied,
            self._mesh,
            self.config,
            at_least=torch.float32 if self._stages else None,
            accumulates=accumulates,
            sharded=self._sharded,
            in_backward=self._in_backward,
        )
        self.data_parallel = data_parallel if data_parallel.has_work else None

    def norm(self, parameters: Iterable[nn.Parameter] | None = None, gone: SquaredNorms | None = None) -> Tensor:
        """Return the norm of the gradients of these parameters, or of all. Collective over all ranks.

        Each tied parameter counts once. With `gone`, freed gradients count, too.
        """
        is_wide = any(parameter.dtype == torch.float64 for parameter in self.parameters)  # frozen ones, too
        at_least = torch.float64 if is_wide else torch.float32
        return self.tied.norm(self.parameters if parameters is None else parameters, at_least, gone)

    def close(self) -> None:
        """Drop buckets and hooks. Local."""
        if self.data_parallel is not None:
            self.data_parallel.remove()
        for stage in self._sharded.values():
            stage.close()
        self.data_parallel, self._needs = None, None
        for parameter in self.parameters:
            if parameter.grad is not None and parameter.grad.dtype != parameter.dtype:
                parameter.grad = None  # of a window that was broken off; a module that moves cannot take it along
