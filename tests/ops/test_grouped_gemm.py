"""`grouped_gemm` on each of its backends."""

import sys
from itertools import product
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops import (
    WeightGradients,
    defer,
    grouped_gemm,
    moe_permute,
    moe_unpermute,
    using_grouped_gemm,
)
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.ops.grouped_gemm import grouped_gemm_reference
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind
from tests.ops.grid import DTYPES as KERNEL_DTYPES
from tests.ops.grid import LAYOUTS, check_op, unwritten_memory_is_nan

products = sys.modules["lightning_d9d.ops.grouped_gemm"]

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
on_every_backend = pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "torch"),
        ("cpu", "eager"),
        pytest.param("cuda", "torch", marks=pytest.mark.gpu),
        pytest.param("cuda", "eager", marks=pytest.mark.gpu),
        pytest.param("cuda", "quack", marks=[pytest.mark.gpu, pytest.mark.quack]),
        pytest.param("cuda", "nv", marks=[pytest.mark.gpu, pytest.mark.nv_grouped_gemm]),
    ],
)
GROUP_SIZES = {
    "even": [16, 16, 16],
    "odd": [7, 1, 22],
    "empty groups": [0, 13, 0, 0, 5, 0],
    "no rows": [0, 0, 0],
    "one group": [9],
}


def dtypes_of(backend):
    return {"nv": [torch.bfloat16], "quack": [torch.bfloat16, torch.float16]}.get(backend, KERNEL_DTYPES)


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


def check(sizes, num_in, num_out, dtype, device, backend, **options):
    x, weight, _, offsets = (tensor.detach() for tensor in make(sizes, num_in, num_out, torch.float32))

    def reference(x, weight, offsets, backend):
        return grouped_gemm_reference(x, weight, offsets)

    tensors = {"x": x, "weight": weight, "offsets": offsets}
    check_op(grouped_gemm, reference, tensors, dtype, device, backend=backend, **options)


@on_every_backend
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES.keys())
def test_every_backend(sizes, device, backend):
    for dtype, (num_in, num_out) in product(dtypes_of(backend), [(32, 48), (8, 264)]):
        check(sizes, num_in, num_out, dtype, device, backend)


@on_every_backend
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, device, backend):
    for dtype, sizes in product(dtypes_of(backend), [[4, 0, 9], [1]]):
        check(sizes, 32, 48, dtype, device, backend, layout=layout, gradients_of=["x", "weight"])


@on_every_backend
def test_every_gradient_alone_and_together(device, backend):
    for dtype, names in product(dtypes_of(backend), [[], ["x"], ["weight"], ["x", "weight"]]):
        check([4, 0, 9], 32, 48, dtype, device, backend, gradients_of=names)


