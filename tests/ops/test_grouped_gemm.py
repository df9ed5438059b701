import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from lightning_d9d.ops import WeightGradients, grouped_gemm, put_off
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
GROUP_SIZES = {
    "even": [16, 16, 16],
    "odd": [7, 1, 22],
    "empty groups": [0, 13, 0, 0, 5, 0],
    "no rows": [0, 0, 0],
    "one group": [9],
}


def make(sizes, num_in, num_out, dtype, device="cpu", num_after=0):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes) + num_after, num_in, generator=generator).to(device, dtype)
    weight = torch.randn(len(sizes), num_out, num_in, generator=generator).to(device, dtype)
    gradient = torch.randn(len(x), num_out, generator=generator).to(device, dtype)
    offsets = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
    return x.requires_grad_(), weight.requires_grad_(), gradient, offsets


def by_hand(x, weight, gradient, sizes):
    """Result and gradients, group by group, in float64 from the same rounded inputs."""
    x, weight, gradient = x.detach().double(), weight.detach().double(), gradient.double()
    y, dx, dw = torch.zeros_like(gradient), torch.zeros_like(x), torch.zeros_like(weight)
    start = 0
    for group, size in enumerate(sizes):
        rows = slice(start, start + size)
        y[rows] = x[rows] @ weight[group].T
        dx[rows] = gradient[rows] @ weight[group]
        dw[group] = gradient[rows].T @ x[rows]
        start += size
    return y, dx, dw


@on_every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES.keys())
@pytest.mark.parametrize(("num_in", "num_out"), [(32, 48), (15, 48), (32, 7)])
def test_equals_a_product_per_group(sizes, num_in, num_out, dtype, device):
    x, weight, gradient, offsets = make(sizes, num_in, num_out, dtype, device)
    y = grouped_gemm(x, weight, offsets)
    y.backward(gradient)
    expected = by_hand(x, weight, gradient, sizes)
    assert y.dtype == x.grad.dtype == weight.grad.dtype == dtype
    for name, actual, reference in zip(("y", "dx", "dweight"), (y, x.grad, weight.grad), expected, strict=True):
        assert_close_named(name, actual, reference.to(dtype), kind=Kind.GRADIENT)


@on_every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", [[5, 0, 8], [0, 0]], ids=str)
def test_rows_after_the_last_group_are_zero(sizes, dtype, device):
    x, weight, gradient, offsets = make(sizes, 16, 32, dtype, device, num_after=6)
    with torch.no_grad():
        x[sum(sizes) :] = float("nan")  # what an exchange buffer holds there
    gradient[sum(sizes) :] = float("nan")
    y = grouped_gemm(x, weight, offsets, padded=True)
    y.backward(gradient)
    for name, actual, reference in zip(
        ("y", "dx", "dweight"), (y, x.grad, weight.grad), by_hand(x, weight, gradient, sizes), strict=True
    ):
        assert_close_named(name, actual, reference.to(dtype))
    assert not y[sum(sizes) :].any()
    assert not x.grad[sum(sizes) :].any()


@on_every_device
@pytest.mark.parametrize("num_out", [48, 7])
def test_expanded_gradient(num_out, device):
    sizes = [4, 0, 9]
    x, weight, gradient, offsets = make(sizes, 32, num_out, torch.float32, device)
    y = grouped_gemm(x, weight, offsets)
    y.sum().backward()  # the gradient of a sum is one number, expanded
    _, dx, dw = by_hand(x, weight, torch.ones_like(gradient), sizes)
    assert_close_named("dx", x.grad, dx.float())
    assert_close_named("dweight", weight.grad, dw.float())


@on_every_device
def test_strided_operands(device):
    sizes = [4, 0, 9]
    x, weight, gradient, offsets = make(sizes, 32, 48, torch.float32, device)
    # Rows that begin at no multiple of 16 bytes, though each is one wide.
    cut = F.pad(x.detach(), (0, 1))[:, :-1].requires_grad_()
    cut_weight = F.pad(weight.detach(), (0, 1))[..., :-1].requires_grad_()
    y = grouped_gemm(cut, cut_weight, offsets)
    y.backward(gradient.T.contiguous().T)
    for name, actual, reference in zip(
        ("y", "dx", "dweight"), (y, cut.grad, cut_weight.grad), by_hand(cut, cut_weight, gradient, sizes), strict=True
    ):
        assert_close_named(name, actual, reference.float())


