"""Planned bytes on links, equal to those of a recorder: a step on four ranks of a CPU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch.utils.data import DataLoader

from lightning_d9d.memory.traffic import by_kind
from lightning_d9d.plan import plan
from tests.benchmarks.plan_runs import Run
from tests.benchmarks.plan_runs_job import Rows, module_of, strategy_of
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.records import KINDS, read, sent_bytes
from tests.strategy.plain import trainer

MESHES: dict[str, dict[str, int]] = {
    "tensors and shards": {"tensor_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2},
    "copies of shards": {"data_parallel_replicate": 2, "data_parallel_shard": 2, "expert_parallel": 4},
    "copies of shards and of experts": {
        "data_parallel_replicate": 2,
        "data_parallel_shard": 2,
        "expert_parallel": 2,
    },
    "shards of experts": {"data_parallel_shard": 4, "expert_parallel": 2},
    "tensors": {"tensor_parallel": 2, "data_parallel_replicate": 2, "expert_parallel": 4},
    "shards of stages": {"pipeline_parallel": 2, "data_parallel_shard": 2},
    "copies of stages": {"pipeline_parallel": 2, "data_parallel_replicate": 2, "expert_parallel": 2},
    "contexts": {"context_parallel_shard": 2, "data_parallel_replicate": 2, "expert_parallel": 2},
}


class Sent(L.Callback):
    """Records what this rank sends in the second step."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.bytes: defaultdict[str, float] = defaultdict(float)
        self.recorder: Recorder | None = None

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.recorder = Recorder()
            self.recorder.start(self.path)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.recorder is not None:
            self.recorder.close()
            for entry in read(self.path):
                if len(entry.ranks) > 1 and entry.operator in KINDS:
                    self.bytes[KINDS[entry.operator]] += sent_bytes(entry, trainer.global_rank)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.meshes if place else ()) for place, name in enumerate(MESHES)]
)
def test_bytes_are_those_of_the_recorder(name: str, rank: RankContext) -> None:
    in_parts = "pipeline_parallel" in MESHES[name]
    run = Run(name=name, gpus=4, mesh=MESHES[name], tokens=64, precision="32-true", microbatches=4 if in_parts else 1)
    sent = Sent(rank.tmp_dir / f"sent_{rank.rank}")
    fit = trainer(strategy_of(run), 4, callbacks=[sent], max_steps=2, gradient_clip_val=1.0)
    module = module_of(run, is_quick=True)
    fit.fit(module, DataLoader(Rows(32, run.tokens, module.config.vocab_size), batch_size=run.rows))
    found = plan(
        module_of(run, is_quick=True), strategy_of(run), 4, rows=run.rows, tokens=run.tokens, precision="32-true"
    )
    stage = found.ranks[rank.rank * len(found.ranks) // 4]
    assert by_kind(stage.sent) == {kind: num_bytes for kind, num_bytes in sent.bytes.items() if num_bytes}
