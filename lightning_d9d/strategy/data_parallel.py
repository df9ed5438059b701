"""Assigns gradients to the ranks over which they are summed, and tracks when they are complete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.collectives import device_of_messages
from lightning_d9d.mesh.sharding import local
from lightning_d9d.parallel.data import FullySharded
from lightning_d9d.parallel.fsdp import fully_sharded
from lightning_d9d.parallel.plan import NOT_TENSOR_SHARDED, ShardingKind, Summed, group_of, sharding_kind
from lightning_d9d.strategy.step_in_backward import CompleteGradients, StepInBackward
from lightning_d9d.strategy.tied import TiedParameter
from lightning_d9d.strategy.whole_gradients import WholeGradients
from lightning_d9d.sync.buckets import BucketGroup, GradientBuckets, GradSyncConfig, bucket_dtype
from lightning_d9d.waits import waiting


class DataParallelStages:
    """Passes events of stages from the executor to gradient buckets and fully sharded stages. `build` makes it.

    Args:
        buckets: Buckets of this rank's replicated parameters; None if nothing is reduced or accumulated in any.
        groups_of_stage: For each stage the indices of the bucket groups that have its parameters.
        sharded: Stages with fully sharded parameters.
        afterwards: Fully sharded parameters, by the ranks over which their reduced gradients are still to be summed.
            These are ranks of tensor parallelism, and pipeline ranks that have the parameters, too. All of them must
            have the same parameters in this order.
        whole: Checks the first gradients that are summed; None if ranks share no tokens.
        complete: Notified of complete gradients outside of buckets; None if nothing waits for them.
    """

    def __init__(
        self,
        buckets: GradientBuckets | None,
        groups_of_stage: Mapping[int, Sequence[int]],
        sharded: Mapping[int, FullySharded],
        afterwards: Mapping[dist.ProcessGroup, Sequence[nn.Parameter]],
        whole: WholeGradients | None = None,
        complete: CompleteGradients | None = None,
    ) -> None:
        self.buckets = buckets
        self.groups_of_stage = groups_of_stage
        self.sharded = sharded
        self.afterwards = afterwards
        self._whole = whole
        if whole is not None and buckets is not None:
            buckets.before_sum = whole.note
        self._complete = complete
        if complete is not None and buckets is not None:
            buckets.on_summed = complete.steps.take_rest
        self._reduces = False

    @classmethod
    def build(
        cls,
        trained: Sequence[nn.Parameter],
        stages: Mapping[int, nn.Module],
        tied: Mapping[nn.Parameter, TiedParameter],
        mesh: MeshDomains | None,
        grad_sync: GradSyncConfig,
        *,
        at_least: torch.dtype | None,
        accumulates: bool,
        sharded: Mapping[int, FullySharded],
        in_backward: StepInBackward | None = None,
    ) -> DataParallelStages:
        """Build it for the trained parameters of a rank. Collective over the ranks that hold the same stages.

        Args:
            trained: This rank's parameters that get gradients, except those that a plain module sums itself.
            stages: Stages by index; none for a plain module.
            tied: Parameters that other ranks of the pipeline have, too.
            mesh: Mesh of several ranks; None for one process.
            grad_sync: Dtype and size of buckets, and when fully sharded gradients are reduced.
            at_least: Dtype to which narrower dtypes are promoted in buckets; None does not promote.
            accumulates: Whether several backwards add up to a step.
            sharded: Stages with fully sharded parameters.
            in_backward: Receives parameters whose gradients are complete; None if nothing does.
        """
        units = {parameter for stage in stages.values() for parameter in fully_sharded(stage)}
        in_buckets = [parameter for parameter in trained if parameter not in units]

        def bucket_group(parameter: nn.Parameter) -> dist.ProcessGroup | None:
            if mesh is None:
                return None
            kind = sharding_kind(parameter, units)
            if stages:
                return group_of(kind, mesh, Summed.IN_BUCKETS)
            if kind is ShardingKind.EXPERTS:
                return mesh.group(Axis.EP_REPLICATE)  # also of one rank: a plain module's sums are divided behind it
            if mesh.dp_size in (1, mesh.config.world_size):
                return None if mesh.dp_size == 1 else mesh.everyone
            return mesh.group(Axis.DP)

        dtype = None if grad_sync.dtype == "auto" else getattr(torch, grad_sync.dtype)
        widens = accumulates and any(p.dtype != bucket_dtype(p, dtype, at_least) for p in in_buckets)
        bucket_groups, groups_of_stage = bucket_groups_of(in_buckets, stages, tied, bucket_group)
        bucket_groups = [each if each.group is not None or widens else BucketGroup([], None) for each in bucket_groups]
        buckets = None
        if any(each.parameters for each in bucket_groups):
            buckets = GradientBuckets(bucket_groups, dtype=dtype, at_least=at_least, bucket_mb=grad_sync.bucket_mb)
        afterwards: dict[dist.ProcessGroup, list[nn.Parameter]] = {}
        for parameter in sorted(
            units & tied.keys(), key=lambda parameter: (tied[parameter].ranks, tied[parameter].name)
        ):
            afterwards.setdefault(tied[parameter].group, []).append(parameter)
        for parameter in (each for each in trained if each in units and each not in tied):
            assert mesh is not None
            if (group := group_of(sharding_kind(parameter, units), mesh, Summed.AFTERWARDS)) is not None:
                afterwards.setdefault(group, []).append(parameter)
        whole = None
        if mesh is not None and stages and mesh.sizes[Axis.TP] > 1:
            names = {p: name for stage in stages.values() for name, p in stage.named_parameters()}
            whole = WholeGradients(
                {p: n for p, n in names.items() if sharding_kind(p, units) in NOT_TENSOR_SHARDED}, mesh
            )
        complete = None
        if in_backward is not None:
            left = {p for each in bucket_groups for p in each.parameters} | {
                p for ps in afterwards.values() for p in ps
            }
            complete = complete_gradients([p for p in trained if p not in left], stages, units, in_backward)
        return cls(buckets, groups_of_stage, sharded, afterwards, whole, complete)

    @property
    def has_work(self) -> bool:
        """True if anything is gathered, reduced or accumulated, or complete gradients are awaited."""
        return self.buckets is not None or len(self.sharded) > 0 or self._complete is not None

    def begin(self, *, is_first: bool, reduces: bool, splits_backward: bool) -> None:
        """Begin a batch.

        Args:
            is_first: Whether it is the first of a window: gradients of an earlier window are then forgotten.
            reduces: Whether gradients are summed over ranks in it.
            splits_backward: Whether its backwards come in two halves.
        """
        self._reduces = reduces
        if self._complete is not None:
            self._complete.begin()
        for stage in self.sharded.values():
            stage.begin(is_first=is_first, reduces=reduces, splits_backward=splits_backward)

    def unshard(self, stage: int) -> None:
        """Gather fully sharded parameters."""
        if stage in self.sharded:
            self.sharded[stage].unshard()

    def reshard(self, stage: int) -> None:
        """Reshard it."""
        if stage in self.sharded:
            self.sharded[stage].reshard()

    def last_backward(self, stage: int) -> None:
        """Allow buckets and units to be sent while it runs."""
        if self._complete is not None and self._reduces:
            self._complete.last_backward(stage)
        if self.buckets is not None and self._reduces:
            for group in self.groups_of_stage[stage]:
                self.buckets.start(group)
        if stage in self.sharded:
            self.sharded[stage].last_backward()

    def reduce(self, stage: int) -> None:
        """Send the remaining gradients."""
        if self.buckets is not None and self._reduces:
            for group in self.groups_of_stage[stage]:
                self.buckets.complete(group)
        if self._complete is not None and self._reduces:
            self._complete.reduce(stage)
        if stage in self.sharded:
            self.sharded[stage].reduce()

    def finish(self) -> None:
        """Wait for all sums of the batch (on CUDA the stream waits, not the host)."""
        if not self._reduces:
            return
        if self.buckets is not None:
            self.buckets.finish()
        for group, parameters in self.afterwards.items():
            gradients = {p: local(p.grad) for p in parameters if p.grad is not None}
            if self._whole is not None:
                self._whole.note(gradients, gradients.values())
            _sum_together(list(gradients.values()), group)
        if self._complete is not None:
            self._complete.steps.end_backward()

    def check_whole(self) -> None:
        """Check, after the first window, the gradients that were summed. Collective over the tensor axis.

        Raises:
            ConfigError: A gradient was summed although it was already whole. See `WholeGradients`.
        """
        if self._whole is not None:
            self._whole.check()

    def forget_whole(self) -> None:
        """Stop checking gradients."""
        self._whole = None
        if self.buckets is not None:
            self.buckets.before_sum = None

    def remove(self) -> None:
        """Remove all hooks from the parameters."""
        if self.buckets is not None:
            self.buckets.remove()
        if self._complete is not None:
            self._complete.remove()

    def drop(self) -> None:
        """Forget an interrupted batch."""
        for stage in self.sharded.values():
            stage.drop()


def complete_gradients(
    parameters: Iterable[nn.Parameter],
    stages: Mapping[int, nn.Module],
    units: Collection[nn.Parameter],
    steps: StepInBackward,
) -> CompleteGradients:
    """Watch parameters whose gradients are summed neither in a bucket nor after the backward.

    Args:
        parameters: Parameters, in any order. Parameters of several stages of this rank are left out.
        stages: By index.
        units: Parameters that FSDP2 reduces.
        steps: Takes them.
    """
    stages_of = _stages_of(stages)
    alone: dict[int, list[nn.Parameter]] = defaultdict(list)
    sharded: dict[int, list[nn.Parameter]] = defaultdict(list)
    for parameter in parameters:
        if len(stages_of[parameter]) == 1:
            (sharded if parameter in units else alone)[stages_of[parameter][0]].append(parameter)
    return CompleteGradients(alone, sharded, steps)


def _stages_of(stages: Mapping[int, nn.Module]) -> dict[nn.Parameter, list[int]]:
    stages_of: dict[nn.Parameter, list[int]] = defaultdict(list)
    for index, stage in stages.items():
        for parameter in stage.parameters():
            stages_of[parameter].append(index)
    return stages_of


def _sum_together(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients over ranks in place, in one message for each dtype.

    Collective: all ranks must have the same gradients.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = defaultdict(list)
    for gradient in gradients:
        by_dtype[gradient.dtype].append(gradient)
    device = device_of_messages(group)
    for alike in by_dtype.values():
        message = torch.cat([gradient.reshape(-1).to(device) for gradient in alike])
        with waiting():
            dist.all_reduce(message, group=group)
        sums = message.split([gradient.numel() for gradient in alike])
        torch._foreach_copy_(alike, [part.view_as(gradient) for part, gradient in zip(sums, alike, strict=True)])


def bucket_groups_of(
    trained: Iterable[nn.Parameter],
    stages: Mapping[int, nn.Module],
    tied: Mapping[nn.Parameter, TiedParameter],
    group_of: Callable[[nn.Parameter], dist.ProcessGroup | None],
) -> tuple[list[BucketGroup], dict[int, list[int]]]:
    """Return the bucket groups for `GradientBuckets`, and for each stage the indices of its groups.

    Tied parameters come first, so that they are sent last: their sum waits for the rank that finishes last. They are
    sorted by name, because the modules of different ranks may have different orders. Then come parameters of no stage
    or of several; those of a single stage are complete when the stage is.

    Args:
        trained: All parameters of this rank, except fully sharded ones.
        stages: By index.
        tied: Parameters that other pipeline ranks have, too.
        group_of: Ranks over which all other parameters are summed.
    """
    stages_of = _stages_of(stages)
    by_holders: dict[tuple[int, ...], BucketGroup] = {}
    rest: dict[dist.ProcessGroup | None, BucketGroup] = {}
    own: dict[int, dict[dist.ProcessGroup | None, BucketGroup]] = {index: {} for index in stages}
    for parameter in sorted((p for p in trained if p in tied), key=lambda p: tied[p].name):
        shared = tied[parameter]
        by_holders.setdefault(shared.ranks, BucketGroup([], shared.group)).parameters.append(parameter)
    for parameter in trained:
        if parameter not in tied:
            holders, group = stages_of[parameter], group_of(parameter)
            by_group = own[holders[0]] if len(holders) == 1 else rest
            by_group.setdefault(group, BucketGroup([], group)).parameters.append(parameter)
    groups = [*(by_holders[ranks] for ranks in sorted(by_holders)), *rest.values()]
    of_stages = {}
    for index, by_group in own.items():
        of_stages[index] = list(range(len(groups), len(groups) + len(by_group)))
        groups += by_group.values()
    return groups, of_stages
