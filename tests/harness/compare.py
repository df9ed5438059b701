"""Comparisons of tensors whose messages name the tensor, the error and what was allowed.

A DTensor is compared by its `full_tensor()`: then every rank of its mesh must make the same call.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from tests.harness.tolerances import Kind, Tolerance, tolerance_for

_INTEGER_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_LISTED = 20


def assert_close_named(
    name: str,
    actual: Tensor,
    expected: Tensor,
    *,
    kind: Kind = Kind.GRADIENT,
    tolerance: Tolerance | None = None,
) -> None:
    """Asserts that `actual` is `expected` up to rounding, by norm (see `Tolerance`).

    Args:
        kind: row of the table to read, together with the coarser dtype of the two.
        tolerance: replaces the table's entry, for a test that knows a tighter bound or a reason for a looser one.
    """
    if difference := _difference(actual, expected, kind, tolerance):
        raise AssertionError(f"{name}: {difference}")


def assert_tensors_close(
    actual: Mapping[str, Tensor | None],
    expected: Mapping[str, Tensor | None],
    *,
    kind: Kind = Kind.GRADIENT,
    tolerance: Tolerance | None = None,
) -> None:
    """Asserts equal names and `assert_close_named` for each of them; None equals only None. Lists every difference."""
    differences = [f"{name}: only in actual" for name in actual if name not in expected]
    differences += [f"{name}: only in expected" for name in expected if name not in actual]
    for name in [name for name in expected if name in actual]:
        ours, theirs = actual[name], expected[name]
        if ours is None or theirs is None:
            if ours is not theirs:
                differences.append(f"{name}: {'actual' if ours is None else 'expected'} is None, the other is not")
        elif difference := _difference(ours, theirs, kind, tolerance):
            differences.append(f"{name}: {difference}")
    if differences:
        more = [f"... and {len(differences) - _MAX_LISTED} more"] if len(differences) > _MAX_LISTED else []
        head = f"{len(differences)} of {len(actual.keys() | expected.keys())} tensors differ:"
        raise AssertionError("\n  ".join([head, *differences[:_MAX_LISTED], *more]))


def assert_gradients_equal(
    actual: nn.Module,
    expected: nn.Module,
    *,
    rename: Callable[[str], str] = str,
    tolerance: Tolerance | None = None,
) -> None:
    """Asserts that both modules hold the same gradients, parameter by parameter; None equals only None.

    Args:
        rename: from a parameter name of `actual` to the one of `expected`.
    """
    assert_tensors_close(
        {rename(name): parameter.grad for name, parameter in actual.named_parameters()},
        {name: parameter.grad for name, parameter in expected.named_parameters()},
        tolerance=tolerance,
    )


def assert_bitwise_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Asserts equal dtype, shape and bits (so `-0.0` is not `0.0`, and a NaN equals the same NaN)."""
    actual, expected = _whole(actual), _whole(expected)
    assert actual.dtype == expected.dtype, f"{name}: dtype {actual.dtype}, expected {expected.dtype}"
    assert actual.shape == expected.shape, f"{name}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    differs = _bits(actual) != _bits(expected)
    if num_different := int(differs.sum()):
        index = tuple(differs.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {num_different} of {actual.numel()} elements differ in their bits, first at {list(index)}: "
            f"{actual[index].item()!r}, expected {expected[index].item()!r}"
        )


def _difference(actual: Tensor, expected: Tensor, kind: Kind, tolerance: Tolerance | None) -> str | None:
    """What is wrong with `actual`, or None. Norms are taken in float64."""
    actual, expected = _whole(actual), _whole(expected)
    if actual.shape != expected.shape:
        return f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    allowed = tolerance or tolerance_for(kind, actual.dtype, expected.dtype)
    actual, expected = actual.double(), expected.double()
    for label, tensor in (("actual", actual), ("expected", expected)):
        if num_nonfinite := int((~tensor.isfinite()).sum()):
            return f"{num_nonfinite} of {tensor.numel()} elements of {label} are not finite"
    actual_norm, expected_norm = actual.norm().item(), expected.norm().item()
    limit = allowed.absolute + allowed.relative * expected_norm
    bound = f"{limit:.3g} = {allowed.absolute:.3g} + {allowed.relative:.3g} * ||expected||"
    if allowed.angle is None:
        error = (actual - expected).norm().item()
        if error <= limit:
            return None
        relative = error / expected_norm if expected_norm else float("inf")
        return (
            f"||actual - expected|| = {error:.3g} ({relative:.3g} of ||expected|| = {expected_norm:.6g}, "
            f"||actual|| = {actual_norm:.6g}) exceeds {bound}"
        )
    if abs(actual_norm - expected_norm) > limit:
        return f"||actual|| = {actual_norm:.6g} and ||expected|| = {expected_norm:.6g} differ by more than {bound}"
    product = actual_norm * expected_norm
    angle = 1 - (actual * expected).sum().item() / product if product else 0.0
    if angle > allowed.angle:
        return f"1 - cos(actual, expected) = {angle:.3g} exceeds {allowed.angle:.3g} (norms {bound})"
    return None


def _whole(tensor: Tensor) -> Tensor:
    """The tensor without graph, gathered if it is a DTensor, on the CPU."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor:
        from torch.distributed.tensor import DTensor  # 1.5 s to import: only where one may be

        if isinstance(tensor, DTensor):
            tensor = tensor.full_tensor()
    return tensor.cpu()


def _bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(_INTEGER_OF_SIZE[tensor.element_size()])
