"""Rates of computation and links of a machine, from shipped tables or a file."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

from lightning_d9d.errors import ConfigError, did_you_mean, reason
from lightning_d9d.memory import GPU_OVERHEAD
from lightning_d9d.schedule import HostSeconds, Machine
from lightning_d9d.schedule.layers import HOST_SECONDS, check_host_seconds

_SHIPPED = Path(__file__).with_name("machines.json")


class AttentionRate(NamedTuple):
    """Operations per second of attention for rows of a length."""

    tokens: int
    forward_flops: float
    backward_flops: float


@dataclass(frozen=True, kw_only=True)
class MachineTable:
    """Rates of one kind of GPU and of its links, in operations and bytes per second.

    Raises:
        ConfigError: A rate is not a finite number above 0.
    """

    device: str
    """The name that `torch.cuda.get_device_name` returns."""
    memory_gib: float
    """The memory in bytes that torch can use."""
    peak_flops: float
    """Dense bfloat16 products by the data sheet, of which MFU is a share."""
    linear_flops: float
    """Products of projections and of the head."""
    grouped_flops: float
    """Products of experts."""
    attention_forward_flops: float
    """The forward of attention."""
    attention_backward_flops: float
    """The backward of attention."""
    copy_bytes: float
    """Bytes read and written by operations that only move memory."""
    gpus_per_node: int
    node_link_bytes: float
    """Bytes per second that a rank sends within its node."""
    network_bytes: float
    """Bytes per second that a rank sends to other nodes."""
    latency: float
    """Latency of a message in seconds."""
    action_seconds: float
    """Seconds that an action of a pipeline adds to its kernels."""
    host_share: float
    """Extra time of kernels in a step, as a share of their time alone."""
    wait_seconds: float = 0.0
    """Seconds from a wait of the host for numbers of other ranks until the device is busy again."""
    message_slowdown: float = 0.58
    """The time that computation loses beside messages of weights and gradients, as a share of the messages' time."""
    attention_by_tokens: tuple[AttentionRate, ...] = ()
    """Rates of attention by the length of a row. The nearest length replaces the two rates above."""
    sparse_host_seconds: HostSeconds | None = None
    """The host's seconds for a block with experts, neither compiled nor captured; None if not known."""
    dense_host_seconds: HostSeconds | None = None
    """The same for a block without experts."""
    linear_adapter_host_seconds: HostSeconds | None = None
    """The seconds that each adapter of a linear layer adds to its block; None counts nothing."""
    experts_adapter_host_seconds: HostSeconds | None = None
    """The seconds that each adapter of a weight of experts adds to its block; None counts nothing."""
    step_host_seconds: float = 0.0
    """The host's seconds for all else of a step: data, hooks, head, clipping and update. 0 counts nothing."""
    launch_seconds: float = 0.0
    """Measured seconds of the host to launch a kernel, for information only; 0 if not measured."""
    source: str
    not_measured: tuple[str, ...] = ()
    """The fields that come from data sheets, other devices, fits or assumptions; `source` says which."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "not_measured", tuple(self.not_measured))
        object.__setattr__(
            self, "attention_by_tokens", tuple(AttentionRate(*each) for each in self.attention_by_tokens)
        )
        check_host_seconds(self)
        for each in fields(self):
            value = getattr(self, each.name)
            if each.type in ("float", "int"):
                is_number = isinstance(value, int | float) and math.isfinite(value)
                may_be_zero = each.name in (
                    "host_share",
                    "latency",
                    "launch_seconds",
                    "step_host_seconds",
                    "wait_seconds",
                    "message_slowdown",
                )
                if not is_number or value < 0 or (value == 0 and not may_be_zero):
                    raise ConfigError(f"a machine's {each.name}={value!r} must be a number above 0")

    @property
    def memory_bytes(self) -> int:
        """The memory in bytes that torch can use."""
        return int(self.memory_gib * 2**30)

    @property
    def allocatable(self) -> int:
        """The memory in bytes that tensors can take."""
        return GPU_OVERHEAD.allocatable(self.memory_bytes)

    @cached_property
    def rates(self) -> Machine:
        """The rates by which layers are timed."""
        return Machine(
            flops_per_second=self.linear_flops,
            grouped_flops_per_second=self.grouped_flops,
            attention_forward_flops_per_second=self.attention_forward_flops,
            attention_backward_flops_per_second=self.attention_backward_flops,
            bytes_per_second=self.copy_bytes,
            link_bytes_per_second=self.node_link_bytes / 2,
            link_latency=self.latency,
            action_seconds=self.action_seconds,
            gpus_per_node=self.gpus_per_node,
            exchange_bytes_per_second=self.node_link_bytes,
            network_bytes_per_second=self.network_bytes,
            host_share=self.host_share,
            wait_seconds=self.wait_seconds,
            **{name: getattr(self, name) for name in HOST_SECONDS},
        )

    def rates_for(self, tokens: int) -> Machine:
        """Return the rates for rows of a length. Local."""
        if not self.attention_by_tokens:
            return self.rates
        nearest = min(self.attention_by_tokens, key=lambda each: abs(math.log(each.tokens / tokens)))
        return replace(
            self.rates,
            attention_forward_flops_per_second=nearest.forward_flops,
            attention_backward_flops_per_second=nearest.backward_flops,
        )

    def link(self, span: int) -> str:
        """Return the link that joins a number of consecutive ranks. Local."""
        return "node" if span <= self.gpus_per_node else "network"

    def save(self, path: str | Path, name: str) -> None:
        """Write the table to a file, which `machine_of` reads.

        Raises:
            ConfigError: The file cannot be written.
        """
        try:
            Path(path).write_text(json.dumps({name: asdict(self)}, indent=1) + "\n")
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {reason(error)}; give another place") from error


def shipped() -> dict[str, MachineTable]:
    """Return the tables of this package, by name."""
    return _read(_SHIPPED)


def machine_of(gpu: str | MachineTable, *, gpus_per_node: int | None = None) -> MachineTable:
    """Return the table of a GPU. Local.

    Args:
        gpu: A name of `shipped()`, a file with one table, or a table.
        gpus_per_node: Replaces the table's value.

    Raises:
        ConfigError: The GPU is unknown, or the file does not have one table.
    """
    if isinstance(gpu, MachineTable):
        table = gpu
    elif Path(gpu).suffix == ".json":
        tables = _read(Path(gpu))
        if len(tables) != 1:
            raise ConfigError(f"{gpu} has {len(tables)} machines; leave one")
        (table,) = tables.values()
    else:
        tables = shipped()
        if gpu.lower() not in tables:
            raise ConfigError(
                f"gpu={gpu!r} is unknown; choose one of {', '.join(tables)}, or a file that ends in .json with a table "
                f"like theirs{did_you_mean(gpu.lower(), tables)}"
            )
        table = tables[gpu.lower()]
    if gpus_per_node is None:
        return table
    if gpus_per_node < 1:
        raise ConfigError(f"gpus_per_node={gpus_per_node} must be at least 1")
    return replace(table, gpus_per_node=gpus_per_node)


def _read(path: Path) -> dict[str, MachineTable]:
    try:
        content: dict[str, dict[str, Any]] = json.loads(path.read_text())
        return {name: MachineTable(**_with_host_seconds(values)) for name, values in content.items()}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        what = reason(error) if isinstance(error, OSError) else error
        raise ConfigError(f"{path} is not a table of a machine: {what}; see MachineTable.save") from error


def _with_host_seconds(values: dict[str, Any]) -> dict[str, Any]:
    """Return a table's values, with the H200's in place of missing seconds of the host, which are listed as such."""
    missing = [name for name in (*HOST_SECONDS, "step_host_seconds") if values.get(name) is None]
    unmeasured = dict.fromkeys((*values.get("not_measured", ()), *missing))
    return values | {name: _of_h200()[name] for name in missing} | {"not_measured": tuple(unmeasured)}


@cache
def _of_h200() -> dict[str, Any]:
    """Return the shipped values of the H200."""
    return json.loads(_SHIPPED.read_text())["h200"]
