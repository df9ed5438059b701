"""Tensor parallelism with sequence parallelism: ranks shard matrices, and sequences between them.

[Note: who holds which tokens] Between sharded modules, each rank of the tensor axis holds a slice of the rows' tokens.
Slices follow the order of ranks. Norms, residuals, routers and experts work on the slice. Between pipeline stages each
rank sends its own slice. A sharded module *gathers* the tokens of all slices, computes with its shard of the matrices,
and *scatters*. The scatter sums the results of all ranks, and each rank keeps its slice of the sum. There is one
message each way. In the backward, gather and scatter are exchanged.

[Note: gradients] All ranks of the axis compute one loss together. A sharded parameter has seen the tokens of all
slices: its gradient is complete. A parameter that is not sharded, such as a norm's, has seen only this rank's slice or
heads. Its gradient is summed over the axis with those of all other ranks.

[Note: adapters] A low-rank adapter beside a sharded weight is sharded in the same dim: its `b` with the outputs, its
`a` with the inputs. The adapter's other matrix is whole on each rank, which has a summand of the gradient.

[Note: shared heads] With more ranks than heads of keys and values, several ranks hold the same heads. Then the axis is
split into `tp_shard` and `tp_replicate` (`MeshDomains.split_tensor`), for all weights of the model.

Sharded parameters are DTensors, so that checkpoints, norms and FSDP2 know what a rank holds. Activations are plain
tensors.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from lightning_d9d.errors import ConfigError
from lightning_d9d.legal import divisors
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.axes import submesh
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.mesh.sharding import distribute, local_ranges
from lightning_d9d.modules import GroupedQueryAttention, LMHead, SparseMoE, SplitTokenEmbedding, SwiGLU, TokenEmbedding
from lightning_d9d.modules.adapters import adapted_linear, adapter_of
from lightning_d9d.modules.lm_head import SplitLMHead
from lightning_d9d.ops import VocabShard, gather_dim, linear, linear_cross_entropy, scatter_sum
from lightning_d9d.ops.linear_cross_entropy import Reduction
from lightning_d9d.ops.vocab_parallel import vocab_parallel_embedding

_SEQUENCE = 1
"""The dim of tokens in `[batch, seq, hidden]`."""


def shard_tensors(module: nn.Module, mesh: MeshDomains) -> None:
    """Shard attention, dense MLPs, embedding and head of a module over the tensor axis, in place.

    Between these, activations hold this rank's slice of the tokens. `parallel/tensor.py` says which. Mixtures of
    experts stay whole: they compute only for their slice. With one rank nothing is done. Collective over all ranks:
    each shards the same. For stages of a `D9DModule`: a plain LightningModule does not sum the gradients of parameters
    that are not sharded over these ranks.

    Args:
        module: A module on the meta device, or with equal values on all ranks. Its data is not sharded yet.
        mesh: The mesh of all ranks.

    Raises:
        ConfigError: Heads, inner widths or the vocabulary cannot be shared evenly by the ranks.
    """
    if mesh.sizes[Axis.TP] == 1:
        return
    _split(_heads_of([module]), mesh)
    parts = list(module.modules())
    within_mixtures = {each for part in parts if isinstance(part, SparseMoE) for each in part.modules()}
    for part in parts:
        match part:
            case GroupedQueryAttention():
                shard_attention(part, mesh)
            case SwiGLU() if part not in within_mixtures:
                shard_mlp(part, mesh)
            case SplitTokenEmbedding() | SplitLMHead():
                raise ConfigError(
                    f"a vocabulary in parts (vocab_splits: {', '.join(part)}) cannot be sharded over the ranks of "
                    f"tensor_parallel={mesh.sizes[Axis.TP]}; leave one of the two out"
                )
            case TokenEmbedding():
                shard_embedding(part, mesh)
            case LMHead():
                shard_head(part, mesh)


def split_for_heads(stages: Iterable[nn.Module], mesh: MeshDomains) -> None:
    """Split the tensor axis as attention on any rank needs it. See [Note: shared heads]. Collective over all ranks.

    Use it if the mesh is new to the stages, which are sharded over another mesh or not at all. `shard_tensors` does
    this itself if all ranks call it for equal modules, unlike those of a pipeline.

    Args:
        stages: This rank's stages.
        mesh: The mesh of all ranks.

    Raises:
        ConfigError: The numbers of heads need different splits; raised on every rank.
    """
    if mesh.sizes[Axis.TP] > 1:
        _split(set().union(*all_gather_object(_heads_of(stages))), mesh)


def _heads_of(stages: Iterable[nn.Module]) -> set[int]:
    """Return the numbers of heads of keys and values."""
    parts = (part for stage in stages for part in stage.modules() if isinstance(part, GroupedQueryAttention))
    return {part.k_proj.out_features // part.head_dim for part in parts}


def _split(numbers_of_heads: Iterable[int], mesh: MeshDomains) -> None:
    for number in sorted(numbers_of_heads):
        if mesh.sizes[Axis.TP] % number == 0:  # `shard_attention` refuses the other numbers, if they cannot be shared
            mesh.split_tensor(number)


def shard_attention(attention: GroupedQueryAttention, mesh: MeshDomains) -> None:
    """Give each rank some heads; `parallel/tensor.py` says which. Collective over all ranks.

    Raises:
        ConfigError: The ranks cannot share the query heads evenly, or they cannot share the heads of keys and values.
    """
    tp = mesh.sizes[Axis.TP]
    num_heads = attention.q_proj.out_features // attention.head_dim
    num_key_value_heads = attention.k_proj.out_features // attention.head_dim
    _check_shared(num_heads, "attention heads (num_attention_heads)", tp)
    if num_key_value_heads % tp and tp % num_key_value_heads:
        legal = [n for n in divisors(num_heads) if num_key_value_heads % n == 0 or n % num_key_value_heads == 0]
        raise ConfigError(
            f"tensor_parallel={tp} and {num_key_value_heads} heads of keys and values (num_key_value_heads): one of "
            f"the two must divide the other. With {num_heads} attention heads, tensor_parallel can be {_listed(legal)}"
        )
    mesh.split_tensor(num_key_value_heads)
    gather_tokens(attention, mesh)
    shard_colwise(attention.q_proj, mesh)
    shard_colwise(attention.k_proj, mesh, num_shards=num_key_value_heads)
    shard_colwise(attention.v_proj, mesh, num_shards=num_key_value_heads)
    shard_rowwise(attention.o_proj, mesh)
    if attention.sinks is not None:
        _shard(attention, "sinks", mesh, 0)


def shard_mlp(mlp: SwiGLU, mesh: MeshDomains) -> None:
    """Give each rank an equal part of the inner width.

    Raises:
        ConfigError: The parts would not be equal.
    """
    _check_shared(mlp.gate_proj.out_features, "inner width of an MLP (intermediate_size)", mesh.sizes[Axis.TP])
    gather_tokens(mlp, mesh)
    shard_colwise(mlp.gate_proj, mesh)
    shard_colwise(mlp.up_proj, mesh)
    shard_rowwise(mlp.down_proj, mesh)


def shard_embedding(embedding: nn.Embedding, mesh: MeshDomains) -> None:
    """Give each rank a part of the vocabulary; the embedding takes all tokens and returns this rank's slice of them.

    Raises:
        ConfigError: The parts would not be equal.
    """
    _check_shared(embedding.num_embeddings, "tokens of the vocabulary (vocab_size)", mesh.sizes[Axis.TP])
    _shard(embedding, "weight", mesh, 0)
    first, is_last = _rows_of(embedding.weight)
    _shard_adapter(embedding, "a", mesh, 1)
    embedding.forward = partial(_look_up, embedding, first, is_last, _group_name(mesh))


def shard_head(head: LMHead, mesh: MeshDomains) -> None:
    """Give each rank a part of the vocabulary; the head takes this rank's slice of the tokens, and all labels.

    Losses are those of all tokens, on every rank. Logits are gathered only if no labels are given.

    Raises:
        ConfigError: The parts would not be equal.
    """
    if head.weight is not None:
        _check_shared(len(head.weight), "tokens of the vocabulary (vocab_size)", mesh.sizes[Axis.TP])
        _shard(head, "weight", mesh, 0)
        _shard_adapter(head, "b", mesh, 0)
    head.forward = partial(_predict, head, _group_name(mesh))


def gather_tokens(module: nn.Module, mesh: MeshDomains) -> None:
    """Make a module gather the tokens of all slices from this rank's slice, its first argument."""
    module.forward = partial(_with_all_tokens, module, _group_name(mesh))


