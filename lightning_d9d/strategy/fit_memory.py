"""Reports before a fit that it cannot fit into a rank's memory, and describes the memory after it ran out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import lightning as L
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim import Adam, AdamW, Optimizer

from lightning_d9d import memory
from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.display import say
from lightning_d9d.memory import GPU_OVERHEAD, HOST_OVERHEAD, StagesHeld, StepMemory, StepSettings, stage_held
from lightning_d9d.memory.held import StageHeld
from lightning_d9d.memory.layers import Microbatch
from lightning_d9d.memory.peak import GradientRules
from lightning_d9d.memory.step import gib
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.sharding import local
from lightning_d9d.modules.peer_dispatch import PeerExchange, peer_exchanges
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.parallel.fsdp import parameter_groups
from lightning_d9d.pipeline.executor import SplitBatch
from lightning_d9d.pipeline.microbatch import num_tokens
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.sync.buckets import GradSyncConfig

_FRAGMENTS = 0.03
"""The share of a GPU's memory that may be lost in fragments."""
_BELOW = 0.9
"""Advice is given for this share of the memory that a failed step needed."""


class Gradients(Protocol):
    """The gradients of this rank, as in `GradientSync`."""

    @property
    def parameters(self) -> Sequence[nn.Parameter]:
        """The parameters of this rank."""
        ...

    @property
    def num_bytes(self) -> int:
        """Size of all gradients at the end of a step."""
        ...

    @property
    def num_accumulated_bytes(self) -> int:
        """Size of the gradients before a step's last microbatch."""
        ...


@dataclass(frozen=True, kw_only=True)
class BatchShape:
    """The shape of a batch of this rank."""

    rows: int
    """Rows of a microbatch."""
    tokens: int
    """Number of tokens in a row, on this rank; 0 if unknown."""
    num_microbatches: int

    @classmethod
    def of(cls, split: SplitBatch) -> BatchShape:
        """Return the shape of an actual batch."""
        rows = split.rows[0] or 1
        return cls(
            rows=rows, tokens=num_tokens(split.microbatches[0]) // rows, num_microbatches=len(split.microbatches)
        )


