"""The memory that a fit takes of the host, which all ranks of a machine share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from lightning_d9d.errors import ConfigError
from lightning_d9d.memory.layers import StageOfRank
from lightning_d9d.memory.step import gib
from lightning_d9d.schedule.actions import Action
from lightning_d9d.schedule.simulate import Costs, live

_CLOSE = 0.9
_MEMORY_FILES = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
_REMEDIES = {
    "checkpoint": "CheckpointConfig(asynchronous=False), which copies nothing",
    "offloaded": "ParallelConfig(offload=False), or more ranks that share the weights",
    "inputs": 'ParallelConfig(recompute="full"), which keeps them on the device',
}


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Bytes of the host's memory that the ranks of a machine certainly take. Workers of loaders are not counted."""

    checkpoint: int = 0
    """Copies of weights and optimizer states, for saves in the background."""
    offloaded: int = 0
    """Weights, gradients and states that stay in the host's memory."""
    inputs: int = 0
    """Inputs of blocks, kept for the backward."""

    def times(self, num_ranks: int) -> HostMemory:
        """Return the bytes of a number of ranks like this one."""
        return HostMemory(**{each.name: num_ranks * getattr(self, each.name) for each in fields(self)})

    @property
    def total(self) -> int:
        """The sum of all parts."""
        return sum(getattr(self, each.name) for each in fields(self))

    @property
    def _parts(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {gib(value)}" for name, value in self._parts.items())

    @property
    def remedy(self) -> str:
        """The setting that frees the most."""
        parts = self._parts
        return _REMEDIES[max(parts, key=lambda name: parts[name])]


def input_bytes(stages: Mapping[int, StageOfRank], actions: Sequence[Action]) -> int:
    """Count the bytes of kept inputs of a rank's blocks, at the moment with the most. Local.

    Args:
        stages: The rank's stages, by index in the whole model.
        actions: The rank's actions of a batch, in order.
    """
    of_stages = [0.0] * (max(stages) + 1)
    for index, stage in stages.items():
        of_stages[index] = sum(layer.costs.output_bytes for layer in stage.layers)
    return int(max((num_bytes for _, _, num_bytes in live(actions, Costs(activation=of_stages))), default=0.0))


def host_bytes() -> tuple[int, int] | None:
    """Return the host's memory, or the limit of this process's cgroup, and the memory available now. Local.

    Returns:
        Both in bytes; None if the system does not report them.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        sizes = {name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        total, available = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, KeyError, ValueError, IndexError):
        return None
    for path in _MEMORY_FILES:
        try:
            total = min(total, int(path.read_text()))
        except (OSError, ValueError):  # there is none, or it says "max"
            continue
    return total, min(total, available)


def check_host(needed: HostMemory, total: int, available: int) -> str | None:
    """Refuse a fit that keeps more in the host's memory than it has. Local.

    Args:
        needed: Bytes that all ranks of the machine need.
        total: Bytes that the host has.
        available: Free bytes.

    Returns:
        A note if it may be too close to fit, else None.

    Raises:
        ConfigError: The host has less memory than is needed.
    """
    if needed.total > total:
        raise ConfigError(
            f"the fit needs {gib(needed.total)} of the host's memory, which has {gib(total)}: {needed}; give "
            f"{needed.remedy}"
        )
    if needed.total > _CLOSE * available:
        return (
            f"the fit needs at least {gib(needed.total)} of the host's memory, of which {gib(available)} are free: "
            f"{needed}. If the host runs out of memory, give {needed.remedy}"
        )
    return None
