"""Messages between stages on different ranks: the tensors of a tree, one after the other, to or from one rank.

[Note: schemas] A message does not have a header: the receiver knows the number and shapes of its tensors from the
*schema*. A stage's schema follows from the shapes of the microbatch, its *signature*. Every rank of a pipeline knows
the signature, because all read the same batch. The first message of each signature is preceded by its schema, and the
receiver waits for it on the host. Later messages have no schema, so steps of known shapes do not wait. A schema
includes which tensors are frozen or trained: `forget` makes the next message of every signature send its schema again.

[Note: links] Each pair of ranks has a separate process group for either direction of the model. NCCL runs the messages
of one group one at a time. In a group of all ranks, a receive that waits for one neighbour would block a send to the
other.

[Note: after an error] A rank that raises in the middle of a schedule leaves some messages unsent and others unreceived.
The watchdog ends ranks that wait for it. If all ranks raise and live on, the next run could receive a message of the
earlier one. Therefore the links are abandoned, and the next run gets new ones.
"""

from __future__ import annotations

import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.groups import abandon
from lightning_d9d.pipeline.trees import Skeleton, in_words, others, take_apart
from lightning_d9d.waits import waiting


class Link(NamedTuple):
    """The connection of this rank to another rank of its pipeline. [Note: links]."""

    peer: int
    """Global rank of the peer."""
    forward: dist.ProcessGroup
    """Group for outputs of stages."""
    backward: dist.ProcessGroup
    """Group for gradients."""


_PLAIN = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.Size)
"""Types that are passed on to the next stage unchanged."""


class TensorSchema(NamedTuple):
    """Properties of a tensor that a receiver must know."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool


@dataclass(frozen=True)
class Schema:
    """Structure, shapes and dtypes of a stage's output, which a receiver must know."""

    skeleton: Skeleton
    tensors: tuple[TensorSchema, ...]

    @classmethod
    def of(cls, output: Any, stage: int) -> tuple[Schema, list[Tensor]]:
        """Return the schema of an output, and its tensors.

        Raises:
            ConfigError: The output has a DTensor, whose mesh lacks the next stage's ranks, or an object that may hide
                tensors.
        """
        tensors, skeleton = take_apart(output)
        for other in others(skeleton):
            if not isinstance(other, _PLAIN):
                raise ConfigError(
                    f"stage {stage} returned a {type(other).__name__}; return tensors and plain values in lists, "
                    "tuples, NamedTuples, dicts and dataclasses"
                )
        for tensor in tensors:
            if isinstance(tensor, DTensor):
                raise ConfigError(
                    f"stage {stage} returned a DTensor placed {tensor.placements}; return this rank's shard, "
                    "tensor.to_local()"
                )
        return cls(skeleton, tuple(TensorSchema(t.shape, t.dtype, t.requires_grad) for t in tensors)), tensors

    @property
    def trained(self) -> list[TensorSchema]:
        """The tensors that need a gradient, in order."""
        return [tensor for tensor in self.tensors if tensor.requires_grad]


class _Sent(NamedTuple):
    work: dist.Work
    tensor: Tensor
    peer: int


class _Posted(NamedTuple):
    works: list[dist.Work]
    tensors: list[Tensor]
    schema: Schema | None
    peer: int


