"""Operations of a training step, in the usual conventions.

[Note: conventions] A multiplication with its addition is two operations. Forward counts once and backward twice, for
products with weights and for attention alike. `causal` counts the half of attention's square that a causal mask leaves;
`full` counts all of it. These are operations of the model (MFU, https://arxiv.org/abs/2204.02311, appendix B). With
`recompute`, the hardware's operations are counted (HFU): the forward of recomputed blocks counts once more.
"""

from __future__ import annotations

from enum import StrEnum

from lightning_d9d.schedule import LayerCosts, ModelCosts


class Convention(StrEnum):
    """A convention for counting operations, which `metrics/flops.py` defines."""

    CAUSAL = "causal"
    FULL = "full"
    CAUSAL_RECOMPUTE = "causal_recompute"
    FULL_RECOMPUTE = "full_recompute"

    @property
    def utilization(self) -> str:
        """The metric's name: "mfu/full", or "hfu/full" for the hardware's operations, which count recomputation."""
        attention = self.removesuffix("_recompute")
        return f"{'mfu' if attention == self else 'hfu'}/{attention}"


class StepFlops:
    """Operations of forward and backward for one sequence.

    Costs are polynomials of the sequence length: products grow with it, attention with its square. Two lengths
    determine both parts.

    Args:
        once: Costs of the model for sequences of some length.
        twice: Costs for sequences of twice the length.
        recomputed: The share of the layers whose forward is recomputed in the backward, 0 to 1.
        frozen: Whether weights have no gradients, as with adapters. The operations of adapters are left out.
    """

    def __init__(self, once: ModelCosts, twice: ModelCosts, recomputed: float = 0.0, *, frozen: bool = False) -> None:
        forward, forward_square = _split(*(sum(each.forward_flops for each in costs.layers) for costs in (once, twice)))
        total, _ = _split(*(sum(_all(each, frozen) for each in costs.parts) for costs in (once, twice)))
        self.products = total
        """The operations of products with weights."""
        self.causal_attention = 3 * forward_square
        """The operations of attention, with half of its square."""
        self._again = {1: recomputed * (forward + forward_square), 2: recomputed * (forward + 2 * forward_square)}
        self.recomputes = recomputed > 0
        """True if conventions with recomputation differ from those without."""

    def count(self, convention: Convention) -> float:
        """Return the number of operations in a convention. Local."""
        squares = 2 if convention in (Convention.FULL, Convention.FULL_RECOMPUTE) else 1
        counted = self.products + squares * self.causal_attention
        return counted + (self._again[squares] if convention.endswith("_recompute") else 0.0)


def _all(layer: LayerCosts, frozen: bool) -> float:
    return layer.forward_flops + layer.backward_input_flops + (0.0 if frozen else layer.backward_weight_flops)


def _split(once: float, twice: float) -> tuple[float, float]:
    """Return the linear and the quadratic part of a cost, from those of a sequence and of one twice as long."""
    square = twice / 2 - once
    return once - square, square


_PEAKS = {"H100 PCIe": 756e12, "H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}
"""Peaks of dense products in bfloat16, by a part of the device's name; from NVIDIA's data sheets. The first matching
name is used."""


def peak_flops(device_name: str) -> float | None:
    """Return the operations in a second that a GPU's data sheet promises in bfloat16, without sparsity. Local.

    Args:
        device_name: Name of the device from `torch.cuda.get_device_name`.

    Returns:
        None for an unknown device.
    """
    return next((peak for part, peak in _PEAKS.items() if part in device_name), None)
