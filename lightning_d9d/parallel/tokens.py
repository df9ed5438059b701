"""Defines which tokens a rank has of the batch that its data rank reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function_unary

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.ops import gather_dim, sum_over
from lightning_d9d.parallel.context import SequenceShard
from lightning_d9d.pipeline.trees import with_children


@dataclass(frozen=True)
class TokenShard:
    """The tokens of a rank: two chunks of each sequence by context parallelism, a slice of those by tensor parallelism.

    By default a rank has all tokens. Methods are local unless their docstring names a collective.
    """

    sequence: SequenceShard = field(default_factory=SequenceShard)
    """The shard of each sequence, over the ranks of context parallelism."""

    num_slices: int = 1
    """The number of slices that split the tokens of this rank's chunks over the ranks of tensor parallelism, between
    modules that gather them."""

    context_group: str = ""
    """The `group_name` of the ranks of context parallelism."""

    tensor_group: str = ""
    """The `group_name` of the ranks with the slices."""

    slice_index: int = 0
    """The index of this rank's slice."""

    @staticmethod
    def of(mesh: MeshDomains | None) -> TokenShard:
        """Return the tokens this rank holds."""
        if mesh is None or mesh.sizes[Axis.CP] * mesh.sizes[Axis.TP] == 1:
            return TokenShard()
        return TokenShard(
            SequenceShard(mesh.coordinates[Axis.CP], mesh.sizes[Axis.CP]),
            mesh.sizes[Axis.TP],
            mesh.group(Axis.CP).group_name,
            mesh.group(Axis.TP).group_name,
            mesh.coordinates[Axis.TP],
        )

    @property
    def multiple(self) -> int:
        """Return the number that the length of a whole sequence must be a multiple of."""
        return self.num_slices * (2 * self.sequence.size if self.sequence.size > 1 else 1)

    def positions(self, slice_length: int, device: torch.device) -> Tensor:
        """Return the places of this rank's chunks in the whole sequence, int64 `[1, slice_length * num_slices]`."""
        return self.sequence.positions(slice_length * self.num_slices, device).unsqueeze(0)

    def of_whole(self, compute: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        """Return this rank's chunks of the result of `compute` for whole sequences, given its chunks of `ids`.

        `ids` has the shape `[batch, seq]`. Collective over the ranks of context parallelism.
        """
        return self.sequence.take(compute(self.join(ids, 1)), 1)

    def join(self, chunks: Tensor, dim: int) -> Tensor:
        """Join the chunks of all ranks to whole sequences along `dim`. Collective over ranks of context parallelism."""
        if self.sequence.size == 1:
            return chunks
        return self.sequence.join(gather_dim(chunks, dim, self.context_group), dim)

    def own_slice(self, chunks: Tensor, dim: int) -> Tensor:
        """Return this rank's slice of the tokens of its chunks along `dim`, in the form used between modules.

        A view.
        """
        length = chunks.shape[dim] // self.num_slices
        return chunks.narrow(dim, self.slice_index * length, length)

    def whole(self, slices: Tensor, dim: int) -> Tensor:
        """Join the slices of all ranks to whole sequences along `dim`, in order. Collective over ranks that share them.

        Gradients are as in `sum`.
        """
        if self.num_slices > 1:
            slices = gather_dim(slices, dim, self.tensor_group, sums_gradients=False)
        return self.join(slices, dim)

    def sum(self, x: Tensor) -> Tensor:
        """Sum the results of each rank's slice over all ranks that share sequences. Collective over them.

        Ranks with different chunks each have their own loss, to which the sum may belong; ranks with different slices
        have one loss together. The gradients of summands are those of the sum of all losses.
        """
        if self.num_slices > 1:
            x = sum_over(x, self.tensor_group, sums_gradients=False)
        if self.sequence.size > 1:
            x = sum_over(x, self.context_group, sums_gradients=True)
        return x

    @staticmethod
    def summand(x: Tensor) -> Tensor:
        """Mark and return a result of one rank's tokens, which a later `sum` adds to those of the other ranks.

        Between modules and stages, a sum over the tokens of one rank alone is refused without this mark.
        """
        return handle_torch_function(TokenShard.summand, (x,), x) if has_torch_function_unary(x) else x

    def mean(self, loss: Tensor) -> Tensor:
        """Average a loss over all ranks that share sequences, each of which has equally many tokens. Collective.

        Gradients are as in `sum`.
        """
        num_ranks = self.num_slices * self.sequence.size
        return loss if num_ranks == 1 else self.sum(loss / num_ranks)


def sequence_length(batch: Any, dims: Mapping[str, int]) -> int:
    """Return the number of tokens of a batch's sequences; 0 if it has none of the tensors in `dims`.

    Raises:
        ConfigError: The batch is not a mapping, a tensor lacks its dim, or sequences have different lengths.
    """
    if not isinstance(batch, Mapping):
        raise ConfigError(
            f"a batch is a {type(batch).__name__}, but sequence_dims={dict(dims)} names tensors of a mapping; give "
            "batches as dictionaries, or leave context and tensor parallelism out"
        )
    shapes = {name: batch[name].shape for name in dims if isinstance(batch.get(name), Tensor)}
    for name, shape in shapes.items():
        if dims[name] >= len(shape):
            raise ConfigError(
                f"sequence_dims says that {name!r} of a batch has its tokens in dim {dims[name]}, but its shape is "
                f"{list(shape)}; name only tensors with tokens there"
            )
    lengths = {name: shape[dims[name]] for name, shape in shapes.items()}
    if len({*lengths.values()}) > 1:
        raise ConfigError(
            f"the sequences of a batch have different lengths along sequence_dims: {lengths}; pad them to the longest, "
            "or leave tensors without tokens out of sequence_dims"
        )
    return max(lengths.values(), default=0)


def own_chunks(
    batch: Any, dims: Mapping[str, int], tokens: TokenShard, padding: Mapping[str, int] | None = None
) -> Any:
    """Return a batch with this rank's chunks of its sequences.

    Args:
        batch: A mapping of tensors. Tensors in `dims` are sharded; the others do not change.
        dims: The dim of tokens in each tensor that has one. Names that the batch does not have are ignored.
        tokens: The tokens this rank holds.
        padding: Sequences that cannot be shared evenly are padded at their end, with the number given here for a name,
            or 0. With None they are refused.

    Raises:
        ConfigError: The batch is not a mapping or has none of the tensors. Or its sequences have different lengths, or
            a length that cannot be shared.
    """
    if tokens.multiple == 1 or not dims:
        return batch
    length = sequence_length(batch, dims)
    if length == 0:
        raise ConfigError(
            f"a batch has {', '.join(map(str, batch)) or 'nothing'}, but none of the tensors {', '.join(dims)} that "
            "sequence_dims names. So it has no sequences to shard over ranks: name the batch's own token tensors in "
            "sequence_dims"
        )
    missing = -length % tokens.multiple
    if missing and padding is None:
        raise ConfigError(
            f"a batch has sequences of {length} tokens, which the ranks cannot share evenly. The length must be a "
            f"multiple of {tokens.multiple} (tensor_parallel={tokens.num_slices}"
            + (f" x 2 x {tokens.sequence.size} ranks of context parallelism" if tokens.sequence.size > 1 else "")
            + (
                f"), such as {length - length % tokens.multiple or tokens.multiple} or {length + missing}. Make the "
                "data have such sequences, or set ParallelConfig.pad_sequences"
            )
        )
    own = dict(batch)
    for name in (name for name in dims if isinstance(batch.get(name), Tensor)):
        tensor, dim = batch[name], dims[name] % batch[name].dim()
        if missing:
            assert padding is not None
            tensor = F.pad(tensor, [0, 0] * (tensor.dim() - 1 - dim) + [0, missing], value=padding.get(name, 0))
        own[name] = tokens.sequence.take(tensor, dim)
    return with_children(batch, own)