def shard_colwise(module: nn.Linear, mesh: MeshDomains, *, num_shards: int | None = None) -> None:
    """Give each rank some outputs of a linear layer, like torch's `ColwiseParallel`.

    When called with all tokens, the layer returns this rank's outputs.

    Args:
        module: The layer.
        mesh: Mesh of all ranks.
        num_shards: The largest number of shards of the outputs; smaller than the number of ranks only after
            `MeshDomains.split_tensor` with this number.
    """
    is_shared = num_shards is not None and num_shards < mesh.sizes[Axis.TP]
    for name, _ in list(module.named_parameters(recurse=False)):
        _shard(module, name, mesh, 0, is_shared=is_shared)
    _shard_adapter(module, "b", mesh, 0, is_shared=is_shared)
    module.forward = partial(adapted_linear, module, own_part=True)


def shard_rowwise(module: nn.Linear, mesh: MeshDomains) -> None:
    """Give each rank some inputs of a linear layer, like torch's `RowwiseParallel`.

    When called with these inputs of all tokens, the layer returns this rank's slice of the tokens.
    """
    _shard(module, "weight", mesh, 1)
    _shard_adapter(module, "a", mesh, 1)
    module.forward = partial(_summed_outputs, module, _group_name(mesh))


def _group_name(mesh: MeshDomains) -> str:
    return mesh.group(Axis.TP).group_name


