"""Parameter groups for torch's optimizers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError

S = TypeVar("S")


@dataclass(frozen=True)
class ParameterGroup:
    """Parameters by a pattern of their names, with separate settings.

    Raises:
        ConfigError: A setting is negative, or all are left out.
    """

    pattern: str
    """A whole name as in checkpoints, in which `*` stands for any characters, dots included, and `?` for one."""
    lr: float | None = None
    """The learning rate; by default the optimizer's. A schedule multiplies it."""
    weight_decay: float | None = None
    """The weight decay of all of them; by default that which they have without the group."""

    def __post_init__(self) -> None:
        if self.lr is None and self.weight_decay is None:
            raise ConfigError(
                f"{self} has no effect because it sets nothing; give it lr or weight_decay, or leave it out"
            )
        for name in ("lr", "weight_decay"):
            if (value := getattr(self, name)) is not None and value < 0:
                raise ConfigError(f"{name}={value} of the parameter group {self.pattern!r} must be at least 0")

    def matches(self, name: str) -> bool:
        """Return whether a parameter of this name belongs to the group."""
        return fnmatchcase(name, self.pattern)


def parameter_groups(
    module: nn.Module, weight_decay: float = 0.1, *, decays: Callable[[str, nn.Parameter], bool] | None = None
) -> list[dict[str, Any]]:
    """Return trainable parameters in groups that fused and foreach optimizers support, those with weight decay first.

    A group has parameters of one device, dtype and mesh: fused and foreach steps do not mix plain tensors and DTensors.
    Groups, and parameters in them, come in the order in which the module names them.

    Args:
        module: The module; its frozen parameters are left out.
        weight_decay: Weight decay of the parameters that decay; the others have 0.
        decays: Returns for a name and parameter whether it decays; by default matrices and larger tensors do, while
            vectors (biases, weights of norms) do not.

    Returns:
        Mappings with `params` and `weight_decay`. If nothing is trainable, as in a frozen pipeline stage, the list has
        one group without parameters. Torch's optimizers refuse an empty list, but accept such a group.
    """

    def decay_of(name: str, parameter: nn.Parameter) -> bool:
        return parameter.ndim >= 2 if decays is None else bool(decays(name, parameter))

    grouped = _grouped(module.named_parameters(), decay_of)
    by_decay = [
        {"params": parameters, "weight_decay": weight_decay if decay else 0.0}
        for wanted in (True, False)
        for decay, parameters in grouped
        if decay == wanted
    ]
    return by_decay or [{"params": [], "weight_decay": weight_decay}]


def groups_by_pattern(
    parameters: Iterable[tuple[str, nn.Parameter]],
    patterns: Sequence[ParameterGroup],
    without_decay: Collection[str] = (),
    of_name: Callable[[str], Mapping[str, Any]] = lambda name: {},
) -> list[dict[str, Any]]:
    """Return trainable parameters in groups that fused and foreach optimizers support, with the settings of patterns.

    Vectors have no weight decay. Groups are in the order of patterns, after those that no pattern matches.

    Args:
        parameters: Parameters with their names; frozen ones are left out.
        patterns: Patterns, of which at most one matches each parameter, see `check_patterns`.
        without_decay: The names of larger parameters without weight decay, such as embeddings.
        of_name: Returns further settings of a parameter's group.

    Returns:
        Mappings with `params`, and with `lr` and `weight_decay` if these differ from the optimizer's own. If nothing is
        trainable, the result is one group without parameters.
    """

    def settings_of(name: str, parameter: nn.Parameter) -> tuple[int, float | None, float | None, Any]:
        others = tuple(of_name(name).items())
        decay = 0.0 if parameter.ndim < 2 or name in without_decay else None
        for index, group in enumerate(patterns):
            if group.matches(name):
                return index, group.lr, decay if group.weight_decay is None else group.weight_decay, others
        return -1, None, decay, others

    grouped = _grouped(parameters, settings_of)
    grouped.sort(key=lambda entry: (entry[0][0], entry[0][2] is not None))  # stable: else in the order of names
    found = []
    for (_, lr, decay, others), members in grouped:
        settings = {"lr": lr, "weight_decay": decay, **dict(others)}
        found.append({"params": members} | {name: value for name, value in settings.items() if value is not None})
    return found or [{"params": []}]


def check_patterns(patterns: Sequence[ParameterGroup], names: Collection[str]) -> None:
    """Raise `ConfigError` for a pattern that matches no parameter, and for two that match the same. Local.

    Args:
        patterns: The groups.
        names: The names of all parameters of the whole model.
    """
    owner: dict[str, ParameterGroup] = {}
    for group in patterns:
        matched = [name for name in names if group.matches(name)]
        if not matched:
            raise ConfigError(
                f"pattern={group.pattern!r} of parameter_groups matches none of the {len(names)} parameters; the "
                f"nearest names are {', '.join(map(repr, _nearest(group.pattern, names)))}"
            )
        for name in matched:
            if name in owner:
                raise ConfigError(
                    f"pattern={group.pattern!r} and pattern={owner[name].pattern!r} of parameter_groups both match "
                    f"{name!r}, which can be in one group only; narrow one of them"
                )
            owner[name] = group


def _nearest(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names most similar to a pattern, each once for all layers and experts."""
    shapes = {re.sub(r"\.\d+(?=\.)", ".*", name): None for name in names}
    return difflib.get_close_matches(pattern, shapes, n=3, cutoff=0.0)


def _grouped(
    parameters: Iterable[tuple[str, nn.Parameter]], settings_of: Callable[[str, nn.Parameter], S]
) -> list[tuple[S, list[nn.Parameter]]]:
    """Trainable parameters of the same settings, device, dtype and mesh, in the order of the first of each."""
    groups: dict[Any, tuple[S, list[nn.Parameter]]] = {}
    for name, parameter in parameters:
        if parameter.requires_grad:
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            settings = settings_of(name, parameter)
            key = (settings, parameter.device, parameter.dtype, mesh)
            groups.setdefault(key, (settings, []))[1].append(parameter)
    return list(groups.values())
