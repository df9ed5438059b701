"""The parts of a model's weights on each rank of a mesh, by arithmetic: no mesh is built.

[Note: shares of a weight] A weight is split twice. Tensor parallelism splits matrices in equal parts, but heads of keys
and values in no more parts than there are heads. Expert parallelism splits the experts. Each part is then fully sharded
over `num_shards` ranks along `shard_dim`: all but the last have ceil(size / num_shards) rows. `num_copies` ranks have
the same shard. The rules are those of `lightning_d9d.parallel`; tests compare them with its tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import torch
from torch import nn

from lightning_d9d.mesh import Axis, MeshConfig
from lightning_d9d.modules import GroupedQueryAttention, LMHead, SparseMoE, SwiGLU, TokenEmbedding
from lightning_d9d.modules.adapters import Adapter
from lightning_d9d.parallel.config import ParallelConfig
from lightning_d9d.parallel.data import blocks_of, shard_dim


class Cut(StrEnum):
    """The axis that splits a weight before it is fully sharded."""

    NOTHING = "nothing"
    TENSOR = "tensor ranks"
    HEADS = "tensor ranks, in heads of keys and values"
    EXPERTS = "expert ranks"


class Part(StrEnum):
    """The part of a model that a weight belongs to, as tables name it."""

    EMBEDDING = "embedding"
    ATTENTION = "attention"
    MLP = "dense MLP"
    ROUTER = "router"
    EXPERTS = "experts"
    NORMS = "norms"
    HEAD = "head"
    ADAPTERS = "adapters"
    OTHER = "other"


@dataclass(frozen=True, kw_only=True)
class Weight:
    """A parameter of the whole model."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    part: Part
    cut: Cut = Cut.NOTHING
    dim: int = 0
    """The dim along which it is split."""
    num_heads: int = 0
    """The heads of keys and values, if it is split by heads."""
    is_trained: bool = True
    is_adapter: bool = False
    """True for either of an adapter's two matrices."""

    @functools.cached_property
    def numel(self) -> int:
        """Elements of the whole weight."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class ModelWeights:
    """The parameters of a whole model, grouped as a pipeline splits it."""

    before: tuple[Weight, ...] = ()
    layers: tuple[tuple[Weight, ...], ...]
    after: tuple[Weight, ...] = ()
    tied: tuple[Weight, ...] = ()
    """Weights of `before` that the last stage has a copy of, if it is not the first."""

    @property
    def every(self) -> list[Weight]:
        """All weights of the whole model, each once."""
        return self.of_stage(range(len(self.layers)), is_first=True, is_last=True)

    @property
    def numel(self) -> int:
        """Elements of the whole model, each once."""
        return sum(each.numel for each in self.every)

    def of_stage(self, layers: range, *, is_first: bool, is_last: bool) -> list[Weight]:
        """Return the weights of a stage."""
        before = self.before if is_first else self.tied if is_last else ()
        inside = (weight for index in layers for weight in self.layers[index])
        return [*before, *inside, *(self.after if is_last else ())]


@dataclass(frozen=True, kw_only=True)
class Share:
    """The part of a weight on a rank. See [Note: shares of a weight]."""

    weight: Weight
    gathered: tuple[int, ...]
    """Shape after FSDP2 gathered it."""
    shape: tuple[int, ...]
    """Shape on the first of the ranks that fully shard it, which has the most."""
    num_shards: int
    num_copies: int
    is_unit: bool
    """True if FSDP2 gathers and reduces it."""
    gather_dtype: torch.dtype | None = None
    """The dtype in which FSDP2 gathers it; None: its own."""
    stays_gathered: bool = False
    """True if it belongs to the whole stage, which is gathered once a batch, as a tied matrix does."""

    @functools.cached_property
    def numel(self) -> int:
        """Elements on the rank."""
        return math.prod(self.shape)

    @functools.cached_property
    def num_gathered(self) -> int:
        """Elements after FSDP2 gathered it."""
        return math.prod(self.gathered)

    @property
    def width(self) -> int:
        """Bytes of an element of the weight in products, and of its gradient before sums."""
        return ((self.gather_dtype if self.is_unit else None) or self.weight.dtype).itemsize

    @property
    def num_padded(self) -> int:
        """Elements of a message of FSDP2, in which each rank has the size of the first one's part."""
        return self.numel * self.num_shards

    def of_rank(self, place: int) -> tuple[int, ...]:
        """Return the shape on another of the ranks that fully shard it; it has a 0 if nothing is left."""
        if self.num_shards == 1:
            return self.shape
        dim = shard_dim(self.gathered, self.num_shards)
        left = max(0, min(self.shape[dim], self.gathered[dim] - place * self.shape[dim]))
        return (*self.shape[:dim], left, *self.shape[dim + 1 :])


