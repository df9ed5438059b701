"""Steps of Qwen3-30B-A3B on several GPUs, with its experts spread over all: ours, transformers, torchtitan.

    python -m tests.benchmarks expert_peers --layers 16
    python -m tests.benchmarks expert_peers --gpus 4 --contenders ours transformers torchtitan

All contenders have equal weights in bfloat16, take the same tokens and keep states of AdamW in bfloat16. All sum
gradients in bfloat16, and neither clip nor log. They recompute as `--recompute` says: transformers each block, or none.
Peers spread the model in their own ways: transformers by its `DistributedConfig`, torchtitan by its function for Qwen3.
The learning rate is 0, so all tokens go to the same experts for all contenders, and losses are compared.

Contenders run one after the other, each in processes of its own and for so long at most. Each is printed when it is
measured, and appended to `$OUT/expert_peers.jsonl`: the median of the steps, the most memory of a GPU, or the error.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_d9d import ParallelConfig
from tests.benchmarks.expert_peers_job import FIRST_STEPS, Job
from tests.benchmarks.frame import LOSS_TOLERANCE, spread
from tests.benchmarks.options import check_choices, naming
from tests.benchmarks.plan_runs import finish

OURS = "ours"
CONTENDERS: dict[str, dict[str, Any]] = {
    OURS: {"package": "lightning_d9d"},
    "transformers": {"package": "transformers", "spreads": False},
    "torchtitan": {"package": "torchtitan"},
    "transformers_spread": {"package": "transformers"},
    "torchtitan_compiled": {"package": "torchtitan", "compiles": True},
    "transformers_compiled": {"package": "transformers", "spreads": False, "compiles": True},
    "torchtitan_sharded": {"package": "torchtitan", "spreads": False, "compiles": True},
}
"""What a contender is, by its name: a package, whether experts are spread or sharded, whether layers are compiled."""
LEAST_OF_PEER = 1.3
"""Tokens/s of ours, of the best peer's."""
MOST_SECONDS = 150
"""The most time of a contender, from its start."""
_FRAGMENTS = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""The peers' environment: they allocate much at a time, and need memory in one piece."""


@dataclass(frozen=True)
class PeersCase:
    """The work, and who does it."""

    name: str
    jobs: Mapping[str, Job]
    seconds: int
    judges: bool

    @property
    def num_processes(self) -> int:
        """One a GPU."""
        return next(iter(self.jobs.values())).num_ranks


def cases(
    device_type: str,
    quick: bool,
    gpus: int = 2,
    layers: int | None = None,
    contenders: Sequence[str] = tuple(CONTENDERS),
    steps: int = 9,
    rows: int = 4,
    recompute: str = "full",
    seconds: int = MOST_SECONDS,
) -> list[PeersCase]:
    """The 30b-a3b geometry with some of its layers, or all; on a CPU a tiny one."""
    check_choices("--contenders", contenders, CONTENDERS)
    with naming(f"--recompute {recompute}"):
        ParallelConfig(recompute=recompute)
    if steps <= FIRST_STEPS:
        raise ValueError(f"--steps {steps} leaves none to time behind the first {FIRST_STEPS}; give more")
    is_tiny = quick or device_type == "cpu"
    work: dict[str, Any] = {"preset": "30b-a3b", "layers": layers or 48, "tokens": 4096}
    if is_tiny:
        work = {"preset": "tiny", "layers": layers or 2, "tokens": 64}
    work |= {"num_ranks": gpus, "device_type": device_type, "rows": rows, "steps": steps, "recompute": recompute}
    jobs = {name: Job(**CONTENDERS[name], **work) for name in contenders}
    return [PeersCase(f"{work['layers']} layers on {gpus} ranks", jobs, seconds, not is_tiny)]


