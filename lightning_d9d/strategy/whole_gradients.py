"""Finds parameters that are not sharded, but whose whole gradient each rank of tensor parallelism has.

Such gradients would be summed over these ranks, because each normally sees its own slice of the tokens (`WHO_SUMS` in
`lightning_d9d.parallel.plan`). A rank that has computed with all tokens already has the whole sum, and the result would
be a multiple of it. Whole gradients are equal on all ranks, bit by bit; those of slices are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.mesh.collectives import all_gather_object


class WholeGradients:
    """Records gradients before they are summed over ranks.

    Args:
        names: Parameters that are not sharded over the tensor axis.
        mesh: Mesh of all ranks.
    """

    def __init__(self, names: Mapping[nn.Parameter, str], mesh: MeshDomains) -> None:
        self._names = names
        self._mesh = mesh
        self._noted: dict[str, Tensor] = {}

    def note(self, parameters: Iterable[nn.Parameter], gradients: Iterable[Tensor]) -> None:
        """Record two numbers of each gradient, on its device."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter in self._names and gradient.numel() > 0:
                norm = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(gradient.dtype, torch.float32))
                self._noted[self._names[parameter]] = torch.stack([norm, gradient.sum(dtype=norm.dtype)])

    def check(self) -> None:
        """Compare the records. It reads the device. Collective over the tensor axis.

        Raises:
            ConfigError: Some gradient is the same on all ranks of the axis, and not 0.
        """
        ours = {name: self._noted[name].tolist() for name in self._names.values() if name in self._noted}
        of_ranks = all_gather_object(ours, self._mesh.group(Axis.TP))
        whole = [n for n, numbers in ours.items() if numbers[0] > 0 and all(r.get(n) == numbers for r in of_ranks)]
        num_ranks = self._mesh.sizes[Axis.TP]
        if whole:
            raise ConfigError(
                f"each of the {num_ranks} ranks of tensor parallelism has the whole gradient of {first_of(whole)}; "
                f"summed over them it would be {num_ranks} times as large. Make these parameters see each rank's slice "
                "of the tokens (lightning_d9d.parallel.shard_tensors, TokenShard.own_slice), shard them over the axis "
                "'tp', freeze them, or set MeshConfig.tensor_parallel to 1"
            )