def _shard(module: nn.Module, name: str, mesh: MeshDomains, dim: int, *, is_shared: bool = False) -> None:
    axes = mesh.tensor_axes
    placements: list[Placement] = [Shard(dim) for _ in axes]
    if is_shared:
        placements[-1] = Replicate()
    distribute(module, name, submesh(mesh.weights, *axes), placements)


def _shard_adapter(module: nn.Module, name: str, mesh: MeshDomains, dim: int, *, is_shared: bool = False) -> None:
    """Shard the matrix of a layer's adapter that has the sharded dim of its weight. [Note: adapters].

    The adapter's other matrix stays whole, and its product is part of the same sum, so no further message is needed.
    """
    if (adapter := adapter_of(module)) is not None:
        _shard(adapter, name, mesh, dim, is_shared=is_shared)


def _rows_of(weight: Tensor) -> tuple[int, bool]:
    """Return the first row of a matrix that this rank has, and whether it has the last one."""
    rows = local_ranges(weight)[0]
    return rows.start, rows.stop == len(weight)


# Forwards of sharded modules


def _with_all_tokens(module: nn.Module, group_name: str, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    return type(module).forward(module, gather_dim(x, _SEQUENCE, group_name), *args, **kwargs)


def _summed_outputs(module: nn.Linear, group_name: str, input: Tensor) -> Tensor:
    y = scatter_sum(adapted_linear(module, input, own_part=True, with_bias=False), _SEQUENCE, group_name)
    return y if module.bias is None else y + module.bias


def _look_up(module: nn.Embedding, first: int, is_last: bool, group_name: str, input: Tensor) -> Tensor:
    def look_up(ids: Tensor, weight: Tensor) -> Tensor:
        return vocab_parallel_embedding(ids, weight, first, is_first=first == 0, is_last=is_last)

    rows = look_up(input, module.weight.to_local())  # type: ignore[operator]
    if (adapter := adapter_of(module)) is not None:
        rows = rows + adapter(input, look_up)
    return scatter_sum(rows, _SEQUENCE, group_name)


def _predict(
    module: LMHead,
    group_name: str,
    x: Tensor,
    labels: Tensor | None = None,
    reduction: Reduction = "none",
    weight: Tensor | None = None,
) -> Tensor:
    whole = module.weight if weight is None else weight
    assert whole is not None, "a head without a weight needs one in the call"
    x = gather_dim(x, _SEQUENCE, group_name)
    first, _ = _rows_of(whole)
    shard = VocabShard(group_name, first, len(whole))
    adapter = adapter_of(module)
    x, own = (x, whole) if adapter is None else adapter.extend(x, whole)
    if labels is None:
        logits = module.loss_options.capped(linear(x, own, own_part=True))
        return gather_dim(logits, -1, group_name, sums_gradients=False)  # all ranks compute one loss from them
    return linear_cross_entropy(x, own, labels, options=module.loss_options, reduction=reduction, shard=shard)


# Checks


def _check_shared(number: int, what: str, tp: int) -> None:
    if number % tp:
        raise ConfigError(
            f"tensor_parallel={tp} does not divide the {number} {what}; it can be {_listed(divisors(number))}"
        )


def _listed(numbers: list[int], most: int = 12) -> str:
    return ", ".join(map(str, numbers[:most])) + (", ..." if len(numbers) > most else "")
