"""Checkpoints without frozen parameters, which name the base of the trained ones.

[Note: base] A run that resumes from such a checkpoint builds its base again: from the directory that `pretrained`
names, or from the seed. The checkpoint stores both. Other facts about the frozen parameters are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import lightning as L
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.peft.inject import SCALES, check_scales

BASE = "lightning_d9d_base"
"""The name under which a checkpoint without frozen parameters describes its base."""


def leave_out_frozen(checkpoint: dict[str, Any], module: L.LightningModule, seed: int | None) -> None:
    """Remove frozen parameters from a checkpoint, and record their base, if there are any. Collective over all ranks.

    Args:
        checkpoint: Lightning's checkpoint, with this rank's state dict; it is changed.
        module: The module.
        seed: Seed that determines the initial weights; None if no single seed does.
    """
    frozen = frozen_parameters(module)
    if not any(Ranks().all_gather(bool(frozen))):
        return
    checkpoint["state_dict"] = {name: each for name, each in checkpoint["state_dict"].items() if name not in frozen}
    pretrained = getattr(module, "pretrained", None)
    checkpoint[BASE] = {"pretrained": None if pretrained is None else str(pretrained), "seed": seed}


def frozen_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module that are not trained, by their names in its state dict. Local."""
    state = module.state_dict(keep_vars=True)
    return {name: each for name, each in state.items() if isinstance(each, nn.Parameter) and not each.requires_grad}


def add_frozen(checkpoint: dict[str, Any], module: nn.Module) -> None:
    """Add the module's own frozen parameters to a checkpoint that was saved without them. Local.

    Args:
        checkpoint: Any checkpoint; one with frozen parameters stays unchanged.
        module: Module with the base's weights.
    """
    if BASE in checkpoint:
        own = {name: each.detach() for name, each in frozen_parameters(module).items()}
        checkpoint["state_dict"] = {**own, **checkpoint["state_dict"]}


def check_model(checkpoint: Mapping[str, Any], module: nn.Module, seed: int | None, source: str) -> None:
    """Check that a module has the base of a checkpoint, and scales its adapters alike. Local.

    Args:
        checkpoint: Any checkpoint; one that has neither a separate base nor scales fits.
        module: Module that gets its weights.
        seed: Seed that determines the module's initial weights; None if that is unknown.
        source: Name of the checkpoint, for messages.

    Raises:
        StateError: The base or a scale differs, or their record is damaged.
    """
    if BASE in checkpoint:
        check_base(checkpoint[BASE], module, seed, source)
    check_scales(checkpoint.get(SCALES, {}), module)


def check_base_given(recorded: Any, given: object, source: object) -> None:
    """Check that a command got the directory of a base if, and only if, a checkpoint needs one. Local.

    Args:
        recorded: The checkpoint's value under `BASE`; None without one, as in a Hugging Face directory.
        given: The directory; None without one.
        source: Name of the checkpoint, for messages.

    Raises:
        ConfigError: The directory is missing, or has no effect.
    """
    pretrained = recorded.get("pretrained") if isinstance(recorded, Mapping) else None
    if pretrained is not None and given is None:
        raise ConfigError(
            f"{source} has only trained parameters (CheckpointConfig.trainable_only), on the base {pretrained!r}; give "
            f"--base {pretrained}, or base= in Python"
        )
    if pretrained is None and given is not None:
        what = "has all weights" if recorded is None else "has only trained parameters, on initial weights"
        raise ConfigError(f"base={str(given)!r} has no effect: {source} {what}; leave it out")


def check_base(base: Any, module: object, seed: int | None, source: object) -> None:
    """Check that a module has the base of a checkpoint that was saved without it. Local.

    Args:
        base: The checkpoint's value under `BASE`.
        module: Module whose `pretrained` names a base.
        seed: Seed that determines its initial weights; None if that is unknown.
        source: Name of the checkpoint, for messages.

    Raises:
        StateError: The module begins with other weights, or the record is damaged.
    """
    if not isinstance(base, Mapping) or not {"pretrained", "seed"} <= base.keys():
        raise StateError(f"{source}: {BASE}={base!r} does not describe the base; give another checkpoint")
    theirs, ours = base["pretrained"], getattr(module, "pretrained", None)
    if theirs is not None and ours is None:
        raise StateError(
            f"{source} has only trained parameters, on the base {theirs!r}; set --model.pretrained {theirs}, or "
            "pretrained of the model in a file or in Python"
        )
    if theirs is None and ours is not None:
        raise StateError(
            f"{source} has only trained parameters, on initial weights; leave out pretrained of the model "
            f"({str(ours)!r})"
        )
    if theirs is not None and str(ours) != theirs:
        rank_zero_warn(
            f"{source} has only trained parameters, beside {theirs!r}: {str(ours)!r} must have the same weights"
        )
    if theirs is None and None not in (seed, base["seed"]) and seed != base["seed"]:
        raise StateError(
            f"{source} has only trained parameters, on the initial weights of seed {base['seed']}, but this run has "
            f"seed {seed}. Set --seed_everything {base['seed']}, or call seed_everything({base['seed']}) in Python"
        )
