"""The memory of a training step on one rank, for settings that a user can change."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from lightning_d9d.memory.held import StagesHeld
from lightning_d9d.memory.peak import WORKSPACE, PeakBytes

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Overhead:
    """Memory of a device that no tensor uses."""

    workspace: int = WORKSPACE
    """Bytes that libraries allocate."""
    pools: int = 256 * 2**20
    """Bytes of the allocator's pools of small blocks."""
    fragments: float = 0.06
    """Fragments as a share of the allocated bytes. This and `pools` were fitted to one H200 run, which reserved 129 GiB
    for 121 (docs/benchmarks/whole-model.md)."""
    keeps_apart: bool = True
    """True if free blocks are kept for other tensors. [Note: blocks that are kept apart] in `memory/peak.py`."""
    outside: int = 700 * 2**20
    """Bytes of CUDA's context and libraries, and of nccl's buffers. They are outside of torch's allocator. Assumed."""

    def reserved(self, peak: PeakBytes, at_least: int = 0) -> int:
        """Return the bytes that torch's allocator reserves on the device. Local.

        Large gradients that find no free block are fragments of a single pool, so the larger of both counts. Each
        stream of FSDP2 has a pool with fragments of its own.

        Args:
            peak: The peak of a step.
            at_least: Bytes that are allocated, if those of the peak are not all.
        """
        allocated = max(peak.total, at_least) + (peak.streams if self.keeps_apart else 0)
        fragmented = int(allocated * (1 + self.fragments)) + self.pools
        return max(fragmented, allocated + peak.apart) if self.keeps_apart else fragmented

    def needed(self, peak: PeakBytes, at_least: int = 0) -> int:
        """Return the bytes that the process takes on the device, also outside of torch's allocator. Local."""
        return self.reserved(peak, at_least) + self.outside + peak.peers

    def allocatable(self, device: int) -> int:
        """Return the most bytes that tensors can take on a device of `device` bytes. Local."""
        return max(0, int((device - self.outside - self.pools) / (1 + self.fragments)))


GPU_OVERHEAD = Overhead()
HOST_OVERHEAD = Overhead(workspace=0, pools=0, outside=0, keeps_apart=False)


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes on one rank at the peak of a step."""

    peak: PeakBytes
    certain: int
    """Bytes of weights, all gradients and states, which every step needs at its end."""
    knows_states: bool = True
    knows_activations: bool = True
    overhead: Overhead = HOST_OVERHEAD

    @property
    def total(self) -> int:
        """The bytes at the peak, at least `certain`; unknown parts count as 0."""
        return max(self.peak.total, self.certain)

    @property
    def needed(self) -> int:
        """The bytes of the device that the step needs, with fragments and memory outside of torch."""
        return self.overhead.needed(self.peak, self.total)

    def __str__(self) -> str:
        peak = self.peak
        parts = {
            "weights": peak.weights,
            "gradients": peak.gradients,
            "states": peak.states if self.knows_states else None,
            "activations": peak.activations + peak.working if self.knows_activations else None,
            "buffers": peak.gathered + peak.constant + peak.peers,
        }
        return ", ".join(f"{name} {'unknown' if value is None else gib(value)}" for name, value in parts.items())


@dataclass(frozen=True, kw_only=True)
class StepSettings:
    """Settings on which the memory of a step depends."""

    recompute: str = "none"
    num_rows: int | None = None
    """Rows of a microbatch; None: unknown, before the first batch."""
    step_in_backward: bool = False
    eight_bits: bool = False
    """True if optimizer states are to be replaced by those of eight bits."""
    num_ranks: int = 1
    """Factor by which more ranks share the weights than in this run."""


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """The memory of a step as a function of its settings."""

    weights: int
    gradients: int
    """All gradients at the end of a step."""
    gradients_in_backward: int
    """Most bytes of gradients at one time if the update runs inside of the backward."""
    states: int | None
    eight_bit_states: int | None
    """Bytes of states in eight bits; None if the optimizer has no such states."""
    gathered: int = 0
    """Buffers of gathered weights, counted if activations are unknown."""
    held: StagesHeld | None = None
    """The rank's stages and its actions; None if the model gives no costs."""
    accumulates: bool = False
    """True if several backwards add up to a step, so that no gradient is free before the last one."""
    overhead: Overhead = HOST_OVERHEAD
    _found: dict[StepSettings, RankMemory] = field(init=False, default_factory=dict, repr=False, compare=False)

    def of(self, settings: StepSettings) -> RankMemory:
        """Return the memory of a step with these settings. Local."""
        alone = replace(settings, num_ranks=1)
        if alone not in self._found:
            self._found[alone] = self._of(alone)
        found, ranks = self._found[alone], settings.num_ranks
        peak = found.peak
        shared = replace(
            peak, weights=peak.weights // ranks, gradients=peak.gradients // ranks, states=peak.states // ranks
        )
        return replace(found, peak=shared, certain=found.certain // ranks)

    def _of(self, settings: StepSettings) -> RankMemory:
        in_backward = settings.step_in_backward and not self.accumulates
        gradients = self.gradients_in_backward if in_backward else self.gradients
        states = self.eight_bit_states if settings.eight_bits else self.states
        peak = None
        if self.held is not None and settings.num_rows is not None:
            peak = self.held.peak(
                settings.recompute,
                settings.num_rows,
                weights=self.weights,
                states=states or 0,
                part_bytes=self.gradients_in_backward if in_backward else None,
                constant=self.overhead.workspace,
            )
        at_end = PeakBytes(
            weights=self.weights,
            gradients=gradients,
            states=states or 0,
            gathered=self.gathered,
            constant=self.overhead.workspace,
        )
        return RankMemory(
            peak=peak or at_end,
            certain=self.weights + gradients + (states or 0),
            knows_states=states is not None,
            knows_activations=peak is not None,
            overhead=self.overhead,
        )


def gib(num_bytes: int) -> str:
    """Return a number of bytes as text in GiB or MiB."""
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:.1f} MiB"
