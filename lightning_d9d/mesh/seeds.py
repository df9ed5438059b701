"""Seeds: which ranks draw the same random numbers and which draw other ones. And the state of what draws them."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.axes import Axis
from lightning_d9d.mesh.config import MeshConfig

Purpose = Literal["dropout", "sharded_dropout", "router_noise", "sharded_router_noise", "dataloader"]

_WHOLE_ACTIVATION = (Axis.PP, Axis.DP, Axis.CP)  # ranks of one tp axis hold copies, which must stay equal
_SHARDED_ACTIVATION = (*_WHOLE_ACTIVATION, Axis.TP)
_COUNTING_AXES: dict[str, tuple[Axis, ...]] = {
    "dropout": _WHOLE_ACTIVATION,
    "sharded_dropout": _SHARDED_ACTIVATION,
    "router_noise": _WHOLE_ACTIVATION,
    "sharded_router_noise": _SHARDED_ACTIVATION,
    "dataloader": (Axis.DP,),
}
_MESH_AXES = frozenset(axis for domain in MeshConfig().domains().values() for axis in domain)


def seed_for(base: int, *, purpose: Purpose, coordinates: Mapping[str, int]) -> int:
    """The seed of a rank's random numbers for one purpose. Local; ranks with equal seeds draw equal numbers.

    | purpose | seeds differ along | for |
    |---|---|---|
    | `dropout`, `router_noise` | pp, dp, cp | activations that tensor-parallel ranks hold copies of |
    | `sharded_dropout`, `sharded_router_noise` | pp, dp, cp, tp | activations sharded over tp, by sequence or heads |
    | `dataloader` | dp | samples, which all other ranks of a data rank read alike |

    A seed has no state: a step that is recomputed or resumed gets the one that it had.

    Args:
        base: The seed of the job.
        purpose: A row of the table. Numbers of different purposes are independent.
        coordinates: `MeshDomains.coordinates`, and anything else by which numbers are to differ: names that are no axes
            of a mesh, such as `worker`, `step`, `microbatch` or `stage`, count for every purpose.

    Returns:
        At least 0 and less than 2**63.

    Raises:
        ConfigError: No such purpose, or an axis that counts for it is not in `coordinates`.
    """
    if purpose not in _COUNTING_AXES:
        raise ConfigError(f"seed_for(purpose={purpose!r}) must be one of {', '.join(map(repr, get_args(Purpose)))}")
    axes = _COUNTING_AXES[purpose]
    if missing := [axis for axis in axes if axis not in coordinates]:
        raise ConfigError(
            f"seed_for(purpose={purpose!r}) needs the coordinates {', '.join(axes)}, of which "
            f"{', '.join(missing)} is missing among {', '.join(coordinates) or 'none'}; start from "
            "MeshDomains.coordinates"
        )
    counting = sorted(
        (str(name), int(place)) for name, place in coordinates.items() if name in axes or name not in _MESH_AXES
    )
    return derived(int(base), purpose, counting)


def derived(*parts: object, bits: int = 63) -> int:
    """A number of so many bits that follows from the parts alone, the same on every machine.

    Args:
        parts: Integers, texts, and lists or tuples of them: what has an exact `repr`.
        bits: At most 512.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=-(-bits // 8)).digest()
    return int.from_bytes(digest, "little") >> (-bits % 8)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of the global random number generators of torch (CPU and `device`), NumPy and Python.

    In tensors and numbers, which load from a file without running code.
    """
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": (version, torch.tensor(words), gauss),
        "numpy": (name, torch.tensor(keys.astype(np.int64)), position, has_gauss, cached),  # type: ignore[union-attr]
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Let the global generators go on from `random_state`'s; a CUDA device's only if there was one."""
    version, words, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
