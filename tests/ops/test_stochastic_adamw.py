"""AdamW of many tensors: one launch equals the reference bit by bit, whatever lies where."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.stochastic_adamw import AdamWTensors, MultiTensorAdamW, Place, Scalars, blocks_of, fma
from tests.harness.compare import assert_bitwise_equal
from tests.ops.grid import DEVICES

WIDE, NARROW = torch.float32, torch.bfloat16
DTYPES = {
    "all bfloat16": (NARROW, NARROW, NARROW),
    "states float32": (NARROW, NARROW, WIDE),
    "gradients float32": (NARROW, WIDE, WIDE),
    "states bfloat16": (WIDE, WIDE, NARROW),
    "all float32": (WIDE, WIDE, WIDE),
}


def whole(*shape: int) -> Place:
    return Place(shape, tuple(map(range, shape)))


PLACES = {
    "scalar": whole(),
    "odd": whole(3, 5),
    "empty": whole(0, 4),
    "a row of tiles": whole(1024),
    "several chunks": whole(3, 2801),
    "rows": Place((12, 5), (range(4, 9), range(5))),
    "columns": Place((50, 90), (range(50), range(30, 60))),
    "both": Place((12, 30), (range(3, 9), range(10, 30))),
    "experts and columns": Place((8, 3, 20), (range(4, 8), range(3), range(5, 10))),
    "three dims": Place((6, 5, 4), (range(2, 4), range(3, 5), range(1, 3))),
    "far away": Place((2**20, 2**15), (range(2**19 + 1, 2**19 + 3), range(7, 12))),
}
SCALARS = Scalars(1e-2, (0.9, 0.99), 1e-8, 0.1, 77)
WRITTEN = ("parameter", "exp_avg", "exp_avg_sq")


def make(place: Place, dtypes: tuple[torch.dtype, ...], number: int, device: str = "cpu") -> AdamWTensors:
    generator = torch.Generator().manual_seed(number)
    shape = [len(held) for held in place.ranges]
    p, g, m, v = (torch.randn(shape, generator=generator) for _ in range(4))
    of_parameter, of_gradient, of_states = dtypes
    p, g, m, v = p.to(of_parameter), g.to(of_gradient), (m / 10).to(of_states), v.square().to(of_states)
    return AdamWTensors(*(each.to(device) for each in (p, g, m, v)), torch.tensor(number + 1.0).to(device), place)


def make_all(dtypes: tuple[torch.dtype, ...], device: str = "cpu") -> list[AdamWTensors]:
    return [make(place, dtypes, number, device) for number, place in enumerate(PLACES.values())]


def after(tensors: Sequence[AdamWTensors], scalars: Scalars = SCALARS, kernels: str = "torch") -> list[AdamWTensors]:
    """Copies, updated together."""
    result = copy.deepcopy(list(tensors))
    with using_kernels(kernels):  # type: ignore[arg-type]
        MultiTensorAdamW()(result, scalars)
    return result


def assert_equal(actual: Sequence[AdamWTensors], expected: Sequence[AdamWTensors]) -> None:
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for name in AdamWTensors._fields[:5]:
            assert_bitwise_equal(f"{name} {number}", getattr(ours, name), getattr(theirs, name))


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_blocks_are_where_elements_are(place: Place) -> None:
    found = []
    for block in blocks_of(place):
        assert block.start == sum(map(len, found))
        i = torch.arange(block.size)
        found.append(block.first + i // block.length * block.stride + i % block.length)
    assert torch.equal(torch.cat(found), place.indices(torch.device("cpu")).reshape(-1))


def test_rows_that_are_too_long_are_blocks() -> None:
    """Kernels count columns in 32 bits."""
    place = Place((4, 2**32), (range(1, 3), range(5, 5 + 2**31)))
    first, second = blocks_of(place)
    assert tuple(first) == (0, 2**31, 2**32 + 5, 2**31, 2**32)
    assert tuple(second) == (2**31, 2**31, 2 * 2**32 + 5, 2**31, 2**32)


@DEVICES
@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=DTYPES.keys())
def test_kernel_equals_reference(dtypes: tuple[torch.dtype, ...], device: str) -> None:
    tensors = make_all(dtypes)
    scalars = SCALARS._replace(grad_scale=torch.tensor(3.0), found_inf=torch.tensor(0.0))
    on_device = [AdamWTensors(*(t.to(device) for t in each[:5]), each.place) for each in tensors]
    assert_equal(after(on_device, scalars, "triton"), after(tensors, scalars))


@DEVICES
def test_dtypes_mix(device: str) -> None:
    tensors = [make(PLACES["odd"], dtypes, number, device) for number, dtypes in enumerate(DTYPES.values())]
    together = after(tensors, kernels="triton")
    assert_equal(together, [after([each], kernels="triton")[0] for each in tensors])


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_order_does_not_matter(kernels: str, device: str) -> None:
    names = ("odd", "empty", "both", "a row of tiles", "three dims")
    tensors = [make(PLACES[name], DTYPES["all bfloat16"], number, device) for number, name in enumerate(names)]
    forwards = after(tensors, kernels=kernels)
    assert_equal(after(tensors[::-1], kernels=kernels)[::-1], forwards)
    assert_equal(after(tensors[2:], kernels=kernels), forwards[2:])


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("dims", [(0,), (1,), (0, 1)], ids=str)
def test_parts_get_the_bits_of_the_whole(dims: tuple[int, ...], kernels: str, device: str) -> None:
    tensors = make(whole(7, 90), DTYPES["all bfloat16"], 0, device)
    [expected] = after([tensors], kernels=kernels)
    cuts = {0: (range(3), range(3, 7)), 1: (range(40), range(40, 90))}
    rows, columns = (cuts[dim] if dim in dims else (range((7, 90)[dim]),) for dim in (0, 1))
    parts = []
    for ranges in [(r, c) for r in rows for c in columns]:
        index = tuple(slice(held.start, held.stop) for held in ranges)
        cut = [each[index].clone() for each in tensors[:4]]
        parts.append(AdamWTensors(*cut, tensors.step, Place((7, 90), ranges)))
    for part in after(parts[::-1], kernels=kernels):
        index = tuple(slice(held.start, held.stop) for held in part.place.ranges)
        for name in WRITTEN:
            assert_bitwise_equal(name, getattr(part, name), getattr(expected, name)[index].contiguous())


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("field", AdamWTensors._fields[:4])
def test_memory_does_not_matter(field: str, kernels: str, device: str) -> None:
    """Transposed tensors, and tensors that begin between 16 bytes."""
    tensors = make(whole(64, 65), DTYPES["states float32"], 0, device)
    [expected] = after([tensors], kernels=kernels)
    value: Tensor = getattr(tensors, field)
    transposed = value.t().contiguous().t()
    shifted = torch.cat([value.new_zeros(1), value.flatten()])[1:].view(64, 65)
    for other in (transposed, shifted):
        changed = tensors._replace(**{n: getattr(tensors, n).clone() for n in WRITTEN})._replace(**{field: other})
        with using_kernels(kernels):  # type: ignore[arg-type]
            MultiTensorAdamW()([changed], SCALARS)
        assert_equal([changed], [expected])


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_found_inf_leaves_all_as_it_is(kernels: str, device: str) -> None:
    tensors = make_all(DTYPES["all bfloat16"], device)
    scalars = SCALARS._replace(found_inf=torch.tensor(1.0, device=device))
    assert_equal(after(tensors, scalars, kernels), tensors)


@DEVICES
def test_gradients_and_parameters_may_move(device: str) -> None:
    """What an instance keeps follows them."""
    update, dtypes = MultiTensorAdamW(), DTYPES["states float32"]
    tensors = [make(PLACES[name], dtypes, number, device) for number, name in enumerate(("odd", "columns"))]
    expected = copy.deepcopy(tensors)
    for step in range(4):
        if step == 2:
            tensors = copy.deepcopy(tensors)
        if step == 3:
            tensors, expected = tensors[:1], expected[:1]
        gradients = [each.gradient.roll(step, 0) for each in tensors]
        tensors = [each._replace(gradient=g.clone()) for each, g in zip(tensors, gradients, strict=True)]
        expected = [each._replace(gradient=g) for each, g in zip(expected, gradients, strict=True)]
        with using_kernels("triton"):
            update(tensors, SCALARS)
        expected = after(expected)
        assert_equal(tensors, expected)


@pytest.mark.gpu
def test_the_host_waits_for_nothing() -> None:
    tensors = make_all(DTYPES["all bfloat16"], "cuda")
    scalars = SCALARS._replace(
        lr=torch.tensor(0.1, device="cuda"),
        grad_scale=torch.tensor(2.0, device="cuda"),
        found_inf=torch.tensor(0.0, device="cuda"),
    )
    update = MultiTensorAdamW()
    update(tensors, scalars)
    moved = [each._replace(gradient=each.gradient.clone()) for each in tensors]
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        update(moved, scalars)
    finally:
        torch.cuda.set_sync_debug_mode(before)


def test_rounding_without_bias_and_independently() -> None:
    """Errors have no mean, and those of two parameters, of neighbours, and of a parameter and its states, have nothing
    in common."""
    count = 2**16
    errors = []
    for number in (1, 2):
        p, g, m, v, *rest = make(whole(count), DTYPES["all bfloat16"], number)
        tensors = AdamWTensors(p.fill_(1.5), g, m.fill_(1.5), v.fill_(1.5), *rest)
        [exact] = after([AdamWTensors(*(each.float() for each in tensors[:4]), *rest)])
        [actual] = after([tensors])
        errors.append([(getattr(actual, n).float() - getattr(exact, n)).double() * 2**7 for n in WRITTEN])
    for error in (*errors[0], *errors[1]):
        assert bool((error.abs() < 1).all())
        assert error.var().item() > 0.04
        for mean in (error.mean(), (error[1:] * error[:-1]).mean()):
            assert abs(mean.item()) < 5 * 0.5 / count**0.5
    (p, m, v), others = errors
    for one, other in [*zip((p, m, v), others, strict=True), (p, m), (p, v), (m, v)]:
        assert abs((one * other).mean().item()) < 5 * 0.5 / count**0.5


def test_fused_multiply_add_is_rounded_once() -> None:
    """No other float32 is closer to the exact result, also where the product and the number nearly cancel."""
    generator = torch.Generator().manual_seed(0)
    a, b, c = torch.randn(3, 600, generator=generator)
    c[:200] = -(a * b)[:200]
    c[200:400] *= 2.0**-30
    result = fma(a, b, c)
    infinity = torch.full_like(result, torch.inf)
    below, above = result.nextafter(-infinity), result.nextafter(infinity)
    for x, y, z, *near in torch.stack([a, b, c, result, below, above], 1).tolist():
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        errors = [abs(exact - Fraction(each)) for each in near]
        assert errors[0] == min(errors)
