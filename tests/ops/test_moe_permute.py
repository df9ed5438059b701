"""Rows of experts and sums of copies against torch and a loop over tokens, with and without padding and weights."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_d9d.ops import moe_permute, moe_unpermute
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.moe_permute import (
    moe_permute_reference,
    moe_unpermute_reference,
    sort_by_expert,
    sort_reference,
)
from lightning_d9d.ops.moe_ranks import ranks_once
from lightning_d9d.ops.multihot import indices_from_multihot, multihot_from_indices
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.ops.grid import DEVICES, LAYOUTS, check_op, dtypes, laid_out, unwritten_memory_is_nan

SHAPES = [(1, 5, 1, 1), (7, 48, 6, 2), (13, 33, 4, 3), (3, 2056, 2, 2), (2, 1100, 7, 5)]
"""Tokens, width, experts, and how many a token visits; of the wide ones a program sees several parts."""
KERNELS = pytest.mark.parametrize("kernels", ["torch", "triton"])


def make_indices(num_tokens: int, num_experts: int, top_k: int, seed: int = 0) -> Tensor:
    """The last expert has none if there are enough others."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    return order.masked_fill(order == num_experts - 1, 0)[:, :top_k] if num_experts > top_k else order[:, :top_k]


def make(num_tokens: int, width: int, num_experts: int, top_k: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "x": torch.randn(num_tokens, width, generator=generator),
        "weights": torch.rand(num_tokens, top_k, generator=generator),
        "indices": make_indices(num_tokens, num_experts, top_k),
    }


def check_permute(
    tensors: dict[str, Tensor], num_experts: int, dtype: torch.dtype, device: str, multiple: int = 1, **options: Any
) -> None:
    def run(function: Any, x: Tensor, indices: Tensor, weights: Tensor | None = None) -> tuple[Tensor | None, ...]:
        rows, spread, permutation = function(x, indices, weights, num_experts, multiple=multiple)
        return rows, spread, *permutation[:3]

    check_op(
        lambda **given: run(moe_permute, **given),
        lambda **given: run(moe_permute_reference, **given),
        tensors,
        dtype,
        device,
        **options,
    )


def check_unpermute(
    tensors: dict[str, Tensor], num_experts: int, dtype: torch.dtype, device: str, multiple: int = 1, **options: Any
) -> None:
    permutation = sort_by_expert(tensors["indices"].to(device), num_experts, multiple)
    rows = torch.randn(permutation.num_rows, tensors["x"].shape[1], generator=torch.Generator().manual_seed(2))
    is_row = torch.zeros(permutation.num_rows, dtype=torch.bool)
    is_row[permutation.places.long().flatten().cpu()] = True
    rows[~is_row] = 1e4  # padding is not read
    check_op(
        lambda rows, weights=None: moe_unpermute(rows, permutation, weights),
        lambda rows, weights=None: moe_unpermute_reference(rows, permutation, weights),
        {"rows": rows} | ({"weights": tensors["weights"]} if "weights" in tensors else {}),
        dtype,
        device,
        **options,
    )


@DEVICES
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(device: str, shape: tuple[int, int, int, int], multiple: int) -> None:
    tensors = make(*shape)
    for dtype in dtypes(device):
        check_permute(tensors, shape[2], dtype, device, multiple, wide=["weights"])
        check_unpermute(tensors, shape[2], dtype, device, multiple, wide=["weights"])


@DEVICES
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(device: str, layout: str) -> None:
    tensors = make(6, 24, 5, 2)
    check_permute(tensors, 5, torch.float32, device, layout=layout)
    check_unpermute(tensors, 5, torch.float32, device, layout=layout)


@DEVICES
def test_each_gradient_alone_and_no_weights(device: str) -> None:
    tensors = make(6, 24, 5, 2)
    for names in (["x"], ["weights"], []):
        check_permute(tensors, 5, torch.float32, device, 4, gradients_of=names)
        names = ["rows" if name == "x" else name for name in names]
        check_unpermute(tensors, 5, torch.float32, device, 4, gradients_of=names)
    del tensors["weights"]
    check_permute(tensors, 5, torch.float32, device)
    check_unpermute(tensors, 5, torch.float32, device)