def test_autocast_casts_as_linear_does():
    x, weight, _, offsets = make([6, 10], 32, 48, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_gemm(x, weight, offsets)
        expected = torch.cat([F.linear(x[:6], weight[0]), F.linear(x[6:], weight[1])])
    assert y.dtype == expected.dtype == torch.bfloat16
    assert_close_named("y", y, expected, kind=Kind.OUTPUT)
    y.backward(torch.ones_like(y))
    assert x.grad.dtype == weight.grad.dtype == torch.float32


@on_every_device
def test_a_gradient_is_computed_only_where_one_is_wanted(device):
    x, weight, gradient, offsets = make([6, 10], 32, 48, torch.float32, device)
    (dx,) = torch.autograd.grad(grouped_gemm(x, weight.detach(), offsets), x, gradient)
    (dw,) = torch.autograd.grad(grouped_gemm(x.detach(), weight, offsets), weight, gradient)
    _, expected_dx, expected_dw = by_hand(x, weight, gradient, [6, 10])
    assert_close_named("dx", dx, expected_dx.float())
    assert_close_named("dweight", dw, expected_dw.float())


def run(x, weight, gradient, offsets, *, split, forward=grouped_gemm, **options):
    """The result, what the weight has after the input backward, and the gradients."""
    gradients = WeightGradients()
    if split:
        with put_off(gradients):
            y = forward(x, weight, offsets, **options)
        gradients.backward(y, gradient)
    else:
        y = forward(x, weight, offsets, **options)
        y.backward(gradient)
    first = weight.grad
    gradients.accumulate()
    dx, dw = x.grad, weight.grad
    x.grad = weight.grad = None
    return y, first, dx, dw


@on_every_device
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES.keys())
@pytest.mark.parametrize(("num_out", "num_after"), [(48, 0), (7, 0), (48, 5)], ids=["native", "loop", "padded"])
def test_weight_gradient_put_off_equals_bit_by_bit(sizes, num_out, num_after, dtype, device):
    operands = make(sizes, 32, num_out, dtype, device, num_after)
    options = {"padded": num_after > 0}
    y, first, dx, dw = run(*operands, split=True, **options)
    assert first is None
    expected_y, expected_first, expected_dx, expected_dw = run(*operands, split=False, **options)
    assert expected_first is expected_dw
    for name, ours, theirs in (("y", y, expected_y), ("dx", dx, expected_dx), ("dweight", dw, expected_dw)):
        assert_bitwise_equal(name, ours, theirs)


@pytest.mark.parametrize("num_out", [48, 7], ids=["native", "loop"])
def test_weight_gradient_put_off_under_autocast(num_out):
    operands = make([6, 0, 10], 32, num_out, torch.float32)
    operands[2].copy_(operands[2].bfloat16())
    forward = torch.autocast("cpu", torch.bfloat16)(grouped_gemm)
    _, first, dx, dw = run(*operands, split=True, forward=forward)
    assert first is None
    assert dw.dtype == torch.float32
    _, _, expected_dx, expected_dw = run(*operands, split=False, forward=forward)
    assert_bitwise_equal("dx", dx, expected_dx)
    assert_bitwise_equal("dweight", dw, expected_dw)


@on_every_device
@pytest.mark.parametrize("num_out", [48, 7], ids=["native", "loop"])
def test_weight_gradient_put_off_with_recomputation(num_out, device):
    operands = make([6, 0, 10], 32, num_out, torch.float32, device)
    calls = []

    def forward(x, weight, offsets):
        def counted(x):
            calls.append(x)
            return grouped_gemm(x.sin(), weight, offsets).cos()

        return checkpoint(counted, x, use_reentrant=False)

    _, first, dx, dw = run(*operands, split=True, forward=forward)
    assert first is None
    assert len(calls) == 2
    _, _, expected_dx, expected_dw = run(*operands, split=False, forward=forward)
    assert_bitwise_equal("dx", dx, expected_dx)
    assert_bitwise_equal("dweight", dw, expected_dw)


@pytest.mark.parametrize("num_out", [48, 7], ids=["native", "loop"])
def test_weights_that_are_no_leaves_do_not_wait(num_out):
    operands = make([6, 0, 10], 32, num_out, torch.float32)

    def forward(x, weight, offsets):
        return grouped_gemm(x, 2 * weight, offsets)

    _, first, _, dw = run(*operands, split=True, forward=forward)
    assert first is dw
    assert_bitwise_equal("dweight", dw, run(*operands, split=False, forward=forward)[-1])


def test_frozen_weight_inside_put_off():
    x, weight, gradient, offsets = make([6, 0, 10], 32, 48, torch.float32)
    _, first, dx, dw = run(x, weight.detach(), gradient, offsets, split=True)
    assert first is dw is None
    assert_bitwise_equal("dx", dx, run(x, weight.detach(), gradient, offsets, split=False)[2])


def test_compiled():
    operands = make([6, 0, 10], 32, 48, torch.bfloat16)
    compiled = torch.compile(lambda *args: grouped_gemm(*args).sin(), backend="aot_eager")
    actual = run(*operands, split=True, forward=compiled)
    expected = run(*operands, split=False, forward=lambda *args: grouped_gemm(*args).sin())
    assert actual[1] is actual[3]  # nothing waits there
    for name, ours, theirs in zip(("y", "dweight", "dx", "dweight"), actual, expected, strict=True):
        assert_close_named(name, ours, theirs)
