"""The table of dispatches of docs/explanation/moe-dispatch.md, by arithmetic with the rates of the H100's table."""

from __future__ import annotations

import functools
import math
from pathlib import Path

import pytest

from lightning_d9d import D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.memory.traffic import Sent, of_layer
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.plan import Plan, machine_of, plan

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "moe-dispatch.md"
MACHINE = machine_of("h100")
EXPERTS, TOP_K, TOKENS = 128, 8, 16_384
CASES = [(8, 8, "peer"), (8, 8, "all_to_all"), (64, 8, "peer"), (64, 64, "all_to_all")]
CASES += [(1024, 8, "peer"), (1024, 64, "all_to_all"), (1024, 128, "all_to_all")]


@functools.cache
def planned(ranks: int, experts: int, dispatch: str) -> Plan:
    mesh = MeshConfig(data_parallel_shard=8, data_parallel_replicate=-1, expert_parallel=experts)
    parallel = ParallelConfig(recompute="full", expert_dispatch=dispatch)  # type: ignore[arg-type]
    strategy = D9DStrategy(mesh=mesh, parallel=parallel)
    return plan(Qwen3MoePretraining(preset="30b-a3b"), strategy, ranks, MACHINE, rows=4, tokens=4096)


def messages(found: Plan) -> Sent:
    """Those of one layer, forward and backward, with a recomputed forward."""
    (stage,) = found.model.stages(0).values()
    (sent,) = (each for each in of_layer(found.model, stage.layers[0], 1) if each.what == "tokens to experts")
    return sent


def drawn(experts: int) -> float:
    """The rows of a token to other ranks if each set of eight experts is as likely."""
    here = 1 - math.comb(EXPERTS - EXPERTS // experts, TOP_K) / math.comb(EXPERTS, TOP_K)
    return (experts - 1) * here


@pytest.mark.parametrize(("ranks", "experts", "dispatch"), CASES)
def test_the_page_has_what_plans_say(ranks: int, experts: int, dispatch: str) -> None:
    found = planned(ranks, experts, dispatch)
    assert found.missing <= 0
    sent, rates = messages(found), MACHINE.rates
    most = min(TOP_K, experts) * (experts - 1) / experts
    near, far = rates.spread_bytes(sent.num_bytes, experts, experts, is_ring=False)
    links, waits = 1e3 * rates.send_seconds(near, far), 1e3 * sent.num_waits * MACHINE.wait_seconds
    total = links + waits + 1e3 * sent.num_messages * MACHINE.latency
    row = (
        f"| {ranks:,} | {experts} | `{dispatch}` | {most:.1f} | {drawn(experts):.1f} | {near / 1e9:.2f} | "
        f"{far / 1e9:.2f} | {links:.1f} | {waits:.1f} | {total:.1f} | {found.tokens_per_second:,.0f} |"
    )
    assert row in PAGE.read_text()


def test_rows_over_the_network_by_node_and_by_rank() -> None:
    """Of 64 ranks in eight nodes: a row for each other node, and for each of the 56 ranks there."""
    assert f"{drawn(8):.1f} instead of {drawn(64) * 56 / 63:.1f}." in PAGE.read_text()


@pytest.mark.parametrize(("ranks", "megabytes"), [(2, 67), (4, 183), (8, 314), (16, 415)])
def test_messages_of_a_few_ranks(ranks: int, megabytes: int) -> None:
    assert round(drawn(ranks) * TOKENS * 4096 / 1e6) == megabytes
    of_experts = round(TOP_K * (ranks - 1) / ranks * TOKENS * 4096 / 1e6)
    assert f"| {ranks} | {drawn(ranks):.1f} | {megabytes} | {of_experts} |" in PAGE.read_text()


def test_a_path_sends_what_the_page_says() -> None:
    """Bytes of a token for each row: hidden states four times, then numbers and weights of experts, by path."""
    text = PAGE.read_text()
    for dispatch, notes in (("all_to_all", 2 * 2 * TOP_K * 4), ("peer", 3 * TOP_K * 4 + 2 * 4)):
        parallel = ParallelConfig(expert_dispatch=dispatch)  # type: ignore[arg-type]
        strategy = D9DStrategy(mesh=MeshConfig(data_parallel_shard=8, expert_parallel=8), parallel=parallel)
        found = plan(Qwen3MoePretraining(preset="30b-a3b"), strategy, 8, "h200", rows=4, tokens=4096)
        rows = TOKENS * TOP_K * 7 / 8
        counts = 7 * (8 * 16 if dispatch == "all_to_all" else (8 + 128) * 4)
        assert messages(found).num_bytes == rows * (4 * 4096 + notes) + counts
        assert f"| `{dispatch}` | {4 * 4096:,} | {notes} | {counts:,} |" in text
