"""Parallel degrees and the axes that follow from them. Pure arithmetic, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from lightning_d9d.errors import ConfigError
from lightning_d9d.legal import divisors, nearest
from lightning_d9d.mesh.axes import Axis, plain

_FILL = -1


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Parallel degrees.

    All degrees but `expert_parallel` multiply to the number of ranks; experts reuse the ranks of the other axes.

    One of the two data degrees may be -1: it then takes all ranks that the other degrees leave. `resolve` replaces it
    by its value.

    Raises:
        ConfigError: A degree is not an integer of at least 1, or is -1 where that is not possible.
    """

    pipeline_parallel: int = 1
    """Number of pipeline ranks; each holds one or more stages."""
    data_parallel_replicate: int = 1
    """Number of copies of the weights, each with its own part of the batch."""
    data_parallel_shard: int = 1
    """Number of ranks that share one copy of the weights (FSDP), each with its own part of the batch."""
    context_parallel_shard: int = 1
    """Number of parts of each sequence; weights are sharded over these ranks too."""
    context_parallel_replicate: int = 1
    """Number of parts of each sequence; weights are replicated over these ranks."""
    tensor_parallel: int = 1
    """Number of shards of each matrix."""
    expert_parallel: int = 1
    """Number of ranks that share one copy of the experts. They are consecutive ranks of a pipeline stage, along any of
    its axes, `tp` included. It divides the ranks of a stage. A Qwen3 without experts refuses a degree above 1.
    """

    def __post_init__(self) -> None:
        for name, degree in self._degrees():
            if isinstance(degree, bool) or not isinstance(degree, int):
                raise ConfigError(f"MeshConfig.{name}={degree!r} must be an integer")
            if degree < 1 and not (degree == _FILL and name in _DATA_DEGREES):
                rest = f", or {_FILL} for all ranks that the other degrees leave" if name in _DATA_DEGREES else ""
                raise ConfigError(f"MeshConfig.{name}={degree} must be at least 1{rest}")
        if all(getattr(self, name) == _FILL for name in _DATA_DEGREES):
            raise ConfigError(
                f"MeshConfig.data_parallel_replicate and data_parallel_shard are both {_FILL}: only one can take all "
                "ranks that the other degrees leave; set the other to 1 or more"
            )

    def resolve(self, world_size: int) -> MeshConfig:
        """Return the degrees for that many ranks, with -1 replaced by its value.

        Raises:
            ConfigError: The degrees do not fit. The message names the degree, its value and the nearest legal values.
        """
        if world_size < 1:
            raise ConfigError(f"world_size={world_size} must be at least 1")
        left, filled = world_size, None
        taken: list[str] = []
        for name in _ORDER:
            degree = getattr(self, name)
            if degree == _FILL:
                filled = name
            elif left % degree:
                raise ConfigError(_does_not_fit(name, degree, world_size, left, taken))
            else:
                left //= degree
                taken += [f"{name}={degree}"] if degree > 1 else []
        if filled:
            resolved = replace(self, **{filled: left})
        elif left == 1:
            resolved = self
        else:
            raise ConfigError(_leaves_ranks(self, world_size, left, taken))
        stage = world_size // self.pipeline_parallel
        if stage % self.expert_parallel:
            raise ConfigError(
                f"MeshConfig.expert_parallel={self.expert_parallel} must divide the {stage} ranks of a pipeline stage "
                f"({world_size} ranks / pipeline_parallel={self.pipeline_parallel}): "
                f"{_neighbours(self.expert_parallel, stage)}"
            )
        return resolved

    @property
    def world_size(self) -> int:
        """The number of ranks. The degrees must be resolved."""
        return math.prod(degree for name, degree in self._degrees() if name != "expert_parallel")

    def domains(self) -> dict[str, dict[str, int]]:
        """Return the axes of each domain with their sizes. The degrees must be resolved.

        Every domain splits the same ranks 0, 1, 2, ... in its own way; its last axis changes fastest.
        """
        pp, tp, ep = self.pipeline_parallel, self.tensor_parallel, self.expert_parallel
        replicate, shard = self.data_parallel_replicate, self.data_parallel_shard
        cp_shard, cp_replicate = self.context_parallel_shard, self.context_parallel_replicate
        domains = {
            "regular": {
                Axis.PP: pp,
                Axis.DP_REPLICATE: replicate,
                Axis.DP_SHARD: shard,
                Axis.CP_SHARD: cp_shard,
                Axis.CP_REPLICATE: cp_replicate,
                Axis.TP: tp,
            },
            "dense": {
                Axis.PP: pp,
                Axis.DP_REPLICATE: replicate,
                Axis.DP_CP_SHARD: shard * cp_shard,
                Axis.CP_REPLICATE: cp_replicate,
                Axis.TP: tp,
            },
            "expert": {Axis.PP: pp, Axis.EP_REPLICATE: self.world_size // pp // ep, Axis.EP_SHARD: ep},
            "batch": {Axis.PP: pp, Axis.DP: replicate * shard, Axis.CP: cp_shard * cp_replicate, Axis.TP: tp},
            "flat": {Axis.WORLD: self.world_size},
        }
        return {domain: plain(sizes) for domain, sizes in domains.items()}

    def split_tensor(self, num_shards: int) -> dict[str, dict[str, int]]:
        """Return the domains with `tp`, split in two: `tp_shard`, and `tp_replicate` for copies of each shard.

        This is for weights with fewer shards than tensor-parallel ranks: heads of keys and values.

        Args:
            num_shards: Number of shards; it divides `tensor_parallel`.
        """
        split = plain({Axis.TP_SHARD: num_shards, Axis.TP_REPLICATE: self.tensor_parallel // num_shards})
        return {
            name: {axis: size for axis, size in shape.items() if axis != Axis.TP} | split
            for name, shape in self.domains().items()
            if Axis.TP in shape
        }

    def expert_weights(self) -> dict[str, int]:
        """Return a domain like `expert`, with `ep_replicate` split in two.

        Along `ep_fsdp` a copy of the experts is fully sharded over the ranks of one replica that hold the same experts.
        This needs an axis that shards data, and a copy within one replica. Along `ep_dp_replicate` there are copies.
        """
        ranks = self.world_size // self.pipeline_parallel
        replica = ranks // self.data_parallel_replicate
        shards_data = self.data_parallel_shard * self.context_parallel_shard > 1
        within_replica = replica // self.expert_parallel if replica % self.expert_parallel == 0 else 1
        sharded = within_replica if shards_data else 1
        sizes = {
            Axis.PP: self.pipeline_parallel,
            Axis.EP_DP_REPLICATE: ranks // self.expert_parallel // sharded,
            Axis.EP_FSDP: sharded,
            Axis.EP_SHARD: self.expert_parallel,
        }
        return plain(sizes)

    def _degrees(self) -> list[tuple[str, int]]:
        return [(field.name, getattr(self, field.name)) for field in fields(self)]


_DATA_DEGREES = ("data_parallel_replicate", "data_parallel_shard")
_ORDER = (  # the order in which degrees take their ranks: the data degrees get the rest, so they are blamed last
    "pipeline_parallel",
    "tensor_parallel",
    "context_parallel_shard",
    "context_parallel_replicate",
    *_DATA_DEGREES,
)


def _leaves_ranks(config: MeshConfig, world_size: int, left: int, taken: list[str]) -> str:
    name = max(_DATA_DEGREES, key=lambda name: getattr(config, name))
    degree = getattr(config, name)
    experts = "" if config.expert_parallel == 1 else "; expert_parallel takes no ranks of its own"
    return (
        f"MeshConfig asks for {world_size // left} of {world_size} ranks "
        f"({' x '.join(taken) or 'all degrees are 1'}): set {name} to {degree * left} instead of {degree}, or to "
        f"{_FILL} for all ranks that are left{experts}"
    )


def _does_not_fit(name: str, degree: int, world_size: int, left: int, taken: list[str]) -> str:
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    ranks += f", of which {' x '.join(taken)} leave {left}" if taken else ""
    fill = f", or {_FILL} for all ranks that are left" if name in _DATA_DEGREES else ""
    return f"MeshConfig.{name}={degree} does not divide {ranks}: {_neighbours(degree, left)}{fill}"


def _neighbours(degree: int, total: int) -> str:
    """Name the divisors of `total` nearest to a degree that does not divide it."""
    if degree > total:
        return f"at most {total} fits"
    return f"the nearest that fit are {' and '.join(map(str, nearest(degree, divisors(total))))}"
