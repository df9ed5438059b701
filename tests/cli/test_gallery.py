"""The configurations of the gallery run with tiny models, on meshes like theirs, and fit their GPUs by arithmetic."""

from __future__ import annotations

import csv
import json
import os
import re
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from lightning_d9d.cli import D9DCLI, main
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from tests.cli.test_30b_examples import write_tiny
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind, tolerance_for

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = ROOT / "docs" / "how-to" / "gallery.md"
MESHES = {
    "fsdp": {"data_parallel_shard": 4, "expert_parallel": 4},
    "two_nodes": {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2},
    "long_context": {"context_parallel_shard": 4, "expert_parallel": 4},
}
"""Degrees of each file on four ranks."""
AXES = ("pipeline_parallel", "data_parallel_shard", "context_parallel_shard", "expert_parallel")
ROWS = 8
"""The rows of a step, on all ranks together."""


def configured(*names: str) -> list[str]:
    return [word for name in names for word in ("--config", str(EXAMPLES / f"{name}.yaml"))]


def losses_below(folder: Path) -> list[float]:
    (metrics,) = folder.glob("lightning_logs/version_*/metrics.csv")
    with metrics.open() as file:
        return [float(row["train_loss"]) for row in csv.DictReader(file) if row["train_loss"]]


def fit_on_ranks(name: str, output: str, degrees: dict[str, int], options: list[str]) -> None:
    given = [f"--trainer.strategy.mesh.{axis}={degrees.get(axis, 1)}" for axis in AXES]
    replicas = 1 if degrees else 4
    data_ranks = replicas * degrees.get("data_parallel_shard", 1)
    D9DCLI(
        args=[
            *("fit", *configured(f"qwen3_moe/30b_a3b_{name}", "qwen3_moe/30b_a3b_tiny"), *given, *options),
            *("--trainer.devices=4", "--trainer.num_nodes=1", "--trainer.max_steps=2", "--trainer.limit_val_batches=0"),
            *("--trainer.precision=32-true", "--model.optimizer.state_dtype=float32"),
            *("--model.lr_scheduler.warmup_steps=1", f"--trainer.default_root_dir={output}"),
            f"--trainer.strategy.mesh.data_parallel_replicate={replicas}",
            f"--data.batch_size={ROWS // data_ranks}",
        ]
    )


@pytest.fixture
def base(tmp_path: Path) -> Path:
    write_tiny(tmp_path, num_layers=4)
    text = "The loss of a text that repeats falls from one step to the next. " * 200
    (tmp_path / "train.jsonl").write_text(f"{json.dumps({'text': text})}\n" * 20)
    return tmp_path / "base"


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "name",
    [
        "two_nodes",
        pytest.param("fsdp", marks=pytest.mark.meshes),
        pytest.param("long_context", marks=pytest.mark.meshes),
    ],
)
def test_losses_are_those_of_replicas(rank: RankContext, name: str, base: Path) -> None:
    assert base.parent == rank.tmp_dir == Path.cwd()
    plain = {"two_nodes": ["--trainer.strategy.schedule=null"]}
    variables = {"LIGHTNING_D9D_CACHE": str(rank.tmp_dir / "cache")}
    with patch.object(sys, "argv", ["lightning-d9d"]), patch.dict(os.environ, variables):
        fit_on_ranks(name, "split", MESHES[name], [])
        fit_on_ranks(name, "replicas", {}, plain.get(name, []))
    if rank.rank == 0:
        losses, expected = (losses_below(rank.tmp_dir / output) for output in ("split", "replicas"))
        assert len(losses) == 2
        assert losses[1] < losses[0]
        assert losses == pytest.approx(expected, abs=tolerance_for(Kind.LOSS, torch.float32).absolute)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "argv", ["lightning-d9d"])
    monkeypatch.setenv("LIGHTNING_D9D_CACHE", str(tmp_path / "cache"))
    return tmp_path


def test_chats_train(folder: Path) -> None:
    write_tiny(folder)
    turns = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5, and no more"}]
    (folder / "train.jsonl").write_text(f"{json.dumps({'messages': turns})}\n" * 200)
    D9DCLI(args=["fit", *configured("qwen3_moe/chats", "qwen3_moe/lora_tiny"), "--trainer.max_steps=10"])
    losses = losses_below(folder / "chats_output")
    assert len(losses) == 10
    assert losses[-1] < losses[0] - 1
    assert (folder / "chats_output" / "export" / "config.json").exists()


def test_own_model_trains(folder: Path) -> None:
    cli = D9DCLI(args=["fit", *configured("own_model"), "--trainer.accelerator=cpu"])
    assert cli.trainer.global_step == 5 * 1024 / 64
    assert cli.trainer.callback_metrics["val_accuracy"] > 0.8


@pytest.mark.parametrize(("name", "world_size"), [("fsdp", 8), ("two_nodes", 16), ("long_context", 8)])
def test_it_fits_80_gb_by_arithmetic(folder: Path, name: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "base").mkdir()
    (folder / "base" / "config.json").write_text(json.dumps(Qwen3MoeConfig.preset("30b-a3b").to_dict()))
    options = ["--world_size", str(world_size), "--gpu", "h100", "--json", "plan.json"]
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "plan", *configured(f"qwen3_moe/30b_a3b_{name}"), *options])
    main()
    (needed,) = re.findall(rf"^\| .*30b_a3b_{name}\.yaml.*?\| (\d+) GiB", PAGE.read_text(), re.M)
    plan = json.loads((folder / "plan.json").read_text())
    planned = max(each["needed_bytes"] for each in plan["ranks"]) / 2**30
    assert planned == pytest.approx(int(needed), abs=1)
    assert planned < plan["machine"]["memory_gib"]


def test_the_page_has_every_configuration() -> None:
    named = set(re.findall(r"`(examples/[\w/]+\.yaml)`", PAGE.read_text(encoding="utf-8")))
    assert named == {str(path.relative_to(ROOT)) for path in EXAMPLES.rglob("*.yaml")}
