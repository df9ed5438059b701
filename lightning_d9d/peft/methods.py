"""Methods of fine-tuning: settings that select weights for adapters, and trained parameters."""

from __future__ import annotations

import math
import re
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeGuard

from torch import nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.peft.sites import (
    Site,
    chosen_by,
    default_sites,
    nearest_names,
    refuse_tied,
    refuse_without_adapter,
    sites_of,
)


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of an adapter of one weight."""

    rank: int
    scale: float
    dropout: float


@dataclass(frozen=True)
class PeftPlan:
    """The result of a method for a whole model, by names: each stage takes its part."""

    adapters: Mapping[str, AdapterSettings] = field(default_factory=dict)
    """Adapters, by the name of a `Site`."""
    trained: frozenset[str] = frozenset()
    """Parameters of the base that are trained."""


class PeftMethod(ABC):
    """A way to select the trained parts of a model."""

    @abstractmethod
    def plan(self, module: nn.Module) -> PeftPlan:
        """Select by the names and shapes of a whole model, which may be on the meta device. Local.

        Raises:
            ConfigError: A target matches nothing, or does not support the method.
        """


def is_number(value: object) -> TypeGuard[int | float]:
    """Return whether a setting is a number, which True and False are not. Local."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_patterns(targets: object) -> bool:
    """Return whether targets are a list with at least one pattern."""
    if isinstance(targets, str) or not isinstance(targets, Sequence):
        return False
    return len(targets) > 0 and all(isinstance(each, str) and each for each in targets)


