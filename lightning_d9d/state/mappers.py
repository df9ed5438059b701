"""Mappers say which tensors become which others: names and shapes, before there is any data.

A mapper declares groups of names that belong together, and maps `View`s. Leaves move values or cast them; `Sequential`,
`Parallel`, `Prefix`, `Share` and `Inverse` put mappers together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.agreement import first_of
from lightning_d9d.state.views import (
    Sharding,
    Spec,
    View,
    checked_dim,
    concatenate,
    inverted,
    materialized,
    stack,
    substituted,
)


class Group(NamedTuple):
    """Names of tensors that are needed together, and of the tensors made from them."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class Mapper(ABC):
    """A mapper makes tensors from tensors. Each name is in one group of a mapper."""

    @property
    @abstractmethod
    def groups(self) -> tuple[Group, ...]:
        """Return the groups: which outputs are made from which inputs. Groups do not depend on each other."""

    @abstractmethod
    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Map some whole groups to their outputs.

        Args:
            views: All inputs of these groups, and only these.

        Raises:
            StateError: Shapes or dtypes do not fit. The message has the tensor's name.
        """

    @cached_property
    def group_of(self) -> dict[str, Group]:
        """The group of each input."""
        return {name: group for group in self.groups for name in group.inputs}

    def plan(self, specs: Mapping[str, Spec | Tensor], *, strict: bool = True) -> dict[str, View]:
        """Check the mapper against tensors without their data.

        Args:
            specs: All inputs; further tensors are ignored. Tensors may be on the meta device.
            strict: If True, all inputs must be there. Otherwise groups that lack one are left out.

        Returns:
            The outputs.

        Raises:
            StateError: An input is missing, or shapes or dtypes do not fit.
        """
        missing = [name for name in self.group_of if name not in specs]
        if strict and missing:
            raise StateError(
                f"{first_of(missing)}: this input of the mapper is missing; give it, or a mapper of these tensors"
            )
        complete = [group for group in self.groups if all(name in specs for name in group.inputs)]
        views = {name: View.of(name, specs[name]) for group in complete for name in group.inputs}
        return self.map(views) if views else {}

    def describe(self, specs: Mapping[str, Spec | Tensor] | None = None) -> str:
        """Describe each group in a line: inputs and outputs; with `specs`, as in `plan`, also shapes and dtypes."""
        known: dict[str, Spec] = {}
        taken: dict[str, Spec] = {}
        if specs is not None:
            known = {name: view.spec for name, view in self.plan(specs).items()}
            taken = {name: View.of(name, specs[name]).spec for name in self.group_of}

        def text(names: Iterable[str], kind: Mapping[str, Spec]) -> str:
            return ", ".join(f"{name} {kind[name]}" if name in kind else name for name in names) or "nothing"

        return "\n".join(f"{text(group.inputs, taken)} -> {text(group.outputs, known)}" for group in self.groups)

    def apply(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Map tensors in memory. Collective where DTensors are gathered.

        Args:
            tensors: All inputs; further tensors are ignored.

        Returns:
            The outputs: new tensors, except those that equal an input.
        """
        return dict(materialized(self.plan(tensors), tensors))

    def stream(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Map a stream of tensors: a group is mapped when its last input has arrived, and then forgotten.

        Names that the mapper does not take are left out. Collective if DTensors are gathered: they must then arrive in
        the same order on all ranks.

        Raises:
            StateError: A group is incomplete at the end.
        """
        waiting: dict[Group, dict[str, Tensor]] = {}
        for name, tensor in tensors:
            group = self.group_of.get(name)
            if group is None:
                continue
            inputs = waiting.setdefault(group, {})
            inputs[name] = tensor
            if len(inputs) == len(group.inputs):
                views = self.map({each: View.of(each, inputs[each]) for each in group.inputs})
                yield from materialized(views, inputs)
                del waiting[group], inputs
        if waiting:
            group, inputs = next(iter(waiting.items()))
            missing = [each for each in group.inputs if each not in inputs]
            raise StateError(
                f"{first_of(missing)} never arrived, but {first_of([*group.outputs])} is made from it; give it"
            )

    def with_rest(self, names: Iterable[str]) -> Mapper:
        """Return this mapper with the rest of `names`, which pass unchanged."""
        return Parallel([self, Identity(name for name in names if name not in self.group_of)])

    def inverse(self, specs: Mapping[str, Spec | Tensor]) -> Inverse:
        """Return the mapper from the outputs to the inputs, an `Inverse`."""
        return Inverse(self, specs)

    def __str__(self) -> str:
        return self.describe()


# Leaves


class _Leaf(Mapper):
    """A mapper with one group."""

    def __init__(self, inputs: Iterable[str], outputs: Iterable[str]) -> None:
        self._group = Group(tuple(inputs), tuple(outputs))
        for names in self._group:
            if not names:
                raise StateError(f"{type(self).__name__} has no inputs or no outputs; give it names")
            if repeated := [name for name in names if names.count(name) > 1]:
                raise StateError(f"{type(self).__name__} names {repeated[0]} twice; name each tensor once")

    @property
    def groups(self) -> tuple[Group, ...]:
        return (self._group,)


class _Each(Mapper):
    """A mapper with a group for each name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._groups = tuple(Group((name,), (name,)) for name in dict.fromkeys(names))

    @property
    def groups(self) -> tuple[Group, ...]:
        return self._groups

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        return {name: self.change(view) for name, view in views.items()}

    def change(self, view: View) -> View:
        """Return the changed tensor."""
        return view


class Identity(_Each):
    """Leave tensors unchanged.

    Args:
        names: Names of the tensors.
    """


class Rename(_Leaf):
    """Give a tensor another name."""

    def __init__(self, source: str, target: str) -> None:
        super().__init__([source], [target])

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Return the view under its other name."""
        [view], [target] = views.values(), self._group.outputs
        return {target: view.renamed(target)}


class Select(_Leaf):
    """Take children of a stacked tensor by their index in a dim, which the children lack.

    Args:
        source: The stacked tensor.
        targets: Name and index of each child to take.
        dim: Dim in which they are stacked.

    Raises:
        StateError: A child is taken twice.
    """

    def __init__(self, source: str, targets: Mapping[str, int], dim: int = 0) -> None:
        super().__init__([source], targets)
        self._index_of, self._dim = dict(targets), dim
        name_of: dict[int, str] = {}
        for name, index in targets.items():
            if index in name_of:
                raise StateError(
                    f"{name_of[index]} and {name} are both child {index} of {source}; take each child once"
                )
            name_of[index] = name

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Return a view for each child."""
        [view] = views.values()
        dim = checked_dim(view.name, len(view.shape), self._dim)
        for name, index in self._index_of.items():
            if not 0 <= index < view.shape[dim]:
                raise StateError(
                    f"{view.name} {list(view.shape)} has no child {index} in dim {dim} for {name}; take another"
                )
        return {name: view.select(dim, index).renamed(name) for name, index in self._index_of.items()}


class Stack(_Leaf):
    """Stack tensors of one shape along a new dim."""

    def __init__(self, sources: Sequence[str], target: str, dim: int = 0) -> None:
        super().__init__(sources, [target])
        self._dim = dim

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Return one view."""
        [target] = self._group.outputs
        return {target: stack(target, [views[name] for name in self._group.inputs], self._dim)}


class Concatenate(_Leaf):
    """Concatenate tensors along an existing dim."""

    def __init__(self, sources: Sequence[str], target: str, dim: int = 0) -> None:
        super().__init__(sources, [target])
        self._dim = dim

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Return one view."""
        [target] = self._group.outputs
        return {target: concatenate(target, [views[name] for name in self._group.inputs], self._dim)}


class Split(_Leaf):
    """Split a tensor along a dim.

    Args:
        source: The tensor.
        targets: Name and length of each part, in order; the lengths add up to the whole dim.
        dim: Dim that is split.
    """

    def __init__(self, source: str, targets: Mapping[str, int], dim: int = 0) -> None:
        super().__init__([source], targets)
        self._lengths, self._dim = dict(targets), dim

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Return a view for each part."""
        [view] = views.values()
        dim = checked_dim(view.name, len(view.shape), self._dim)
        if sum(self._lengths.values()) != view.shape[dim]:
            raise StateError(
                f"{view.name} {list(view.shape)} cannot be split in dim {dim} into {[*self._lengths.values()]}, "
                f"{sum(self._lengths.values())} together; give lengths for all of it"
            )
        parts, start = {}, 0
        for name, length in self._lengths.items():
            parts[name] = view.narrow(dim, start, length).renamed(name)
            start += length
        return parts


class Transpose(_Each):
    """Swap two dims of each tensor."""

    def __init__(self, names: Iterable[str], first: int = -2, second: int = -1) -> None:
        super().__init__(names)
        self._dims = first, second

    def change(self, view: View) -> View:
        """Return the transposed view."""
        first, second = (checked_dim(view.name, len(view.shape), dim) for dim in self._dims)
        order = list(range(len(view.shape)))
        order[first], order[second] = second, first
        return view.permute(order)


class Cast(_Each):
    """Cast tensors to another dtype."""

    def __init__(self, names: Iterable[str], dtype: torch.dtype) -> None:
        super().__init__(names)
        self._dtype = dtype

    def change(self, view: View) -> View:
        """Return the cast view."""
        return view.cast(self._dtype)


class Distribute(_Each):
    """Make DTensors from tensors that all ranks have or can read: each rank takes its own part, and nothing is sent.

    Args:
        names: Names of the tensors.
        device_mesh: Mesh of the DTensors.
        placements: `Shard` or `Replicate` for each dim of the mesh.
    """

    def __init__(self, names: Iterable[str], device_mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
        super().__init__(names)
        if partial := [placement for placement in placements if placement.is_partial()]:
            raise StateError(f"weights cannot be distributed as {partial[0]!r}; give Shard or Replicate")
        self._sharding = Sharding(device_mesh, tuple(placements))

    def change(self, view: View) -> View:
        """Return the sharded view."""
        return view.as_sharded(self._sharding)


class Gather(_Each):
    """Gather DTensors into whole tensors on each rank. Collective over their meshes when it is applied."""

    def change(self, view: View) -> View:
        """Return the gathered view."""
        return view.as_gathered()


# Compositions


class Parallel(Mapper):
    """Mappers side by side.

    Raises:
        StateError: Two of them take or make a tensor of the same name.
    """

    def __init__(self, mappers: Iterable[Mapper]) -> None:
        self._mappers = [mapper for mapper in mappers if mapper.groups]
        self._groups = tuple(group for mapper in self._mappers for group in mapper.groups)
        for kind in ("inputs", "outputs"):
            seen: set[str] = set()
            for name in (name for group in self._groups for name in getattr(group, kind)):
                if name in seen:
                    raise StateError(f"{name} is among the {kind} of two parallel mappers; leave it to one of them")
                seen.add(name)
        self._mapper_of = {
            name: index
            for index, mapper in enumerate(self._mappers)
            for group in mapper.groups
            for name in group.inputs
        }

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return the groups of all mappers."""
        return self._groups

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Map with each mapper its own groups."""
        theirs: dict[int, dict[str, View]] = {}
        for name, view in views.items():
            theirs.setdefault(self._mapper_of[name], {})[name] = view
        return {name: view for index, those in theirs.items() for name, view in self._mappers[index].map(those).items()}


class Sequential(Mapper):
    """Mappers one after the other.

    Names that a mapper does not take pass through unchanged. Outputs that no later mapper takes are outputs of the
    whole. Inputs that no earlier mapper makes are inputs of the whole.

    Raises:
        StateError: An earlier mapper has already taken an input, or two tensors would have the same name.
    """

    def __init__(self, mappers: Iterable[Mapper]) -> None:
        self._mappers = [mapper for mapper in mappers if mapper.groups]
        self._groups = self._merged(self._net_inputs())

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return the groups of the whole: which of its inputs and outputs belong together."""
        return self._groups

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Map with the first mapper, then with the next, to the last."""
        present = dict(views)
        for mapper in self._mappers:
            if taken := {name: present.pop(name) for name in [*present] if name in mapper.group_of}:
                present |= mapper.map(taken)
        return present

    def _net_inputs(self) -> dict[str, tuple[str, ...]]:
        """Return the inputs of the whole that each output of the whole is made of."""
        made_of: dict[str, tuple[str, ...]] = {}
        used: set[str] = set()
        for mapper in self._mappers:
            made: dict[str, tuple[str, ...]] = {}
            for group in mapper.groups:
                sources: dict[str, None] = {}
                for name in group.inputs:
                    if name not in made_of and name in used:
                        raise StateError(f"{name} is taken by two mappers in sequence, and only one can have it")
                    sources |= dict.fromkeys(made_of.pop(name, (name,)))
                    used.add(name)
                made |= dict.fromkeys(group.outputs, tuple(sources))
            used |= made.keys()
            if both := [name for name in made if name in made_of]:
                raise StateError(f"{both[0]} is made by a mapper, but an earlier tensor has this name; rename one")
            made_of |= made
        return made_of

    @staticmethod
    def _merged(made_of: Mapping[str, tuple[str, ...]]) -> tuple[Group, ...]:
        """Merge outputs that have inputs in common into groups."""
        leader: dict[str, str] = {}

        def find(name: str) -> str:
            while leader.setdefault(name, name) != name:
                leader[name] = leader[leader[name]]
                name = leader[name]
            return name

        for sources in made_of.values():
            for name in sources[1:]:
                leader[find(name)] = find(sources[0])
        inputs: dict[str, dict[str, None]] = {}
        outputs: dict[str, list[str]] = {}
        for output, sources in made_of.items():
            key = find(sources[0])
            inputs.setdefault(key, {}).update(dict.fromkeys(sources))
            outputs.setdefault(key, []).append(output)
        return tuple(Group(tuple(inputs[key]), tuple(outputs[key])) for key in inputs)


class Prefix(Mapper):
    """A mapper whose names get prefixes: "layers.0." lets the mapper of one layer map the first.

    Args:
        mapper: A mapper with names without the prefixes.
        inputs: Prefix of its inputs.
        outputs: Prefix of its outputs; by default the same.
    """

    def __init__(self, mapper: Mapper, inputs: str, outputs: str | None = None) -> None:
        self._mapper, self._inputs, self._outputs = mapper, inputs, inputs if outputs is None else outputs

    @cached_property
    def groups(self) -> tuple[Group, ...]:  # type: ignore[override]
        """Return the mapper's groups with prefixes."""
        return tuple(
            Group(
                tuple(f"{self._inputs}{name}" for name in group.inputs),
                tuple(f"{self._outputs}{name}" for name in group.outputs),
            )
            for group in self._mapper.groups
        )

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Map with the mapper's own names."""
        inner = self._mapper.map({name.removeprefix(self._inputs): view for name, view in views.items()})
        return {f"{self._outputs}{name}": view.renamed(f"{self._outputs}{name}") for name, view in inner.items()}


class Share(Mapper):
    """A rank's part of a mapper's groups, so that ranks can divide the work.

    Args:
        mapper: A mapper that is the same on all ranks.
        rank: This rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, mapper: Mapper, rank: int, num_ranks: int) -> None:
        if not 0 <= rank < num_ranks:
            raise StateError(f"rank {rank} of {num_ranks} ranks has no share; give a rank from 0 to {num_ranks - 1}")
        self._mapper = mapper
        self._groups = tuple(sorted(mapper.groups, key=lambda group: sorted(group.inputs))[rank::num_ranks])

    @property
    def groups(self) -> tuple[Group, ...]:
        """Return every n-th group, in the order of the inputs' names."""
        return self._groups

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Map like the mapper."""
        return self._mapper.map(views)


class Inverse(Mapper):
    """The reverse of another mapper, so that one mapper serves to load and to save.

    Args:
        mapper: A mapper that keeps all values of its inputs.
        specs: Specs of its inputs, which are the outputs here.

    Raises:
        StateError: The mapper does not keep all values, or the specs do not fit.
    """

    def __init__(self, mapper: Mapper, specs: Mapping[str, Spec | Tensor]) -> None:
        self._mapper = mapper
        self._expected = mapper.plan(specs)
        self._views = inverted(self._expected, {name: View.of(name, specs[name]).spec for name in mapper.group_of})

    @cached_property
    def groups(self) -> tuple[Group, ...]:  # type: ignore[override]
        """Return the mapper's groups with inputs and outputs swapped."""
        return tuple(Group(group.outputs, group.inputs) for group in self._mapper.groups)

    def map(self, views: Mapping[str, View]) -> dict[str, View]:
        """Make the mapper's inputs from its outputs."""
        for name, view in views.items():
            if view.shape != self._expected[name].shape:
                raise StateError(
                    f"{name} has shape {list(view.shape)} but should have {list(self._expected[name].shape)}; give "
                    "tensors as the mapper makes them"
                )
        made = {name: None for each in views for name in self.group_of[each].outputs}
        return {name: substituted(self._views[name], views) for name in made}
