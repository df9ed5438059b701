"""Names of parameters: those of stages are global, without the number of the stage."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.sharding import local


def drop_stage_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Name the entries of a D9DModule's state dict as its stages do: a hook of torch.

    Raises:
        ConfigError: Two tensors have one name.
    """
    for key in [key for key in state if key.startswith(f"{prefix}stages.")]:
        name = prefix + key.removeprefix(f"{prefix}stages.").split(".", 1)[1]
        if name in state and not _is_same(state[name], state[key]):
            raise ConfigError(f"two tensors of {type(module).__name__} are named {name!r}; names must be global")
        state[name] = state.pop(key)


def add_stage_prefix(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Undo `drop_stage_prefix` before a D9DModule loads a state dict: a hook of torch."""
    taken = set()
    for index, stage in enumerate(module.stages):
        for name in stage.state_dict(keep_vars=True):
            if prefix + name in state:
                state[f"{prefix}stages.{index}.{name}"] = state[prefix + name]
                taken.add(prefix + name)
    for name in taken:
        del state[name]


def parameter_names(stage: nn.Module) -> list[str]:
    """Return all names of a stage's parameters, including several names of one parameter."""
    return [name for name, _ in stage.named_parameters(remove_duplicate=False)]


def _is_same(one: Any, other: Any) -> bool:
    """Return whether two entries of a state dict are the same tensor."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    one, other = local(one), local(other)
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
