"""The contenders of `expert_peers` must do the same work, and one that fails is in the table with its error."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from tests.benchmarks.expert_peers import OURS, cases, measured, run_case, summary, table, verdicts
from tests.benchmarks.expert_peers_job import OF_ITS_EXPERTS, OF_TORCHTITAN, Job, train_ours, train_transformers
from tests.harness import warm
from tests.harness.jobs import run_job
from tests.harness.ranks import RankContext

(TINY,) = cases("cpu", quick=True, steps=4, rows=2)


@pytest.mark.ranks(2)
def test_contenders_have_equal_losses(rank: RankContext) -> None:
    """Nobody trains with a rate of 0, so the loss of the last step is that of equal weights and tokens."""
    losses = {OURS: train_ours(TINY.jobs[OURS])["loss"]}
    groups = set(dist.distributed_c10d._world.pg_map)
    for name in ("transformers", "transformers_spread"):
        losses[name] = train_transformers(TINY.jobs[name])["loss"]
    for group in [each for each in dist.distributed_c10d._world.pg_map if each not in groups]:
        dist.destroy_process_group(group)
    assert list(losses.values()) == pytest.approx([losses[OURS]] * 3, rel=1e-6)
    assert losses[OURS] == pytest.approx(torch.tensor(256.0).log().item(), abs=0.2)


def test_torchtitan_has_a_name_for_each_of_our_parameters() -> None:
    with torch.device("meta"):
        ours = dict(Qwen3MoeForCausalLM(TINY.jobs[OURS].config).named_parameters())
    names = {f"{name}.weight" for name in OF_TORCHTITAN.values()} | {
        f"mlp.experts.{name}" for name, _ in OF_ITS_EXPERTS.values()
    }
    assert {name.replace("model.layers.0.", "").replace("model.layers.1.", "") for name in ours} == names


@pytest.mark.jobs
def test_a_contender_that_fails_or_is_late_says_so(tmp_path: Path) -> None:
    run_job(1, tmp_path, fail_and_be_late, tmp_path)


def fail_and_be_late(folder: Path) -> None:
    """Launch contenders as forks of this process."""
    warm.fork_pythons()
    job = TINY.jobs[OURS]
    assert measured("x", replace(job, package="no_such_package"), 1)["failed"] == "not installed"
    assert measured("x", job, 0.2)["failed"] == "not done in 0.2 s"
    os.environ["OUT"] = str(folder)
    result = run_case(replace(TINY, jobs={OURS: replace(job, recompute="sometimes")}), "cpu")
    (row,) = map(json.loads, (folder / "expert_peers.jsonl").read_text().splitlines())
    assert row["failed"].startswith("exit code 1: ")
    assert "ConfigError: ParallelConfig.recompute='sometimes'" in row["failed"]
    assert row["failed"] in table(result, "cpu")


def rows(**tokens_per_s: float) -> dict[str, dict[str, object]]:
    """Return rows as they are measured on GPUs."""
    job = Job(package="any", device_type="cuda", preset="30b-a3b", layers=48, rows=4, tokens=4096, steps=9)
    return {
        name: {
            "contender": name,
            "tokens_per_s": dict.fromkeys(("median", "low", "high"), speed),
            **{"rows": job.rows, "tokens": job.tokens, "allocated_bytes": 2**36, "reserved_bytes": 2**36},
            **{"loss": 12.0, "seconds": 40.0},
        }
        for name, speed in tokens_per_s.items()
    }


def test_ours_is_judged_by_the_best_peer() -> None:
    (whole,) = cases("cuda", quick=False)
    assert {(job.layers, job.tokens, job.dtype) for job in whole.jobs.values()} == {(48, 4096, torch.bfloat16)}
    result = {"case": whole.name, **summary(whole, rows(ours=13_100, transformers=8_000, torchtitan=10_000))}
    assert (result["peer"], verdicts(result)) == ("torchtitan", ["met"])
    assert "ours: 1.31 of the tokens/s of torchtitan" in table(result, "cuda")
    assert "| ours | 13100 | 13100 .. 13100 | 1251 | 64.0 | 64.0 | 12.0000 | 40 |" in table(result, "cuda")
    assert verdicts(summary(whole, rows(ours=12_900, torchtitan=10_000))) == ["missed"]
    assert verdicts(summary(whole, rows(ours=12_900))) == []


def test_bad_choices() -> None:
    with pytest.raises(ValueError, match=r"--contenders 'megatron' is unknown; choose from 'ours', 'transformers', "):
        cases("cpu", quick=True, contenders=["megatron"])
    with pytest.raises(ValueError, match="--steps 3 leaves none to time behind the first 3; give more"):
        cases("cpu", quick=True, steps=3)
