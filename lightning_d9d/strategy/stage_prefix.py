"""Names of a state dict: tensors of a stage are named without its number."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.sharding import local


def drop_stage_prefix(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    """Name what stages have without their number, as a hook behind `state_dict`.

    Raises:
        ConfigError: Two stages have different tensors of one name.
    """
    for key in [key for key in state if key.startswith(f"{prefix}stages.")]:
        name = prefix + key.removeprefix(f"{prefix}stages.").split(".", 1)[1]
        if name in state and not _is_same(state[name], state[key]):
            raise ConfigError(f"two tensors of {type(module).__name__} are named {name!r}; names must be global")
        state[name] = state.pop(key)


def add_stage_prefix(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Add the numbers of stages to names again, as a hook before `load_state_dict`."""
    taken = set()
    for index, stage in module.get_submodule("stages").named_children():
        for name in stage.state_dict(keep_vars=True):
            if prefix + name in state:
                state[f"{prefix}stages.{index}.{name}"] = state[prefix + name]
                taken.add(prefix + name)
    for name in taken:
        del state[name]


def _is_same(one: Any, other: Any) -> bool:
    """Tell whether two entries of a state dict are one tensor."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return False
    one, other = local(one), local(other)
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape
