"""A process of `plan_runs`: fits for some steps, and measures memory, time, bubble and what is sent."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import statistics
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, Dataset

from lightning_d9d import D9DStrategy, GradSyncConfig, MeshConfig, ParallelConfig
from lightning_d9d.mesh.collectives import all_gather_object
from lightning_d9d.metrics.profiled import COMMUNICATION, profiled_steps
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.modules import BalanceConfig
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.peft import FullTune, LoRA
from lightning_d9d.pipeline.timeline import Timeline
from lightning_d9d.schedule import bubble_ratio
from tests.benchmarks.plan_runs import Run, listed
from tests.benchmarks.step_profile import of_trace
from tests.harness.recorder import Recorder
from tests.harness.records import KINDS, read, sent_bytes

STEPS, FIRST_STEPS = 11, 4
"""The steps of a fit, and the first ones, which are not timed. Three more at the end are measured in other ways."""
_SHOWN = 40


class Rows(Dataset[dict[str, Tensor]]):
    """Drawn tokens."""

    def __init__(self, num_rows: int, tokens: int, vocabulary: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self._tokens = torch.randint(vocabulary, (num_rows, tokens + 1), generator=generator)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._tokens[index, :-1], "labels": self._tokens[index, 1:]}


class Measure(L.Callback):
    """Notes the time of steps behind the first, then what one sends, when one computes, and its kernels."""

    def __init__(self, steps: int, folder: Path) -> None:
        self.steps = steps
        self.folder = folder
        self.values: dict[str, Any] = {}
        self._events: list[torch.cuda.Event] = []
        self._recorder: Recorder | None = None
        self._timeline: Timeline | None = None
        self._profile: profile | None = None

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Begin to look, in the last three steps. Collective in a pipeline."""
        strategy: Any = trainer.strategy
        if batch_idx == self.steps - 3:
            self._recorder = Recorder()
            self._recorder.start(self.folder / f"sent_{trainer.global_rank}")
        if batch_idx == self.steps - 2 and strategy.pipeline.num_ranks > 1:
            self._timeline = strategy.executor.observer = Timeline(pl_module.device, strategy.pipeline.group)
        if batch_idx == self.steps - 1 and pl_module.device.type == "cuda" and trainer.global_rank == 0:
            torch.cuda.synchronize()
            self._profile = profile(
                activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], record_shapes=True, acc_events=True
            )
            self._profile.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Note when a step is done, by the device's clock, and look away."""
        on_cuda = pl_module.device.type == "cuda"
        if on_cuda and batch_idx == 1:
            self.values["first_allocated_bytes"] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()
        if on_cuda and FIRST_STEPS - 1 <= batch_idx < self.steps - 3:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        if on_cuda and batch_idx == self.steps - 4:
            self.values["allocated_bytes"] = torch.cuda.max_memory_allocated()
            self.values["reserved_bytes"] = torch.cuda.max_memory_reserved()
            self.values["allocator"] = allocator()
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
            sent: Counter[str] = Counter()
            for entry in read(self.folder / f"sent_{trainer.global_rank}"):
                if len(entry.ranks) > 1 and entry.operator in KINDS:
                    sent[KINDS[entry.operator]] += sent_bytes(entry, trainer.global_rank)
            self.values["sent_bytes"] = dict(sent)
        if self._timeline is not None:
            strategy: Any = trainer.strategy
            strategy.executor.observer = None
            self.values["bubble"] = bubble_ratio(self._timeline.spans())
            self._timeline = None
        if self._profile is not None:
            torch.cuda.synchronize()
            self._profile.stop()
            self.values["profile"] = summed(self._profile, self.folder)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Take the median of the steps."""
        if self._events:
            torch.cuda.synchronize()
            pairs = zip(self._events[:-1], self._events[1:], strict=True)
            self.values["step_seconds"] = statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1e3


def allocator() -> dict[str, Any]:
    """Bytes that torch's allocator has, by stream and pool, and what it counted."""
    pools: dict[str, list[int]] = {}
    for segment in torch.cuda.memory_snapshot():
        pool = pools.setdefault(f"{segment['stream']} {segment['segment_type']}", [0, 0, 0])
        for place, value in enumerate((1, segment["total_size"], segment["allocated_size"])):
            pool[place] += value
    statistics = torch.cuda.memory_stats()
    names = ("requested_bytes.all.peak", "inactive_split_bytes.all.peak", "num_alloc_retries", "num_device_alloc")
    return {"segments, bytes, allocated": pools, **{name: statistics.get(name) for name in names}}