def weights_of(model: nn.Module, shard_blocks: Sequence[str] | None = None) -> ModelWeights:
    """List the parameters of a whole model, which may be on the meta device. Local.

    Parameters that are outside of blocks, and declared behind the first block, count as behind the layers.

    Args:
        model: The whole model as one stage.
        shard_blocks: As `ParallelConfig.shard_blocks`.
    """
    described = described_parameters(model)
    parts = parts_of(model, described, shard_blocks)
    before = [described[each] for each in parts.before]
    layers = [[described[each] for each in layer] for layer in parts.layers]
    after = [described[each] for each in parts.after]
    is_tied = any(isinstance(each, LMHead) and each.weight is None for each in model.modules())
    tied = tuple(each for each in before if each.part is Part.EMBEDDING) if is_tied else ()
    return ModelWeights(before=tuple(before), layers=tuple(map(tuple, layers)), after=tuple(after), tied=tied)


class StageParts(NamedTuple):
    """The parameters of a stage in the order of its forward."""

    before: list[nn.Parameter]
    layers: list[list[nn.Parameter]]
    after: list[nn.Parameter]


def parts_of(
    stage: nn.Module, described: Mapping[nn.Parameter, Weight], shard_blocks: Sequence[str] | None = None
) -> StageParts:
    """Return the parameters before, in and behind the blocks of a stage. Local.

    Args:
        stage: A stage or a whole model.
        described: Its `described_parameters`.
        shard_blocks: As `ParallelConfig.shard_blocks`.
    """
    blocks = blocks_of(stage, shard_blocks)
    block_of = {parameter: index for index, block in enumerate(blocks) for parameter in block.parameters()}
    found = StageParts([], [[] for _ in blocks], [])
    for parameter in stage.parameters():
        if parameter in block_of:
            found.layers[block_of[parameter]].append(parameter)
        else:
            is_before = described[parameter].part is Part.EMBEDDING
            (found.before if is_before else found.after).append(parameter)
    return found


_Rule = tuple[nn.Module, Part, Cut, int, int]
"""A module with the purpose of its parameters, and how they are split: the axis, the dim and the heads."""


def described_parameters(model: nn.Module) -> dict[nn.Parameter, Weight]:
    """Describe each parameter by the modules that own it; DTensors have the shape of the whole. Local."""
    found: dict[nn.Parameter, Weight] = {}
    of_adapters = {p for each in model.modules() if isinstance(each, Adapter) for p in each.parameters()}
    inside = {part for moe in model.modules() if isinstance(moe, SparseMoE) for part in moe.modules()}
    adapters: list[_Rule] = [
        (each, Part.ADAPTERS, Cut.NOTHING, 0, 0)
        for each in model.modules()
        if isinstance(each, Adapter) and each not in inside
    ]
    rules = [rule for module in model.modules() for rule in _rules(module, module in inside)]
    for module, part, cut, dim, heads in (*adapters, *rules):
        for parameter in module.parameters():
            if parameter in found:
                continue
            is_vector = parameter.dim() == 1 and dim == 1  # the bias of a layer whose inputs are cut
            plain = _plain(parameter, part, is_adapter=parameter in of_adapters)
            found[parameter] = plain if is_vector else replace(plain, cut=cut, dim=dim, num_heads=heads)
    for parameter in model.parameters():
        found.setdefault(parameter, _plain(parameter, Part.NORMS if parameter.dim() == 1 else Part.OTHER))
    return found


