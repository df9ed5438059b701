from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from lightning_d9d.errors import ConfigError
from lightning_d9d.ops.backend import is_at_least, runs_triton
from lightning_d9d.ops.linear import autocast_dtype
from lightning_d9d.ops.operator import define
from lightning_d9d.ops.packages import optional_module
from lightning_d9d.ops.sharded_weights import local_shard
from lightning_d9d.ops.weight_gradients import AT_ONCE, WeightGradients, receiver

GroupedGemmBackend = Literal["auto", "torch", "quack", "nv", "eager"]

_TORCH_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_QUACK_DTYPES = (torch.bfloat16, torch.float16)
_LEAST_QUACK_OPERATIONS = 10**11
"""Smallest size for which "auto" uses quack: the device then works longer than the host takes to call it."""
_chosen: GroupedGemmBackend = "auto"


def grouped_gemm(x: Tensor, weight: Tensor, offsets: Tensor, *, backend: GroupedGemmBackend | None = None) -> Tensor:
    """Multiply each group of rows with its own matrix: row r of group g becomes `weight[g] @ x[r]`.

    It is one operator, `torch.ops.lightning_d9d.grouped_gemm`, differentiable in `x` and `weight` any number of times.
    Its backward is the same product with transposed matrices and, for the weight,
    `torch.ops.lightning_d9d.grouped_gemm_weight_gradient`. It keeps `x` only for the gradient of `weight`, and `weight`
    only for that of `x`. Sums are in float32, or in float64 for float64; results are rounded once. A group without rows
    gives its matrix a zero gradient. Under autocast both factors are cast as `torch.nn.functional.linear` would. Inside
    `defer`, and with a leaf as `weight`, the gradient of `weight` is deferred; see
    `lightning_d9d.ops.weight_gradients`.

    Rows after the last group are never read, and groups do not get gradients from them. Their values in the result and
    in the gradient of `x` are arbitrary.

    Args:
        x: Rows sorted by group, shape `[rows, in]`.
        weight: One matrix for each group, shape `[groups, out, in]`, in the dtype of `x`. Or a DTensor that is sharded
            along its first dim. Then the groups are those that this rank holds. Its gradient is a DTensor with the same
            placements, with contributions of this rank's rows only.
        offsets: One past the last row of each group, int32 on the device of `x`, shape `[groups]`, not decreasing.
        backend: The backend; None uses that of `using_grouped_gemm`, or "auto".

            - "auto": "torch" if it takes these tensors, else "eager"; but "quack" on Hopper, where it is installed, for
              products of 10**11 operations or more that both take.
            - "torch": `torch.nn.functional.grouped_mm`. It takes bfloat16, float16 and float32 whose rows, those of `x`
              and of the result, are multiples of 16 bytes. For bfloat16 on CUDA devices of compute capability 9.0 or
              more that is one kernel, which reads `offsets` on the device; else a loop of torch's over the groups.
            - "quack": quack-kernels, for bfloat16 and float16 on CUDA devices of compute capability 9.0, and rows that
              are multiples of 16 bytes. One kernel, which reads `offsets` on the device.
            - "nv": nv-grouped-gemm, for bfloat16 on CUDA: a product of cuBLAS for each group, on four streams. Reads
              `offsets` on the host, so it waits for the device in the result and in each gradient.
            - "eager": a loop of products, for any dtype, size and device. Reads `offsets` on the host, too.

    Returns:
        Shape `[rows, out]`, in the dtype of `x`.

    Raises:
        ConfigError: Shapes or dtypes do not match, the backend does not support them, or it is not installed.
    """
    gradients, leaf, weight = receiver(x, weight), weight, local_shard(weight, x)
    x = x.to(autocast_dtype(x))
    runs_on = choose_backend(x, weight, offsets, backend or _chosen)
    if gradients is None or gradients is AT_ONCE:
        return _multiply_op(x, weight, offsets, runs_on)
    return _Deferred.apply(x, weight.detach(), offsets, runs_on, gradients, leaf)


@contextmanager
def using_grouped_gemm(backend: GroupedGemmBackend) -> Generator[None]:
    """Set the default backend of `grouped_gemm` in this process, within a block.

    A backward uses the backend of its forward. `ParallelConfig.grouped_gemm` sets it for a run. Compiled blocks and
    CUDA graphs follow the choice.

    Raises:
        ConfigError: The backend is unknown or not installed.
    """
    global _chosen
    if backend not in get_args(GroupedGemmBackend):
        raise ConfigError(_unknown(backend))
    if backend == "nv":
        _nv_gmm()
    elif backend == "quack":
        _quack_gemm()
    before, _chosen = _chosen, backend
    try:
        yield
    finally:
        _chosen = before


def chosen_grouped_gemm() -> GroupedGemmBackend:
    """Return the backend that `using_grouped_gemm` has set."""
    return _chosen