def summed(profiler: profile, folder: Path) -> dict[str, Any]:
    """Milliseconds of a step's kernels: by part, by name, of the streams, and without anything beside messages."""
    profiler.export_chrome_trace(str(folder / "trace.json"))
    found = of_trace(json.loads((folder / "trace.json").read_text())["traceEvents"], 1)
    steps = profiled_steps(profiler, 0.0)
    assert steps.device is not None
    kernels = sorted(found["kernels"].items(), key=lambda each: -each[1]["ms"])[:_SHOWN]
    return {
        "parts": {name: round(1e3 * seconds, 3) for name, seconds in steps.parts.items() if seconds},
        f"{COMMUNICATION} alone": steps.device.communication_alone / 1e3,
        "busy": found["busy_ms"],
        "idle": found["idle_ms"],
        "launches": found["launches"],
        "streams": found["streams"],
        "kernels": {name[:120]: [int(of["calls"]), round(of["ms"], 3)] for name, of in kernels},
        "operators": [
            [each.name, each.shapes[:120], each.calls, round(1e3 * each.seconds, 3)] for each in steps.operators
        ],
    }


def module_of(run: Run, is_quick: bool) -> Qwen3MoePretraining:
    """Return the module of a run."""
    config = Qwen3MoeConfig.preset("tiny" if is_quick else run.preset)  # type: ignore[arg-type]
    config = dataclasses.replace(config, **({} if is_quick else run.sizes))
    most = max(config.max_position_embeddings, run.tokens)
    config = dataclasses.replace(config, max_position_embeddings=most)
    optimizers = {"adamw": None}
    for name in ("bfloat16", "uint8"):
        optimizers[name] = functools.partial(StochasticAdamW, lr=1e-5, state_dtype=getattr(torch, name))
    balance = BalanceConfig(forced=True) if config.num_experts else None
    peft = None
    if run.adapters is not None:
        given = dict(run.adapters)
        peft = FullTune(given["trained"]) if "trained" in given else LoRA(**given)
    return Qwen3MoePretraining(config, optimizer=optimizers[run.optimizer], balance=balance, peft=peft)


def strategy_of(run: Run) -> D9DStrategy:
    """Return the strategy of a run. Tokens travel by all-to-all, as when the runs were measured."""
    dispatch = "all_to_all" if run.mesh.get("expert_parallel", 1) > 1 else "auto"
    return D9DStrategy(
        mesh=MeshConfig(**run.mesh),
        schedule=run.schedule,
        num_microbatches=run.microbatches if run.microbatches > 1 else None,
        parallel=ParallelConfig(recompute=run.recompute, expert_dispatch=dispatch),
        grad_sync=GradSyncConfig(dtype=run.sums or "auto"),  # type: ignore[arg-type]
        step_in_backward=run.in_backward,
    )


def main() -> None:
    """Fit, and write what was measured on all ranks: of memory the most, of the rest rank 0's."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("device", choices=("cpu", "cuda"))
    parser.add_argument("output", type=Path)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    (run,) = (each for each in listed() if each.name == arguments.name)
    if arguments.quick:
        run = dataclasses.replace(run, tokens=64)
    module = module_of(run, arguments.quick)
    shares = run.mesh.get("data_parallel_replicate", 1) * run.mesh.get("data_parallel_shard", 1)
    rows = Rows(STEPS * shares * run.rows, run.tokens, module.config.vocab_size)
    with tempfile.TemporaryDirectory() as folder:
        measure = Measure(STEPS, Path(folder))
        trainer = L.Trainer(
            strategy=strategy_of(run),
            accelerator="gpu" if arguments.device == "cuda" else "cpu",
            devices=run.gpus,
            precision="32-true" if arguments.device == "cpu" else run.precision,  # type: ignore[arg-type]
            max_steps=STEPS,
            gradient_clip_val=None if run.in_backward else 1.0,
            callbacks=[measure],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=True,
            default_root_dir=folder,
        )
        trainer.fit(module, DataLoader(rows, batch_size=run.rows))
    every = all_gather_object(measure.values) if dist.is_initialized() else [measure.values]
    if int(os.environ.get("RANK", "0")) == 0:
        values: dict[str, Any] = {"gpus": run.gpus, "torch": torch.__version__}
        if arguments.device == "cuda":
            values["device"] = torch.cuda.get_device_name()
        for name in ("step_seconds", "bubble", "allocator", "profile"):
            values |= {name: measure.values[name]} if name in measure.values else {}
        for name in ("allocated_bytes", "reserved_bytes", "first_allocated_bytes"):
            values |= {name: [each[name] for each in every]} if name in measure.values else {}
        values["sent_bytes"] = [each["sent_bytes"] for each in every]
        arguments.output.write_text(json.dumps(values))


if __name__ == "__main__":
    main()
