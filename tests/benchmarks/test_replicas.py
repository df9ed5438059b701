"""What the benchmarks of decentralised replicas predict, judge and show, and that they run."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
from torch import nn

from lightning_d9d import D9DStrategy
from tests.benchmarks import replica_links, replica_loss, replica_stop
from tests.benchmarks.replica_links import LinksCase, message_bytes, predicted_seconds
from tests.benchmarks.replica_ranks import Paused, Times, run_ranks, trainer_of
from tests.benchmarks.replica_stop import StopCase, lateness


def test_a_slow_link_costs_an_all_reduce_more() -> None:
    case = LinksCase()  # 1 M parameters, 0.3 s of computation
    assert message_bytes(case, "all_reduce") == 6e6
    assert message_bytes(case, "one_peer_exp") == 4e6
    assert message_bytes(case, "alternating_exp_ring") == 2e6
    assert predicted_seconds(case, "all_reduce", 100, 0.01) == pytest.approx(0.1 + 0.025 + 0.48 + 0.01)
    assert predicted_seconds(case, "one_peer_exp", 100, 0.01) == pytest.approx(0.32 + 0.01)
    assert predicted_seconds(case, "alternating_exp_ring", 50, 0.0) == pytest.approx((0.64 + 0.3) / 2)
    assert predicted_seconds(case, "all_reduce", 10_000, 0.0) == pytest.approx(0.3)


def test_links_are_shown_and_judged() -> None:
    seconds = {"all_reduce": 0.6, "one_peer_exp": 0.3, "alternating_exp_ring": 0.25}
    values = {
        name: {"seconds": each, "predicted": each, "bytes": 4e6, "account": 4e6} for name, each in seconds.items()
    }
    free = {name: {"seconds": 0.3, "bytes": 4e6, "account": 4e6} for name in seconds}
    result = {"case": "4 replicas", "rates": {"None": free, "50": values, "changing": values}, "changing": (200, 50)}
    assert replica_links.verdicts(result) == ["met", "met"]
    text = replica_links.table(result, "cpu")
    assert "| 50 | one_peer_exp | 3.33 | 3.33 | 2.00 | 2.00 | 4.00 | 4.00 |" in text
    assert "| 200, one 200 or 50 | all_reduce | 1.67 | 1.67 | 1 | 1 |" in text


def test_a_stop_is_later_by_a_computation_less_at_each_edge() -> None:
    case = StopCase(computing_seconds=1.0, stopped_seconds=2.5)
    assert replica_stop.predicted(case, "ring") == [0, 0.5, 1.5, 2.5, 1.5, 0.5, 0, 0]
    assert replica_stop.predicted(case, "all_reduce") == [2.5] * 8
    late = lateness(StopCase(stop_at=4, steps=7), [1.0, 2.0, 3.0, 4.0, 7.0, 8.0, 9.5])
    assert late == [0, 0, 0, 0, 2.0, 2.0, 2.5]


def test_stops_are_shown_judged_and_drawn(tmp_path: Path) -> None:
    late = {name: [[0.0, 0.0, each, each, each] for each in (0.0, 1.0, 2.5, 1.0)] for name in replica_stop.WAYS}
    result = {
        **{"case": "4 replicas", "stopped": 2, "stop_at": 2, "stopped_seconds": 2.5, "computing_seconds": 1.5},
        **{"late": late, "predicted": {name: [0.0, 1.0, 2.5, 1.0] for name in late}},
    }
    assert replica_stop.verdicts(result) == ["met"]
    assert "| ring | 0.00 (0.00) | 1.00 (1.00) | 2.50 (2.50) | 1.00 (1.00) |" in replica_stop.table(result, "cpu")
    replica_stop.write(result, tmp_path, "cpu")
    assert (tmp_path / "replica_stop-4-replicas.png").stat().st_size > 0
    far = {**result, "late": {**late, "ring": [[0.0, 0.0, 1.0, 1.0, 1.0]] * 4}}
    assert replica_stop.verdicts(far) == ["missed"]


def test_losses_are_compared_at_the_best_rate_of_each() -> None:
    curves = {
        "all_reduce": {"0.003": [(250, 2.0), (500, 1.9)], "0.006": [(250, 2.0), (500, 1.8)]},
        "one_peer_exp": {"0.003": [(250, 2.2), (500, 2.0)], "0.006": [(250, 2.0), (500, 1.809)]},
    }
    result = {"case": "4 replicas", "steps": 500, "curves": curves}
    assert replica_loss.verdicts(result) == ["met"]
    assert "| one_peer_exp | 0.006 | 2.0000 | 1.8090 | +0.50% |" in replica_loss.table(result, "cpu")
    with_high_loss = {**curves, "one_peer_exp": {"0.003": [(250, 2.2), (500, 2.0)]}}
    assert replica_loss.verdicts({**result, "curves": with_high_loss}) == ["missed"]


def steps_of(rank: int) -> list[float]:
    times = Times()
    module = Paused(16, 0.0, 0.0, num_layers=2)
    trainer_of(D9DStrategy(replicate_sync="ring"), 2, callbacks=[times], max_steps=3, log_every_n_steps=0).fit(module)
    assert isinstance(module.weights[0], nn.Parameter)
    assert module.weights[0].mean().item() == pytest.approx(-0.15)  # three steps of 0.1 along a gradient of 0.5
    return times.ends


def fails(problem: str, rank: int) -> None:
    raise ValueError(f"{problem} on rank {rank}")


@pytest.mark.jobs
def test_ranks_return_what_they_found_and_name_what_failed() -> None:
    found = run_ranks(steps_of, 2)
    assert all(len(ends) == 3 and ends == sorted(ends) for ends in found)
    with pytest.raises(RuntimeError, match=r"rank 0: Traceback[\s\S]*ValueError: nothing on rank 0"):
        run_ranks(partial(fails, "nothing"), 1)