@DEVICES
@KERNELS
@pytest.mark.parametrize("shape", [(7, 48, 6, 2), (2, 1100, 7, 5)], ids=str)
def test_both_gradients_are_those_of_one_at_a_time(
    device: str, shape: tuple[int, int, int, int], kernels: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lightning_d9d.ops.kernels import moe_permute as moe_permute_kernels

    x, weights, indices = (tensor.to(device) for tensor in make(*shape).values())
    with using_kernels(kernels), unwritten_memory_is_nan():
        permutation = sort_by_expert(indices, shape[2], 4)
        rows = torch.randn(permutation.num_rows, shape[1], device=device).half()

        def gradients_of(*needed: str) -> list[Tensor]:
            leaves = {"rows": rows, "weights": weights}
            leaves = {name: leaf.detach().requires_grad_(name in needed) for name, leaf in leaves.items()}
            sums = moe_unpermute(leaves["rows"], permutation, leaves["weights"])
            return list(torch.autograd.grad(sums, [leaves[name] for name in needed], x.half()))

        expected = gradients_of("rows") + gradients_of("weights")
        for name in ("copy_rows", "dot_rows"):
            monkeypatch.setattr(moe_permute_kernels, name, None)
        of_rows, of_weights = gradients_of("rows", "weights")
    assert_bitwise_equal("rows", of_rows, expected[0])
    assert_close_named("weights", of_weights, expected[1])


@KERNELS
def test_second_derivatives(kernels: Any) -> None:
    tensors = make(5, 8, 4, 3)
    permutation = sort_by_expert(tensors["indices"], 4, 2)
    rows, weights = torch.randn(permutation.num_rows, 8, requires_grad=True), tensors["weights"].requires_grad_()
    x = tensors["x"].requires_grad_()
    with using_kernels(kernels):
        of_rows, _ = torch.autograd.grad(
            moe_unpermute(rows, permutation, weights), (rows, weights), x, create_graph=True
        )
        given = torch.autograd.grad(of_rows.square().sum(), (x, weights))
    copies = x.unsqueeze(1) * weights.unsqueeze(2)
    expected = torch.autograd.grad(copies.square().sum(), (x, weights))
    for name, ours, theirs in zip(("gradient", "weights"), given, expected, strict=True):
        assert_close_named(name, ours, theirs)


@DEVICES
def test_rows_too_large_for_a_cache(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_d9d.ops.kernels import moe_permute as moe_permute_kernels

    monkeypatch.setattr(moe_permute_kernels, "_STREAMED_BYTES", 0)
    check_permute(make(7, 48, 6, 2), 6, torch.float32, device, 4)


@DEVICES
@KERNELS
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(140, 9, 4), (140, 520, 4), (3, 40, 5), (5, 1, 1), (0, 4, 2)], ids=str
)
def test_rows_are_in_order(
    device: str, num_tokens: int, num_experts: int, top_k: int, multiple: int, dtype: torch.dtype, kernels: Any
) -> None:
    """More copies than a block has, more blocks than are summed at once, experts without any, and none at all."""
    indices = make_indices(num_tokens, num_experts, top_k)
    with using_kernels(kernels), unwritten_memory_is_nan():
        places, counts, offsets, num_rows = sort_by_expert(indices.to(device, dtype), num_experts, multiple)
    place, expected = 0, torch.zeros(num_tokens, top_k, dtype=torch.int32)
    for expert in range(num_experts):
        copies = (indices == expert).nonzero()
        assert counts[expert] == len(copies)
        for row, (token, k) in enumerate(copies.tolist()):
            expected[token, k] = place + row
        place += -(-len(copies) // multiple) * multiple
        assert offsets[expert] == place
    assert_bitwise_equal("places", places.cpu(), expected)
    assert counts.dtype == offsets.dtype == torch.int32
    assert place <= num_rows
    assert num_rows % multiple == 0
    assert num_rows == place or multiple > 1


@DEVICES
@pytest.mark.parametrize(("most_blocks", "most_steps"), [(3, 64), (1, 64), (2, 2)], ids=str)
def test_blocks_of_many_copies(device: str, most_blocks: int, most_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_d9d.ops.kernels import moe_permute as moe_permute_kernels

    monkeypatch.setattr(moe_permute_kernels, "_MOST_BLOCKS", most_blocks)
    monkeypatch.setattr(moe_permute_kernels, "_MOST_STEPS", most_steps)
    indices = make_indices(150, 9, 4).to(device)
    with using_kernels("triton"), unwritten_memory_is_nan():
        places, counts, offsets, _ = sort_by_expert(indices, 9, 4)
    for name, ours, theirs in zip(
        ("places", "counts", "offsets"), (places, counts, offsets), sort_reference(indices, 9, 4), strict=True
    ):
        assert_bitwise_equal(name, ours, theirs)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "num_experts"), [(16384, 128), (40_001, 512), (150_000, 8)], ids=str)
