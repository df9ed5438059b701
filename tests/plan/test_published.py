"""Plans that pages show: beside published runs of Qwen3-30B-A3B, and of a large model."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.plan import Plan, machine_of, plan

DOCS = Path(__file__).parents[2] / "docs"
PAGE, LARGE = DOCS / "explanation" / "what-a-rank-holds-and-sends.md", DOCS / "how-to" / "plan-a-run.md"


def planned(ranks: int, rows: int, microbatches: int, recompute: str, experts: int | None = None) -> Plan:
    mesh = MeshConfig(data_parallel_shard=ranks, expert_parallel=experts or ranks)
    strategy = D9DStrategy(mesh=mesh, num_microbatches=microbatches, parallel=ParallelConfig(recompute=recompute))
    return plan(Qwen3MoePretraining(preset="30b-a3b"), strategy, ranks, "h100", rows=rows, tokens=4096)


@pytest.mark.parametrize(
    ("ranks", "rows", "microbatches", "recompute", "published", "error"),
    [(8, 64, 16, "full", 12040, -0.103), (8, 4, 1, "full", 11340, -0.090), (16, 64, 64, "none", 13000, -0.514)],
)
def test_the_table_is_that_of_the_plans(
    ranks: int, rows: int, microbatches: int, recompute: str, published: float, error: float
) -> None:
    found = planned(ranks, rows, microbatches, recompute)
    assert found.tokens_per_second / published - 1 == pytest.approx(error, abs=0.0006)
    assert f"| {published:,} | {found.tokens_per_second:,.0f} | {100 * error:.1f} % |" in PAGE.read_text()
    assert found.missing <= 0


def test_why_two_nodes_are_slow() -> None:
    """Half of a token's experts are in the other node: with one row for them the network has a quarter to carry."""
    found = planned(16, 64, 64, "none")
    far, seconds = found.timed.links["network"]
    messages = found.timed.seconds.messages
    assert seconds == pytest.approx(far / machine_of("h100").network_bytes)
    faster = found.step_seconds - seconds + seconds / 4
    assert messages == pytest.approx(28.4, abs=0.05)
    assert messages - seconds + seconds / 4 == pytest.approx(12.8, abs=0.05)
    assert found.tokens / faster / 16 == pytest.approx(10129, abs=1)
    waits = 64 * 48 * machine_of("h100").wait_seconds
    assert waits == pytest.approx(7.1, abs=0.05)
    assert found.tokens / (faster - waits) / 16 == pytest.approx(13932, abs=1)
    assert planned(16, 64, 64, "none", experts=8).tokens_per_second == pytest.approx(9546, abs=1)


def test_links_by_hand() -> None:
    rates = machine_of("h100").rates
    assert rates.spread_bytes(16.0, 8, 8, is_ring=False) == (16.0, 0.0)
    assert rates.spread_bytes(16.0, 16, 16, is_ring=True) == (14.0, 2.0)  # one of eight is at the border
    assert rates.spread_bytes(15.0, 16, 16, is_ring=False) == (7.0, 8.0)
    assert rates.spread_bytes(16.0, 16, 128, is_ring=True) == (0.0, 16.0)  # one rank a node
    assert rates.send_seconds(235e9, 40e9) == 1.0
    assert rates.send_seconds(235e9, 80e9) == 2.0


@pytest.mark.meshes
def test_the_page_has_the_plan_of_a_large_model() -> None:
    degrees = {"pipeline_parallel": 8, "data_parallel_shard": 8, "data_parallel_replicate": -1, "expert_parallel": 8}
    parallel = ParallelConfig(recompute="full")
    strategy = D9DStrategy(
        mesh=MeshConfig(**degrees), schedule="interleaved_1f1b", num_microbatches=32, parallel=parallel
    )
    found = plan(Qwen3MoePretraining(preset="235b-a22b"), strategy, 256, "h100", rows=32, tokens=4096, clips=False)
    shown, _, _ = str(found).partition("not measured on this device")
    assert f"```text\n{shown.strip()}\n```" in LARGE.read_text()


def test_a_plan_of_16384_ranks_takes_seconds() -> None:
    """The processor time of the arithmetic, without imports."""
    degrees = {"pipeline_parallel": 16, "data_parallel_shard": 8, "data_parallel_replicate": -1, "expert_parallel": 64}
    strategy = D9DStrategy(mesh=MeshConfig(**degrees), num_microbatches=64, schedule="zero_bubble_v")
    begin = time.process_time()
    found = plan(Qwen3MoePretraining(preset="30b-a3b"), strategy, 16384, "h200", rows=64, tokens=4096)
    assert time.process_time() - begin < 5
    assert len(found.ranks) == 16
