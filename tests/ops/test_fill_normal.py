"""Normal values by place: equal bits from the host, the kernel and the definition, and how normal they are."""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_d9d import ConfigError
from lightning_d9d.ops import fill_normal, fill_normal_
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.places import VARIANCE, Runs, normal_reference, runs_of, word_of
from tests.harness.compare import assert_bitwise_equal
from tests.ops.grid import DEVICES

KEY = 0xFEDCBA98_76543210_01234567_89ABCDEF
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
"""The kernel writes bfloat16 as integers, so the interpreter has it, too."""
SLICES: dict[str, tuple[tuple[int, ...], list[range]]] = {
    "a number": ((), []),
    "a vector": ((2053,), [range(2053)]),
    "one of it": ((7,), [range(6, 7)]),
    "rows": ((9, 5), [range(3, 8), range(5)]),
    "columns": ((9, 5), [range(9), range(2, 5)]),
    "a column": ((9, 5), [range(9), range(3, 4)]),
    "columns far apart": ((3, 1500), [range(3), range(1497, 1500)]),
    "experts": ((5, 3, 7), [range(1, 4), range(3), range(7)]),
    "rows of experts": ((5, 3, 7), [range(5), range(1, 2), range(7)]),
    "columns of experts": ((5, 3, 7), [range(2, 5), range(3), range(7)[3:]]),
    "a corner of experts": ((5, 3, 7), [range(2, 5), range(1, 3), range(2, 4)]),
    "four dims": ((2, 3, 4, 5), [range(2), range(1, 3), range(4), range(1, 3)]),
    "sizes of one": ((1, 6, 1, 4), [range(1), range(2, 5), range(1), range(4)]),
    "nothing": ((9, 5), [range(9, 9), range(5)]),
    "behind 2**33": ((2**31, 10), [range(2**30, 2**30 + 3), range(3, 8)]),
}
EACH_SLICE = pytest.mark.parametrize("name", SLICES)
DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "initial-weights.md"


def places_of(shape: Sequence[int], ranges: Sequence[range]) -> list[int]:
    """Return places by the definition of row-major order."""
    places = np.zeros((), np.int64)
    for size, held in zip(shape, ranges, strict=True):
        places = places[..., None] * size + np.asarray(held, np.int64)
    return places.flatten().tolist()


def filled(name: str, dtype: torch.dtype, device: str = "cpu", std: float = 0.02) -> Tensor:
    shape, ranges = SLICES[name]
    return fill_normal_(
        torch.full([len(r) for r in ranges], math.nan, dtype=dtype, device=device), std, KEY, shape, ranges
    )


def expected(name: str, dtype: torch.dtype, std: float = 0.02) -> Tensor:
    shape, ranges = SLICES[name]
    return normal_reference(places_of(shape, ranges), std, KEY).to(dtype).view([len(r) for r in ranges])


# Bits


def test_words_are_the_published_ones() -> None:
    """The words are those of Random123 for a counter and a key of zeros. The counter of place 0 is 1."""
    assert [word_of(place, 0) for place in range(-4, 0)] == [
        0x16554D9ECA36314C,
        0xDB20FE9D672D0FDC,
        0xD7E772CEE186176B,
        0x7E68B68AEC7BA23B,
    ]


@pytest.mark.parametrize("first", [0, 3, 2**33 + 6])
def test_words_are_numpys(first: int) -> None:
    words = fill_normal.words_of(KEY, Runs(first, 0, 40, 1))
    assert words.tolist() == [[word_of(first + i, KEY) for i in range(40)]]


@EACH_SLICE
def test_runs_are_the_places_of_a_slice(name: str) -> None:
    shape, ranges = SLICES[name]
    if not math.prod(map(len, ranges)):
        return
    runs = list(runs_of(shape, ranges))
    found = [r.first + row * r.stride + column for r in runs for row in range(r.num_runs) for column in range(r.length)]
    assert found == places_of(shape, ranges)


@EACH_SLICE
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64, torch.float8_e4m3fn])
def test_the_host_has_the_bits_of_the_definition(name: str, dtype: torch.dtype) -> None:
    bits = torch.uint8 if dtype == torch.float8_e4m3fn else dtype
    assert_bitwise_equal(name, filled(name, dtype).view(bits), expected(name, dtype).view(bits))


