"""Checks an op with kernels of its own against its plain reference, over dtypes, layouts and gradients.

The truth is the reference in float64, from inputs that are already rounded to the dtype. An op may be at most twice as
far from it as the reference is when torch computes it in the dtype itself, and one rounding more.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_d9d.ops.backend import using_kernels
from tests.harness.compare import assert_bitwise_equal

Op = Callable[..., Any]
"""Called with the tensors by name; returns a tensor or a tuple of them."""

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
"""The devices of tests. On the CPU kernels run in Triton's interpreter."""
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
LAYOUTS = ["contiguous", "transposed", "sliced", "expanded"]

MOST_ERROR = 2.0
"""The largest error, as a multiple of that of the reference in the same dtype."""


def dtypes(device: str) -> list[torch.dtype]:
    """The interpreter has no bfloat16."""
    return DTYPES if device == "cuda" else DTYPES[:2]


def shapes_and_dtypes(shapes: Sequence[Any], device: str, is_other: bool) -> list[tuple[Any, torch.dtype]]:
    """Every shape with every dtype; in the interpreter with one of its two, and with the other one if `is_other`."""
    if device == "cuda":
        return [*product(shapes, dtypes(device))]
    return [(shape, dtypes(device)[(index + is_other) % 2]) for index, shape in enumerate(shapes)]


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """The same values in another layout; "expanded" repeats the first row, so values change."""
    if tensor.dim() == 0 or layout == "contiguous":
        return tensor.contiguous()
    if layout == "transposed":
        return tensor.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        whole = tensor.new_full(
            (*tensor.shape[:-1], 2 * tensor.shape[-1] + 3), float("nan") if tensor.is_floating_point() else 0
        )
        part = whole[..., 1 : 1 + 2 * tensor.shape[-1] : 2]
        part.copy_(tensor)
        return part
    assert layout == "expanded"
    return tensor[:1].expand_as(tensor)


def check_op(
    op: Op,
    reference: Op,
    tensors: Mapping[str, Tensor],
    dtype: torch.dtype,
    device: str,
    *,
    layout: str = "contiguous",
    gradients_of: Sequence[str] | None = None,
    wide: Sequence[str] = (),
    is_reproducible: bool = True,
    **options: Any,
) -> None:
    """Compare results and gradients, with unwritten memory full of NaN.

    On a GPU two runs are compared with one another bit by bit.

    Args:
        op: What is checked.
        reference: What it should be.
        tensors: Arguments by name, in float32 or integers, on the CPU.
        dtype: What floats are rounded to.
        device: Where it runs.
        layout: Of all arguments and of the outgoing gradients ("expanded" is for the latter alone where it would change
            what an argument means: give those contiguous by leaving them out of `gradients_of`).
        gradients_of: Arguments that need gradients; by default all floats.
        wide: Arguments that stay float32.
        is_reproducible: Whether two runs on a GPU give equal bits.
        options: Further arguments.
    """
    names = [name for name, t in tensors.items() if t.is_floating_point()] if gradients_of is None else gradients_of
    rounded = {
        name: t.to(torch.float32 if name in wide or not t.is_floating_point() else dtype)
        if t.is_floating_point()
        else t
        for name, t in tensors.items()
    }
    placed = {name: laid_out(t, layout if name in names else "contiguous").to(device) for name, t in rounded.items()}

    def run(op: Op, arguments: Mapping[str, Tensor]) -> list[Tensor]:
        leaves = {n: t.detach().requires_grad_(n in names) for n, t in arguments.items()}
        results = op(**leaves, **options)
        results = [r for r in (results if isinstance(results, tuple) else (results,)) if r is not None]
        trained = [r for r in results if r.requires_grad]
        outgoing = [laid_out(_noise(r), layout) for r in trained]
        given = torch.autograd.grad(trained, [leaves[name] for name in names], outgoing) if names and trained else ()
        return [*results, *given]

    truth = run(reference, {n: t.double() if t.is_floating_point() else t for n, t in placed.items()})
    with using_kernels("torch"):
        own = run(reference, placed)
    with using_kernels("triton"), unwritten_memory_is_nan():
        actual = run(op, placed)
        # The interpreter runs one program after the other: a second run would be the first.
        again = run(op, placed) if is_reproducible and device == "cuda" else actual
    labels = [f"result {i}" for i in range(len(truth) - len(names))] + [f"gradient of {name}" for name in names]
    for label, ours, theirs, exact, second in zip(labels, actual, own, truth, again, strict=True):
        assert ours.dtype == theirs.dtype, f"{label}: {ours.dtype}, torch gives {theirs.dtype}"
        assert ours.shape == theirs.shape, f"{label}: shape {list(ours.shape)}, torch gives {list(theirs.shape)}"
        if not ours.is_floating_point():
            assert_bitwise_equal(label, ours, exact)
        else:
            error, allowed = _distance(ours, exact), MOST_ERROR * _distance(theirs, exact)
            allowed += torch.finfo(ours.dtype).eps / 2 * float(exact.detach().double().norm())
            assert error <= allowed, f"{label}: error {error:.3e}, allowed {allowed:.3e} ({layout}, {dtype})"
        assert_bitwise_equal(f"{label}, run twice", second, ours)


@contextmanager
def unwritten_memory_is_nan() -> Generator[None]:
    """New memory is full of NaN, or of the largest integer, until something is written to it."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _noise(like: Tensor) -> Tensor:
    """Outgoing gradients: the same for every run, rounded to float16 and bfloat16 alike."""
    generator = torch.Generator().manual_seed(like.numel())
    return torch.randint(-8, 9, like.shape, generator=generator).div(8).to(like.device, like.dtype)


def _distance(one: Tensor, other: Tensor) -> float:
    return float((one.detach().double() - other.detach().double()).norm())
