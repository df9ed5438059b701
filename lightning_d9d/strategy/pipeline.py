"""A rank's place in the pipeline: which stages it has, and how it reaches the ranks that have the others."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError, ScheduleError
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.mesh.collectives import all_gather_object, broadcast_tensors, digest
from lightning_d9d.mesh.sharding import local
from lightning_d9d.parallel.tokens import TokenPart
from lightning_d9d.pipeline.totals import BatchTotals
from lightning_d9d.pipeline.transfer import Link, Messages
from lightning_d9d.pipeline.trees import put_together, take_apart
from lightning_d9d.pipeline.types import StageInfo
from lightning_d9d.schedule import Action, BackwardInput, Schedule, add_data_parallel, compute_parts
from lightning_d9d.sync.norm import gradient_norm

T = TypeVar("T")


class Reported(NamedTuple):
    """What the totals of a batch are, apart from their values."""

    loss_is_mean: bool | None
    metrics: tuple[str, ...]
    """Names, sorted."""
    dtype: torch.dtype
    """Of the loss; at least float32."""


class Tie(NamedTuple):
    """What a parameter that several ranks of a pipeline hold has in common with its copies."""

    name: str
    ranks: tuple[int, ...]
    """The pipeline ranks that hold it."""
    counts_here: bool
    """Whether this rank has it in its norm."""
    group: dist.ProcessGroup
    """All ranks over which its gradient is still to be summed when the stages are done: of the holders, and of those
    that have other tokens. (Not those over which FSDP2 sums.)"""


class Pipeline:
    """One rank's part of a pipeline.

    Args:
        schedule: Places stages and makes programs.
        mesh: Of several ranks; links are made here then, so this is collective over all of them. None for one process.
        device: Where messages go.
        layers: For each stage the layers it is to have; None lets modules cut themselves.

    Raises:
        ScheduleError: The schedule gives a rank no stage, or places one on a rank that is not there.
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
        self.num_ranks = 1 if mesh is None else mesh.sizes["pp"]
        self.rank = 0 if mesh is None else mesh.coordinates["pp"]
        self.placement = _placement(schedule, self.num_ranks)
        self.group: dist.ProcessGroup | None = None
        """The ranks of this pipeline; None where it is one."""
        self.tokens = TokenPart.of(mesh)
        """What this rank has of the sequences of a batch."""
        self.token_group: dist.ProcessGroup | None = None
        """The ranks of the stage over which tokens are split; None for one process."""
        self.batch_group: dist.ProcessGroup | None = None
        """The ranks of this pipeline with other stages or other chunks of the same sequences; None where it is one."""
        self.readers: dist.ProcessGroup | None = None
        """The ranks that read the same batches; None where it is one."""
        self.messages: Messages | None = None
        if mesh is not None:
            sizes = mesh.sizes
            is_whole = sizes["dp"] * sizes["cp"] == mesh.config.world_size
            self.token_group = dist.group.WORLD if is_whole else mesh.group("dp", "cp")
            self.batch_group = mesh.group("pp", "cp") if sizes["pp"] * sizes["cp"] > 1 else None
            self.readers = mesh.group("pp", "cp", "tp") if sizes["dp"] < mesh.config.world_size else None
        if mesh is not None and self.num_ranks > 1:
            self.group = mesh.group("pp")
            links = self._links(mesh, self.group)
            self.messages = Messages(self.placement, links, device, lambda: mesh.timeout_seconds)
        self._reported: dict[str, Reported] = {}
        self._compared: set[str] = set()
        self._has_ties = False
        self.program = functools.cache(self._program)
        self.forward_only = functools.cache(self._forward_only)
        self.splits = functools.cache(self._splits)

    @property
    def stages(self) -> list[StageInfo]:
        """This rank's, ascending."""
        return [
            StageInfo(index, len(self.placement), None if self.layers is None else self.layers[index])
            for index in self.schedule.stages_of(self.rank, self.num_ranks)
        ]

    @property
    def last_rank(self) -> int:
        """The pipeline rank on which losses are made."""
        return self.placement[-1]

    def num_taken(self, num_microbatches: int) -> int:
        """The least number from this one on that the schedule takes; this one if none near is."""
        counts = range(num_microbatches, num_microbatches + 4 * self.num_ranks)
        return next((n for n in counts if self.schedule.takes(self.num_ranks, n)), num_microbatches)

    def find_tied(
        self, names: Mapping[nn.Parameter, str], axes_of: Callable[[nn.Parameter], Sequence[str]]
    ) -> dict[nn.Parameter, Tie]:
        """The parameters that other ranks of the pipeline hold, too, by their names. Collective over all ranks.

        Args:
            names: Of this rank's parameters.
            axes_of: Along which axes of `batch` the gradient of one is still to be summed when stages are done.
        """
        if self.group is None:
            return {}
        assert self.mesh is not None
        of_ranks = all_gather_object({name: tuple(axes_of(p)) for p, name in names.items()}, self.group)
        every_name = {name: axes for theirs in of_ranks for name, axes in theirs.items()}
        holders = {name: tuple(r for r, theirs in enumerate(of_ranks) if name in theirs) for name in every_name}
        ties = {name: (holders[name], axes) for name, axes in every_name.items() if len(holders[name]) > 1}
        groups: dict[tuple[tuple[int, ...], tuple[str, ...]], dist.ProcessGroup] = {
            (ranks, axes): self.mesh.pipeline_group([ranks], *axes) for ranks, axes in sorted({*ties.values()})
        }
        self._has_ties = bool(groups)
        return {
            parameter: Tie(name, holders[name], holders[name][0] == self.rank, groups[ties[name]])
            for parameter, name in names.items()
            if name in ties
        }

    def check_stages(self, stages: Mapping[int, nn.Module]) -> None:
        """See that not every stage is the whole model. Collective over the pipeline.

        Args:
            stages: This rank's, by index in the whole model.

        Raises:
            ConfigError: All stages have the same parameters.
        """
        if len(self.placement) == 1:
            return
        ours = [sorted(name for name, _ in stage.named_parameters()) for stage in stages.values()]
        of_ranks = [ours] if self.group is None else all_gather_object(ours, self.group)
        of_stages = [names for theirs in of_ranks for names in theirs]
        if of_stages[0] and all(names == of_stages[0] for names in of_stages):
            raise ConfigError(
                f"each of the {len(of_stages)} stages has the whole model, on the pipeline ranks 0 to "
                f"{self.num_ranks - 1}: all have the parameters {first_of(of_stages[0])}, which would be trained as "
                "one. Let configure_stage(stage) build a part of the layers, those of stage.index out of "
                "stage.num_stages, named by their index in the whole model, as "
                "lightning_d9d.pipeline.BlockSequence(blocks, stage) does; or set MeshConfig.pipeline_parallel to 1"
            )

    def make_equal(self, tied: Mapping[nn.Parameter, Tie]) -> None:
        """Overwrite tied parameters by the first holder's: those in no stage each rank has drawn. Collective."""
        in_order = sorted(tied, key=lambda parameter: (tied[parameter].ranks, tied[parameter].name))
        for group, parameters in groupby(in_order, key=lambda parameter: tied[parameter].group):
            broadcast_tensors(map(local, parameters), group, dist.get_process_group_ranks(group)[0])

    def norm(self, parameters: Iterable[nn.Parameter], tied: Mapping[nn.Parameter, Tie]) -> Tensor:
        """The norm of all gradients of the model, each tied parameter counted once. Collective."""
        counted = [parameter for parameter in parameters if parameter not in tied or tied[parameter].counts_here]
        return gradient_norm(counted, pipeline_group=self.group)

    def begin_epoch(self, tied: Mapping[nn.Parameter, Tie]) -> None:
        """Take notice of what callbacks froze and unfroze between epochs. Collective over the pipeline.

        Raises:
            ConfigError: A tied parameter is frozen on some ranks only.
        """
        if self.messages is not None:
            self.messages.forget()
        if self._has_ties:
            ours = {tie.name: parameter.requires_grad for parameter, tie in tied.items()}
            of_ranks = all_gather_object(ours, self.group)
            for name, is_trained in ours.items():
                if any(theirs.get(name, is_trained) != is_trained for theirs in of_ranks):
                    raise ConfigError(
                        f"parameter {name!r} is on several stages and frozen on some of them only; set requires_grad "
                        "of every parameter with that name, on all ranks"
                    )

    def check_same(self, kind: str, batch: Any) -> None:
        """See that ranks which share batches read the same, in the first batch of each kind. Collective over them.

        Args:
            kind: Of batch: "train", "val", ...
            batch: This rank's.

        Raises:
            ConfigError: They do not.
        """
        if self.readers is None or kind in self._compared:
            return
        self._compared.add(kind)
        if len(set(all_gather_object(digest(take_apart(batch)[0]), self.readers))) > 1:
            raise ConfigError(
                f"rank {dist.get_rank()}: ranks {dist.get_process_group_ranks(self.readers)} read different first "
                f"{kind} batches, but each runs a part of the same one. Let data depend on the data-parallel rank "
                "alone (strategy.distributed_sampler_kwargs), and seed what is shuffled alike on all ranks"
            )

    def report(self, kind: str, totals: BatchTotals, group: dist.ProcessGroup | None = None) -> tuple[Reported, Tensor]:
        """What the totals of a batch are, on all ranks of the pipeline, and the values of this one.

        Collective over the pipeline and the group the first time for each kind.

        Args:
            kind: Of batch: "train", "val", ...
            totals: Empty but where the last stage is; there, too, for a filler.
            group: Ranks that add up values of this kind by position; None for this pipeline alone.

        Returns:
            And `[1 + metrics, 2]`, value sums and weights, the loss first, in float64, in which counts of tokens stay
            exact beyond 2**24. They are 0 on ranks without the last stage: a sum over the pipeline makes them equal.

        Raises:
            ConfigError: It is not what it was in the first batch, or on other ranks.
        """
        ours = None
        if totals.loss is not None:
            dtype = torch.promote_types(totals.loss[0].dtype, torch.float32)
            ours = Reported(totals.loss_is_mean, tuple(sorted(totals.metrics)), dtype)
        if kind not in self._reported:
            self._reported[kind] = _agreed(self.share(ours), group)
        reported = self._reported[kind]
        if ours is None:
            return reported, torch.zeros(1 + len(reported.metrics), 2, dtype=torch.float64, device=self.device)
        if ours != reported:
            raise ConfigError(
                f"a {kind} batch gave {_described(ours)}, the first one {_described(reported)}; return the same names "
                "and the same kind of loss for every microbatch: WeightedLoss(0, 0) where there is nothing to count"
            )
        assert totals.loss is not None
        pairs = [totals.loss, *(totals.metrics[name] for name in reported.metrics)]
        return reported, torch.stack([torch.stack([value.double(), weight.double()]) for value, weight in pairs])

    def sum_of_batch(self, values: Tensor) -> Tensor:
        """The sum over the ranks that share a batch, in place. Collective over the pipeline and its sequences."""
        if self.batch_group is not None:
            dist.all_reduce(values, group=self.batch_group)
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the ranks of the pipeline, in place. Collective over them."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def share(self, value: T) -> T:
        """The last stage's picklable value on every rank of the pipeline. Collective over them."""
        return value if self.group is None else all_gather_object(value, self.group)[self.last_rank]

    def share_tree(self, tree: Any) -> Any:
        """The last stage's tree of tensors on every rank of the pipeline. Collective over them."""
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

    def _splits(self, num_microbatches: int) -> bool:
        """Whether backwards come in two halves, on this rank."""
        actions = self.program(num_microbatches)
        return any(isinstance(part, BackwardInput) for action in actions for part in compute_parts(action))

    def _forward_only(self, num_microbatches: int) -> Sequence[Action]:
        return self.schedule.forward_only(self.num_ranks, num_microbatches).ranks[self.rank]

    def _links(self, mesh: MeshDomains, group: dist.ProcessGroup) -> dict[int, Link]:
        """By pipeline rank, those whose stages are next to this rank's."""
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
            f"pipeline of {num_ranks}; give each of the ranks 0 to {num_ranks - 1}, and no other, at least one"
        )
    return placement


def disjoint_pairs(placement: Sequence[int]) -> list[list[tuple[int, int]]]:
    """The pairs of ranks with stages next to each other, in lists in which each rank is at most once.

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


def _agreed(reported: Reported | None, group: dist.ProcessGroup | None) -> Reported:
    """What it is on the ranks of a group that have had a first batch; one of them has."""
    of_ranks = [reported] if group is None else all_gather_object(reported, group)
    first = next(theirs for theirs in of_ranks if theirs is not None)
    for theirs in of_ranks:
        if theirs not in (first, None):
            raise ConfigError(
                f"the first batch gave {_described(first)} on a rank and {_described(theirs)} on another. Return the "
                "same names on every rank: WeightedLoss(0, 0) where there is nothing to count"
            )
    return first


def _described(reported: Reported) -> str:
    return f"{'a mean' if reported.loss_is_mean else 'a WeightedLoss'} and the metrics {list(reported.metrics)}"