@DEVICES
@EACH_SLICE
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_has_the_bits_of_the_definition(name: str, dtype: torch.dtype, device: str) -> None:
    with using_kernels("triton"):
        assert_bitwise_equal(name, filled(name, dtype, device).cpu(), expected(name, dtype))


@pytest.mark.parametrize("std", [0.0, 1.0, 3e-6, 1e4, 1e-42])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_scale(std: float, dtype: torch.dtype) -> None:
    """Halfway cases, numbers too small for the dtype and, in float16, too large ones."""
    with np.errstate(over="ignore"):
        host = filled("a vector", dtype, std=std)
    with using_kernels("triton"):
        kernel = filled("a vector", dtype, std=std)
    assert_bitwise_equal("host", host, expected("a vector", dtype, std))
    assert_bitwise_equal("kernel", kernel, host)


@EACH_SLICE
@pytest.mark.parametrize("gap", [-1, 2, 10**6])
def test_pieces_and_threads_do_not_matter(name: str, gap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fill_normal, "_CHUNK", 6)
    monkeypatch.setattr(fill_normal, "_GAP", gap)
    monkeypatch.setattr(fill_normal, "num_threads", lambda: 3)
    assert_bitwise_equal(name, filled(name, torch.float32), expected(name, torch.float32))


def test_threads_work_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A piece waits until another thread is at one, too."""
    both, words_of = threading.Barrier(2, timeout=60), fill_normal.words_of

    def together(key: int, runs: Runs) -> NDArray[np.uint64]:
        both.wait()
        return words_of(key, runs)

    monkeypatch.setattr(fill_normal, "_CHUNK", 8)
    monkeypatch.setattr(fill_normal, "num_threads", lambda: 2)
    monkeypatch.setattr(fill_normal, "words_of", together)
    values = fill_normal_(torch.empty(32), 1.0, KEY, (32,), [range(32)])
    assert_bitwise_equal("values", values, normal_reference(range(32), 1.0, KEY))


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_layouts_do_not_matter(kernels, device: str) -> None:
    target = torch.zeros(6, 7, device=device).T
    with using_kernels(kernels):
        assert fill_normal_(target, 0.02, KEY, (7, 6), [range(7), range(6)]) is target
    assert_bitwise_equal("target", target.cpu().contiguous(), normal_reference(range(42), 0.02, KEY).view(7, 6))


def test_keys_decide() -> None:
    def bits(key: int) -> list[float]:
        return fill_normal_(torch.empty(50), 1.0, key, (50,), [range(50)]).tolist()

    different = {tuple(bits(key)) for key in (0, 1, 2**63, 2**64, 2**127, 2**128 - 1)}
    assert len(different) == 6


@pytest.mark.parametrize(
    ("dtype", "digest"),
    [(torch.float32, "e34085f4eb80967d"), (torch.bfloat16, "a3c3b4643593e7d0"), (torch.float16, "0cc639655202d98a")],
    ids=str,
)
def test_every_bit_is_pinned(dtype: torch.dtype, digest: str) -> None:
    """A seed means the same weights in a later version; a flipped bit is another digest."""
    values = filled("a vector", dtype).view(torch.uint8)
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == digest
    values[1000] ^= 1
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] != digest
    with pytest.raises(AssertionError):
        assert_bitwise_equal("flipped", values.view(dtype), expected("a vector", dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_gpu_has_the_bits_of_the_host(dtype: torch.dtype) -> None:
    """Many values, in each dtype, whole and by columns."""
    shape = (3, 2048, 1001)
    for ranges in ([range(3), range(2048), range(1001)], [range(1, 3), range(7, 2000), range(500, 1001)]):
        sizes = [len(r) for r in ranges]
        host, device = (
            fill_normal_(torch.empty(sizes, dtype=dtype, device=each), 0.02, KEY, shape, ranges)
            for each in ("cpu", "cuda")
        )
        assert_bitwise_equal(f"{dtype}, {sizes}", device.cpu(), host)


@pytest.mark.gpu
def test_more_than_32_bits_of_elements() -> None:
    count = 2**31 + 5
    target = fill_normal_(torch.empty(count, dtype=torch.bfloat16, device="cuda"), 1.0, KEY, (count,), [range(count)])
    assert_bitwise_equal(
        "last", target[-100:].cpu(), normal_reference(range(count - 100, count), 1.0, KEY).to(torch.bfloat16)
    )


@pytest.mark.parametrize(
    ("dtype", "std", "match"),
    [
        (torch.int64, 1.0, r"torch.int64 and std=1.0"),
        (torch.float32, -1.0, "at least 0, not .* std=-1.0"),
        (torch.float32, math.nan, "std=nan"),
    ],
)
def test_what_cannot_be_is_refused(dtype: torch.dtype, std: float, match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        fill_normal_(torch.zeros(2, dtype=dtype), std, KEY, (2,), [range(2)])


def test_threads_are_the_cores_of_this_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(64), raising=False)
    assert fill_normal.num_threads() == 64 // int(fill_normal.os.environ.get("LOCAL_WORLD_SIZE", "1"))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert fill_normal.num_threads() == 8
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(3), raising=False)
    assert fill_normal.num_threads() == 3


# How normal they are

UNIT = 2**16
COINS = {UNIT * (ones - 16): math.comb(32, ones) for ones in range(33)}
PIECES = {total - (UNIT - 1): UNIT - abs(UNIT - 1 - total) for total in range(2 * UNIT - 1)}
"""The summands, each less its mean, with the number of words that have it."""


def moment(power: int) -> Fraction:
    """Return a moment of the integers, over all words."""

    def of(counts: dict[int, int], power: int) -> Fraction:
        return Fraction(sum(count * value**power for value, count in counts.items()), sum(counts.values()))

    return sum((math.comb(power, k) * of(COINS, k) * of(PIECES, power - k) for k in range(power + 1)), Fraction(0))


def share_beyond(deviations: float) -> Fraction:
    """Return the share of words whose integer is farther from zero than this number of standard deviations."""
    bound = math.floor(deviations * math.sqrt(VARIANCE))
    above = 0
    for coin, count in COINS.items():
        below = max(0, min(bound - coin + UNIT, 2 * UNIT - 1))  # sums of pieces that do not get there, from zero
        over = max(0, below - UNIT)
        above += count * (UNIT**2 - below * (below + 1) // 2 + over * (over + 1))
    return 2 * Fraction(above, 2**32 * UNIT**2)


def normal_share_beyond(deviations: float) -> float:
    return math.erfc(deviations / math.sqrt(2))


def test_moments_and_tails_are_as_documented() -> None:
    """Exactly, by counting all words."""
    assert moment(1) == moment(3) == 0
    assert float(moment(2)) == VARIANCE
    excess = float(moment(4) / moment(2) ** 2 - 3)
    largest = (max(COINS) + max(PIECES)) / math.sqrt(VARIANCE)
    farthest = max(
        abs(float(share_beyond(x / 200)) - normal_share_beyond(x / 200)) / 2 for x in range(1200)
    )  # of the distribution functions
    documented = DOCS.read_text(encoding="utf-8")
    for number in (f"{excess:.4f}", f"{largest:.3f}", f"{farthest:.4f}"):
        assert f" {number} " in documented, number
    for deviations in range(1, 6):
        ours, normal = float(share_beyond(deviations)), normal_share_beyond(deviations)
        row = f"| {deviations} | {ours:.3g} | {normal:.3g} | {ours / normal:.3f} |"
        assert row in documented, row


def test_drawn_values_have_these_tails() -> None:
    """There are four million values. Neighbours are not correlated, within a call of Philox or across calls."""
    count = 2**22
    x = fill_normal_(torch.empty(count), 1.0, KEY, (count,), [range(count)]).double()
    assert abs(x.mean()) < 5 / count**0.5
    assert abs(x.var() - 1) < 5 * (2 / count) ** 0.5
    for deviations in (0.5, 1, 2, 3, 4):
        share = float(share_beyond(deviations))
        assert abs((x.abs() > deviations).double().mean() - share) < 5 * (share * (1 - share) / count) ** 0.5
    for lag in (1, 2, 3, 4, 5, 8, 2**17):
        for one, other in ((x[lag:], x[:-lag]), (x[lag:].abs(), x[:-lag].abs())):
            correlation = torch.corrcoef(torch.stack([one, other]))[0, 1]
            assert abs(correlation) < 5 / (count - lag) ** 0.5
