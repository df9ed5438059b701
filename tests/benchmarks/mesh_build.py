"""What one rank of a large job spends on its meshes: `MeshDomains.build` against five calls of `init_device_mesh`.

A step is one rank joining a world of torch's fake backend, which sends nothing, building all domains, and leaving. So
it times what the host does; on a network each group that is not made also spares connections.
"""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_d9d.mesh import MeshConfig, MeshDomains
from tests.benchmarks.frame import Case
from tests.mesh.fake_world import MESHES, fake_world

POOLED, NAIVE = "MeshDomains.build", "five init_device_mesh"


def cases(device_type: str, quick: bool) -> list[Case]:
    """4096 ranks, with `quick` 64. The host's work: the same on every device."""
    config = MESHES["64" if quick else "4096"]
    return [
        Case(
            name=f"{config.world_size} ranks",
            contenders={NAIVE: partial(Naive, config), POOLED: partial(Pooled, config)},
            peer=NAIVE,
            limits={} if quick else {POOLED: 0.5},
            warmup_steps=1,
            block_steps=1,
            repeats=2 if quick else 20,
            conditions={"backend": "fake", "rank": 0, "domains": 5},
        )
    ]


class Naive:
    """Builds each domain with torch alone."""

    def __init__(self, config: MeshConfig, device: torch.device) -> None:
        self._config = config
        self._checksum = 0

    def run(self, steps: int) -> None:
        for _ in range(steps):
            with fake_world(rank=0, world_size=self._config.world_size):
                self._checksum = sum(map(_sum_of_ranks, self._build()))

    def loss(self) -> float:
        """The sum of the ranks of all groups of all axes: equal where the meshes are."""
        return float(self._checksum)

    def close(self) -> None:
        pass

    def _build(self) -> list[DeviceMesh]:
        return [
            init_device_mesh("cpu", tuple(shape.values()), mesh_dim_names=tuple(shape))
            for shape in self._config.domains().values()
        ]


class Pooled(Naive):
    """Builds them as the strategy does, the warm-up of the groups included."""

    def _build(self) -> list[DeviceMesh]:
        domains = MeshDomains.build(self._config, "cpu")
        return [domains.regular, domains.dense, domains.expert, domains.batch, domains.flat]


def _sum_of_ranks(mesh: DeviceMesh) -> int:
    return sum(chain.from_iterable(map(dist.get_process_group_ranks, mesh.get_all_groups())))
