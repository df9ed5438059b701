"""A rank of a planned run: its stages, their parts of weights, and the peak memory of a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lightning_d9d.memory.host import HostMemory, input_bytes
from lightning_d9d.memory.layers import Microbatch, StageOfRank, StageShares, most_load
from lightning_d9d.memory.parameters import part_bytes
from lightning_d9d.memory.peak import GradientRules, PeakBytes, gradients_at_end, peak
from lightning_d9d.memory.spread import ModelWeights, Share, Spread
from lightning_d9d.mesh import MeshConfig
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.dispatch_choice import dispatch_for, planned_places
from lightning_d9d.schedule.actions import Action, BackwardInput, compute_parts
from lightning_d9d.schedule.layers import ModelCosts
from lightning_d9d.schedule.program import Program, merge_backwards
from lightning_d9d.schedule.schedule import Schedule

StateBytes = Callable[[Share], int]
_Found = TypeVar("_Found")


def two_states(share: Share) -> int:
    """Return the bytes of two states in the dtype of a share, and of a step. Local."""
    return 2 * share.numel * share.weight.dtype.itemsize + 4


def _remembered(of_rank: Callable[[RankModel, int], _Found]) -> Callable[[RankModel, int], _Found]:
    """Let a method remember what it returns for each rank."""
    name = f"{of_rank.__name__} of ranks"

    @functools.wraps(of_rank)
    def found(model: RankModel, rank: int) -> _Found:
        known = vars(model).setdefault(name, {})
        if rank not in known:
            known[rank] = of_rank(model, rank)
        return known[rank]

    return found


@dataclass(frozen=True, kw_only=True)
class RankModel:
    """A model and the settings of a run: all that determines a rank's memory."""

    weights: ModelWeights
    costs: ModelCosts
    """Costs of one whole row, on one rank."""
    tokens: int
    """The tokens of a whole row."""
    mesh: MeshConfig
    schedule: Schedule
    layers_of_stages: tuple[range, ...]
    rows: int
    """The rows of a microbatch, for all ranks that share it."""
    num_microbatches: int
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    accumulates_batches: bool = False
    sum_bytes: int = 4
    """Bytes of a number in sums of gradients."""
    reduces_each: bool = False
    """True if FSDP2 reduces gradients after each microbatch."""
    step_in_backward: bool = False
    casts_gradients: bool = True
    """True if the optimizer takes gradients only in the dtype of their weights."""
    autocasts: bool = False
    """True if matrices are cast to two bytes in each forward."""
    counts_experts: bool = False
    """True if the tokens of each expert are counted over ranks, as for balancing."""
    bucket_bytes: int = 32 * 2**20
    gpus_per_node: int = 0
    """Consecutive ranks whose GPUs can write to each other's memory; 0 if none can. "auto" chooses a dispatch by it."""
    state_bytes: StateBytes = two_states
    """Returns the bytes of the optimizer's states for a rank's part of a weight."""
    eight_bit_state_bytes: StateBytes | None = None
    """The same for states in eight bits; None if the optimizer has none."""
    expert_load: float = 1.0
    """The copies of tokens that the experts of a rank get in each layer, as a multiple of an even share."""
    has_eight_bits: bool = False
    """True if a search chose states in eight bits in place of those configured."""

    def in_eight_bits(self) -> RankModel | None:
        """Return the model with optimizer states in eight bits; None if there are none, or they are chosen already."""
        if self.has_eight_bits or self.eight_bit_state_bytes is None:
            return None
        return replace(self, state_bytes=self.eight_bit_state_bytes, has_eight_bits=True)

    @property
    def accumulates(self) -> bool:
        """True if several backwards add up to a step."""
        return self.num_microbatches > 1 or self.accumulates_batches

    @functools.cached_property
    def unit_sum_bytes(self) -> int:
        """Bytes of a number in FSDP2's sums of gradients."""
        reduced = self.parallel.dtypes[1]
        return self.sum_bytes if reduced is None else reduced.itemsize

    @functools.cached_property
    def keeps_gathered(self) -> bool:
        """True if the strategy would keep fully sharded stages gathered over a batch."""
        splits = any(isinstance(part, BackwardInput) for action in self.actions(0) for part in compute_parts(action))
        is_one = self.num_microbatches == 1
        return splits or self.parallel.keeps_gathered(num_stages=self.mesh.pipeline_parallel, is_one_microbatch=is_one)

    @property
    def share_of_row(self) -> float:
        """The share of a microbatch's tokens that a rank computes."""
        mesh = self.mesh
        parts = mesh.tensor_parallel * mesh.context_parallel_shard * mesh.context_parallel_replicate
        return self.rows / parts

    @functools.cached_property
    def microbatch(self) -> Microbatch:
        """A microbatch as a rank computes it."""
        return Microbatch(
            costs=self.costs,
            tokens=self.tokens,
            rows=self.share_of_row,
            recompute=self.parallel.recompute,
            tensor_parallel=self.mesh.tensor_parallel,
            expert_parallel=self.mesh.expert_parallel,
            expert_capacity=self.parallel.expert_capacity if self.writes_to_peers else None,
            expert_load=self.expert_load,
        )

    @property
    def most_load(self) -> float:
        """The largest possible `expert_load`: all tokens choose experts of one rank."""
        layers = zip(self.costs.layers, self.weights.layers, strict=True)
        return max(most_load(costs, weights, self.mesh.expert_parallel) for costs, weights in layers)

    @functools.cached_property
    def dispatch(self) -> str:
        """How tokens reach their experts: "local", "all_to_all" or "peer"."""
        configured, degree = self.parallel.expert_dispatch, self.mesh.expert_parallel
        if degree == 1:
            return "local"
        if configured != "auto":
            return configured
        if not self.gpus_per_node:
            return "all_to_all"
        return dispatch_for(planned_places(self.mesh.world_size, degree, self.gpus_per_node), None).kind

    @property
    def writes_to_peers(self) -> bool:
        """True if tokens are written to the memory of experts' ranks."""
        return self.dispatch == "peer"

    @property
    def chose_peers(self) -> bool:
        """True if "auto" took peer dispatch, which all-to-all may replace."""
        return self.writes_to_peers and self.parallel.expert_dispatch == "auto"

    @functools.cached_property
    def spread(self) -> Spread:
        """The rules that place weights on ranks."""
        return Spread(self.mesh, self.parallel)

    @functools.cached_property
    def _program(self) -> Program:
        return _program_of(self.schedule, self.mesh.pipeline_parallel, self.num_microbatches)

    def actions(self, rank: int) -> tuple[Action, ...]:
        """Return the actions of a pipeline rank in a batch."""
        return self._program.ranks[rank]

    def stages(self, rank: int) -> dict[int, StageOfRank]:
        """Return the stages of a pipeline rank, by index."""
        indices = self.schedule.stages_of(rank, self.mesh.pipeline_parallel)
        return {index: self._stages[index] for index in indices}

    @functools.cached_property
    def _stages(self) -> list[StageOfRank]:
        last = len(self.layers_of_stages) - 1
        return [
            self.stage(layers, is_first=index == 0, is_last=index == last)
            for index, layers in enumerate(self.layers_of_stages)
        ]

    def stage(self, layers: range, *, is_first: bool, is_last: bool) -> StageOfRank:
        """Return a stage with these layers."""
        spread, before, after = self.spread, None, None
        if is_first:
            before = tuple(spread.shares(self.weights.before))
        if is_last:
            after = tuple(spread.shares((*self.weights.after, *(() if is_first else self.weights.tied))))
        if is_first and is_last and self.weights.tied:  # [Note: units] in parallel/data.py
            before, after = (
                tuple(replace(each, stays_gathered=True) for each in part or ()) for part in (before, after)
            )
        own = [tuple(spread.shares(self.weights.layers[index])) for index in layers]
        return self.microbatch.stage(layers, StageShares(own, before, after))

    @_remembered
    def held(self, rank: int) -> list[Share]:
        """Return the parts of weights on a pipeline rank, each weight once."""
        found = []
        for stage in self.stages(rank).values():
            found += [share for part in stage.parts for share in part.shares]
        return found

    @_remembered
    def at_end(self, rank: int) -> tuple[int, int, int]:
        """Count weights, gradients and optimizer states of a pipeline rank at the end of a step. Local."""
        held = self.held(rank)
        weights = sum(share.numel * share.weight.dtype.itemsize for share in held)
        states = sum(self.state_bytes(share) for share in held if share.weight.is_trained)
        return weights, gradients_at_end(held, self.rules(held)), states

    def rules(self, held: list[Share]) -> GradientRules:
        """Return the rules by which gradients are kept."""
        part = None
        if self.step_in_backward:
            whole = sum(share.numel * share.weight.dtype.itemsize for share in held if share.weight.is_trained)
            part = 2 * part_bytes(whole, self.bucket_bytes)
        return GradientRules(
            accumulates=self.accumulates,
            accumulates_batches=self.accumulates_batches,
            wide=self.sum_bytes,
            wide_units=self.unit_sum_bytes,
            reduces_each=self.reduces_each,
            part_bytes=part,
        )

    def host(self, rank: int, *, copies: bool) -> HostMemory:
        """Count the bytes that a pipeline rank keeps in its host's memory. Local.

        Args:
            rank: A pipeline rank.
            copies: Whether checkpoints are written in the background.
        """
        weights, gradients, states = self.at_end(rank)
        keeps_inputs = self.parallel.recompute == "offload"
        return HostMemory(
            checkpoint=(weights + states) * copies,
            offloaded=(weights + gradients + states) * self.parallel.offload,
            inputs=input_bytes(self.stages(rank), self.actions(rank)) if keeps_inputs else 0,
        )

    @_remembered
    def peak(self, rank: int) -> PeakBytes:
        """Return the bytes at the peak of a step on a pipeline rank. Local."""
        weights, _, states = self.at_end(rank)
        return peak(
            self.stages(rank),
            self.actions(rank),
            weights=weights,
            states=states,
            rules=self.rules(self.held(rank)),
            keeps_gathered=self.keeps_gathered,
        )


@functools.lru_cache(maxsize=64)
def _program_of(schedule: Schedule, num_ranks: int, num_microbatches: int) -> Program:
    """Return a program without messages, which models that are compared share."""
    return merge_backwards(schedule.compute(num_ranks, num_microbatches))
