"""Adds adapters to a module, freezes the rest, and merges adapters into weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.modules.adapters import Adapter
from lightning_d9d.peft.methods import PeftMethod, PeftPlan, is_number
from lightning_d9d.peft.sites import Site, sites_of
from lightning_d9d.pipeline.initial_weights import draw_local

SCALES = "lightning_d9d_adapters"
"""The name under which a checkpoint has the ranks and scales of its adapters."""


class BuildsStages(Protocol):
    """A module that builds its layers later, in stages, such as a `D9DModule`."""

    stages: nn.ModuleList
    """The stages of this rank, once they are built."""
    peft: PeftMethod | None
    """The method by which stages are built; None trains all parameters."""
    has_adapters: bool
    """True if built stages have adapters, including those of other ranks."""

    def set_peft(self, method: PeftMethod) -> None:
        """Make the stages be built as the method says."""
        ...


def builds_stages(module: object) -> TypeGuard[BuildsStages]:
    """Return whether a module builds its layers in stages. Local.

    `isinstance` with a protocol would miss `stages`: from Python 3.12 on it does not call `__getattr__`.
    """
    return hasattr(module, "set_peft")


def inject(module: nn.Module, method: PeftMethod) -> None:
    """Add the adapters of a method to a module, and train only these and other named parameters, in place. Local.

    Names, shapes and values of the module's own parameters do not change. Adapters of weights on the meta device are on
    it, too, and are initialized with the module. Other adapters are initialized at once, from `torch.initial_seed()`
    and their names.

    Args:
        module: The whole model, before it is sharded, compiled or recomputed. Or a `D9DModule`, in its `__init__` or
            later, but before its stages are built: each stage then gets its part of the adapters.
        method: `LoRA`, `FullTune` or `Stack`.

    Raises:
        ConfigError: A target matches nothing in the module, does not support the method, or is in a block that is
            compiled, recomputed or sharded. Or the module already has adapters. Nothing is changed then.
    """
    if builds_stages(module):
        module.set_peft(method)
    else:
        apply_plan(module, method.plan(module))


def apply_plan(module: nn.Module, plan: PeftPlan) -> None:
    """Apply the part of a plan that concerns a module: a stage of a model, or the whole. Local.

    Raises:
        ConfigError: The module already has adapters, or a weight is in a block that is compiled, recomputed or sharded.
    """
    sites = [site for name, site in sites_of(module).items() if name in plan.adapters]
    _check_untouched(module, sites)
    seed = torch.initial_seed()
    for site in sites:
        settings = plan.adapters[site.name]
        adapter = site.attach(settings.rank, settings.scale, settings.dropout)
        for name, value in adapter.initial_values().items():
            parameter = adapter.get_parameter(name)
            if not parameter.is_meta:
                drawn = draw_local(value, parameter, seed=seed, name=site.prefix + name, device=parameter.device)
                parameter.data.copy_(drawn)
    own = {parameter for part in module.modules() if isinstance(part, Adapter) for parameter in part.parameters()}
    for parameter in module.parameters():
        parameter.requires_grad_(parameter in own)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if name in plan.trained:
            parameter.requires_grad_(True)


def stages_of(model: nn.Module | Sequence[nn.Module]) -> list[nn.Module]:
    """Return the modules in which parameters have the names of the whole model. Local.

    Args:
        model: The model, its stages on this rank, or the `D9DModule` that contains them.
    """
    if builds_stages(model):
        return list(model.stages)
    return list(model) if isinstance(model, Sequence | nn.ModuleList) else [model]


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name. Local."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def is_adapted(module: nn.Module) -> bool:
    """Return whether a module has adapters, merged or not. Local."""
    return any(isinstance(part, Adapter) for part in module.modules())


@torch.no_grad()
def merge(module: nn.Module) -> None:
    """Add all adapters of a module to their weights, in place; until `unmerge` the adapters themselves add nothing.

    Local.

    The state dict is then that of a module without adapters. Sums are computed in float64, and rounded once. Each rank
    of a pipeline merges its own stages, including those without adapters.

    Raises:
        ConfigError: The module has no adapters, some are merged, or a weight is sharded over ranks. Nothing is changed
            then.
    """
    _merge(module, is_merged=False, sign=1)


@torch.no_grad()
def unmerge(module: nn.Module) -> None:
    """Subtract merged adapters from their weights again, in place. Local.

    Weights equal the earlier ones except for rounding: in bfloat16 a weight may differ in its last bit.

    Raises:
        ConfigError: The module has no adapters, some are not merged, or a weight is sharded over ranks. Nothing is
            changed then.
    """
    _merge(module, is_merged=True, sign=-1)


def adapted_sites(module: nn.Module) -> Iterator[tuple[Site, Adapter]]:
    """Yield the weights of a module that have adapters, merged or not, together with the adapters. Local."""
    for site in sites_of(module).values():
        if (adapter := site.adapter) is not None:
            yield site, adapter


def adapter_scales(module: nn.Module) -> dict[str, tuple[int, float]]:
    """Return the rank and scale of each adapter of a module, by the name of its weight, for a checkpoint. Local."""
    adapted = (pair for stage in stages_of(module) for pair in adapted_sites(stage))
    return {site.name: (adapter.rank, adapter.scale) for site, adapter in adapted if not adapter.is_merged}


def check_scales(saved: Any, module: nn.Module) -> None:
    """Compare the scales of adapters of equal rank: matrices that were trained with another scale compute otherwise.

    Local.

    Args:
        saved: The checkpoint's value under `SCALES`.
        module: The module that gets the adapters.

    Raises:
        StateError: A scale differs, or the value is damaged.
    """
    if not isinstance(saved, Mapping) or not all(map(_is_pair, saved.values())):
        raise StateError(f"{SCALES} of the checkpoint does not have the scales of adapters; give another checkpoint")
    for name, (rank, ours) in adapter_scales(module).items():
        saved_rank, theirs = saved.get(name, (rank, ours))
        if saved_rank == rank and not math.isclose(ours, theirs):
            raise StateError(
                f"the checkpoint's adapter of {name} has scale {theirs:.6g}, but that of the model has "
                f"{ours:.6g}; set LoRA's alpha and rslora to those of the checkpoint"
            )


def _is_pair(value: object) -> bool:
    """Return whether a value is a rank and a scale."""
    return isinstance(value, tuple | list) and len(value) == 2 and all(map(is_number, value))


def _merge(module: nn.Module, *, is_merged: bool, sign: int) -> None:
    adapted = list(adapted_sites(module))
    verb = "unmerge" if is_merged else "merge"
    if not adapted and not (builds_stages(module) and module.has_adapters):
        raise ConfigError(f"{verb}: {type(module).__name__} has no adapters; give it some with inject(module, LoRA())")
    for site, adapter in adapted:
        if adapter.is_merged != is_merged:
            state = "not merged" if is_merged else "merged already"
            raise ConfigError(f"{verb}: the adapter of {site.name} is {state}; call {verb} once")
        if isinstance(site.weight, DTensor) or isinstance(adapter.a, DTensor) or isinstance(adapter.b, DTensor):
            raise ConfigError(
                f"{verb}: {site.parameter} is sharded over ranks. save_huggingface merges while it writes; or load a "
                f"checkpoint in one process and {verb} there"
            )
    for site, adapter in adapted:
        site.weight.copy_(with_product(site.weight, adapter.product() * sign, site.weight.dtype))
        adapter.is_merged = not is_merged


def with_product(weight: Tensor, product: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum of a weight and the product of its adapter, rounded once to a dtype. Local."""
    return (weight.to(product.dtype) + product).to(dtype)


def _check_untouched(module: nn.Module, sites: list[Site]) -> None:
    if is_adapted(module):
        raise ConfigError(
            f"inject: {type(module).__name__} already has adapters; give all methods at once, as Stack([...])"
        )
    for site in sites:
        path = site.name.split(".")
        owners = [module.get_submodule(".".join(path[:end])) for end in range(len(path) + (not site.is_of_experts))]
        changed = [each for each in owners if "forward" in vars(each) or each._compiled_call_impl is not None]
        if changed or "_orig_mod" in path or isinstance(site.weight, DTensor):
            raise ConfigError(
                f"inject: {site.name} is in a {type((changed or owners)[0]).__name__} that is compiled, recomputed or "
                "sharded, which would not see the adapter; call inject first"
            )