def grouped_gemm_reference(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Compute `grouped_gemm` as a loop of ordinary products, for any dtype and size.

    Rows after the last group are zero.
    """
    ends = [0, *offsets.tolist()]
    groups = zip(pairwise(ends), weight.unbind(), strict=True)
    results = [F.linear(x[start:end], matrix) for (start, end), matrix in groups]
    return torch.cat([*results, x.new_zeros(len(x) - ends[-1], weight.shape[1])])


def choose_backend(x: Tensor, weight: Tensor, offsets: Tensor, backend: GroupedGemmBackend) -> str:
    """Return the backend to run, with "auto" resolved; see `grouped_gemm`."""
    if x.dim() != 2 or weight.dim() != 3 or offsets.shape != weight.shape[:1] or x.shape[1] != weight.shape[2]:
        raise ConfigError(
            f"grouped_gemm: x {list(x.shape)}, weight {list(weight.shape)} and offsets {list(offsets.shape)} must be "
            "[rows, in], [groups, out, in] and [groups]"
        )
    if autocast_dtype(weight) != x.dtype:
        raise ConfigError(f"grouped_gemm: x is {x.dtype} and weight {weight.dtype}; cast one of them")
    if backend == "eager":
        return backend
    _, num_out, num_in = weight.shape
    is_aligned = all(width * x.element_size() % 16 == 0 for width in (num_in, num_out))
    if backend in ("auto", "torch"):
        if is_aligned and x.dtype in _TORCH_DTYPES and x.device.type in ("cpu", "cuda", "meta"):
            return "quack" if backend == "auto" and _is_faster_with_quack(x, weight) else "torch"
        if backend == "auto":
            return "eager"
        limit = "bfloat16, float16 and float32 on a CPU or CUDA, with rows that are multiples of 16 bytes"
    elif backend == "quack":
        if is_aligned and x.dtype in _QUACK_DTYPES and x.device.type in ("cuda", "meta"):
            return backend
        limit = "bfloat16 and float16 on CUDA, with rows that are multiples of 16 bytes"
    elif backend == "nv":
        if x.dtype == torch.bfloat16 and x.device.type in ("cuda", "meta"):
            return backend
        limit = "bfloat16 on CUDA"
    else:
        raise ConfigError(_unknown(backend))
    raise ConfigError(
        f"grouped_gemm: backend {backend!r} supports {limit}, not {x.dtype} on {x.device.type} from {num_in} to "
        f"{num_out} numbers a row. Choose 'auto'"
    )


def _is_faster_with_quack(x: Tensor, weight: Tensor) -> bool:
    is_fit = x.dtype in _QUACK_DTYPES and x.is_cuda and runs_triton(x, weight)
    operations = 2 * x.shape[0] * weight.shape[1] * weight.shape[2]
    return is_fit and is_at_least(operations, _LEAST_QUACK_OPERATIONS) and _has_quack(x.device)


@torch.compiler.assume_constant_result
def _has_quack(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device) == (9, 0) and optional_module("quack.gemm_interface") is not None


def _unknown(backend: object) -> str:
    return f"grouped_gemm={backend!r} must be one of {', '.join(map(repr, get_args(GroupedGemmBackend)))}"


class _Deferred(torch.autograd.Function):
    """The operator with a detached weight; `gradients` takes the gradient of the leaf behind it.

    It saves the same tensors as the operator, in the same order, because a recomputation runs the operator instead.
    """

    @staticmethod
    def forward(
        ctx, x: Tensor, weight: Tensor, offsets: Tensor, backend: str, gradients: WeightGradients, leaf: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.backend, ctx.gradients, ctx.leaf = backend, gradients, leaf
        return _multiply_op(x, weight, offsets, backend)

    @staticmethod
    def backward(ctx, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (dy,), (x, weight, offsets), backend = grad_outputs, ctx.saved_tensors, ctx.backend

        def weight_gradient(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
            return _multiply_columns_op(dy, x, offsets, backend)

        ctx.gradients.add(ctx.leaf, weight_gradient, dy, x, offsets)
        dx = _multiply_op(dy, weight.mT, offsets, backend)
        return dx, None, None, None, None, None


# The operators


def multiply(x: Tensor, weight: Tensor, offsets: Tensor, backend: str) -> Tensor:
    """Return the product of `grouped_gemm` with a backend that `choose_backend` gave, without derivatives."""
    weight = weight.to(x.dtype)
    if 0 in (*x.shape, *weight.shape):
        return x.new_zeros(x.shape[0], weight.shape[1])
    if backend == "eager":
        return grouped_gemm_reference(x, weight, offsets)
    if backend in ("torch", "quack"):
        x = _with_regular_rows(x)
        matrices = weight.mT if _has_regular_rows(weight.mT) else _with_regular_rows(weight).mT
        if backend == "torch":
            return F.grouped_mm(x, matrices, offs=offsets)
        return _quack_product(x, matrices, cu_seqlens_m=F.pad(offsets, (1, 0)))
    is_transposed = weight.mT.is_contiguous()
    matrices = weight.mT if is_transposed else weight.contiguous()
    return _nv_gmm()(x.contiguous(), matrices, _sizes(offsets), trans_b=not is_transposed)


def _multiply_columns(dy: Tensor, x: Tensor, offsets: Tensor, backend: str) -> Tensor:
    if 0 in (*dy.shape, *x.shape, *offsets.shape):
        return dy.new_zeros(len(offsets), dy.shape[1], x.shape[1])
    if backend == "eager":
        return torch.stack([dy[start:end].t() @ x[start:end] for start, end in pairwise([0, *offsets.tolist()])])
    if backend in ("torch", "quack"):
        columns, x = _with_regular_rows(dy).t(), _with_regular_rows(x)
        if backend == "torch":
            return F.grouped_mm(columns, x, offs=offsets)
        return _quack_product(columns, x, cu_seqlens_k=F.pad(offsets, (1, 0)))
    return _nv_gmm()(dy.contiguous(), x.contiguous(), _sizes(offsets), trans_a=True)


def _has_regular_rows(tensor: Tensor) -> bool:
    """Return whether rows are regular for `grouped_mm`: each is contiguous, and begins at a multiple of 16 bytes."""
    *outer, last = tensor.stride()
    aligned = all(number * tensor.element_size() % 16 == 0 for number in outer) and tensor.data_ptr() % 16 == 0
    return aligned and last == 1 and outer[-1] >= tensor.shape[-1]


def _with_regular_rows(tensor: Tensor) -> Tensor:
    # Not contiguous(), which leaves any stride to dims of size one.
    return tensor if _has_regular_rows(tensor) else tensor.clone(memory_format=torch.contiguous_format)


def _sizes(offsets: Tensor) -> Tensor:
    """Return the sizes of groups, on the host."""
    ends = offsets.cpu().long()
    return ends.diff(prepend=ends.new_zeros(1))


def _nv_gmm() -> Any:
    try:
        from grouped_gemm.backend import gmm  # type: ignore[import-not-found]
    except ImportError as error:
        raise ConfigError(
            "grouped_gemm='nv' needs nv-grouped-gemm, which is not installed or was built for another torch "
            f"({error}): pip install 'lightning-d9d[grouped-gemm]', or choose 'auto'"
        ) from error
    return gmm


def _quack_product(a: Tensor, b: Tensor, **ends: Tensor) -> Tensor:
    with torch.cuda.device_of(a):
        return _quack_gemm()(a, b, **ends, tuned=False)


def _quack_gemm() -> Any:
    module = optional_module("quack.gemm_interface")
    if module is None:
        raise ConfigError(
            "grouped_gemm='quack' needs quack-kernels, which is not installed or cannot be imported: pip install "
            "'lightning-d9d[quack]', or choose 'auto'"
        )
    return module.gemm


def _new_rows(x: Tensor, weight: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _new_matrices(dy: Tensor, x: Tensor, offsets: Tensor, backend: str) -> Tensor:
    return dy.new_empty(offsets.shape[0], dy.shape[1], x.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the inputs of both operators, which are linear in their first two arguments."""
    first, second, offsets, ctx.backend = inputs
    needs_first, needs_second, *_ = ctx.needs_input_grad
    ctx.save_for_backward(first if needs_second else None, second if needs_first else None, offsets)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offsets = ctx.saved_tensors
    dx = dw = None
    if weight is not None:
        dx = _multiply_op(dy, weight.mT, offsets, ctx.backend)
    if x is not None:
        dw = _multiply_columns_op(dy, x, offsets, ctx.backend)
    return dx, dw, None, None


def _backward_of_columns(ctx: Any, dw: Tensor) -> tuple[Tensor | None, ...]:
    dy, x, offsets = ctx.saved_tensors
    of_dy = of_x = None
    if x is not None:
        of_dy = _multiply_op(x, dw, offsets, ctx.backend)
    if dy is not None:
        of_x = _multiply_op(dy, dw.mT, offsets, ctx.backend)
    return of_dy, of_x, None, None


_multiply_op = define(
    "grouped_gemm",
    "(Tensor x, Tensor weight, Tensor offsets, str backend) -> Tensor",
    multiply,
    _new_rows,
    setup_context=_setup_context,
    backward=_backward,
    keeps_first=True,
)
_multiply_columns_op = define(
    "grouped_gemm_weight_gradient",
    "(Tensor dy, Tensor x, Tensor offsets, str backend) -> Tensor",
    _multiply_columns,
    _new_matrices,
    setup_context=_setup_context,
    backward=_backward_of_columns,
)


@register_flop_formula(torch.ops.lightning_d9d.grouped_gemm)
def _flops(x_shape: torch.Size, weight_shape: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * x_shape.numel() * weight_shape[1]


@register_flop_formula(torch.ops.lightning_d9d.grouped_gemm_weight_gradient)
def _weight_flops(dy_shape: torch.Size, x_shape: torch.Size, *args: Any, **kwargs: Any) -> int:
    return 2 * dy_shape.numel() * x_shape[1]
