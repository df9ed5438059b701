"""Tied parameters: one parameter that several pipeline ranks hold, such as tied embeddings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.collectives import all_gather_object, broadcast_tensors
from lightning_d9d.mesh.sharding import local
from lightning_d9d.sync.norm import SquaredNorms, gradient_norm


class TiedParameter(NamedTuple):
    """A parameter that several pipeline ranks hold, described the same way on all of them."""

    name: str
    ranks: tuple[int, ...]
    """The pipeline ranks that hold it."""
    counts_here: bool
    """True if this rank counts it in its norm."""
    group: dist.ProcessGroup
    """The ranks over which its gradient is still to be summed when the stages are done.

    These are the holders, and the ranks that have other tokens. (Ranks over which FSDP2 sums are not included.)
    """


class TiedParameters(Mapping[nn.Parameter, TiedParameter]):
    """This rank's tied parameters.

    Args:
        tied: The parameters.
        pipeline: The ranks of the pipeline; None for one.
        exist: True if some rank of the pipeline has a tied parameter. Equal on all of them.
    """

    def __init__(
        self,
        tied: Mapping[nn.Parameter, TiedParameter] | None = None,
        pipeline: dist.ProcessGroup | None = None,
        exist: bool = False,
    ) -> None:
        self._tied = dict(tied or {})
        self._pipeline = pipeline
        self._exist = exist

    def __getitem__(self, parameter: nn.Parameter) -> TiedParameter:
        return self._tied[parameter]

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._tied)

    def __len__(self) -> int:
        return len(self._tied)

    @classmethod
    def find(
        cls,
        names: Mapping[nn.Parameter, str],
        axes_of: Callable[[nn.Parameter], Sequence[str]],
        mesh: MeshDomains | None,
    ) -> TiedParameters:
        """Find the parameters that several pipeline ranks hold, by their names. Collective over all ranks.

        Args:
            names: The names of this rank's parameters.
            axes_of: The axes along which the gradient of a parameter is still to be summed when stages are done.
            mesh: The mesh of the run; None for one process.
        """
        if mesh is None or mesh.sizes[Axis.PP] == 1:
            return cls()
        pipeline, rank = mesh.group(Axis.PP), mesh.coordinates[Axis.PP]
        of_ranks = all_gather_object({name: tuple(axes_of(p)) for p, name in names.items()}, pipeline)
        every_name = {name: axes for theirs in of_ranks for name, axes in theirs.items()}
        holders = {name: tuple(r for r, theirs in enumerate(of_ranks) if name in theirs) for name in every_name}
        tied = {name: (holders[name], axes) for name, axes in every_name.items() if len(holders[name]) > 1}
        groups: dict[tuple[tuple[int, ...], tuple[str, ...]], dist.ProcessGroup] = {
            (ranks, axes): mesh.pipeline_group([ranks], *axes) for ranks, axes in sorted({*tied.values()})
        }
        here = {
            parameter: TiedParameter(name, holders[name], holders[name][0] == rank, groups[tied[name]])
            for parameter, name in names.items()
            if name in tied
        }
        return cls(here, pipeline, exist=bool(groups))

    def make_equal(self) -> None:
        """Overwrite each by the first holder's: each rank has drawn those that are in no stage.

        Collective over all ranks.
        """
        in_order = sorted(self, key=lambda parameter: (self[parameter].ranks, self[parameter].name))
        for group, parameters in groupby(in_order, key=lambda parameter: self[parameter].group):
            broadcast_tensors(map(local, parameters), group, dist.get_process_group_ranks(group)[0])

    def norm(
        self,
        parameters: Iterable[nn.Parameter],
        at_least: torch.dtype = torch.float32,
        gone: SquaredNorms | None = None,
    ) -> Tensor:
        """Return the norm of all gradients of the model; each tied parameter counts once. Collective over all ranks.

        Args:
            parameters: Parameters of this rank; there may be none.
            at_least: Dtype of the norm, as in `gradient_norm`.
            gone: Squared norms of parameters that are not tied and whose gradients have been freed.
        """
        counted = [parameter for parameter in parameters if parameter not in self or self[parameter].counts_here]
        return gradient_norm(counted, pipeline_group=self._pipeline, at_least=at_least, gone=gone)

    def check_frozen_alike(self) -> None:
        """Compare which parameters callbacks froze and unfroze between epochs. Collective over the pipeline.

        Raises:
            ConfigError: A tied parameter is frozen only on some ranks.
        """
        if not self._exist:
            return
        ours = {tied.name: parameter.requires_grad for parameter, tied in self.items()}
        of_ranks = all_gather_object(ours, self._pipeline)
        for name, is_trained in ours.items():
            if any(theirs.get(name, is_trained) != is_trained for theirs in of_ranks):
                raise ConfigError(
                    f"parameter {name!r} is on several stages but frozen only on some of them; set requires_grad of "
                    "every parameter with that name, on all ranks"
                )