def test_sort_of_many_copies(num_tokens: int, num_experts: int) -> None:
    indices = make_indices(num_tokens, num_experts, 8).cuda()
    ours = sort_by_expert(indices, num_experts, 16)[:3]
    theirs = sort_reference(indices, num_experts, 16)
    for name, our, their in zip(("places", "counts", "offsets"), ours, theirs, strict=True):
        assert_bitwise_equal(name, our, their)


@DEVICES
@KERNELS
def test_indices_that_lie_otherwise(device: str, kernels: Any) -> None:
    indices = make_indices(70, 5, 3).to(device)
    with using_kernels(kernels):
        expected = sort_by_expert(indices, 5)
        actual = sort_by_expert(indices.t().contiguous().t(), 5)
        none = sort_by_expert(indices[:0], 0)
    for name in ("places", "counts", "offsets"):
        assert_bitwise_equal(name, getattr(actual, name), getattr(expected, name))
    assert [len(each) for each in none[:3]] == [0, 0, 0]


def test_there_is_room_for_the_most_padding() -> None:
    indices = torch.arange(6).view(3, 2)
    assert sort_by_expert(indices, 8, 16).num_rows == 6 * 16 == int(sort_by_expert(indices, 8, 16).offsets[-1])
    assert sort_by_expert(torch.zeros_like(indices), 8, 16).num_rows == 6 * 16
    assert sort_by_expert(torch.arange(1000).view(500, 2) % 4, 4, 16).num_rows == (1000 + 4 * 15) // 16 * 16


