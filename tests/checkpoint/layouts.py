"""The same named tensors, laid out on different meshes of four ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from lightning_d9d.mesh import MeshConfig, MeshDomains

S0, S1, R = Shard(0), Shard(1), Replicate()
FSDP = ("dp_cp_shard",)
HSDP = ("dp_replicate", "dp_cp_shard")

SPECS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "weight": ((8, 6), torch.float32),
    "uneven": ((5, 3), torch.float64),
    "short": ((2, 4), torch.bfloat16),
    "bias": ((7,), torch.float16),
    "experts": ((4, 2, 3), torch.float32),
    "nothing": ((0, 3), torch.float32),
    "scalar": ((), torch.float32),
    "count": ((), torch.int64),
    "mask": ((6,), torch.bool),
}


@dataclass(frozen=True)
class Layout:
    """Placed along some axes first, then sharded by FSDP along others; plain without any."""

    axes: tuple[str, ...] = ()
    placements: tuple[Placement, ...] = ()
    fsdp: tuple[str, ...] = ()


@dataclass(frozen=True)
class Mesh:
    config: MeshConfig
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    """The layouts of names that are not plain."""
    stages: tuple[tuple[str, ...], ...] = (tuple(SPECS),)
    """The names that each pipeline stage has."""


def all_fsdp(axes: tuple[str, ...], experts: Layout) -> dict[str, Layout]:
    sharded = dict.fromkeys(("weight", "uneven", "short", "bias"), Layout(fsdp=axes))
    return {**sharded, "experts": experts, "mask": Layout(axes[-1:], (S0,)), "nothing": Layout(axes[-1:], (S0,))}


TENSOR = {
    "weight": Layout(("tp",), (S0,)),
    "uneven": Layout(("tp",), (S0,)),
    "short": Layout(("tp",), (S1,)),
    "bias": Layout(("tp",), (R,)),
}
MESHES = {
    "fsdp": Mesh(MeshConfig(data_parallel_shard=4), all_fsdp(FSDP, Layout(fsdp=("ep_replicate",)))),
    "hsdp": Mesh(
        MeshConfig(data_parallel_replicate=2, data_parallel_shard=2), all_fsdp(HSDP, Layout(fsdp=("ep_replicate",)))
    ),
    "fsdp and tensor": Mesh(
        MeshConfig(data_parallel_shard=2, tensor_parallel=2, expert_parallel=2),
        {
            **{name: Layout(layout.axes, layout.placements, FSDP) for name, layout in TENSOR.items()},
            "experts": Layout(("ep_shard",), (S0,), ("ep_replicate",)),
        },
    ),
    "tensor": Mesh(MeshConfig(tensor_parallel=4), TENSOR),
    "experts": Mesh(MeshConfig(data_parallel_shard=4, expert_parallel=4), all_fsdp(FSDP, Layout(("ep_shard",), (S0,)))),
    "replicated": Mesh(MeshConfig(data_parallel_replicate=4)),
    "stages": Mesh(
        MeshConfig(pipeline_parallel=2, data_parallel_shard=2),
        all_fsdp(FSDP, Layout(fsdp=("ep_replicate",))),
        (("weight", "short", "scalar", "mask"), ("uneven", "bias", "experts", "nothing", "count")),
    ),
}


def whole_tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: (torch.randn(shape, generator=generator) * 8).to(dtype) for name, (shape, dtype) in SPECS.items()}


def place(domains: MeshDomains, layout: Layout, whole: Tensor) -> Tensor:
    """A copy on this mesh, as torch itself lays it out."""
    placed = whole.clone()
    if layout.axes:
        domain = "dense" if "tp" in layout.axes else None
        placed = distribute_tensor(placed, domains.for_axes(*layout.axes, domain=domain), layout.placements)
    if not layout.fsdp:
        return placed
    holder = nn.ParameterList([nn.Parameter(placed)])
    fully_shard(holder, mesh=domains.for_axes(*layout.fsdp))
    return holder[0]


def on_mesh(mesh: Mesh, domains: MeshDomains, whole: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """What this rank has of the tensors."""
    names = mesh.stages[domains.coordinates["pp"] % len(mesh.stages)]
    return {name: place(domains, mesh.layouts.get(name, Layout()), whole[name].to(device)) for name in names}


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