@on_every_backend
@pytest.mark.parametrize(
    ("num_rows", "num_groups", "num_in", "num_out"),
    [(0, 0, 8, 16), (0, 3, 8, 16), (5, 0, 8, 16), (6, 3, 0, 16), (6, 3, 8, 0)],
)
def test_nothing_to_multiply(num_rows, num_groups, num_in, num_out, device, backend):
    options = {"device": device, "dtype": torch.bfloat16}
    x = torch.randn(num_rows, num_in, **options).requires_grad_()
    weight = torch.randn(num_groups, num_out, num_in, **options).requires_grad_()
    offsets = torch.arange(num_groups, device=device, dtype=torch.int32).add(1).mul(num_rows // max(num_groups, 1))
    with unwritten_memory_is_nan():
        y = grouped_gemm(x, weight, offsets, backend=backend)
        y.sum().backward()
    assert_bitwise_equal("y", y, torch.zeros(num_rows, num_out, **options))
    assert_bitwise_equal("dx", x.grad, torch.zeros_like(x))
    assert_bitwise_equal("dweight", weight.grad, torch.zeros_like(weight))


@on_every_backend
@pytest.mark.parametrize("sizes", [[5, 0, 8], [0, 0]], ids=str)
def test_rows_after_the_last_group_are_not_read(sizes, device, backend):
    for dtype in dtypes_of(backend):
        x, weight, gradient, offsets = make(sizes, 16, 32, dtype, device, num_after=6)
        rows = slice(sum(sizes))
        with torch.no_grad():
            x[sum(sizes) :] = float("nan")  # what an exchange buffer holds there
        gradient[sum(sizes) :] = float("nan")
        y = grouped_gemm(x, weight, offsets, backend=backend)
        y.backward(gradient)
        alone = x.detach()[rows].requires_grad_(), weight.detach().requires_grad_()
        expected = grouped_gemm(*alone, offsets, backend=backend)
        expected.backward(gradient[rows])
        assert len(y) == len(x)
        assert_bitwise_equal("y", y[rows], expected)
        assert_bitwise_equal("dx", x.grad[rows], alone[0].grad)
        assert_bitwise_equal("dweight", weight.grad, alone[1].grad)


@on_every_backend
def test_experts_whose_rows_are_padded(device, backend):
    """Copies of tokens, in as many rows as there may be for multiples of eight an expert, come back as without."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator).to(device, torch.bfloat16) for shape in [(9, 16), (4, 16, 16)]
    )
    indices = torch.randint(3, (9, 2), generator=generator).to(device)  # the last expert has none
    results = []
    for multiple in (1, 8):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with unwritten_memory_is_nan():
            rows, _, permutation = moe_permute(leaves[0], indices, None, 4, multiple=multiple)
            y = moe_unpermute(grouped_gemm(rows, leaves[1], permutation.offsets, backend=backend), permutation)
            results.append([y, *torch.autograd.grad(y.float().square().sum(), leaves)])
    for name, padded, plain in zip(("y", "dx", "dweight"), *reversed(results), strict=True):
        assert_close_named(name, padded, plain)


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
        with defer(gradients):
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


@on_every_backend
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES.keys())
def test_weight_gradient_deferred_equals_bit_by_bit(sizes, device, backend):
    for dtype in dtypes_of(backend):
        operands = make(sizes, 32, 48, dtype, device)
        y, first, dx, dw = run(*operands, split=True, backend=backend)
        assert first is None
        expected_y, expected_first, expected_dx, expected_dw = run(*operands, split=False, backend=backend)
        assert expected_first is expected_dw
        for name, ours, theirs in (("y", y, expected_y), ("dx", dx, expected_dx), ("dweight", dw, expected_dw)):
            assert_bitwise_equal(name, ours, theirs)


@pytest.mark.parametrize("num_out", [48, 7], ids=["native", "loop"])
def test_weight_gradient_deferred_under_autocast(num_out):
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
def test_weight_gradient_deferred_with_recomputation(num_out, device):
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


def test_frozen_weight_inside_defer():
    x, weight, gradient, offsets = make([6, 0, 10], 32, 48, torch.float32)
    _, first, dx, dw = run(x, weight.detach(), gradient, offsets, split=True)
    assert first is dw is None
    assert_bitwise_equal("dx", dx, run(x, weight.detach(), gradient, offsets, split=False)[2])


@on_every_backend
def test_compiled_whole(device, backend):
    operands = make([6, 0, 10], 32, 48, torch.bfloat16, device)

    def forward(x, weight, offsets):
        return grouped_gemm(x, weight, offsets, backend=backend).sin()

    compiled = torch.compile(forward, backend="aot_eager", fullgraph=True)
    actual, expected = run(*operands, split=True, forward=compiled), run(*operands, split=False, forward=forward)
    assert actual[1] is actual[3]  # nothing waits there
    for name, ours, theirs in zip(("y", "dweight", "dx", "dweight"), actual, expected, strict=True):
        assert_bitwise_equal(name, ours, theirs)


@on_every_backend
def test_the_operators_are_what_torch_takes_them_for(device, backend):
    x, weight, gradient, offsets = make([6, 0, 10], 16, 24, torch.bfloat16, device)
    ops = torch.ops.lightning_d9d
    torch.library.opcheck(ops.grouped_gemm.default, (x, weight, offsets, backend))
    gradient.requires_grad_()
    torch.library.opcheck(ops.grouped_gemm_weight_gradient.default, (gradient, x, offsets, backend))


def test_differentiated_twice():
    x, weight, _, offsets = make([3, 0, 2], 2, 3, torch.float64)
    assert torch.autograd.gradgradcheck(lambda *leaves: grouped_gemm(*leaves, offsets), (x, weight))


def test_what_is_kept():
    x, weight, _, offsets = make([6, 0, 10], 16, 24, torch.bfloat16)
    for trained, expected in (("x weight", {"x", "weight"}), ("x", {"weight"}), ("weight", {"x"}), ("", set())):
        kept = []
        with saved_tensors_hooks(lambda tensor, kept=kept: kept.append(tensor) or tensor, lambda tensor: tensor):
            leaves = {"x": x, "weight": weight}
            leaves = {name: t.detach().requires_grad_(name in trained.split()) for name, t in leaves.items()}
            grouped_gemm(**leaves, offsets=offsets)
        kept = [tensor.data_ptr() for tensor in kept]
        assert {name for name, tensor in leaves.items() if tensor.data_ptr() in kept} == expected


def test_operations_are_counted():
    x, weight, _, offsets = make([6, 0, 10], 16, 24, torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        grouped_gemm(x, weight, offsets).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 16 * 16 * 24


@pytest.mark.gpu
def test_torch_waits_for_nothing():
    operands = make([600, 0, 1000], 64, 48, torch.bfloat16, "cuda")
    run(*operands, split=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(*operands, split=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


class Backends(TorchDispatchMode):
    """What products ran on."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "grouped_gemm" in str(func):
            self.seen.append(args[-1])
        return func(*args, **(kwargs or {}))


def test_the_backend_is_chosen():
    x, weight, gradient, offsets = make([6, 0, 10], 16, 24, torch.bfloat16)
    with Backends() as backends:
        grouped_gemm(x, weight, offsets)
        grouped_gemm(x.double(), weight.double(), offsets)
        grouped_gemm(x[:, :15], weight[..., :15], offsets)
        with using_grouped_gemm("eager"):
            y = grouped_gemm(x, weight, offsets)
            grouped_gemm(x, weight, offsets, backend="torch")
        y.backward(gradient)
    assert backends.seen == ["torch", "eager", "eager", "eager", "torch", "eager", "eager"]


def test_backends_that_cannot_be_had(monkeypatch):
    x, weight, _, offsets = make([6, 0, 10], 16, 24, torch.bfloat16)
    one_of = "grouped_gemm='fast' must be one of 'auto', 'torch', 'quack', 'nv', 'eager'"
    with pytest.raises(ConfigError, match=one_of):
        grouped_gemm(x, weight, offsets, backend="fast")
    with pytest.raises(ConfigError, match=one_of), using_grouped_gemm("fast"):
        pass
    with pytest.raises(
        ConfigError, match=r"'nv' supports bfloat16 on CUDA, not torch.bfloat16 on cpu .* Choose 'auto'"
    ):
        grouped_gemm(x, weight, offsets, backend="nv")
    with pytest.raises(ConfigError, match=r"multiples of 16 bytes, not torch.float64 on cpu from 16 to 24 numbers"):
        grouped_gemm(x.double(), weight.double(), offsets, backend="torch")
    monkeypatch.setitem(sys.modules, "grouped_gemm", None)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-d9d\[grouped-gemm\]'"), using_grouped_gemm("nv"):
        pass


def test_operands_that_do_not_fit():
    x, weight, _, offsets = make([6, 0, 10], 16, 24, torch.bfloat16)
    for wrong in [
        (x[0], weight, offsets),
        (x[:, :8], weight, offsets),
        (x, weight, offsets[:2]),
        (x, weight[0], offsets),
    ]:
        with pytest.raises(ConfigError, match=r"must be \[rows, in\], \[groups, out, in\] and \[groups\]"):
            grouped_gemm(*wrong)
    with pytest.raises(ConfigError, match=r"x is torch\.bfloat16 and weight torch\.float32; cast one of them"):
        grouped_gemm(x, weight.float(), offsets)


def gemm_of_quack(a, b, *, cu_seqlens_m=None, cu_seqlens_k=None, tuned):
    """Call torch's products as quack's are called. Rows after the last group are NaN."""
    assert not tuned
    if cu_seqlens_k is not None:
        return F.grouped_mm(a, b, offs=cu_seqlens_k[1:])
    assert cu_seqlens_m[0] == 0
    result = F.grouped_mm(a, b, offs=cu_seqlens_m[1:])
    result[cu_seqlens_m[-1] :] = float("nan")
    return result


@pytest.fixture
def has_quack(monkeypatch):
    module = ModuleType("quack.gemm_interface")
    module.gemm = gemm_of_quack  # type: ignore[attr-defined]
    monkeypatch.setattr(products, "optional_module", lambda name: {"quack.gemm_interface": module}[name])
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)


