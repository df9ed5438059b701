"""What mixing costs a step on fast links, where it should be hidden behind computation, and what it sends.

The peer takes the same steps and never begins a round. Each replica is a process with a model of its own. Pairs on one
host copy weights into each other's memory; they also exchange messages, as pairs of two hosts do.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d import D9DStrategy
from lightning_d9d.mixing import ReplicaMixing
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from tests.benchmarks import frame
from tests.benchmarks.frame import Case, Contender
from tests.benchmarks.strategy_overhead import PausedFit, Work, staged_module
from tests.harness.peer_writes import PeerWrites
from tests.harness.recorder import Recorder
from tests.harness.records import read, sent_bytes

ALONE, MIXED, MESSAGES, SUMMED = "no messages", "one_peer_exp", "one_peer_exp by messages", "all_reduce"
PAIRS = (MIXED, MESSAGES)
EXPOSED = 1.02
"""The most time of a step, over that of one without messages."""
RECORDED_STEPS = 2
SENDING = ("send", "allreduce")


class Alone(D9DStrategy):
    """Replicas that were to mix, and never do."""

    def _launch_mixing(self, norm: Tensor | None) -> None:
        del norm


def cases(device_type: str, quick: bool) -> list[Case]:
    """Two replicas."""
    if quick or device_type == "cpu":
        tiny = Qwen3MoeConfig.preset("tiny")
        work = Work(config=tiny, precision="32-true", batch_size=2, sequence_length=32)
    else:
        config = replace(Qwen3MoeConfig.preset("30b-a3b"), num_hidden_layers=2, vocab_size=8192)
        work = Work(config=config, precision="bf16-true", batch_size=32, sequence_length=4096)
    return [
        Case(
            name="2 replicas",
            contenders={
                ALONE: partial(fit, work, Alone, MIXED),
                MIXED: partial(fit, work, D9DStrategy, ReplicaMixing(topology=MIXED, peer_copies=True)),
                MESSAGES: partial(fit, work, D9DStrategy, ReplicaMixing(topology=MIXED, peer_copies=False)),
                SUMMED: partial(fit, work, D9DStrategy, "all_reduce"),
            },
            peer=ALONE,
            limits={} if quick else {MIXED: EXPOSED},
            num_processes=2,
            warmup_steps=4,
            loss_tolerance=0.1,  # they take other steps: a replica of its own has half of the data
            block_steps=2 if quick else 12,  # the last exchange of a block has no step to hide behind
            repeats=2 if quick else 6,
            afterwards=partial(sent, work),
            conditions=work.conditions(),
        )
    ]


def fit(work: Work, strategy: type[D9DStrategy], sync: str | ReplicaMixing, device: torch.device) -> PausedFit:
    """A paused fit of two replicas. It logs nothing in between, where replicas would exchange numbers."""
    made = strategy(replicate_sync=sync)
    return PausedFit(staged_module(work, device), made, work, device, 2, None, log_every_n_steps=1_000_000)


def sent(work: Work, contenders: Mapping[str, Contender], device: torch.device) -> dict[str, dict[str, Any]]:
    """Record what this rank sends a step, beside the account. Collective."""
    found: dict[str, dict[str, Any]] = {}
    recorder = Recorder()
    account = work.config.num_parameters * (2 if work.precision == "bf16-true" else 4)
    accounts = {ALONE: 0, MIXED: account, MESSAGES: account}
    for name, contender in contenders.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "record")
            frame.synchronize(device)
            recorder.start(path)
            with PeerWrites(buffers_of(contender), dist.get_rank()) as writes:
                contender.run(RECORDED_STEPS)
            recorder.stop()
            entries = [entry for entry in read(path) if len(entry.ranks) > 1 and entry.operator in SENDING]
        by_messages = sum(sent_bytes(entry, dist.get_rank()) for entry in entries)
        found[name] = {"sent_bytes": (by_messages + writes.num_bytes) / RECORDED_STEPS}
        if name in accounts:
            found[name]["account_bytes"] = accounts[name]
    recorder.close()
    return found


def buffers_of(contender: Contender) -> Sequence[Tensor]:
    """Return the memory of all ranks that a contender copies weights into, if it does."""
    mixed = contender._trainer.strategy.mixed  # type: ignore[attr-defined]
    return () if mixed is None or mixed.mixer._pushes is None else mixed.mixer._pushes.buffers


def verdicts(result: Mapping[str, Any]) -> list[str | None]:
    """Return the verdicts on the time and on the bytes."""
    contenders = result["contenders"]
    counted = ["met" if contenders[n]["sent_bytes"] == contenders[n]["account_bytes"] else "missed" for n in PAIRS]
    return [contenders[MIXED]["ratio"].get("verdict"), *counted]


def table(result: Mapping[str, Any], device_type: str) -> str:
    """Return the table of the frame, with the bytes that are sent."""
    from tests.benchmarks.__main__ import table as table_of

    lines = [table_of(dict(result), device_type), "", "| | bytes that a rank sends a step | account |", "|---|---|---|"]
    for name, values in result["contenders"].items():
        lines.append(f"| {name} | {values['sent_bytes']:,.0f} | {values.get('account_bytes', '')} |")
    return "\n".join(lines)