class Messages:
    """Messages of this rank that are under way, by stage and microbatch.

    Args:
        placement: The pipeline rank of each stage.
        links: Links to the pipeline ranks with a stage next to one of this rank's.
        device: Device of the tensors.
        limit_seconds: Returns the current time limit of the host's wait for a message; None: the limit with which the
            link's group was made.
    """

    def __init__(
        self,
        placement: Sequence[int],
        links: Mapping[int, Link],
        device: torch.device,
        limit_seconds: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.placement = placement
        self.links = links
        self.device = device
        self.limit_seconds = limit_seconds
        self.num_calls = 0
        """Number of messages given to torch so far, one a tensor."""
        self._schemas: dict[tuple[int, Hashable], Schema] = {}
        self._sent: defaultdict[dist.ProcessGroup, deque[_Sent]] = defaultdict(deque)
        self._forward: dict[tuple[int, int], _Posted] = {}
        self._backward: dict[tuple[int, int], _Posted] = {}

    def forget(self) -> None:
        """Make ranks send schemas again. All ranks of a pipeline call it between the same two steps."""
        self._schemas.clear()

    # Outputs of stages

    def send_forward(self, stage: int, signature: Hashable, schema: Schema, tensors: Sequence[Tensor]) -> None:
        """Send the output of `stage` to the rank of the next one. It does not wait.

        Raises:
            ConfigError: The schema differs from that of earlier microbatches of the same shapes, or the output is on
                another device.
        """
        link = self.links[self.placement[stage + 1]]
        known = self._schemas.get((stage, signature))
        if known is None:
            for tensor in tensors:
                if tensor.device.type != self.device.type:
                    raise ConfigError(
                        f"stage {stage} returned a tensor on {tensor.device}; move it to {self.device}, the device "
                        "of messages to other ranks"
                    )
            self._schemas[stage, signature] = schema
            content = torch.frombuffer(bytearray(pickle.dumps(schema)), dtype=torch.uint8).to(self.device)
            self._send(torch.tensor([content.numel()], device=self.device), link.peer, link.forward)
            self._send(content, link.peer, link.forward)
        elif known != schema:
            raise ConfigError(
                f"stage {stage} returned {_described(schema)} for a microbatch, after {_described(known)} for one of "
                "the same shapes in this epoch. The output must follow from the input's shapes. Pad outputs to a size "
                "that follows from the inputs' shapes, and freeze or unfreeze parameters between epochs"
            )
        for tensor in tensors:
            self._send(tensor.detach().contiguous(), link.peer, link.forward)

    def post_forward(self, stage: int, microbatch: int, signature: Hashable) -> None:
        """Allocate buffers for the input of `stage` and start receiving. An unknown schema is waited for."""
        link = self.links[self.placement[stage - 1]]
        schema = self._schemas.get((stage - 1, signature))
        if schema is None:
            size = self._receive_now(torch.empty(1, dtype=torch.int64, device=self.device), link)
            content = self._receive_now(torch.empty(int(size), dtype=torch.uint8, device=self.device), link)
            schema = self._schemas[stage - 1, signature] = pickle.loads(content.cpu().numpy().tobytes())
        self._forward[stage, microbatch] = self._post(schema.tensors, link.peer, link.forward, schema)

    def receive_forward(self, stage: int, microbatch: int) -> tuple[Schema, list[Tensor]]:
        """Return the input of `stage` once it has arrived (on CUDA the stream waits, not the host)."""
        posted = self._arrived(self._forward, stage, microbatch)
        assert posted.schema is not None
        return posted.schema, posted.tensors

    # Gradients

    def send_backward(self, stage: int, gradients: Sequence[Tensor]) -> None:
        """Send the gradients of the input of `stage` to the rank of the previous stage, without waiting."""
        link = self.links[self.placement[stage - 1]]
        for gradient in gradients:
            self._send(gradient.contiguous(), link.peer, link.backward)

    def post_backward(self, stage: int, microbatch: int, schema: Schema) -> None:
        """Allocate buffers for the gradients of the output of `stage` and start receiving."""
        link = self.links[self.placement[stage + 1]]
        self._backward[stage, microbatch] = self._post(schema.trained, link.peer, link.backward, None)

    def receive_backward(self, stage: int, microbatch: int) -> list[Tensor]:
        """Return the gradients of the output of `stage` once they have arrived (on CUDA only the stream waits)."""
        return self._arrived(self._backward, stage, microbatch).tensors

    def finish(self) -> None:
        """Wait until all sent messages have been received (on CUDA the stream waits, not the host)."""
        for on_the_way in self._sent.values():
            for sent in on_the_way:
                self._wait(sent.work, f"for rank {sent.peer} to take a message")
        self._sent.clear()

    def drop(self) -> None:
        """Forget all messages under way, and the links. See [Note: after an error]."""
        for link in self.links.values():
            abandon(link.forward)
            abandon(link.backward)
        self._sent.clear()
        self._forward.clear()
        self._backward.clear()
        self._schemas.clear()

    def _send(self, tensor: Tensor, peer: int, group: dist.ProcessGroup) -> None:
        on_the_way = self._sent[group]
        while on_the_way and on_the_way[0].work.is_completed():  # in the order in which they were sent
            self._wait(on_the_way.popleft().work, f"for rank {peer}")  # does not wait; it releases the tensor
        work = dist.isend(tensor, peer, group)
        assert work is not None
        self.num_calls += 1
        on_the_way.append(_Sent(work, tensor, peer))

    def _post(
        self, schemas: Sequence[TensorSchema], peer: int, group: dist.ProcessGroup, schema: Schema | None
    ) -> _Posted:
        tensors = [torch.empty(each.shape, dtype=each.dtype, device=self.device) for each in schemas]
        works = [dist.irecv(tensor, peer, group) for tensor in tensors]
        self.num_calls += len(works)
        return _Posted([work for work in works if work is not None], tensors, schema, peer)

    def _arrived(self, posted: dict[tuple[int, int], _Posted], stage: int, microbatch: int) -> _Posted:
        of_microbatch = posted.pop((stage, microbatch))
        for work in of_microbatch.works:
            self._wait(work, f"for a message from rank {of_microbatch.peer}")
        return of_microbatch

    def _receive_now(self, tensor: Tensor, link: Link) -> Tensor:
        work = dist.irecv(tensor, link.peer, link.forward)
        assert work is not None
        self.num_calls += 1
        self._wait(work, f"for the first message of its kind from rank {link.peer}")
        return tensor

    def _wait(self, work: dist.Work, what: str) -> None:
        seconds = self.limit_seconds()
        try:
            with waiting():
                if (
                    self.device.type == "cpu" and seconds is not None
                ):  # gloo keeps the limit that the group was made with
                    work.wait(timedelta(seconds=seconds))
                else:
                    work.wait()
        except RuntimeError as error:
            error.add_note(f"while waiting {what}")
            raise


def _described(schema: Schema) -> str:
    tensors = []
    for shape, dtype, requires_grad in schema.tensors:
        text = f"{str(dtype).removeprefix('torch.')}{list(shape)}"
        tensors.append(f"{text} with gradient" if requires_grad else text)
    return f"({in_words(schema.skeleton, tensors)})"
