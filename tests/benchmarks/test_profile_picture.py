"""The picture of one layer from a trace: its borders, and what messages ran with nothing beside."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from tests.benchmarks.profile_picture import alone, draw, kernels_of, kind_of, layers, main

FORWARD, BACKWARD = "cudnn_sdpa_fprop", "cudnn_sdpa_bprop"
STEP = [
    (FORWARD, 7, 0, 10), ("_exchange", 7, 10, 14), ("cutlass::device_kernel", 7, 14, 40),
    (FORWARD, 7, 40, 50), ("_exchange", 9, 50, 54), ("_take_rest", 7, 52, 60),
    (BACKWARD, 7, 60, 80), ("ncclDevKernel_AllReduce_Sum", 20, 80, 90), ("nvjet", 7, 85, 95),
    (BACKWARD, 7, 100, 120),
]  # fmt: skip


def trace(folder: Path) -> Path:
    events = [
        {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": {"stream": stream}}
        for name, stream, begin, end in reversed(STEP)
    ]
    path = folder / "rank_0.trace.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": [*events, {"cat": "cpu_op", "name": "x"}]}).encode()))
    return path


def test_kinds() -> None:
    kinds = ["messages of experts", "sums of gradients", "copies of tokens", "experts' products", "all else"]
    names = ["ncclDevKernel_SendRecv", "ncclDevKernel_AllReduce", "_take_rest", "cutlass::device_kernel", "_rms_norm"]
    assert [kind_of(name) for name in names] == kinds


def test_messages_with_nothing_beside(tmp_path: Path) -> None:
    found = alone(kernels_of(trace(tmp_path)))
    assert found == pytest.approx({"messages of experts": 0.006, "sums of gradients": 0.005, "both": 0.011})


def test_borders_of_layers(tmp_path: Path) -> None:
    assert layers(kernels_of(trace(tmp_path))) == ((0, 40), (60, 100))


def test_a_trace_of_one_layer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no two layers"):
        draw([("one", kernels_of(trace(tmp_path))[:3])], tmp_path / "layer.png")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace(tmp_path)
    main([str(tmp_path / "layer.png"), f"before={path}", f"after={path}"])
    assert (
        "before: ms with only messages, of all steps of the trace: messages of experts 0.01" in capsys.readouterr().out
    )
    assert (tmp_path / "layer.png").read_bytes().startswith(b"\x89PNG")
