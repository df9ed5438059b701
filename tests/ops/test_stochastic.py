"""Stochastic rounding: without bias, to a neighbour, from bits that follow from seed and index alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_d9d import ConfigError
from lightning_d9d.ops import round_stochastic_
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.philox import philox
from lightning_d9d.ops.stochastic import round_stochastic_reference
from tests.harness.compare import assert_bitwise_equal
from tests.ops.grid import DEVICES, LAYOUTS, laid_out

NUM_SAMPLES = 2**16
SIGMAS = 5


def rounded(source: Tensor, seed: int, offset: int = 0) -> Tensor:
    return round_stochastic_(torch.empty_like(source, dtype=torch.bfloat16), source, seed, offset)


def every_scale(count: int) -> Tensor:
    """Normal numbers, numbers too small for that, all but infinite ones, and what is no number."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.empty(count).uniform_(-149, 128, generator=generator)
    values = torch.randn(count, generator=generator).sign() * torch.exp2(exponents)
    special = [float("nan"), -float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 3.4e38, -3.4e38, 1e-45]
    values[: len(special)] = torch.tensor(special)[:count]
    return values


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    ],
)
def test_philox_has_the_published_values(counter, key, expected):
    words = philox(tuple(torch.tensor([c]) for c in counter), torch.tensor(key))
    assert tuple(int(word) for word in words) == expected


@DEVICES
@pytest.mark.parametrize("offset", [0, 3, 8, 2**33 + 5])
@pytest.mark.parametrize("count", [1, 7, 2048, 5003])
def test_kernel_equals_reference(count, offset, device):
    source = every_scale(count)
    with using_kernels("triton"):
        actual = rounded(source.to(device), 2**40 + 3, offset)
    assert_bitwise_equal("rounded", actual, round_stochastic_reference(source, 2**40 + 3, offset))


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_matter(layout, kernels, device):
    source = laid_out(torch.randn(6, 7, generator=torch.Generator().manual_seed(0)), layout).to(device)
    target = laid_out(torch.zeros(6, 7), "transposed" if layout == "expanded" else layout).to(device, torch.bfloat16)
    with using_kernels(kernels):
        assert round_stochastic_(target, source, 1) is target
    assert_bitwise_equal("target", target.contiguous(), round_stochastic_reference(source.cpu(), 1))


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_nothing_is_rounded_to_nothing(kernels, device):
    with using_kernels(kernels):
        assert rounded(torch.zeros(0, 3, device=device), 1).shape == (0, 3)


@DEVICES
def test_parts_get_the_bits_of_the_whole(device):
    source = torch.randn(3000, generator=torch.Generator().manual_seed(0)).to(device)
    with using_kernels("triton"):
        whole, parts = (
            rounded(source, 7),
            [rounded(part, 7, start) for start, part in ((1301, source[1301:]), (0, source[:1301]))],
        )
    assert_bitwise_equal("parts", torch.cat(parts[::-1]), whole)


def test_seeds_differ():
    source = torch.full((1000,), 1 + 2**-8)
    assert 400 < int((rounded(source, 1) != rounded(source, 2)).sum()) < 600
    assert 400 < int((rounded(source, 1) != rounded(source, 1 + 2**32)).sum()) < 600


@pytest.mark.parametrize("value", [1.0, -2.5, 3e-40, 2.0**127])
@pytest.mark.parametrize("fraction", [0.0, 1 / 256, 0.3, 0.5, 0.99])
def test_values_go_to_a_neighbour_without_bias(value, fraction):
    """Each sample is above with probability `fraction`: mean and variance are those of a coin."""
    low = torch.tensor(value, dtype=torch.bfloat16)
    high = (low.view(torch.int16) + 1).view(torch.bfloat16)
    source = low.float().view(torch.int32) + round(fraction * 65536)
    fraction = round(fraction * 65536) / 65536
    samples = rounded(source.view(torch.float32).expand(NUM_SAMPLES).contiguous(), 11)
    is_high = samples == high
    assert bool((is_high | (samples == low)).all())
    deviation = (fraction * (1 - fraction) / NUM_SAMPLES) ** 0.5
    assert abs(is_high.double().mean().item() - fraction) <= SIGMAS * deviation
    assert abs(is_high.double().var(correction=0).item() - fraction * (1 - fraction)) <= SIGMAS * deviation


def test_neighbouring_elements_and_seeds_are_independent():
    """No correlation along the elements, from one seed to the next, and none of any 16 bits that one call gives."""
    source = torch.full((NUM_SAMPLES,), 1 + 2**-8)
    first, second = ((rounded(source, seed) > 1).double() * 2 - 1 for seed in (1, 2))
    pairs = [(first[lag:], first[:-lag]) for lag in range(1, 17)] + [(first, second)]
    for one, other in pairs:
        assert abs((one * other).mean().item()) <= SIGMAS / NUM_SAMPLES**0.5
    for column in first.view(-1, 8).unbind(1):
        assert abs(column.mean().item()) <= SIGMAS / len(column) ** 0.5


def test_what_is_no_number_stays_and_finite_stays_finite():
    largest = torch.finfo(torch.bfloat16).max
    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1, -(2**23) + 1], dtype=torch.int32)  # NaN of all kinds
    for seed in range(50):
        assert bool(rounded(bits.view(torch.float32), seed).isnan().all())
        values = torch.tensor([float("inf"), -float("inf"), 3.4028e38, -3.4028e38, largest])
        expected = torch.tensor([float("inf"), -float("inf"), largest, -largest, largest], dtype=torch.bfloat16)
        assert_bitwise_equal("special", rounded(values, seed), expected)


def test_what_bfloat16_holds_stays():
    bits = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    numbers = bits[~bits.isnan()]
    assert_bitwise_equal("numbers", rounded(numbers.float(), 5), numbers)


def test_the_compiler_takes_it_whole():
    source = torch.randn(40, generator=torch.Generator().manual_seed(0))

    def around(source: Tensor) -> Tensor:
        target = torch.zeros_like(source, dtype=torch.bfloat16)
        round_stochastic_(target, source * 2, 3)
        return target + 1

    compiled = torch.compile(around, backend="aot_eager", fullgraph=True)
    assert_bitwise_equal("compiled", compiled(source), around(source))
    arguments = (torch.zeros(40, dtype=torch.bfloat16), source, 3, 5)
    torch.library.opcheck(torch.ops.lightning_d9d.round_stochastic_.default, arguments)


@pytest.mark.parametrize(
    ("target", "source", "seed", "offset", "match"),
    [
        (torch.zeros(2), torch.zeros(2), 0, 0, r"torch.float32 \[2\] and source"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2).double(), 0, 0, "float64"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3), 0, 0, r"\[3\] must be"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), -1, 0, "seed=-1"),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), 0, -1, "offset=-1"),
    ],
)
def test_what_cannot_be_is_refused(target, source, seed, offset, match):
    with pytest.raises(ConfigError, match=match):
        round_stochastic_(target, source, seed, offset)