def run_case(case: PeersCase, device_type: str) -> dict[str, Any]:
    """Measure contenders one by one.

    Raises:
        RuntimeError: The losses of two contenders differ.
    """
    print(f"\nexpert_peers, {case.name}", flush=True)
    rows = {}
    for name, job in case.jobs.items():
        rows[name] = measured(name, job, case.seconds)
        print(f"  {json.dumps(rows[name])}", flush=True)
        if directory := os.environ.get("OUT"):
            with (Path(directory) / "expert_peers.jsonl").open("a") as file:
                file.write(json.dumps(rows[name]) + "\n")
    losses = {name: row["loss"] for name, row in rows.items() if "loss" in row}
    if losses and max(losses.values()) > (1 + LOSS_TOLERANCE) * min(losses.values()):
        raise RuntimeError(f"{case.name}: the losses differ: {losses}")
    return {"case": case.name, "contenders": {}, **summary(case, rows)}


def measured(name: str, job: Job, seconds: float) -> dict[str, Any]:
    """Train in processes of their own. Return what was measured, or why there is nothing."""
    row: dict[str, Any] = {"contender": name, **asdict(job)}
    if find_spec(job.package) is None:
        return row | {"failed": "not installed"}
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "measured.json"
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(job.num_ranks),
        ]
        command = [*launcher, "-m", "tests.benchmarks.expert_peers_job", json.dumps(asdict(job)), str(output)]
        failed = finish(command, Path(folder) / "log", seconds, {} if name == OURS else _FRAGMENTS)
        found = {"failed": failed} if failed else json.loads(output.read_text())
    if not failed:
        low, median, high = spread(found["step_seconds"])
        tokens = job.rows * job.tokens
        found["tokens_per_s"] = {"median": tokens / median, "low": tokens / high, "high": tokens / low}
    return row | found | {"seconds": time.perf_counter() - begin}


def summary(case: PeersCase, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the rows, the best peer, what ours has of its tokens/s, and the verdict."""
    found: dict[str, Any] = {"rows": list(rows.values()), "verdicts": []}
    speeds = {name: row["tokens_per_s"]["median"] for name, row in rows.items() if "tokens_per_s" in row}
    peers = {name: speed for name, speed in speeds.items() if name != OURS}
    if peers and OURS in speeds:
        best = max(peers, key=lambda name: peers[name])
        found |= {"peer": best, "of_peer": speeds[OURS] / peers[best]}
        if case.judges:
            found["verdicts"].append("met" if found["of_peer"] >= LEAST_OF_PEER else "missed")
    return found


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return the verdict on tokens/s."""
    return list(result["verdicts"])


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown. Times and memory only of GPUs."""
    head = "| | tokens/s a GPU | quartiles | ms | GiB allocated | GiB reserved | loss | s in all |"
    lines = [f"\nexpert_peers, {result['case']}", "", head, "|---|---|---|---|---|---|---|---|"]
    for row in result["rows"]:
        name = row["contender"]
        if "failed" in row:
            lines.append(f"| {name} | {row['failed']} | | | | | | |")
        elif device_type == "cpu":
            lines.append(f"| {name} | | | | | | {row['loss']:.4f} | |")
        else:
            speed = row["tokens_per_s"]
            quartiles = f"{speed['low']:.0f} .. {speed['high']:.0f}"
            milliseconds = 1e3 * row["rows"] * row["tokens"] / speed["median"]
            memory = f"{row['allocated_bytes'] / 2**30:.1f} | {row['reserved_bytes'] / 2**30:.1f}"
            cells = f"{speed['median']:.0f} | {quartiles} | {milliseconds:.0f} | {memory}"
            lines.append(f"| {name} | {cells} | {row['loss']:.4f} | {row['seconds']:.0f} |")
    if "peer" in result and device_type == "cuda":
        lines.append(f"\n{OURS}: {result['of_peer']:.2f} of the tokens/s of {result['peer']}")
    return "\n".join([*lines, *result["verdicts"]])


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    name = str(result["case"]).replace(" ", "-")
    (directory / f"expert_peers-{name}.md").write_text(table(result, device_type) + "\n")
