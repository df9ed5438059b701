"""Seeds, which decide which ranks draw the same random numbers, and the state of random number generators."""

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

_WHOLE_ACTIVATION = (Axis.PP, Axis.DP, Axis.CP)  # tensor-parallel ranks hold copies, which must stay equal
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
    """Return the seed of a rank's random numbers for one purpose. Local; equal seeds give equal numbers.

    | purpose | seeds differ along | for |
    |---|---|---|
    | `dropout`, `router_noise` | pp, dp, cp | activations that are copies on tensor-parallel ranks |
    | `sharded_dropout`, `sharded_router_noise` | pp, dp, cp, tp | activations sharded over tp, by sequence or heads |
    | `dataloader` | dp | samples, which are the same on all ranks of a data rank |

    A seed has no state: a recomputed or resumed step gets the same seed again.

    Args:
        base: The seed of the job.
        purpose: A row of the table. Numbers of different purposes are independent.
        coordinates: `MeshDomains.coordinates`, and other coordinates along which numbers should differ. Names that are
            not mesh axes, such as `worker`, `step`, `microbatch` or `stage`, count for every purpose.

    Returns:
        At least 0 and less than 2**63.

    Raises:
        ConfigError: The purpose is unknown, or `coordinates` lacks an axis that counts for it.
    """
    if purpose not in _COUNTING_AXES:
        raise ConfigError(f"seed_for(purpose={purpose!r}) must be one of {', '.join(map(repr, get_args(Purpose)))}")
    axes = _COUNTING_AXES[purpose]
    if missing := [axis for axis in axes if axis not in coordinates]:
        raise ConfigError(
            f"seed_for(purpose={purpose!r}) needs the coordinates {', '.join(axes)}, but {', '.join(missing)} is "
            f"missing; it has {', '.join(coordinates) or 'none'}. Start from MeshDomains.coordinates"
        )
    counting = sorted(
        (str(name), int(place)) for name, place in coordinates.items() if name in axes or name not in _MESH_AXES
    )
    return derived(int(base), purpose, counting)


def derived(*parts: object, bits: int = 63) -> int:
    """Derive a number of `bits` bits from the parts alone, the same on every machine.

    Args:
        parts: Integers, strings, and lists or tuples of them: values with an exact `repr`.
        bits: Number of bits, at most 512.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=-(-bits // 8)).digest()
    return int.from_bytes(digest, "little") >> (-bits % 8)


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of the global random number generators of torch (CPU and `device`), NumPy and Python.

    It has only tensors and numbers, which load from a file without running code.
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
    """Set the global generators to a state of `random_state`; a CUDA device's only if the state has one."""
    version, words, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
