"""A profile that is summed up: parts of operators and kernels, and when a device had nothing to do."""

from __future__ import annotations

import inspect
import re
from time import perf_counter
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from lightning_d9d.metrics import profiled_steps
from lightning_d9d.metrics.profiled import (
    ATTENTION,
    COMMUNICATION,
    COPIES,
    EXPERTS,
    GAPS,
    HEAD,
    NORMS,
    OPTIMIZER,
    PARTS_OF_PEER_KERNELS,
    PERMUTES,
    PRODUCTS,
    REST,
    WAIT,
    part_of,
)
from lightning_d9d.ops.kernels import peer_exchange, peer_words

VOCAB = 256


@pytest.mark.parametrize(
    ("name", "shapes", "part"),
    [
        ("aten::mm", [[64, 128], [128, VOCAB]], HEAD),
        ("aten::mm", [[64, 128], [128, 384]], PRODUCTS),
        ("lightning_d9d::linear_cross_entropy", [], HEAD),
        ("aten::_scaled_dot_product_cudnn_attention_backward", [], ATTENTION),
        ("aten::_grouped_mm", [], EXPERTS),
        ("lightning_d9d::moe_copy_rows", [], PERMUTES),
        ("lightning_d9d::moe_route", [], REST),
        ("lightning_d9d::rms_norm_backward", [], NORMS),
        ("Optimizer.step#StochasticAdamW.step", [], OPTIMIZER),
        ("aten::embedding", [], REST),
        ("aten::copy_", [], COPIES),
        ("Memcpy HtoD (Pinned -> Device)", [], COPIES),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", [], COMMUNICATION),
        (WAIT, [], COMMUNICATION),
        ("_exchange", [], COMMUNICATION),
        ("_take_rest", [], PERMUTES),
    ],
)
def test_parts_of_operators(name: str, shapes: list[list[int]], part: str) -> None:
    assert part_of(name, shapes, VOCAB) == part


def test_a_profile_of_a_cpu() -> None:
    """All times make up the step, and the products took most of it."""
    matrix = torch.randn(256, 256)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, acc_events=True) as profiler:
        begin = perf_counter()
        with record_function("0F0"):
            for _ in range(4):
                matrix @ matrix
        seconds = perf_counter() - begin
    found = profiled_steps(profiler, seconds, num_steps=2)
    assert found.seconds == seconds / 2
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    assert found.parts[PRODUCTS] > 0.5 * (found.seconds - found.parts[GAPS])
    assert found.operators[0][:3] == ("aten::mm", "[[256, 256], [256, 256]]", 4)
    assert found.device is None
    assert "| aten::mm | [[256, 256], [256, 256]] | 2.0 |" in found.table()


def kernel(name: str, begin: float, end: float, stream: int = 7, *, is_range: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CUDA,
        device_resource_id=stream,
        is_user_annotation=is_range,
        time_range=SimpleNamespace(start=begin, end=end),
    )


def operator(name: str, *launched: tuple[str, float], wall: float = 1.0, is_range: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        device_type=DeviceType.CPU,
        input_shapes=[],
        is_user_annotation=is_range,
        time_range=SimpleNamespace(elapsed_us=lambda: wall),
        kernels=[SimpleNamespace(name=name, duration=its) for name, its in launched],
    )


def test_a_profile_of_a_gpu() -> None:
    """A kernel is that of the operator that launched it, or of its own name; ranges count nothing."""
    events = [
        operator("aten::mm", ("nvjet", 100.0)),
        operator("lightning_d9d::moe_copy_rows", ("_copy", 12.0), ("_copy", 8.0)),
        operator("c10d::allreduce_", ("ncclDevKernel_AllReduce", 200.0)),
        operator("0F0", ("0F0", 120.0), is_range=True),
        operator("cudaStreamSynchronize", wall=40.0),
        kernel("nvjet", 0, 100),
        kernel("_copy", 100, 112),
        kernel("_copy", 112, 120),
        kernel("ncclDevKernel_AllReduce", 50, 250, stream=20),
        kernel("0F0", 0, 120, is_range=True),
        kernel("_adamw", 300, 350),
        kernel("_copy", 350, 360),  # of no operator this time
    ]
    profiler = cast(Any, SimpleNamespace(use_device="cuda", events=lambda: events))
    found = profiled_steps(profiler, 500e-6)
    us = {name: round(1e6 * seconds) for name, seconds in found.parts.items() if seconds > 0}
    assert us == {PRODUCTS: 100, PERMUTES: 20, COMMUNICATION: 200, OPTIMIZER: 50, REST: 10, GAPS: 500 - 310}
    assert found.operators[0][:3] == ("c10d::allreduce_", "", 1)
    use = found.device
    assert use is not None
    assert (use.num_kernels, use.busy, use.idle, use.num_long_gaps) == (6, 310, 50, 1)
    assert use.communication_alone == 310 - 180
    assert use.streams == {"7": 180, "20": 200}
    assert use.gaps == [(50, "ncclDevKernel_AllReduce", "_adamw")]
    table = found.table(launched=450e-6)
    assert "| ms until the host has launched it | 0.45 |" in table
    assert "| ms in which the host waits for the device | 0.04 |" in table
    assert "- 50 us, ncclDevKernel_AllReduce -> _adamw" in table


def test_an_operator_that_sends_and_copies() -> None:
    """Kernels that write to other ranks are communication, whatever operator launched them."""
    events = [
        operator(
            "lightning_d9d::peer_dispatch", ("_exchange", 30.0), ("_meet", 5.0), ("_take_rest", 20.0), ("fill", 1.0)
        ),
        kernel("_exchange", 0, 30),
        kernel("_meet", 30, 35),
        kernel("_take_rest", 35, 55),
        kernel("fill", 55, 56),
    ]
    found = profiled_steps(cast(Any, SimpleNamespace(use_device="cuda", events=lambda: events)), 56e-6)
    us = {name: round(1e6 * seconds) for name, seconds in found.parts.items() if seconds > 0}
    assert us == {COMMUNICATION: 35, PERMUTES: 20, REST: 1}
    assert found.operators[0].seconds == pytest.approx(56e-6)
    assert found.device is not None
    assert found.device.communication_alone == 35


def test_kernels_of_peers_have_a_part() -> None:
    """Each kernel that a message launches is listed by its name."""
    sources = [inspect.getsource(module) for module in (peer_exchange, peer_words)]
    found = {name for source in sources for name in re.findall(r"^ +(_\w+)\[\(", source, re.MULTILINE)}
    assert found == set(PARTS_OF_PEER_KERNELS)
