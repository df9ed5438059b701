"""Gradient buckets: flat buffers whose views are the gradients, summed over ranks while backward still runs.

[Note: bucket life] A *window* is everything between two optimizer steps: microbatches and accumulated batches. When a
parameter receives its first gradient of the window, the bucket *adopts* it. It copies the gradient into its slice of
the flat buffer (casting to the bucket's dtype). It makes that view the parameter's `.grad`, so that later gradients add
in place. Parameters come in *bucket groups*, such as those of a pipeline stage, whose gradients are complete at
different times. `start(bucket_group)` announces the group's last backward of the window. From then on a bucket is
*complete* once each of its parameters has received a gradient. After `complete(bucket_group)` all buckets of the group
are. A complete bucket is *launched* (one asynchronous SUM all-reduce) after those before it. So all ranks launch in the
same order, while gradients may arrive in any order. `finish()` launches the rest and waits.

A parameter without a gradient on this rank contributes zeros. After the gradients each bucket has one flag for each
parameter, so the same all-reduce says which were used anywhere. A parameter that no rank used keeps `grad is None`, as
under DistributedDataParallel. Only ranks with an unused parameter read flags (a host sync).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.sharding import local
from lightning_d9d.ops.sharded_weights import as_gradient
from lightning_d9d.waits import waiting


@dataclass(frozen=True, kw_only=True)
class GradSyncConfig:
    """How gradients of replicated parameters are kept and summed."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the flat buffers. "auto": for plain LightningModules the parameter's own, as in DDP. For a D9DModule
    float32 wherever gradients of lower precision are accumulated or reduced.
    """

    bucket_mb: float = 32.0
    """Size of a bucket in MiB, counted from local elements and the buffers' dtype. Smaller buckets start earlier;
    larger ones use the network better.
    """

    reduce: Literal["last_microbatch", "every_microbatch"] = "last_microbatch"
    """When gradients of fully sharded parameters are reduced: once, after the last microbatch of a window, or after
    each microbatch. The latter keeps only a shard of the gradients in memory. Gradients of replicated parameters are
    reduced once.
    """

    def __post_init__(self) -> None:
        if self.dtype not in ("auto", "float32", "bfloat16"):
            raise ConfigError(f"GradSyncConfig.dtype={self.dtype!r} must be 'auto', 'float32' or 'bfloat16'")
        if self.reduce not in ("last_microbatch", "every_microbatch"):
            raise ConfigError(f"GradSyncConfig.reduce={self.reduce!r} must be 'last_microbatch' or 'every_microbatch'")
        if not self.bucket_mb > 0:
            raise ConfigError(f"GradSyncConfig.bucket_mb={self.bucket_mb!r} must be greater than 0")

    @property
    def sum_bytes(self) -> int:
        """Bytes of a number in which the gradients of a D9DModule are summed, if parameters are not wider."""
        return (torch.float32 if self.dtype == "auto" else getattr(torch, self.dtype)).itemsize

    @property
    def bucket_bytes(self) -> int:
        """The size of a full bucket."""
        return int(self.bucket_mb * 2**20)


class BucketGroup(NamedTuple):
    """Parameters whose gradients are complete at about the same time."""

    parameters: list[nn.Parameter]
    """Parameters with `requires_grad`, or frozen after they received a gradient, in the module's order. Buckets take
    them in reverse, which is about the order of the backward.
    """
    group: dist.ProcessGroup | None
    """Ranks that hold replicas; None keeps gradients local (buffers still accumulate in their dtype)."""


class _Bucket:
    """Parameters of one dtype and device, their views, and the flat buffer: gradients, then one flag a parameter."""

    def __init__(
        self, parameters: list[nn.Parameter], dtype: torch.dtype, bucket_group: int, group: dist.ProcessGroup | None
    ) -> None:
        self.bucket_group = bucket_group
        self.group = group
        self.parameters = parameters
        self.dtype = dtype
        self.num_elements = sum(local(parameter).numel() for parameter in parameters)
        self.flat: Tensor | None = None
        """The buffer from the first gradient to the sum; [Note: pooled buffers]."""
        self.views: list[Tensor] = []
        self.arrived: set[int] = set()
        self.used: list[bool] = []
        self.launched = False
        self.work: dist.Work | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the buffer in bytes, while it exists."""
        return (self.num_elements + len(self.parameters)) * self.dtype.itemsize

    def take_buffer(self) -> Tensor:
        """Return the flat buffer, or a new one with undefined values."""
        if self.flat is None:
            sizes = [local(parameter).numel() for parameter in self.parameters]
            device = local(self.parameters[0]).device
            self.flat = torch.empty(self.num_elements + len(sizes), dtype=self.dtype, device=device)
            self.views = list(map(_laid_out_as, self.parameters, self.flat[: self.num_elements].split(sizes)))
        return self.flat

    def adopt(self, index: int) -> None:
        """Make the view this parameter's gradient, keeping its value. [Note: bucket life]."""
        parameter = self.parameters[index]
        self.take_buffer()
        view = self.views[index]
        if parameter.grad is None or parameter.grad is view:
            return
        if parameter.grad.layout != torch.strided:
            raise ConfigError(
                f"a parameter of shape {tuple(parameter.shape)} received a {parameter.grad.layout} gradient; but "
                "gradient buckets are dense: build the layer with sparse=False"
            )
        local(view).copy_(local(parameter.grad.detach()))
        parameter.grad = view

    def fill(self) -> None:
        """Put all gradients into the buffer."""
        self.launched = True
        self.take_buffer()
        self.used = [p.grad is not None for p in self.parameters]
        for index, used in enumerate(self.used):
            if used:
                self.adopt(index)
            else:
                local(self.views[index]).zero_()

    def send(self) -> None:
        """Begin to sum the buffer over the ranks."""
        if self.group is None:
            return
        flat = self.take_buffer()
        flags = flat[self.num_elements :]
        if all(self.used):
            flags.fill_(1)
        else:
            flags.copy_(torch.tensor(self.used, dtype=flags.dtype))
        self.work = dist.all_reduce(flat, group=self.group, async_op=True)

    def wait(self, divisor: float = 1.0) -> None:
        """Wait for the sum, divide it, and give parameters unused here the gradients of other ranks."""
        if self.work is not None:
            flat = self.take_buffer()
            with waiting():
                self.work.wait()
            self.work = None
            if divisor != 1:
                flat[: self.num_elements].div_(divisor)
            if not all(self.used):
                for index, flag in enumerate(flat[self.num_elements :].tolist()):
                    if flag and not self.used[index]:
                        self.parameters[index].grad = self.views[index]
        self.flat, self.views = None, []

    def end_window(self) -> None:
        """Reset the bucket for the next window."""
        self.launched = False
        self.arrived.clear()


