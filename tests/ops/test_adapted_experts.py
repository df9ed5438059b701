"""Experts with adapters on kernels (Triton's interpreter without a GPU): the same as separate products of torch's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_d9d.ops import adapted_down, adapted_experts, adapted_gate_up, adapted_swiglu, moe_permute
from lightning_d9d.ops.adapted_experts import (
    adapted_down_reference,
    adapted_gate_up_reference,
    adapted_swiglu_reference,
    thin_product,
)
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.kernels import adapted_swiglu as swiglu_kernels
from lightning_d9d.ops.moe_permute import sort_by_expert
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.ops.grid import DEVICES, check_op, dtypes

HIDDEN, INNER, TOP_K = 40, 72, 2
RANKS = [1, 2, 3, 16, 64]
SIZES = {"usual": [5, 9, 70, 3], "empty and single": [0, 1, 0, 12, 0], "padded": [4, 0, 7], "no rows": [0, 0]}
"""Rows of each expert; "padded" has more rows than these."""


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * scale


def ends(sizes: list[int]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).int()


def num_rows(name: str) -> int:
    return sum(SIZES[name]) + (3 if name == "padded" else 0)


def gate_up_inputs(rows: int, experts: int, rank: int) -> dict[str, Tensor]:
    return {
        "x": noise(rows, HIDDEN),
        "weight": noise(experts, 2 * INNER, HIDDEN, scale=0.1),
        "a": noise(experts, 2 * rank, HIDDEN, scale=0.2),
    }


def swiglu_inputs(rows: int, experts: int, rank: int) -> dict[str, Tensor]:
    return {
        "gate_up": noise(rows, 2 * INNER),
        "h": noise(rows, 2 * rank, scale=rank**-0.5),
        "b": noise(experts, 2 * INNER, rank),
        "a": noise(experts, rank, INNER, scale=0.2),
        "weights": noise(rows).sigmoid(),
    }


def down_inputs(rows: int, experts: int, rank: int) -> dict[str, Tensor]:
    return {
        "inner": noise(rows, INNER),
        "weight": noise(experts, HIDDEN, INNER, scale=0.1),
        "h": noise(rows, rank, scale=rank**-0.5),
        "b": noise(experts, HIDDEN, rank),
    }


CASES = {
    "gate_up": (adapted_gate_up, adapted_gate_up_reference, gate_up_inputs, {"scale": 0.7}),
    "swiglu": (adapted_swiglu, adapted_swiglu_reference, swiglu_inputs, {"scale": 0.7}),
    "down": (adapted_down, adapted_down_reference, down_inputs, {}),
}
"""Op, reference, inputs, and further arguments."""


def check(name: str, sizes: str, rank: int, dtype: torch.dtype, device: str) -> None:
    op, reference, inputs, options = CASES[name]
    offsets, real = ends(SIZES[sizes]).to(device), sum(SIZES[sizes])

    def of_rows(function):
        """What is in padding of results is arbitrary."""

        def run(**tensors: Tensor):
            results = function(**tensors, offsets=offsets, **options)
            return tuple(result[:real] for result in (results if isinstance(results, tuple) else (results,)))

        return run

    tensors = inputs(num_rows(sizes), len(offsets), rank)
    trained = [each for each in tensors if each != "weight"]
    if sizes == "padded":  # nor is it in gradients
        trained = [each for each in trained if each in ("a", "b")]
    check_op(of_rows(op), of_rows(reference), tensors, dtype, device, gradients_of=trained)


@DEVICES
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("rank", RANKS)
def test_every_rank(name: str, rank: int, device: str) -> None:
    for dtype in dtypes(device):
        check(name, "usual", rank, dtype, device)


@DEVICES
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [name for name in SIZES if name != "usual"])
def test_groups_of_every_size(name: str, sizes: str, device: str) -> None:
    for dtype in dtypes(device):
        check(name, sizes, 2, dtype, device)


@DEVICES
@pytest.mark.parametrize("rank", RANKS)
def test_copies_are_made_and_summed(rank: int, device: str) -> None:
    """Products with few columns are dense, and those with many go by rows."""
    experts, tokens = 6, 11
    copies = sort_by_expert(torch.rand(tokens, experts).argsort(1)[:, :TOP_K].to(device), experts)
    arguments = {"offsets": copies.offsets, "copies": copies}
    gate_up, down = gate_up_inputs(tokens, experts, rank), down_inputs(tokens * TOP_K, experts, rank)
    for dtype in dtypes(device):
        for tensors, (op, reference, _, options) in ((gate_up, CASES["gate_up"]), (down, CASES["down"])):
            trained = [each for each in tensors if each != "weight"]
            check_op(op, reference, tensors, dtype, device, gradients_of=trained, **arguments, **options)


@DEVICES
@pytest.mark.parametrize("absent", [("h", "b"), ("a",)])
def test_one_adapter_alone(absent: tuple[str, ...], device: str) -> None:
    offsets, tensors = ends(SIZES["usual"]).to(device), swiglu_inputs(num_rows("usual"), 4, 2)
    none = dict.fromkeys(absent)
    tensors = {name: tensor for name, tensor in tensors.items() if name not in absent}
    check_op(adapted_swiglu, adapted_swiglu_reference, tensors, torch.float32, device, offsets=offsets, **none)


@DEVICES
def test_without_the_gradient_of_x(device: str) -> None:
    tensors = gate_up_inputs(num_rows("usual"), 4, 2)
    offsets = ends(SIZES["usual"]).to(device)
    options = {"offsets": offsets, "scale": 0.7}
    check_op(adapted_gate_up, adapted_gate_up_reference, tensors, torch.float32, device, gradients_of=["a"], **options)


@DEVICES
def test_trained_weights_run_as_separate_products(device: str) -> None:
    tensors = {name: each.to(device) for name, each in down_inputs(num_rows("usual"), 4, 2).items()}
    offsets = ends(SIZES["usual"]).to(device)
    gradients = []
    for op in (adapted_down, adapted_down_reference):
        weight = tensors["weight"].clone().requires_grad_()
        with using_kernels("triton"):
            op(**{**tensors, "weight": weight}, offsets=offsets).sum().backward()
        gradients.append(weight.grad)
    assert_bitwise_equal("weight", *gradients)


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 3, 8])
def test_thin_products_in_16_bits_do_not_wait(rank: int) -> None:
    x, offsets = noise(40, HIDDEN).to("cuda", torch.bfloat16), ends([10, 0, 30]).cuda()
    matrices = noise(3, rank, HIDDEN).to("cuda", torch.bfloat16)
    expected = thin_product(x.double(), matrices.double(), offsets)
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = thin_product(x, matrices, offsets)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert_close_named("product", y, expected.to(y.dtype))


@DEVICES
def test_compiled_whole(device: str) -> None:
    experts, tokens, rank = 3, 5, 2
    copies = sort_by_expert(torch.rand(tokens, experts).argsort(1)[:, :TOP_K].to(device), experts)
    up, down, between = (
        {name: tensor.to(device) for name, tensor in inputs(rows, experts, rank).items()}
        for inputs, rows in (
            (gate_up_inputs, tokens),
            (down_inputs, tokens * TOP_K),
            (swiglu_inputs, tokens * TOP_K),
        )
    )
    leaves = [up["x"], up["a"], between["b"], between["a"], between["weights"], down["b"]]
    for leaf in leaves:
        leaf.requires_grad_()

    def layer(x, a, b, a_down, weights, b_down):
        gate_up, h = adapted_gate_up(x, up["weight"], a, copies.offsets, 0.7, copies)
        inner, h = adapted_swiglu(gate_up, h, b, a_down, weights, copies.offsets, 0.7)
        assert h is not None
        return adapted_down(inner, down["weight"], h, b_down, copies.offsets, copies)

    results = []
    with using_kernels("triton"):
        for function in (torch.compile(layer, backend="aot_eager", fullgraph=True), layer):
            y = function(*leaves)
            results.append([y, *torch.autograd.grad(y.sum(), leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert_bitwise_equal("compiled", ours, theirs)


@DEVICES
def test_the_operators_are_what_torch_takes_them_for(device: str) -> None:
    experts, tokens, rank, ops = 3, 5, 2, torch.ops.lightning_d9d
    copies = sort_by_expert(torch.rand(tokens, experts).argsort(1)[:, :TOP_K].to(device), experts)
    places = (copies.offsets, copies.places, copies.sources())
    up, down, between = (
        [tensor.to(device).requires_grad_(name != "weight") for name, tensor in inputs(rows, experts, rank).items()]
        for inputs, rows in (
            (gate_up_inputs, tokens),
            (down_inputs, tokens * TOP_K),
            (swiglu_inputs, tokens * TOP_K),
        )
    )
    torch.library.opcheck(ops.adapted_gate_up.default, (*up, *places, 0.7, "torch"))
    torch.library.opcheck(ops.adapted_swiglu.default, (*between, copies.offsets, 0.7))
    torch.library.opcheck(ops.adapted_down.default, (*down, *places, "torch"))
    torch.library.opcheck(ops.moe_sources.default, (copies.places,))


@DEVICES
def test_sources(device: str) -> None:
    x = torch.arange(7.0, device=device).unsqueeze(1)
    indices = torch.rand(7, 4).argsort(1)[:, :TOP_K].to(device)
    for kernels in ("torch", "triton"):
        with using_kernels(kernels):
            rows, _, copies = moe_permute(x, indices, None, 4)
            assert_bitwise_equal(kernels, copies.sources().float(), rows.flatten())


@pytest.mark.parametrize(("kib", "stages"), [(227, (3, 3)), (163, (3, 2)), (99, (1, 1))])
def test_stages_fit_into_shared_memory(kib: int, stages: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward, for the largest rank."""
    monkeypatch.setattr(swiglu_kernels, "shared_memory", lambda device: kib * 1024)
    like = torch.zeros(1, dtype=torch.bfloat16)
    found = [
        tile.num_stages(like, RANKS[-1], RANKS[-1]) for tile in (swiglu_kernels._FORWARD, swiglu_kernels._BACKWARD)
    ]
    assert tuple(found) == stages


@pytest.mark.parametrize(("kib", "launches"), [(227, True), (163, False)])
def test_float32_needs_the_memory_of_hopper(kib: int, launches: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other GPUs take ordinary products."""
    launched = []
    forward = swiglu_kernels.forward
    monkeypatch.setattr(adapted_experts, "shared_memory", lambda device: kib * 1024)
    monkeypatch.setattr(swiglu_kernels, "forward", lambda *arguments: launched.append(forward(*arguments)))
    check("swiglu", "usual", 2, torch.float32, "cpu")
    assert bool(launched) == launches