def _rules(module: nn.Module, is_in_mixture: bool) -> list[_Rule]:
    """Return the rules of a module of a class that parallelism knows; those of its parts come first."""
    match module:
        case GroupedQueryAttention():
            heads = module.k_proj.out_features // module.head_dim
            return [
                (module.q_proj, Part.ATTENTION, Cut.TENSOR, 0, 0),
                (module.k_proj, Part.ATTENTION, Cut.HEADS, 0, heads),
                (module.v_proj, Part.ATTENTION, Cut.HEADS, 0, heads),
                (module.o_proj, Part.ATTENTION, Cut.TENSOR, 1, 0),
                (module.q_norm, Part.NORMS, Cut.NOTHING, 0, 0),
                (module.k_norm, Part.NORMS, Cut.NOTHING, 0, 0),
                (module, Part.ATTENTION, Cut.TENSOR, 0, 0),
            ]
        case SparseMoE():
            return [
                (module.gate, Part.ROUTER, Cut.NOTHING, 0, 0),
                (module.experts, Part.EXPERTS, Cut.EXPERTS, 0, 0),
                (module, Part.MLP, Cut.NOTHING, 0, 0),
            ]
        case SwiGLU() if not is_in_mixture:
            return [
                (module.gate_proj, Part.MLP, Cut.TENSOR, 0, 0),
                (module.up_proj, Part.MLP, Cut.TENSOR, 0, 0),
                (module.down_proj, Part.MLP, Cut.TENSOR, 1, 0),
            ]
        case TokenEmbedding():
            return [(module, Part.EMBEDDING, Cut.TENSOR, 0, 0)]
        case nn.Embedding():
            return [(module, Part.EMBEDDING, Cut.NOTHING, 0, 0)]
        case LMHead():
            return [(module, Part.HEAD, Cut.TENSOR, 0, 0)]
    return []


def _plain(parameter: nn.Parameter, part: Part, *, is_adapter: bool = False) -> Weight:
    shape, is_trained = tuple(parameter.shape), parameter.requires_grad
    return Weight(shape=shape, dtype=parameter.dtype, part=part, is_trained=is_trained, is_adapter=is_adapter)


class Spread:
    """The rules that place weights on the ranks of a stage, for one mesh and configuration.

    Args:
        mesh: Resolved degrees.
        parallel: Its dtypes and `offload` determine how FSDP2 treats experts.
    """

    def __init__(self, mesh: MeshConfig, parallel: ParallelConfig | None = None) -> None:
        parallel = parallel or ParallelConfig()
        self.mesh = mesh
        self.num_ranks = mesh.world_size // mesh.pipeline_parallel
        self._tp = mesh.tensor_parallel
        self._shards = mesh.data_parallel_shard * mesh.context_parallel_shard
        self._fsdp_of_experts = mesh.expert_weights()[Axis.EP_FSDP]
        self._apart = mesh.expert_parallel * mesh.tensor_parallel * mesh.context_parallel_replicate > 1
        self._gather_dtype = parallel.dtypes[0]
        self._has_units = self._shards > 1 and (
            self._fsdp_of_experts > 1 or parallel.gather_dtype is not None or parallel.offload
        )
        self.share = functools.cache(self._share)

    def experts_are_apart(self) -> bool:
        """Return whether experts are gathered or summed over other ranks than the rest of their layer."""
        return self._apart

    def _share(self, weight: Weight) -> Share:
        """Return a rank's part of a weight."""
        num_parts, num_shards, is_unit = 1, self._shards, self._shards > 1
        match weight.cut:
            case Cut.EXPERTS if self._apart:
                num_parts = self.mesh.expert_parallel
                is_unit = self._has_units
                num_shards = self._fsdp_of_experts if is_unit else 1
            case Cut.TENSOR:
                num_parts = self._tp
            case Cut.HEADS:
                num_parts = min(self._tp, weight.num_heads)
        gathered = list(weight.shape)
        gathered[weight.dim] //= num_parts
        shape = list(gathered)
        if num_shards > 1:
            dim = shard_dim(gathered, num_shards)
            shape[dim] = -(-gathered[dim] // num_shards)
        return Share(
            weight=weight,
            gathered=tuple(gathered),
            shape=tuple(shape),
            num_shards=num_shards,
            num_copies=self.num_ranks // num_parts // num_shards,
            is_unit=is_unit,
            gather_dtype=self._gather_dtype,
        )

    def shares(self, weights: Iterable[Weight]) -> list[Share]:
        """Return a rank's parts of several weights."""
        return [self.share(each) for each in weights]


def elements(shares: Iterable[Share]) -> dict[Part, int]:
    """Count the elements of the rank with the most, by purpose. Local."""
    counted: dict[Part, int] = {}
    for each in shares:
        counted[each.weight.part] = counted.get(each.weight.part, 0) + each.numel
    return counted


def in_dtype(weights: ModelWeights, dtype: torch.dtype) -> ModelWeights:
    """Return the same weights in another dtype. Local."""

    def changed(several: Iterable[Weight]) -> tuple[Weight, ...]:
        return tuple(replace(each, dtype=dtype) for each in several)

    return ModelWeights(
        before=changed(weights.before),
        layers=tuple(map(changed, weights.layers)),
        after=changed(weights.after),
        tied=changed(weights.tied),
    )