@dataclass(frozen=True)
class LoRA(PeftMethod):
    """Adapters of low rank beside frozen weights (https://arxiv.org/abs/2106.09685).

    A layer computes `base(x) + scale * b(a(dropout(x)))`, with `scale = alpha / rank`. `b` starts at zero. Gate and up
    projections of experts have separate adapters.

    Raises:
        ConfigError: A value is outside of its range.
    """

    rank: int = 16
    """Rank of the adapters of all weights except experts."""

    alpha: float = 32.0
    """The scale times the rank of each adapter."""

    targets: Sequence[str] | None = None
    """Patterns of names, such as `q_proj` or `layers\\.[0-3]\\.self_attn`.

    Each is a regular expression for a whole name, or for the end of one after a dot. The name is that of a layer, of a
    weight of experts (`experts.down_proj`), or of a module with some of these. None takes all projections of attention,
    dense MLPs and experts, but not routers, embedding and head."""

    dropout: float = 0.0
    """Probability with which an adapter in training drops an element of its input."""

    rank_of_experts: int | None = None
    """Rank of the adapter of each expert. None uses `rank` divided by the number of experts that a token visits, at
    least 1."""

    rslora: bool = False
    """True makes the scale `alpha / sqrt(rank)` (https://arxiv.org/abs/2312.03732)."""

    def __post_init__(self) -> None:
        for name in ("rank", "rank_of_experts"):
            value = getattr(self, name)
            if not (value is None and name != "rank") and (type(value) is not int or value < 1):
                raise ConfigError(f"LoRA.{name}={value!r} must be an integer of at least 1")
        if not (is_number(self.alpha) and 0 < self.alpha < math.inf):
            raise ConfigError(f"LoRA.alpha={self.alpha!r} must be a number above 0")
        if not (is_number(self.dropout) and 0 <= self.dropout < 1):
            raise ConfigError(f"LoRA.dropout={self.dropout!r} must be a number from 0 to less than 1")
        if self.targets is not None and not _are_patterns(self.targets):
            raise ConfigError(f"LoRA.targets={self.targets!r} must be a list of patterns, such as ['q_proj', 'v_proj']")
        if self.targets is not None:
            object.__setattr__(self, "targets", tuple(self.targets))  # YAML has lists

    def plan(self, module: nn.Module) -> PeftPlan:
        """Select the weights that get adapters, and their ranks. Local.

        Raises:
            ConfigError: A pattern matches no weight that can have an adapter, or a rank is larger than a weight's dim.
        """
        sites = self._sites(module)
        refuse_tied(sites.values(), module)
        if self.rank_of_experts is not None and not any(site.is_of_experts for site in sites.values()):
            raise ConfigError(
                f"LoRA.rank_of_experts={self.rank_of_experts} has no effect, because targets={self.targets} name no "
                "experts; leave it out, or add 'experts' to the targets"
            )
        return PeftPlan({name: self._settings(site) for name, site in sites.items()})

    def _sites(self, module: nn.Module) -> dict[str, Site]:
        if self.targets is None:
            found = default_sites(module)
            if not found:
                raise ConfigError(
                    f"LoRA: {type(module).__name__} has none of the package's attention, MLPs and experts, which are "
                    f"adapted by default; name layers in targets, such as {nearest_names('proj', [*sites_of(module)])}"
                )
            return found
        sites, chosen = sites_of(module), dict[str, Site]()
        for pattern in self.targets:
            names = chosen_by(pattern, sites)
            if not names:
                refuse_without_adapter(pattern, module)
                raise ConfigError(
                    f"LoRA(targets=[{pattern!r}]) matches no name of {type(module).__name__}; the nearest are "
                    f"{nearest_names(pattern, [*sites])}"
                )
            chosen |= {name: sites[name] for name in names}
        return {name: site for name, site in sites.items() if name in chosen}

    def _settings(self, site: Site) -> AdapterSettings:
        rank, setting = self.rank, "rank"
        if site.is_of_experts:
            setting = "rank_of_experts"
            if self.rank_of_experts is None and site.top_k is None:
                raise ConfigError(
                    f"LoRA: it is unknown how many experts a token visits in {site.name}, so rank={self.rank} cannot "
                    "be divided by it; set rank_of_experts"
                )
            rank = self.rank_of_experts or max(1, self.rank // (site.top_k or 1))
        if rank > site.most:
            raise ConfigError(
                f"LoRA.{setting}: rank {rank} is larger than a dim of {site.parameter}, {list(site.weight.shape)}; use "
                f"at most {site.most}"
            )
        return AdapterSettings(rank, self.alpha / (math.sqrt(rank) if self.rslora else rank), self.dropout)


@dataclass(frozen=True)
class FullTune(PeftMethod):
    """Trains some parameters of the model itself, and freezes the others.

    Raises:
        ConfigError: The targets are not a list of patterns.
    """

    targets: Sequence[str] = (".*",)
    """Patterns of the names of parameters, or of modules with all of theirs, as `LoRA.targets`."""

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", (self.targets,))
        if not _are_patterns(self.targets):
            raise ConfigError(f"FullTune.targets={self.targets!r} must be a list of patterns, such as ['norm']")
        object.__setattr__(self, "targets", tuple(self.targets))

    def plan(self, module: nn.Module) -> PeftPlan:
        """Select the parameters. Local.

        Raises:
            ConfigError: A pattern matches no parameter.
        """
        names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        trained: set[str] = set()
        for pattern in self.targets:
            chosen = chosen_by(pattern, names)
            if not chosen:
                raise ConfigError(
                    f"FullTune(targets=[{pattern!r}]) matches no name of {type(module).__name__}; the nearest are "
                    f"{nearest_names(pattern, names)}"
                )
            trained.update(chosen)
        return PeftPlan(trained=frozenset(trained))


@dataclass(frozen=True)
class Stack(PeftMethod):
    """Several methods at once, such as adapters of attention beside norms that are trained whole.

    Raises:
        ConfigError: The list is empty, or contains something other than a `PeftMethod`.
    """

    methods: Sequence[PeftMethod]
    """The methods; two of them may not give one weight an adapter."""

    def __post_init__(self) -> None:
        if not (isinstance(self.methods, Sequence) and self.methods) or not all(
            isinstance(each, PeftMethod) for each in self.methods
        ):
            raise ConfigError(f"Stack.methods={self.methods!r} must be a list of LoRA, FullTune or Stack")
        object.__setattr__(self, "methods", tuple(self.methods))

    def plan(self, module: nn.Module) -> PeftPlan:
        """Select everything that any of the methods selects. Local.

        Raises:
            ConfigError: Two methods give one weight an adapter, or one of them does not support its targets.
        """
        adapters: dict[str, AdapterSettings] = {}
        trained: set[str] = set()
        for method in self.methods:
            plan = method.plan(module)
            if both := [name for name in plan.adapters if name in adapters]:
                raise ConfigError(
                    f"Stack: two methods give {both[0]} an adapter; leave it out of the targets of one of them"
                )
            adapters |= plan.adapters
            trained |= plan.trained
        return PeftPlan(adapters, frozenset(trained))


def method_of(plan: PeftPlan, module: nn.Module) -> PeftMethod:
    """Return the method that gives a module the adapters of a plan. Local."""
    sites = sites_of(module)
    groups: dict[tuple[AdapterSettings, bool], list[str]] = {}
    for name, settings in plan.adapters.items():
        groups.setdefault((settings, sites[name].is_of_experts), []).append(re.escape(name))
    methods = [
        LoRA(each.rank, each.scale * each.rank, names, each.dropout, each.rank if is_of_experts else None)
        for (each, is_of_experts), names in groups.items()
    ]
    return methods[0] if len(methods) == 1 else Stack(methods)


def as_table(method: PeftMethod) -> dict[str, Any]:
    """Return a method as plain values, for a checkpoint. Local."""
    if isinstance(method, Stack):
        return {"kind": "Stack", "methods": list(map(as_table, method.methods))}
    if type(method) not in (LoRA, FullTune):
        raise ConfigError(
            f"{type(method).__name__} is not LoRA, FullTune or Stack, which are the methods that checkpoints can store"
        )
    return {"kind": type(method).__name__, **asdict(method)}  # type: ignore[call-overload]


def from_table(table: Any) -> PeftMethod:
    """Make a method from a result of `as_table`. Local.

    Raises:
        ConfigError: The table is damaged.
    """
    kinds = {kind.__name__: kind for kind in (LoRA, FullTune, Stack)}
    try:
        settings = dict(table)
        kind = kinds[settings.pop("kind")]
        if kind is Stack:
            return Stack([from_table(each) for each in settings["methods"]])
        return kind(**settings)
    except (TypeError, ValueError, KeyError) as error:
        raise ConfigError(f"{reprlib.repr(table)} is not LoRA, FullTune or Stack ({error})") from error
