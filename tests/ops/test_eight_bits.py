"""States in eight bits: exact codes, rounding without bias, and one launch that equals the reference bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.eight_bits import AVERAGE, BLOCK, CUT, LEAST_SQUARE, SQUARE, Codes, decoded, encoded, scale_shape
from lightning_d9d.ops.stochastic_adamw import AdamWTensors, MultiTensorAdamW, Place, Scalars
from tests.harness.compare import assert_bitwise_equal
from tests.ops.grid import DEVICES

WIDE, NARROW = torch.float32, torch.bfloat16
KINDS = pytest.mark.parametrize("kind", [AVERAGE, SQUARE], ids=["average", "square"])
SCALARS = Scalars(1e-2, (0.9, 0.99), 1e-8, 0.1, 77)
WRITTEN = ("parameter", "exp_avg", "exp_avg_sq", "exp_avg_scale", "exp_avg_sq_scale")


def whole(*shape: int) -> Place:
    return Place(shape, tuple(map(range, shape)))


PLACES = {
    "odd": whole(3, 5),
    "empty": whole(0, 4),
    "a chunk and more": whole(260, 64),
    "ragged rows": whole(4, 70),
    "rows": Place((12, 96), (range(4, 9), range(96))),
    "columns": Place((20, 96), (range(20), range(32, 96))),
    "columns to the ragged end": Place((7, 90), (range(7), range(64, 90))),
    "columns of rows of no whole quads": Place((5, 70), (range(5), range(32, 64))),
    "experts and columns": Place((8, 3, 128), (range(4, 8), range(3), range(32, 64))),
    "three dims": Place((6, 5, 96), (range(2, 4), range(3, 5), range(64, 96))),
    "far away": Place((2**20, 2**15), (range(2**19 + 1, 2**19 + 3), range(64, 128))),
}


def uniform(shape: Sequence[int], seed: int) -> Tensor:
    """What rounds codes."""
    return torch.randint(2**CUT, tuple(shape), generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def make(place: Place, number: int, dtypes: Sequence[torch.dtype] = (NARROW, NARROW)) -> AdamWTensors:
    shape = [len(held) for held in place.ranges]
    p, g, m, v = (normal(*shape, seed=4 * number + i) for i in range(4))
    states = [encoded(x, uniform(shape, number), kind) for x, kind in ((m / 10, AVERAGE), (v.square(), SQUARE))]
    codes, scales = zip(*states, strict=True)
    step = torch.tensor(number + 1.0)
    return AdamWTensors(p.to(dtypes[0]), g.to(dtypes[1]), *codes, step, place, *scales)


def after(tensors: Sequence[AdamWTensors], kernels: str = "torch", scalars: Scalars = SCALARS) -> list[AdamWTensors]:
    """Copies, updated together."""
    result = copy.deepcopy(list(tensors))
    with using_kernels(kernels):  # type: ignore[arg-type]
        MultiTensorAdamW()(result, scalars)
    return result


def on(device: str, tensors: AdamWTensors) -> AdamWTensors:
    return AdamWTensors(*(each.to(device) if isinstance(each, Tensor) else each for each in tensors))


def assert_equal(actual: Sequence[AdamWTensors], expected: Sequence[AdamWTensors]) -> None:
    for number, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
        for name in WRITTEN:
            assert_bitwise_equal(f"{name} {number}", getattr(ours, name), getattr(theirs, name))


def all_codes(kind: Codes) -> Tensor:
    """Rows of each code and the largest one, which sets the scale."""
    codes = torch.arange(256, dtype=torch.uint8)
    return torch.stack([codes, torch.full_like(codes, 127 if kind is AVERAGE else 255)], 1)


@KINDS
@pytest.mark.parametrize("scale", [1, 100, 127, 200])
def test_what_codes_stand_for_is_kept(kind: Codes, scale: int) -> None:
    """Whatever the random bits, and bfloat16 holds it, too."""
    codes = all_codes(kind)
    scales = torch.full((256, 1), scale, dtype=torch.uint8)
    values = decoded(codes, scales, kind)
    assert values[1:].isfinite().all()
    assert torch.equal(values, values.bfloat16().float())
    for random in (0, 2**CUT - 1):
        again, its_scales = encoded(values, torch.full(values.shape, random), kind)
        assert torch.equal(its_scales, scales)
        assert torch.equal(decoded(again, its_scales, kind), values)


@KINDS
def test_steps_are_a_sixteenth_of_a_power_of_two(kind: Codes) -> None:
    """Ordered by code; the relative step is at most a sixteenth, but near the end where an average is 0."""
    values = decoded(all_codes(kind), torch.full((256, 1), 127, dtype=torch.uint8), kind)[:, 0]
    values = values[: 128 if kind is AVERAGE else 256]
    steps = values.diff()
    assert bool((steps > 0).all())
    if kind is SQUARE:
        assert values[0] > 0
        assert (steps / values[:-1]).max() <= 1 / 16
        assert values[-1] / values[0] == 2**15 * 31 / 16
    else:
        assert values[0] == 0
        assert steps.max() / values[-1] <= 1 / 30
        assert values[-1] / steps.min() > 2**11 * 0.95


@KINDS
def test_rounding_is_without_bias(kind: Codes) -> None:
    """The mean over random bits is the value, also at steps where the spacing changes."""
    count = 2**14
    row = normal(BLOCK).abs()
    row[1], row[2], row[3] = row.max() / 4, row.max() / 300, row.max() * 2**-8 * 1.999
    values = row.expand(count, BLOCK)
    codes, scales = encoded(values, uniform(values.shape, 1), kind)
    stored = decoded(codes, scales, kind).double()
    assert bool(((stored - values).abs() <= row.max() / 16).all())
    error = (stored - values).mean(0) / stored.std(0).clamp(min=1e-30)
    assert error.abs().max() < 4 / count**0.5


def test_squares_are_never_zero() -> None:
    """They are not zero beside any larger ones, nor if all are 0."""
    values = torch.zeros(3, BLOCK)
    values[0, :2] = torch.tensor([1.0, 1e-30])
    values[1, 0] = 1e-38
    for random in (0, 2**CUT - 1):
        codes, scales = encoded(values, torch.full(values.shape, random), SQUARE)
        stored = decoded(codes, scales, SQUARE)
        assert bool((stored >= LEAST_SQUARE).all())
        assert bool((stored[0, 1:] <= 2**-14).all())
    assert stored[2].max() < 1e-37


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, -1e-30, 1e-3, -65504.0, 3e38])
def test_averages_of_any_size(value: float) -> None:
    values = torch.full((1, BLOCK), value)
    values[0, 1:] = 0
    for random in (0, 2**CUT - 1):
        codes, scales = encoded(values, torch.full(values.shape, random), AVERAGE)
        stored = decoded(codes, scales, AVERAGE)
        assert bool((stored[0, 1:] == 0).all())
        assert abs(stored[0, 0].item() - value) <= abs(value) / 15 + 1e-38


@pytest.mark.parametrize("shape", [(5,), (2, 64), (3, 2, 33)])
def test_scales_are_of_blocks_of_rows(shape: tuple[int, ...]) -> None:
    values = normal(*shape)
    codes, scales = encoded(values, uniform(shape, 0), AVERAGE)
    assert codes.shape == shape
    assert scales.shape == scale_shape(shape)
    changed = values.clone()
    changed[..., 0] = 1e4
    _, others = encoded(changed, uniform(shape, 0), AVERAGE)
    assert torch.equal(scales[..., 1:], others[..., 1:])
    assert bool((others[..., 0] > scales[..., 0]).all())


@DEVICES
@pytest.mark.parametrize("dtypes", [(NARROW, NARROW), (NARROW, WIDE), (WIDE, WIDE)], ids=str)
def test_kernel_equals_reference(dtypes: tuple[torch.dtype, torch.dtype], device: str) -> None:
    tensors = [make(place, number, dtypes) for number, place in enumerate(PLACES.values())]
    scalars = SCALARS._replace(grad_scale=torch.tensor(3.0), found_inf=torch.tensor(0.0))
    there = after([on(device, each) for each in tensors], "triton", scalars)
    assert_equal([on("cpu", each) for each in there], after(tensors, "torch", scalars))


@DEVICES
def test_first_steps_from_nothing(device: str) -> None:
    """States begin as zeros, and gradients of whole blocks may be 0."""
    tensors = [make(PLACES[name], 0) for name in ("odd", "rows", "ragged rows")]
    for each in tensors:
        for name in WRITTEN[1:]:
            getattr(each, name).zero_()
        each.gradient[1] = 0
    update = MultiTensorAdamW()
    there = [on(device, each) for each in copy.deepcopy(tensors)]
    for _ in range(3):
        with using_kernels("triton"):
            update(there, SCALARS)
        tensors = after(tensors)
        assert_equal([on("cpu", each) for each in there], tensors)
        assert all(bool(each.parameter.isfinite().all()) for each in tensors)


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_parts_get_the_bits_of_the_whole(kernels: str, device: str) -> None:
    tensors = on(device, make(whole(7, 90), 0))
    [expected] = after([tensors], kernels)
    parts = []
    for ranges in [(r, c) for r in (range(3), range(3, 7)) for c in (range(32), range(32, 90))]:
        index = tuple(slice(held.start, held.stop) for held in ranges)
        of_scales = index[0], slice(ranges[1].start // BLOCK, -(-ranges[1].stop // BLOCK))
        cut = {name: getattr(tensors, name)[of_scales if "scale" in name else index].clone() for name in WRITTEN}
        parts.append(tensors._replace(**cut, gradient=tensors.gradient[index], place=Place((7, 90), ranges)))
    for part in after(parts[::-1], kernels):
        rows, columns = part.place.ranges
        index = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
        of_scales = index[0], slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        for name in WRITTEN:
            held = getattr(expected, name)[of_scales if "scale" in name else index].contiguous()
            assert_bitwise_equal(name, getattr(part, name), held)


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("field", ["parameter", "gradient", "exp_avg", "exp_avg_sq"])
def test_memory_does_not_matter(field: str, kernels: str, device: str) -> None:
    """Transposed tensors, and tensors that begin between 16 bytes."""
    tensors = on(device, make(whole(8, 64), 0))
    [expected] = after([tensors], kernels)
    value: Tensor = getattr(tensors, field)
    transposed = value.t().contiguous().t()
    shifted = torch.cat([value.new_zeros(1), value.flatten()])[1:].view(8, 64)
    for other in (transposed, shifted):
        copies = {name: getattr(tensors, name).clone() for name in WRITTEN}
        changed = tensors._replace(**copies)._replace(**{field: other})
        with using_kernels(kernels):  # type: ignore[arg-type]
            MultiTensorAdamW()([changed], SCALARS)
        assert_equal([changed], [expected])


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_found_inf_leaves_all_as_it_is(kernels: str, device: str) -> None:
    tensors = [on(device, make(place, number)) for number, place in enumerate(PLACES.values())]
    scalars = SCALARS._replace(found_inf=torch.tensor(1.0, device=device))
    assert_equal(after(tensors, kernels, scalars), tensors)


def test_roundings_are_independent() -> None:
    """Errors of places near each other, of two parameters, and of a parameter and its states have nothing in common."""
    rows, count = 2**11, 2**16
    errors = []
    for number in (1, 2):
        tensors = make(whole(rows, BLOCK), number, (NARROW, NARROW))
        wide = tensors._replace(parameter=tensors.parameter.float())
        [exact], [stored] = after([wide]), after([tensors])
        error = [(stored.parameter.float() - exact.parameter) / exact.parameter.abs()]
        m = decoded(tensors.exp_avg, tensors.exp_avg_scale, AVERAGE)  # type: ignore[arg-type]
        m = m + (tensors.gradient.float() - m) * (1 - 0.9)
        v = decoded(tensors.exp_avg_sq, tensors.exp_avg_sq_scale, SQUARE)  # type: ignore[arg-type]
        v = v * 0.99 + tensors.gradient.float().square() * (1 - 0.99)
        error.append(decoded(stored.exp_avg, stored.exp_avg_scale, AVERAGE) - m)  # type: ignore[arg-type]
        error.append((decoded(stored.exp_avg_sq, stored.exp_avg_sq_scale, SQUARE) - v) / v)  # type: ignore[arg-type]
        errors.append([each.flatten().double() / each.std() for each in error])
    for error in (*errors[0], *errors[1]):
        assert abs(error.mean().item()) < 5 / count**0.5
        for distance in range(1, 9):  # of eight places with one call of Philox, two each have one word
            assert abs((error[distance:] * error[:-distance]).mean().item()) < 5 / count**0.5
    (p, m, v), others = errors
    for one, other in [*zip((p, m, v), others, strict=True), (p, m), (p, v), (m, v)]:
        assert abs((one * other).mean().item()) < 5 / count**0.5