class FitMemory:
    """Compares the needs of the steps of a fit with this rank's memory.

    Args:
        module: Module on its device, attached to a Trainer.
        optimizers: The module's optimizers; None if unknown.
        gradients: Knows how gradients are kept.
        parallel: The configuration.
        device: The rank's. Nothing is refused on the CPU.
        grad_sync: How gradients are summed.
        steps_in_backward: Whether updates run inside of the backward.
        check_in_backward: Raises `ConfigError` if they cannot; None if they never can.
        activation_dtype: The dtype of activations; None uses that of the parameters.
        keeps_gathered: Whether fully sharded stages stay gathered over a batch.
        may_replace_peers: Whether tokens travel by all-to-all if memory for peer dispatch does not fit.
    """

    def __init__(
        self,
        module: L.LightningModule,
        optimizers: Sequence[Optimizer] | None,
        gradients: Gradients,
        parallel: ParallelConfig,
        device: torch.device,
        *,
        grad_sync: GradSyncConfig,
        steps_in_backward: bool = False,
        check_in_backward: Callable[[], None] | None = None,
        activation_dtype: torch.dtype | None = None,
        keeps_gathered: bool = False,
        may_replace_peers: bool = False,
    ) -> None:
        self._may_replace_peers = may_replace_peers
        self._module = module
        self._optimizers = optimizers
        self._gradients = gradients
        self._parallel = parallel
        self._device = device
        self._grad_sync = grad_sync
        self._check_in_backward = check_in_backward
        self._activation_dtype = activation_dtype
        self._keeps_gathered = keeps_gathered
        self._settings = StepSettings(recompute=parallel.recompute, step_in_backward=steps_in_backward)
        self._shape: BatchShape | None = None
        self._step: StepMemory | None = None
        """The memory at the last check."""
        self._has_noted = False

    @property
    def num_rows(self) -> int | None:
        """Rows of a microbatch; None if unknown."""
        return self._settings.num_rows

    @property
    def _available(self) -> int | None:
        return None if self._parallel.offload else memory.device_bytes(self._device)

    def check(self, shape: BatchShape | None = None) -> None:
        """Refuse a step that cannot fit, and warn if it nearly does not. Collective over all ranks.

        Args:
            shape: The shape of the first batch; None if unknown, so activations do not count.

        Raises:
            ConfigError: The step cannot fit on some rank; raised on every rank.
        """
        self._shape = shape
        if self._available is None:
            return
        if shape is not None:
            self._settings = replace(self._settings, num_rows=shape.rows)
        if self._may_replace_peers and self.num_rows is not None:
            self._replace_peers(self._available)
        note = None
        with Ranks().agreed("the fit cannot begin"):
            step = self._step = self.step()
            can = self._can_step_in_backward
            note = memory.refuse_too_large(step, self._settings, self._available, can_step_in_backward=can)
        if note is not None and not self._has_noted:
            self._has_noted = True
            say(self._module.trainer, note)

    def _replace_peers(self, available: int) -> None:
        """Send tokens by all-to-all if peer dispatch needs more memory than some rank has. Collective."""
        missing = [each for each in Ranks().all_gather(self._needed() - available) if each > 0]
        for exchange in self._exchanges if missing else ():
            exchange.replace(f"with peer dispatch a step needs {gib(max(missing))} more than a rank has")

    def _needed(self) -> int:
        return self.step().of(self._settings).needed

    def lacking(self, before: float, after: float, others: int) -> int:
        """Return the bytes that this rank lacks if experts of a rank get more room; 0 if that is unknown. Local.

        A step needs what it takes by arithmetic. It also needs its growth and the most that was in use so far, which
        may not have optimizer states yet.

        Args:
            before: The room for copies of tokens, as a multiple of an even share.
            after: The new room.
            others: Further bytes of the memory that other ranks write to.
        """
        if self._available is None:
            return 0
        old, new = self._needed_with(before), self._needed_with(after)
        if old is None or new is None or (growth := new - old + others) <= 0:
            return 0
        in_use = growth + memory.most_in_use(self._device)
        return max(0, new + others - self._available, in_use - int((1 - _FRAGMENTS) * self._available))

    def _needed_with(self, room: float) -> int | None:
        """Return the bytes of a step with this room for copies of tokens; None if they are unknown."""
        if self._step is None or (held := self._step.held) is None:
            return None
        held = replace(held, microbatch=replace(held.microbatch, expert_capacity=room))
        return replace(self._step, held=held).of(self._settings).needed

    def note(self, error: BaseException) -> None:
        """Add the contents of the memory to an error that it ran out, and settings that take less. Local."""
        if not isinstance(error, torch.OutOfMemoryError):
            return
        states = (value for each in self._optimizers or () for state in each.state.values() for value in state.values())
        there = {
            "weights": memory.weight_bytes(self._tensors),
            "gradients": sum(local(each.grad).nbytes for each in self._parameters if each.grad is not None),
            "states": sum(local(value).nbytes for value in states if isinstance(value, Tensor)),
        }
        if self._device.type == "cuda":
            most = torch.cuda.max_memory_allocated(self._device)
            there["activations and buffers, at most"] = max(0, most - sum(there.values()))
        error.add_note("memory had " + ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in there.items()))
        self.advise(error)

    def advise(self, error: BaseException) -> None:
        """Add the needs of a step to an error, and settings that take less. Local."""
        if self._step is None or self._available is None:
            return
        needed = self._step.of(self._settings)
        below = min(self._available, int(_BELOW * needed.needed))
        advice = memory.advice(self._step, self._settings, below, self._can_step_in_backward)
        error.add_note(f"by arithmetic a step needs {gib(needed.total)} or more: {needed}; {advice}")

    def step(self) -> StepMemory:
        """Return the needs of a step on this rank, as a function of settings. Local."""
        # Nobody knows which gradients are there at once where the module steps its optimizers itself.
        gradients = self._gradients.num_bytes if self._module.automatic_optimization else 0
        accumulates = self._shape is not None and self._shape.num_microbatches > 1
        accumulates_batches = self._module.trainer.accumulate_grad_batches > 1  # type: ignore[attr-defined]
        if (accumulates or accumulates_batches) and gradients > 0:
            gradients = max(gradients, self._gradients.num_accumulated_bytes)
        largest = max((memory.gradient_bytes([each]) for each in self._parameters), default=0)
        states = [None] if self._optimizers is None else [memory.state_bytes(each) for each in self._optimizers]
        known = [each for each in states if each is not None]
        return StepMemory(
            weights=memory.weight_bytes(self._tensors),
            gradients=gradients,
            gradients_in_backward=min(gradients, max(2 * self._part_bytes, largest)),
            states=sum(known) if len(known) == len(states) else None,
            eight_bit_states=self._eight_bit_states(),
            gathered=self._gathered_bytes(),
            held=self._held(
                GradientRules(
                    accumulates=accumulates or accumulates_batches,
                    accumulates_batches=accumulates_batches,
                    wide=self._grad_sync.sum_bytes,
                    wide_units=(self._parallel.dtypes[1] or torch.float32).itemsize,
                    reduces_each=self._grad_sync.reduce == "every_microbatch",
                )
            ),
            accumulates=accumulates or accumulates_batches,
            overhead=GPU_OVERHEAD if self._device.type == "cuda" else HOST_OVERHEAD,
        )

    @property
    def _parameters(self) -> Sequence[nn.Parameter]:
        return self._gradients.parameters

    @property
    def _part_bytes(self) -> int:
        """Bytes of gradients that are updated together inside of a backward."""
        trained = [each for each in self._parameters if each.requires_grad]
        return memory.part_bytes(memory.weight_bytes(trained), self._grad_sync.bucket_bytes)

    @property
    def _tensors(self) -> list[Tensor]:
        return [*self._parameters, *self._module.buffers()]

    @property
    def _exchanges(self) -> list[PeerExchange]:
        """The memory through which tokens reach experts of other ranks, if they do."""
        return [each for each in peer_exchanges([self._module]) if not each.is_replaced]

    @property
    def _can_step_in_backward(self) -> bool:
        if self._check_in_backward is None:
            return False
        try:
            self._check_in_backward()
        except ConfigError:
            return False
        return True

    def _eight_bit_states(self) -> int | None:
        """Return the bytes of states in eight bits, if `StochasticAdamW` can replace the optimizers."""
        if self._optimizers is None:
            return None
        if any(type(each) not in (Adam, AdamW, StochasticAdamW) for each in self._optimizers):
            return None
        if any(each.dtype not in (torch.bfloat16, torch.float32) for each in self._parameters):
            return None
        return sum(memory.state_bytes(each, eight_bits=True) or 0 for each in self._optimizers)

    def _gathered_bytes(self) -> int:
        """Return the bytes of gathered units: all that are kept, or one and the next."""
        dtype = self._parallel.dtypes[0]
        units = [unit for unit in self._module.modules() if isinstance(unit, FSDPModule)]
        sizes = [
            memory.gathered_bytes(
                [each for group in parameter_groups(unit) for each in group.sharded_parameters], dtype
            )
            for unit in units
        ]
        return sum(sizes) if self._keeps_gathered else sum(sorted(sizes)[-2:])

    def _held(self, rules: GradientRules) -> StagesHeld | None:
        """Return the stages with the needs of the first batch; None if they are unknown, or the costs do not apply."""
        module, shape = self._module, self._shape
        changed = self._parallel.compile or self._parallel.cuda_graphs
        if not isinstance(module, D9DModule) or shape is None or changed:
            return None
        dtypes = {each.dtype for each in self._parameters if each.is_floating_point()}
        itemsize = min(each.itemsize for each in {*dtypes, self._activation_dtype or torch.float64})
        costs = module.model_costs(shape.tokens, itemsize) if shape.tokens > 0 else None
        if costs is None:
            return None
        pipeline, mesh = module.pipeline, module.pipeline.mesh
        stages = self._stages(module, len(costs.layers))
        if stages is None:
            return None
        slices = pipeline.tokens.num_slices
        return StagesHeld(
            microbatch=Microbatch(
                costs=costs,
                tokens=shape.tokens,
                rows=1 / slices,
                tensor_parallel=slices,
                expert_parallel=1 if mesh is None else mesh.config.expert_parallel,
                expert_capacity=next((each.capacity for each in self._exchanges), None),
            ),
            stages=stages,
            actions=pipeline.program(shape.num_microbatches),
            rules=rules,
            keeps_gathered=self._keeps_gathered,
        )

    def _stages(self, module: D9DModule, num_layers: int) -> Mapping[int, StageHeld] | None:
        """Return this rank's stages; None if a stage does not name its layers."""
        found, mesh = {}, module.pipeline.mesh
        num_ranks = 1 if mesh is None else mesh.config.world_size // mesh.config.pipeline_parallel
        for info, (index, stage) in zip(module.pipeline.stages, module.indexed_stages.items(), strict=True):
            built = getattr(stage, "stage", info)  # as models keep it whose layers are not split evenly
            layers = (
                range(num_layers) if info.num_stages == 1 else built.layers if isinstance(built, StageInfo) else None
            )
            if layers is None:
                return None
            held = stage_held(
                stage,
                layers,
                num_ranks,
                is_first=info.is_first,
                is_last=info.is_last,
                shard_blocks=self._parallel.shard_blocks,
                gather_dtype=self._parallel.dtypes[0],
            )
            if held is None:
                return None
            found[index] = held
        return found