@pytest.mark.parametrize(("least", "backend"), [(2 * 16 * 16 * 24, "quack"), (2 * 16 * 16 * 24 + 1, "torch")])
def test_large_products_run_on_quack(least, backend, has_quack, monkeypatch):
    monkeypatch.setattr(products, "_LEAST_QUACK_OPERATIONS", least)
    x, weight, gradient, offsets = make([6, 0, 10], 16, 24, torch.bfloat16)
    with Backends() as backends:
        y = grouped_gemm(x, weight, offsets)
        y.backward(gradient)
        with using_kernels("torch"):
            grouped_gemm(x, weight, offsets)
        grouped_gemm(x.float(), weight.float(), offsets)
        grouped_gemm(x[:, :12], weight[..., :12], offsets)
    assert backends.seen == [*[backend] * 3, "torch", "torch", "eager"]
    for name, actual, reference in zip(
        ("y", "dx", "dweight"), (y, x.grad, weight.grad), by_hand(x, weight, gradient, [6, 0, 10]), strict=True
    ):
        assert_close_named(name, actual, reference.bfloat16(), kind=Kind.GRADIENT)


def test_quack_that_is_not_there(monkeypatch):
    monkeypatch.setattr(products, "optional_module", lambda name: None)
    with (
        pytest.raises(ConfigError, match=r"needs quack-kernels.*pip install 'lightning-d9d\[quack\]'"),
        using_grouped_gemm("quack"),
    ):
        pass
    x, weight, _, offsets = make([6, 0, 10], 16, 24, torch.bfloat16)
    with pytest.raises(
        ConfigError, match=r"backend 'quack' supports bfloat16 and float16 on CUDA, .* not torch.bfloat16 on cpu"
    ):
        grouped_gemm(x, weight, offsets, backend="quack")
