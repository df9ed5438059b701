"""A rank's place in the pipeline: its stages, and its connections to the ranks with the other stages."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import pairwise
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from lightning_d9d.errors import ConfigError, ScheduleError
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.parallel.tokens import TokenShard
from lightning_d9d.pipeline.executor import Executor, ForwardsAgain, MicrobatchHooks
from lightning_d9d.pipeline.transfer import Link, Messages
from lightning_d9d.pipeline.trees import put_together, take_apart
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.schedule import (
    Action,
    BackwardInput,
    OneForwardOneBackward,
    Schedule,
    add_data_parallel,
    compute_parts,
)
from lightning_d9d.strategy.batch_report import BatchReport
from lightning_d9d.waits import waiting

T = TypeVar("T")


class Pipeline:
    """One rank's part of a pipeline.

    Args:
        schedule: Places stages and makes programs.
        mesh: Mesh of several ranks; links are then made, so this is collective over all of them. None for one process.
        device: Device of messages.
        layers: The layers of each stage; None lets modules split themselves.

    Raises:
        ScheduleError: The schedule gives a rank no stage, or places one on a rank that does not exist.
    """

    def __init__(
        self,
        schedule: Schedule,
        mesh: MeshDomains | None,
        device: torch.device,
        layers: Sequence[range] | None = None,
    ) -> None:
        self.schedule = schedule
        self.layers = layers
        self.mesh = mesh
        self.device = device
        self.num_ranks = 1 if mesh is None else mesh.sizes[Axis.PP]
        self.rank = 0 if mesh is None else mesh.coordinates[Axis.PP]
        self.placement = _placement(schedule, self.num_ranks)
        self.group: dist.ProcessGroup | None = None
        """The ranks of this pipeline; None where it is one."""
        self.tokens = TokenShard.of(mesh)
        """The part of the sequences of a batch that this rank has."""
        self.token_group: dist.ProcessGroup | None = None
        """The ranks of the stage over which tokens are split; None for one process."""
        self.batch_group: dist.ProcessGroup | None = None
        """The ranks of this pipeline with other stages or other chunks of the same sequences; None where it is one."""
        self.readers: dist.ProcessGroup | None = None
        """The ranks that read the same batches; None where it is one."""
        self.messages: Messages | None = None
        self.batch_report = BatchReport(mesh, device)
        """The facts about the batches of a fit beside loss and metrics, for whoever watches it."""
        if mesh is not None:
            sizes = mesh.sizes
            is_whole = sizes[Axis.DP] * sizes[Axis.CP] == mesh.config.world_size
            self.token_group = mesh.everyone if is_whole else mesh.group(Axis.DP, Axis.CP)
            self.batch_group = mesh.group(Axis.PP, Axis.CP) if sizes[Axis.PP] * sizes[Axis.CP] > 1 else None
            self.readers = mesh.group(Axis.PP, Axis.CP, Axis.TP) if sizes[Axis.DP] < mesh.config.world_size else None
        if mesh is not None and self.num_ranks > 1:
            self.group = mesh.group(Axis.PP)
            links = self._links(mesh, self.group)
            self.messages = Messages(self.placement, links, device, lambda: mesh.timeout_seconds)
        self.program = functools.cache(self._program)
        self.forward_only = functools.cache(self._forward_only)
        self.splits_backward = functools.cache(self._splits_backward)

    @classmethod
    def alone(cls, device: torch.device) -> Pipeline:
        """Return the place of a single rank with one stage."""
        return cls(OneForwardOneBackward(), None, device)

    def executor(
        self,
        hooks: MicrobatchHooks,
        stages: Mapping[int, nn.Module],
        forward_context: Callable[[], AbstractContextManager],
        before_first: Callable[[nn.Module, Sequence[Any], Mapping[str, Any]], None] | None = None,
        *,
        overlaps_pairs: bool = False,
        again: ForwardsAgain | None = None,
    ) -> Executor:
        """Make the executor of programs over this rank's stages.

        Args:
            hooks: The module's microbatch hooks.
            stages: This rank's stages, by index in the whole model.
            forward_context: The precision context of a forward.
            before_first: As for `Executor`.
            overlaps_pairs: Whether the forward and the backward of an overlapped pair take turns.
            again: As for `Executor`.
        """
        # Weights that FSDP2 gathers in bfloat16 need no autocast; the loss and the metrics do, as on any mesh.
        no_autocast = functools.partial(torch.autocast, self.device.type, enabled=False)
        is_sharded = any(isinstance(stage, FSDPModule) for stage in stages.values())
        return Executor(
            stages,
            len(self.placement),
            hooks,
            forward_context,
            self.messages,
            stage_context=no_autocast if is_sharded else nullcontext,
            before_first=before_first,
            pairs_on=self.device if overlaps_pairs else None,
            again=again,
        )

    @property
    def stages(self) -> list[StageInfo]:
        """This rank's stages, ascending."""
        return [
            StageInfo(index, len(self.placement), None if self.layers is None else self.layers[index])
            for index in self.schedule.stages_of(self.rank, self.num_ranks)
        ]

    @property
    def last_rank(self) -> int:
        """The pipeline rank that computes losses."""
        return self.placement[-1]

    def num_taken(self, num_microbatches: int) -> int:
        """Return the smallest supported number of microbatches from this one on; this one if there is none near."""
        counts = range(num_microbatches, num_microbatches + 4 * self.num_ranks)
        return next((n for n in counts if self.schedule.takes(self.num_ranks, n)), num_microbatches)

    def check_stages(self, names: Sequence[Sequence[str]], whole: Callable[[], Collection[str]]) -> None:
        """Check that the stages together are the model of one process. Collective over the pipeline.

        Args:
            names: Names of the parameters of each of this rank's stages, as `configure_stage` built them.
            whole: Returns the names of the parameters of a model of one stage.

        Raises:
            ConfigError: Every stage is the whole model, or together they lack parameters or have additional ones.
        """
        if len(self.placement) == 1:
            return
        of_ranks = [[*names]] if self.group is None else all_gather_object([*names], self.group)
        of_stages = [sorted(stage) for stages in of_ranks for stage in stages]
        remedy = (
            "Let configure_stage(stage) build a part of the layers, those of stage.index out of stage.num_stages, "
            "named by their index in the whole model, as lightning_d9d.pipeline.BlockSequence(blocks, stage) does"
        )
        if of_stages[0] and all(stage == of_stages[0] for stage in of_stages):
            raise ConfigError(
                f"each of the {len(of_stages)} stages has the whole model, on the pipeline ranks 0 to "
                f"{self.num_ranks - 1}. All have the parameters {first_of(of_stages[0])}, which would be trained as "
                f"one. {remedy}; or set MeshConfig.pipeline_parallel to 1"
            )
        have, wanted = {name for stage in of_stages for name in stage}, set(whole())
        if have == wanted:
            return
        differences = {
            "No stage has": wanted - have,
            "It does not have": have - wanted,
            "Several stages have": {name for name in have if sum(name in stage for stage in of_stages) > 1},
        }
        found = [f"{what} {first_of(sorted(names))}." for what, names in differences.items() if names]
        raise ConfigError(
            f"the {len(of_stages)} stages together differ from the model that configure_stage builds as one stage. "
            f"{' '.join(found)} {remedy}"
        )

    def begin_epoch(self) -> None:
        """Expect new schemas: callbacks may have frozen or unfrozen layers between epochs. Local."""
        if self.messages is not None:
            self.messages.forget()

    def sum_of_batch(self, values: Tensor) -> Tensor:
        """Sum values over the ranks that share a batch, in place. Collective over the pipeline and its sequences."""
        if self.batch_group is not None:
            dist.all_reduce(values, group=self.batch_group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """Sum values over the ranks of the pipeline, in place. Collective over them."""
        if self.group is not None:
            with waiting():
                dist.all_reduce(values, group=self.group)
        return values

    def share(self, value: T) -> T:
        """Return the last stage's picklable value on every rank of the pipeline. Collective over them."""
        return value if self.group is None else all_gather_object(value, self.group)[self.last_rank]

    def share_tree(self, tree: Any) -> Any:
        """Return the last stage's tree of tensors on every rank of the pipeline. Collective over them."""
        if self.group is None:
            return tree
        tensors, skeleton = take_apart(tree)
        layout = self.share((skeleton, [(tensor.shape, tensor.dtype) for tensor in tensors]))
        source = dist.get_process_group_ranks(self.group)[self.last_rank]
        if self.rank != self.last_rank:
            skeleton = layout[0]
            tensors = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in layout[1]]
        tensors = [tensor.to(self.device).contiguous() for tensor in tensors]
        for tensor in tensors:
            dist.broadcast(tensor, source, group=self.group)
        return put_together(skeleton, tensors)

    def _program(self, num_microbatches: int) -> Sequence[Action]:
        program = add_data_parallel(self.schedule.program(self.num_ranks, num_microbatches))
        return program.ranks[self.rank]

    def _splits_backward(self, num_microbatches: int) -> bool:
        """Return whether backwards come in two halves, on this rank."""
        actions = self.program(num_microbatches)
        return any(isinstance(part, BackwardInput) for action in actions for part in compute_parts(action))

    def _forward_only(self, num_microbatches: int) -> Sequence[Action]:
        return self.schedule.forward_only(self.num_ranks, num_microbatches).ranks[self.rank]

    def _links(self, mesh: MeshDomains, group: dist.ProcessGroup) -> dict[int, Link]:
        """Return links, by pipeline rank, to the ranks whose stages are next to this rank's."""
        global_ranks = dist.get_process_group_ranks(group)
        links = {}
        for pairs in disjoint_pairs(self.placement):
            forward = mesh.pipeline_group(pairs, lane="pipeline", neighbours=True)
            backward = mesh.pipeline_group(pairs, lane="pipeline_backward", neighbours=True)
            for pair in pairs:
                if self.rank in pair:
                    peer = pair[1 - pair.index(self.rank)]
                    links[peer] = Link(global_ranks[peer], forward, backward)
        return links


def _placement(schedule: Schedule, num_ranks: int) -> tuple[int, ...]:
    placement = tuple(schedule.placement(num_ranks))
    if {*placement} != {*range(num_ranks)}:
        raise ScheduleError(
            f"{type(schedule).__name__} places its {len(placement)} stages on the ranks {list(placement)} of a "
            f"pipeline of {num_ranks}. Place at least one on each of the ranks 0 to {num_ranks - 1}, and none elsewhere"
        )
    return placement


def disjoint_pairs(placement: Sequence[int]) -> list[list[tuple[int, int]]]:
    """Return the pairs of ranks with stages next to each other, in lists in which each rank is at most once.

    Process groups of one list can be made together.
    """
    lists: list[list[tuple[int, int]]] = []
    for pair in sorted({(min(two), max(two)) for two in pairwise(placement) if two[0] != two[1]}):
        free = next((pairs for pairs in lists if not {*pair} & {rank for other in pairs for rank in other}), None)
        if free is None:
            lists.append([pair])
        else:
            free.append(pair)
    return lists
