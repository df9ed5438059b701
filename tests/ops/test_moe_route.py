"""Experts, their weights and counts against torch, over kinds of scores, biases and choices."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_d9d import ConfigError
from lightning_d9d.ops import moe_route
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.moe_route import moe_route_reference
from tests.harness.compare import assert_bitwise_equal
from tests.ops.grid import DEVICES, LAYOUTS, check_op, dtypes

SHAPES = [(1, 1, 1), (21, 3, 3), (33, 8, 2), (7, 100, 6), (3, 512, 8)]
"""Tokens, experts, and how many a token visits."""


def make_logits(num_tokens: int, num_experts: int, seed: int = 0) -> Tensor:
    """Return logits; no two of a token are equal in float16."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)
    return (order - (num_experts - 1) / 2) * 8 / num_experts * torch.linspace(0.5, 1, num_tokens).unsqueeze(1)


def make_bias(num_experts: int) -> Tensor:
    return torch.linspace(-0.7, 0.9, num_experts).roll(num_experts // 3)


def check(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype, device: str, **options: Any) -> None:
    logits = make_logits(num_tokens, num_experts)
    check_op(moe_route, moe_route_reference, {"logits": logits}, dtype, device, top_k=top_k, **options)


@DEVICES
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_and_dtypes(device: str, shape: tuple[int, int, int], scores: str, normalize: bool) -> None:
    for dtype in dtypes(device) if shape[1] < 100 else [torch.float16]:  # in bfloat16 some of so many are equal
        check(*shape, dtype, device, scores=scores, normalize=normalize)


@DEVICES
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_with_scores(device: str, layout: str, scores: str, normalize: bool) -> None:
    options = dict(layout=layout, scores=scores, normalize=normalize, with_scores=True)
    check(9, 12, 3, torch.float32, device, **options)
    check(9, 12, 3, torch.float32, device, gradients_of=[], **options)


@DEVICES
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_bias_and_chosen_experts(device: str, scores: str, normalize: bool) -> None:
    op, reference = (
        partial(each, top_k=3, scores=scores, normalize=normalize) for each in (moe_route, moe_route_reference)
    )
    logits = make_logits(20, 12)
    tensors = {"logits": logits, "bias": make_bias(12)}
    check_op(op, reference, tensors, torch.float32, device, gradients_of=["logits"], wide=["bias"])
    plain = moe_route_reference(logits, 3).indices
    assert not torch.equal(moe_route_reference(logits, 3, bias=make_bias(12), scores=scores).indices, plain)
    chosen = torch.arange(60).remainder(12).view(20, 3)
    check_op(op, reference, {"logits": logits, "chosen": chosen}, torch.float32, device, gradients_of=["logits"])


@DEVICES
@pytest.mark.parametrize("which", ["weights", "scores"])
@pytest.mark.parametrize("normalize", [True, False])
def test_each_gradient_alone(device: str, normalize: bool, which: str) -> None:
    def result(op: Any, logits: Tensor) -> Tensor:
        return getattr(op(logits, 3, normalize=normalize, with_scores=True), which)

    tensors = {"logits": make_logits(9, 12)}
    check_op(partial(result, moe_route), partial(result, moe_route_reference), tensors, torch.float32, device)


@DEVICES
def test_more_tiles_than_programs(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_d9d.ops.kernels import moe_route as moe_route_kernels

    monkeypatch.setattr(moe_route_kernels, "_TILE", 16)
    check(9 if device == "cpu" else 3000, 8, 3, torch.float32, device)


@DEVICES
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_equal_experts_come_in_order(device: str, scores: str, bias: bool) -> None:
    logits = torch.tensor([[0.0, -0.0, 0.0, -1.0, 0.0], [-2.0, 1.0, -2.0, 1.0, -2.0]], device=device)
    zeros = torch.zeros(5, device=device) if bias else None
    with using_kernels("triton"):
        indices, _, counts, _ = moe_route(logits, 4, scores=scores, bias=zeros)
    assert indices.tolist() == [[0, 1, 2, 4], [1, 3, 0, 2]]
    assert counts.tolist() == [2, 2, 2, 1, 1]


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
@pytest.mark.parametrize("bias", [False, True])
def test_what_is_no_number(device: str, scores: str, normalize: bool, bias: bool, kernels: str) -> None:
    logits = make_logits(4, 6).to(device)
    nan = float("nan")
    logits[1] = nan
    logits[2, :3] = torch.tensor([-nan, float("inf"), nan])
    options = dict(scores=scores, normalize=normalize, bias=torch.zeros(6, device=device) if bias else None)
    with using_kernels(kernels):
        indices, weights, counts, _ = moe_route(logits, 3, **options)
        sound = moe_route(logits[::3], 3, **options)
    assert weights[1].isnan().all()
    assert bias or weights[2].isnan().any()
    for token in indices.tolist():
        assert len({*token}) == 3
        assert {*token} <= {*range(6)}
    assert int(counts.sum()) == 12
    assert_bitwise_equal("indices of the others", indices[::3], sound.indices)
    assert_bitwise_equal("weights of the others", weights[::3], sound.weights)


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("scores", ["softmax", "sigmoid"])
def test_scores_of_zero_have_finite_weights(device: str, scores: str, kernels: str) -> None:
    logits = torch.tensor([[0.0, -1000.0, -1001.0, -2000.0]], device=device, requires_grad=True)
    chosen = torch.tensor([[1, 2]], device=device)
    with using_kernels(kernels):
        _, weights, _, _ = moe_route(logits, 2, scores=scores, chosen=chosen)
        weights[0, 0].backward()
    assert weights.tolist()[0] == pytest.approx([0.7310586, 0.2689414])
    assert logits.grad.tolist()[0] == pytest.approx([0, 0.1966119, -0.1966119, 0])
    with using_kernels(kernels):
        assert moe_route(logits, 4, scores=scores).indices.tolist() == [[0, 1, 2, 3]]


@DEVICES
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_no_tokens(device: str, kernels: str) -> None:
    logits = torch.zeros(0, 6, device=device, requires_grad=True)
    with using_kernels(kernels):
        indices, weights, counts, scores = moe_route(logits, 2, with_scores=True)
        (weights.sum() + scores.sum()).backward()
    assert indices.shape == weights.shape == (0, 2)
    assert counts.tolist() == [0] * 6
    assert logits.grad.shape == (0, 6)


@DEVICES
def test_under_the_compiler(device: str) -> None:
    logits = make_logits(9, 12).to(device).requires_grad_()

    def run(logits: Tensor) -> tuple[Tensor, ...]:
        routes = moe_route(logits, 3, scores="sigmoid", with_scores=True)
        return routes.indices, routes.weights, routes.counts, routes.scores

    with using_kernels("triton"):
        # The rest of opcheck, which starts a sum with the first result, does not take one of integers.
        checks = ("test_schema", "test_autograd_registration", "test_faketensor")
        arguments = logits, 3, None, None, True, False, True
        torch.library.opcheck(torch.ops.lightning_d9d.moe_route, arguments, test_utils=checks)
        expected, actual = run(logits), torch.compile(run, backend="aot_eager", fullgraph=True)(logits)
        of = [torch.autograd.grad(each[1].square().sum() + each[3].sum(), logits)[0] for each in (expected, actual)]
    for name, ours, theirs in zip(("indices", "weights", "counts", "scores"), actual, expected, strict=True):
        assert_bitwise_equal(name, ours, theirs)
    assert_bitwise_equal("gradient", *of)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 5}, "top_k=5 must be at least 1 and at most the number of experts, 4"),
        ({"top_k": 0}, "top_k=0 must be"),
        ({"top_k": 2, "scores": "relu"}, "scores='relu' must be one of 'softmax', 'sigmoid'"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        moe_route(torch.zeros(2, 4), **options)