def _laid_out_as(parameter: nn.Parameter, part: Tensor) -> Tensor:
    return as_gradient(part.view(local(parameter).shape), parameter)


class GradientBuckets:
    """The gradients of replicated parameters in flat buffers, all-reduced over their ranks as they become complete.

    The shard of a DTensor is summed over the ranks that hold the same shard.

    Collective: every rank of a bucket group's process group builds it with equal parameters in equal order, and calls
    `finish` equally often. A rank in the process groups of several bucket groups has them in the same order as its
    peers.

    Args:
        bucket_groups: Bucket groups, launched from the last to the first.
        dtype: Dtype of the buffers; None uses each parameter's own.
        at_least: With `dtype=None`, each parameter's dtype is promoted with this one. It does not depend on a rank's
            other parameters, which its peers may lack.
        bucket_mb: Size limit of a bucket in MiB.
    """

    def __init__(
        self,
        bucket_groups: Sequence[BucketGroup],
        *,
        dtype: torch.dtype | None = None,
        at_least: torch.dtype | None = None,
        bucket_mb: float = 32.0,
    ) -> None:
        self.buckets = [
            _Bucket(parameters, kept_in, index, each.group)
            for index, each in reversed([*enumerate(bucket_groups)])
            for parameters, kept_in in _fill(each.parameters[::-1], dtype, at_least, int(bucket_mb * 2**20))
        ]
        self.before_sum: Callable[[Sequence[nn.Parameter], Sequence[Tensor]], None] | None = None
        """Hook that gets the parameters of each bucket and their gradients before these are summed over ranks."""
        self.on_summed: Callable[[Sequence[nn.Parameter]], None] | None = None
        """Hook that gets the parameters of a bucket during backward, once they are summed and the next bucket has been
        launched. So the stream does not wait for a sum that has just begun. It is not called for buckets that `finish`
        waits for.
        """
        self._armed: set[int] = set()
        self._completed: set[int] = set()
        self._next = 0
        self._num_summed = 0
        self._handles = []
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                if parameter.dtype != bucket.dtype:
                    parameter.grad_dtype = None  # lets .grad have the bucket's dtype; autograd then adds into it
                if parameter.requires_grad:
                    hook = partial(self._on_gradient, bucket, index)
                    self._handles.append(parameter.register_post_accumulate_grad_hook(hook))

    @property
    def num_bytes(self) -> int:
        """The size of all buffers on this rank in bytes, when all exist."""
        return sum(bucket.num_bytes for bucket in self.buckets)

    def start(self, bucket_group: int = 0) -> None:
        """Announce the bucket group's last backward of the window: its complete buckets may be launched."""
        self._armed.add(bucket_group)

    def complete(self, bucket_group: int = 0) -> None:
        """Announce that all gradients of the bucket group are complete: its buckets may be launched."""
        self._completed.add(bucket_group)
        self._launch_complete()

    def finish(self, divisor: float = 1.0) -> None:
        """Launch the remaining buckets in order, wait for all sums (on CUDA only the stream waits), divide them.

        Raises:
            RuntimeError: A peer failed or the group's timeout passed (from torch).
        """
        while self._next < len(self.buckets):
            self._launch_next()
        for bucket in self.buckets[self._num_summed :]:
            bucket.wait(divisor)
        for bucket in self.buckets:
            bucket.end_window()
        self._armed.clear()
        self._completed.clear()
        self._next = self._num_summed = 0

    def remove(self) -> None:
        """Take the hooks off the parameters; gradients stay where they are."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _on_gradient(self, bucket: _Bucket, index: int, parameter: nn.Parameter) -> None:
        if bucket.launched:
            raise RuntimeError(
                f"a parameter of shape {tuple(parameter.shape)} received a second gradient after its bucket had been "
                "summed over ranks. Reentrant activation checkpointing does this: use "
                "torch.utils.checkpoint.checkpoint(..., use_reentrant=False)"
            )
        bucket.adopt(index)
        if bucket.bucket_group in self._armed:
            bucket.arrived.add(index)
            self._launch_complete()

    def _launch_complete(self) -> None:
        while self._next < len(self.buckets) and self._is_complete(self.buckets[self._next]):
            self._launch_next()
        if self.on_summed is None:
            return
        for bucket in self.buckets[self._num_summed : self._next]:
            if bucket.work is not None and bucket is self.buckets[self._next - 1]:
                break
            bucket.wait()
            self._num_summed += 1
            self.on_summed(bucket.parameters)

    def _is_complete(self, bucket: _Bucket) -> bool:
        return bucket.bucket_group in self._completed or len(bucket.arrived) == len(bucket.parameters)

    def _launch_next(self) -> None:
        bucket = self.buckets[self._next]
        bucket.fill()
        if self.before_sum is not None:
            self.before_sum(bucket.parameters, list(map(local, bucket.views)))
        bucket.send()
        self._next += 1


def bucket_dtype(parameter: nn.Parameter, dtype: torch.dtype | None, at_least: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a parameter's gradient buffer; arguments are those of `GradientBuckets`."""
    return dtype or (parameter.dtype if at_least is None else torch.promote_types(parameter.dtype, at_least))


def _fill(
    parameters: list[nn.Parameter], dtype: torch.dtype | None, at_least: torch.dtype | None, limit_bytes: int
) -> list[tuple[list[nn.Parameter], torch.dtype]]:
    """Split parameters into runs of one dtype and device, of at most `limit_bytes` or one larger parameter."""
    filled: list[tuple[list[nn.Parameter], torch.dtype]] = []
    room: dict[tuple[torch.dtype, torch.device], tuple[list[nn.Parameter], int]] = {}
    for parameter in parameters:
        kept_in = bucket_dtype(parameter, dtype, at_least)
        size = local(parameter).numel() * kept_in.itemsize
        bucket, left = room.get((kept_in, parameter.device), ([], 0))
        if size > left:
            bucket, left = [], limit_bytes
            filled.append((bucket, kept_in))
        bucket.append(parameter)
        room[kept_in, parameter.device] = (bucket, left - size)
    return filled
