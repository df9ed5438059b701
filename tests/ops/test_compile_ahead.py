"""Backwards that are compiled while the forward runs."""

from __future__ import annotations

import logging
import multiprocessing
import threading
from collections.abc import Callable
from io import StringIO
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_d9d.log import logger
from lightning_d9d.ops import (
    attention,
    compile_ahead,
    moe_permute,
    moe_route,
    moe_unpermute,
    norm_rope_qk,
    rms_norm,
    rope_qk,
    swiglu,
)
from lightning_d9d.ops.compile_ahead import THREAD_PREFIX, only_compiles
from lightning_d9d.ops.operator import define

Call = tuple[bool, str, torch.Size, tuple[int, ...], bool]
"""A call of a kernel: whether it was only compiled, its tensor's device, sizes and strides, and the option."""
_names = count()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """Lets the CPU compile ahead, and has what the backward's kernels were called with."""
    monkeypatch.setattr(compile_ahead, "_has_compiler", lambda device: True)
    monkeypatch.setattr(compile_ahead, "_set_device", lambda device: None)
    return []


def operator_of(
    calls: list[Call], compiles_ahead: bool | Callable[..., bool] = True, *, go: threading.Event | None = None
) -> Any:
    """`2 * x` whose backward notes how its kernel was called; one that is compiled ahead waits for `go` before."""
    name = f"test_ahead_{next(_names)}"

    def double(x: Tensor, option: bool) -> Tensor:
        return 2 * x

    def double_gradient(dy: Tensor, option: bool) -> Tensor:
        if only_compiles() and go is not None:
            assert go.wait(60)
        calls.append((only_compiles(), dy.device.type, dy.shape, dy.stride(), option))
        return 2 * dy

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.option = inputs[1]

    def differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gradient_op(dy, ctx.option), None

    def new(x: Tensor, option: bool) -> Tensor:
        return torch.empty_like(x)

    gradient_op = define(f"{name}_backward", "(Tensor dy, bool option) -> Tensor", double_gradient, new)
    schema = "(Tensor x, bool option) -> Tensor"
    return define(name, schema, double, new, setup_context=keep, backward=differentiate, compiles_ahead=compiles_ahead)


def wait_for_kernels() -> None:
    """Return when all that is being compiled ahead has been."""
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_PREFIX):
            thread.join()


def leaf(*size: int) -> Tensor:
    return torch.ones(size, requires_grad=True)


def test_a_backward_is_compiled_while_the_forward_goes_on(calls: list[Call]) -> None:
    go = threading.Event()
    double = operator_of(calls, go=go)
    x = leaf(3, 4).t()
    y = double(x, True)
    assert calls == []
    go.set()
    wait_for_kernels()
    assert calls == [(True, "meta", (4, 3), (1, 4), True)]
    y.sum().backward()
    assert [call[:2] for call in calls] == [(True, "meta"), (False, "cpu")]


def test_each_form_is_compiled_once_and_none_after_the_first_backward(calls: list[Call]) -> None:
    double = operator_of(calls)
    last = [double(leaf(size), option) for size, option in [(3, True), (3, True), (3, False), (5, True)]][-1]
    wait_for_kernels()
    assert sorted((size, option) for _, _, size, _, option in calls) == [((3,), False), ((3,), True), ((5,), True)]
    last.sum().backward()
    calls.clear()
    double(leaf(7), True)
    wait_for_kernels()
    assert calls == []


def test_a_forward_without_gradient_compiles_nothing(calls: list[Call]) -> None:
    double = operator_of(calls)
    double(torch.ones(3), True)
    with torch.no_grad():
        double(leaf(3), True)
    wait_for_kernels()
    assert calls == []


def test_an_operator_says_for_which_arguments(calls: list[Call]) -> None:
    double = operator_of(calls, lambda x, option: option)
    double(leaf(3), False)
    wait_for_kernels()
    assert calls == []
    double(leaf(3), True)
    wait_for_kernels()
    assert len(calls) == 1


