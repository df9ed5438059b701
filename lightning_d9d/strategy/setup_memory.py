"""Reports before weights are built or read that a fit cannot fit into a rank's memory, or into that of its host."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.callbacks import BaseFinetuning
from lightning.pytorch.plugins.precision import MixedPrecision, Precision
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn
from torch.optim import Optimizer

from lightning_d9d import memory
from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.display import say
from lightning_d9d.memory import HostMemory, StepMemory
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.pipeline.microbatch import MicrobatchCount
from lightning_d9d.strategy.fit_memory import BatchShape, FitMemory
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.optimizers import OptimizedModule
from lightning_d9d.strategy.step_in_backward import check_step_in_backward
from lightning_d9d.sync.buckets import GradSyncConfig

_FREEZE_NOTHING = {"lightning_d9d", "lightning", "pytorch_lightning"}


@dataclass(frozen=True)
class PlannedGradients:
    """The least memory of gradients of parameters without storage."""

    parameters: Sequence[nn.Parameter]
    dtype: torch.dtype | None
    """The dtype of their sums; None means their own or a wider one."""
    is_settled: bool
    """True if it is known which parameters are trained."""

    @property
    def num_bytes(self) -> int:
        """Size of all gradients at the end of a step; 0 if it is unknown what is trained."""
        if not self.is_settled:
            return 0
        return memory.gradient_bytes(self.parameters, self._narrowest)

    @property
    def num_accumulated_bytes(self) -> int:
        """The same size: accumulation in a wider dtype is not known yet."""
        return self.num_bytes

    def _narrowest(self, parameter: nn.Parameter) -> torch.dtype:
        dtypes = [parameter.dtype] if self.dtype is None else [parameter.dtype, self.dtype]
        return min(dtypes, key=lambda dtype: dtype.itemsize)


class SetupMemory:
    """Checks the memory of a fit with stages on the meta device.

    Activations count if the data module gives the number of rows.

    Args:
        settings: The values of `D9DStrategy`'s arguments, by name.
        parallel: The configuration in effect.
        precision: The Trainer's plugin.
        count: The number of microbatches of a batch.
        device: The rank's.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        parallel: ParallelConfig,
        precision: Precision,
        count: MicrobatchCount,
        device: torch.device,
    ) -> None:
        self._settings = settings
        self._parallel = parallel
        self._precision = precision
        self._count = count
        self._device = device
        self._memory: FitMemory | None = None

    def check(self, module: D9DModule, stages: Sequence[nn.Module]) -> None:
        """Refuse a fit that does not fit into memory. Collective over all ranks.

        Args:
            module: Module attached to the Trainer that is about to fit; it has no stages yet.
            stages: This rank's stages, on the meta device.

        Raises:
            ConfigError: A step does not fit on some rank, or its host has too little memory; raised on every rank.
        """
        trainer: Any = module.trainer
        copies = self._settings["checkpoint"].asynchronous and bool(trainer.checkpoint_callbacks)
        takes_host = copies or self._parallel.offload or self._parallel.recompute == "offload"
        is_limited = takes_host or memory.device_bytes(self._device) is not None
        if trainer.state.fn != TrainerFn.FITTING or not is_limited:
            return
        before, module.stages = module.stages, nn.ModuleList(stages)
        try:
            self._memory = self._of(module)
            self._memory.check(None if _may_freeze(module) else self._shape(module))
            note = None
            with Ranks().agreed("the fit cannot begin"):
                note = self._check_host(self._memory, trainer.num_devices, copies=copies) if takes_host else None
            if note is not None:
                say(trainer, note)
        finally:
            module.stages = before

    def note(self, error: BaseException) -> None:
        """Add the needs of a step, and settings that take less, to an error that memory ran out before training.

        Local.
        """
        if self._memory is not None and isinstance(error, torch.OutOfMemoryError):
            error.add_note("memory ran out while the model was made or loaded")
            self._memory.advise(error)

    def _of(self, module: D9DModule) -> FitMemory:
        state = module.state_dict(keep_vars=True)
        parameters = [value for value in state.values() if isinstance(value, nn.Parameter)]
        is_settled = not _may_freeze(module)
        grad_sync: GradSyncConfig = self._settings["grad_sync"]
        dtype = None if grad_sync.dtype == "auto" else getattr(torch, grad_sync.dtype)
        optimizers = self._optimizers(module) if is_settled else None
        check = functools.partial(
            check_step_in_backward,
            module,
            optimizers or (),
            self._precision,
            offloads=self._parallel.offload,
            skips=self._settings["skip_nonfinite"],
        )
        autocasts = isinstance(self._precision, MixedPrecision)
        return FitMemory(
            module,
            optimizers,
            PlannedGradients(parameters, dtype, is_settled),
            self._parallel,
            self._device,
            grad_sync=grad_sync,
            steps_in_backward=self._settings["step_in_backward"],
            check_in_backward=None if optimizers is None else check,
            activation_dtype=torch.bfloat16 if autocasts else self._parallel.dtypes[0],
            keeps_gathered=self._parallel.keeps_gathered(
                num_stages=module.pipeline.num_ranks, is_one_microbatch=self._count.is_one
            ),
            may_replace_peers=self._settings["parallel"].expert_dispatch != self._parallel.expert_dispatch == "peer",
        )

    @staticmethod
    def _optimizers(module: D9DModule) -> list[Optimizer] | None:
        """Return optimizers of the parameters on the meta device; None if a module builds its own."""
        if type(module).configure_optimizers is not OptimizedModule.configure_optimizers:
            return None
        try:
            return [module.make_optimizer()]
        except (ConfigError, RuntimeError, ValueError):  # raised again when it is built for good, or for meta alone
            return None

    def _shape(self, module: D9DModule) -> BatchShape | None:
        """Return the shape of each batch, if the data module knows it."""
        known = getattr(module.trainer.datamodule, "batch_shape", None)  # type: ignore[attr-defined]
        if known is None:
            return None
        rows, length = known
        number = self._count.of(rows)
        parts = module.pipeline.tokens.sequence.size
        return BatchShape(rows=-(-rows // number), tokens=length // parts, num_microbatches=number)

    def _check_host(self, of_rank: FitMemory, num_ranks: int, *, copies: bool) -> str | None:
        there = memory.host_bytes()
        if there is None:
            return None
        step = of_rank.step()
        states = step.states or 0
        needed = HostMemory(
            checkpoint=(step.weights + states) * copies,
            offloaded=(step.weights + step.gradients + states) * self._parallel.offload,
            inputs=self._inputs(step, of_rank.num_rows),
        )
        return memory.check_host(needed.times(num_ranks), *there)

    def _inputs(self, step: StepMemory, num_rows: int | None) -> int:
        kind, held = self._parallel.recompute, step.held
        if kind != "offload" or held is None or num_rows is None:
            return 0
        stages = held.stages_of(kind, num_rows)
        return 0 if stages is None else memory.input_bytes(stages, held.actions)


def _may_freeze(module: D9DModule) -> bool:
    """Return whether parameters may be frozen later, which then have no gradients and states."""
    hooks = [getattr(type(module), name) for name in ("on_stages_built", "on_fit_start", "on_train_start")]
    own = any(hook.__module__.partition(".")[0] not in _FREEZE_NOTHING for hook in hooks)
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    return own or any(isinstance(each, BaseFinetuning) for each in callbacks)