@DEVICES
@pytest.mark.parametrize("num_groups", [0, 2, 5])
@pytest.mark.parametrize("weighted", [True, False])
def test_last_groups_that_are_left_out(device: str, num_groups: int, weighted: bool) -> None:
    """Their copies are not made, and nothing is added for them, forward and backward."""
    tensors = make(7, 48, 6, 2)
    whole = sort_by_expert(tensors["indices"], 6)
    num_rows = int(whole.counts[:num_groups].sum())
    is_there = (tensors["indices"] < num_groups).float()
    of_rows = torch.randn(num_rows, 48, generator=torch.Generator().manual_seed(2))

    def copied(x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        part = sort_by_expert(indices, 6)._replace(num_rows=num_rows)
        return part.copy(x), part.spread(weights)

    def copied_whole(x: Tensor, weights: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows, spread, _ = moe_permute_reference(x, indices, weights, 6)
        return rows[:num_rows], spread[:num_rows]

    def summed(rows: Tensor, indices: Tensor, weights: Tensor | None = None) -> Tensor:
        return moe_unpermute(rows, sort_by_expert(indices, 6)._replace(num_rows=num_rows), weights)

    def summed_whole(rows: Tensor, indices: Tensor, weights: Tensor | None = None) -> Tensor:
        rows = torch.cat([rows, rows.new_zeros(14 - num_rows, 48)])
        there = None if weights is None else weights * is_there.to(weights)
        return moe_unpermute_reference(rows, sort_by_expert(indices, 6), there)

    for dtype in dtypes(device):
        check_op(copied, copied_whole, tensors, dtype, device, wide=["weights"])
        given = {"rows": of_rows, "indices": tensors["indices"]} | ({"weights": tensors["weights"]} if weighted else {})
        check_op(summed, summed_whole, given, dtype, device, wide=["weights"])


@DEVICES
@KERNELS
@pytest.mark.parametrize("shape", [(0, 8, 4, 2), (3, 0, 4, 2)], ids=str)
def test_nothing_to_copy(device: str, shape: tuple[int, int, int, int], kernels: Any) -> None:
    x, weights, indices = (each.to(device) for each in make(*shape).values())
    x.requires_grad_()
    weights.requires_grad_()
    with using_kernels(kernels):
        rows, spread, permutation = moe_permute(x, indices, weights, shape[2], multiple=4)
        sums = moe_unpermute(rows, permutation, weights)
        (sums.sum() + spread.sum()).backward()
    assert sums.shape == x.grad.shape == x.shape
    assert_bitwise_equal("weights", weights.grad, torch.ones_like(weights))
    assert spread.shape == rows.shape[:1]


@DEVICES
def test_under_the_compiler(device: str) -> None:
    tensors = {name: tensor.to(device) for name, tensor in make(6, 16, 5, 2).items()}
    x, weights = (tensors[name].requires_grad_() for name in ("x", "weights"))

    def run(x: Tensor, weights: Tensor, indices: Tensor) -> Tensor:
        rows, spread, permutation = moe_permute(x, indices, weights, 5, multiple=4)
        return moe_unpermute(rows * spread.unsqueeze(1), permutation, weights)

    ops = torch.ops.lightning_d9d
    with using_kernels("triton"):
        places, counts, offsets, num_rows = sort_by_expert(tensors["indices"], 5, 4)
        rows = torch.randn(num_rows, 16, device=device, requires_grad=True)
        for op, arguments in (
            (ops.moe_copy_rows, (x, places, weights, counts, offsets, num_rows, True)),
            (ops.moe_sum_rows, (rows, places, weights, counts, offsets, True)),
            (ops.moe_copy_and_dot_rows, (x.detach(), rows.detach(), places, weights.detach(), counts, offsets, True)),
            (ops.moe_sort, (tensors["indices"], 5, 4)),
            (ops.moe_ranks, (tensors["indices"], 3, 2)),
        ):
            checks = ("test_schema", "test_autograd_registration", "test_faketensor")
            torch.library.opcheck(op, arguments, test_utils=checks)
        expected, actual = run(**tensors), torch.compile(run, backend="aot_eager", fullgraph=True)(**tensors)
        of = [torch.autograd.grad(each.square().sum(), [x, weights]) for each in (expected, actual)]
    assert_bitwise_equal("sums", actual, expected)
    for name, ours, theirs in zip(("x", "weights"), *of, strict=True):
        assert_bitwise_equal(name, ours, theirs)


def test_kernels_of_the_backward_are_those_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_d9d.ops.kernels import moe_permute as moe_permute_kernels

    x = torch.randn(3, 4, requires_grad=True)
    with using_kernels("torch"):
        rows, _, _ = moe_permute(x, make_indices(3, 4, 2), None, 4)
    monkeypatch.setattr(moe_permute_kernels, "sum_rows", None)
    with using_kernels("triton"):
        rows.sum().backward()
    assert_bitwise_equal("gradient", x.grad, torch.full_like(x, 2))


@DEVICES
@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_local", "num_ranks"),
    [(1, 1, 3, 1), (300, 8, 16, 8), (1030, 3, 5, 2), (7, 6, 1, 9), (0, 2, 4, 2)],
)
def test_ranks_of_tokens_come_once(device: str, num_tokens: int, top_k: int, num_local: int, num_ranks: int) -> None:
    """The kernel and torch's operators find, for each token, what a loop over its experts does."""
    experts = make_indices(num_tokens, num_local * num_ranks, top_k)
    ranks = [[expert // num_local for expert in row] for row in experts.tolist()]
    once = [[num_ranks if rank in row[:k] else rank for k, rank in enumerate(row)] for row in ranks]
    expected = torch.tensor(once, dtype=torch.int32, device=device).view(num_tokens, top_k)
    for kernels, dtype, layout in product(("torch", "triton"), (torch.int32, torch.int64), LAYOUTS[:3]):
        given = laid_out(experts, layout).to(device, dtype)
        with using_kernels(kernels), unwritten_memory_is_nan():
            assert_bitwise_equal(f"{kernels}, {dtype}", ranks_once(given, num_local, num_ranks), expected)


def test_multihot_there_and_back() -> None:
    indices = torch.tensor([[2, 0], [3, 4], [1, 3]])
    weights = torch.rand(3, 2, dtype=torch.float64, requires_grad=True)
    visits, probabilities = multihot_from_indices(indices, weights, 5)
    assert visits.int().tolist() == [[1, 0, 1, 0, 0], [0, 0, 0, 1, 1], [0, 1, 0, 1, 0]]
    assert_bitwise_equal("weights", probabilities[visits], torch.stack([weights[0].flip(0), *weights[1:]]).flatten())
    assert not probabilities[~visits].any()
    back, of_back = indices_from_multihot(visits, probabilities, 2)
    assert back.tolist() == [[0, 2], [3, 4], [1, 3]]
    assert_bitwise_equal("weights of the way back", of_back, torch.stack([weights[0].flip(0), *weights[1:]]))
    (of_back * torch.arange(6).view(3, 2)).sum().backward()
    assert weights.grad.tolist() == [[1, 0], [2, 3], [4, 5]]
    empty = multihot_from_indices(indices[:0], weights[:0], 5)
    assert [each.shape for each in (*empty, *indices_from_multihot(*empty, 2))] == [(0, 5), (0, 5), (0, 2), (0, 2)]