def test_what_cannot_be_compiled_ahead_fails_in_the_backward_alone(
    calls: list[Call], caplog: pytest.LogCaptureFixture
) -> None:
    class Calls(list[Call]):
        def append(self, call: Call) -> None:
            raise RuntimeError("this kernel is refused")

    with caplog.at_level("DEBUG", "lightning_d9d"):
        y = operator_of(Calls())(leaf(3), True)
        wait_for_kernels()
    assert "was not compiled ahead" in caplog.text
    with pytest.raises(RuntimeError, match="is refused"):
        y.sum().backward()


def test_a_cpu_has_no_compiler() -> None:
    calls: list[Call] = []
    operator_of(calls)(leaf(3), True)
    wait_for_kernels()
    assert calls == []


# On a GPU

BF16 = {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}


def _norm() -> Any:
    return rms_norm(torch.ones(64, 128, **BF16), torch.ones(128, **BF16), 1e-6)


def _norm_of_sum() -> Any:
    x, residual = (torch.ones(64, 128, **BF16) for _ in range(2))
    return rms_norm(x, torch.ones(128, **BF16), 1e-6, residual=residual)


def _swiglu() -> Any:
    return swiglu(torch.ones(64, 256, **BF16), torch.ones(64, device="cuda", requires_grad=True))


def _turned() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Queries and keys, and tables of angles."""
    cos, sin = torch.ones(2, 1, 32, 1, 32, device="cuda").unbind()
    return (torch.ones(1, 32, 4, 64, **BF16), torch.ones(1, 32, 2, 64, **BF16)), (cos, sin)


def _rope() -> Any:
    heads, angles = _turned()
    return rope_qk(*heads, *angles)


def _norm_rope() -> Any:
    heads, angles = _turned()
    return norm_rope_qk(*heads, torch.ones(64, **BF16), torch.ones(64, **BF16), 1e-6, *angles)


def _route() -> Any:
    return moe_route(torch.randn(64, 16, device="cuda", requires_grad=True), 4).weights


def _permute() -> Any:
    indices = torch.randint(16, (64, 4), device="cuda")
    return moe_permute(torch.ones(64, 128, **BF16), indices, torch.ones(64, 4, **BF16), 16, multiple=8)[:2]


def _unpermute() -> Any:
    indices = torch.randint(16, (64, 4), device="cuda")
    rows, _, permutation = moe_permute(torch.ones(64, 128, **BF16).detach(), indices, None, 16)
    return moe_unpermute(rows.requires_grad_(), permutation, torch.ones(64, 4, **BF16))


def _attention() -> Any:
    q, k, v = (torch.ones(1, heads, 256, 64, **BF16) for heads in (4, 2, 2))
    return attention(q, k, v, window=64, kernel="triton")


CASES = [_norm, _norm_of_sum, _swiglu, _rope, _norm_rope, _route, _permute, _unpermute, _attention]


def _compile(make: Callable[[], Any], compiled: Any) -> None:
    from lightning_d9d.ops.kernels import compiling

    numbers: list[int] = []

    def note(**options: Any) -> None:
        numbers[-1] += not options["cache_hit"]

    compiling.knobs.compilation.listener = note
    failures = StringIO()
    logger.addHandler(logging.StreamHandler(failures))
    logger.setLevel(logging.DEBUG)
    numbers.append(0)
    outputs = make()
    wait_for_kernels()
    numbers.append(0)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    torch.cuda.synchronize()
    compiled.put((*numbers, failures.getvalue()))


@pytest.mark.gpu
@pytest.mark.parametrize("make", CASES, ids=lambda make: make.__name__[1:])
def test_a_first_backward_finds_its_kernels_compiled(
    make: Callable[[], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    spawn = multiprocessing.get_context("spawn")
    compiled = spawn.Queue()
    process = spawn.Process(target=_compile, args=(make, compiled))
    process.start()
    num_before, num_in_backward, failures = compiled.get(timeout=300)
    process.join()
    assert not failures
    assert num_before >= 2
    assert num_in_backward == 0
