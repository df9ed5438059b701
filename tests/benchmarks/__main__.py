"""`python -m tests.benchmarks [names] [--device cpu|cuda] [--repeats N] [--output file.json] [--quick]`.

Tables and pictures go to the directory `$OUT`, if it is set.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import sys
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.frame import MIN_STEP_SECONDS, run_case

NAMES = (
    "strategy_overhead",
    "mesh_build",
    "pipeline",
    "parallel",
    "tensor",
    "context",
    "expert_dispatch",
    "expert_messages",
    "ops",
    "train_step",
    "adapters",
    "fine_tune",
    "streaming",
    "saving",
    "step_in_backward",
    "muon",
    "optimizer_loss",
    "data",
    "whole_model",
    "plan_runs",
    "expert_peers",
    "replica_loss",
    "replica_stop",
    "replica_links",
    "replica_mixing",
)
SELECTIONS = {
    "pipeline": ("schedules", "microbatches"),
    "ops": ("ops", "sizes"),
    "train_step": ("peers",),
    "fine_tune": ("layers", "experts", "seconds", "recompute", "contenders", "folder"),
    "step_in_backward": ("layers",),
    "optimizer_loss": ("methods", "rates", "steps", "jobs"),
    "data": ("file_gib", "memory"),
    "whole_model": (
        *("layers", "gpus", "parts", "steps", "tokens", "rows", "recompute", "states"),
        *("accumulate", "deterministic", "folder", "mesh", "schedule"),
        *("num_microbatches", "routing", "profile"),
    ),
    "expert_messages": ("layers", "steps"),
    "plan_runs": ("gpus",),
    "expert_peers": ("gpus", "layers", "contenders", "steps", "rows", "recompute", "seconds"),
    "replica_loss": ("steps", "rows", "rates"),
}
"""Options of single benchmarks."""


def main() -> int:
    """Runs benchmarks one after another, prints a table for each case and writes the JSON. 1 if a target is missed."""
    arguments = _parse()
    results, missed = [], False
    directory = os.environ.get("OUT")
    for name in arguments.names or NAMES:
        module = import_module(f"tests.benchmarks.{name}")
        options = {option: getattr(arguments, option) for option in SELECTIONS.get(name, ())}
        selected = {option: value for option, value in options.items() if value is not None}
        for case in module.cases(arguments.device, arguments.quick, **selected):
            if arguments.cases and not any(words in case.name for words in arguments.cases):
                continue
            if arguments.device == "cuda" and torch.cuda.device_count() < case.num_processes:
                print(f"{name}, {case.name}: left out, needs {case.num_processes} GPUs", flush=True)
                continue
            if arguments.repeats is not None:
                case = dataclasses.replace(case, repeats=arguments.repeats)
            load_before = os.getloadavg()[0]
            result = {"benchmark": name, **getattr(module, "run_case", run_case)(case, arguments.device)}
            result["load_average"] = [load_before, os.getloadavg()[0]]
            results.append(result)
            print(getattr(module, "table", table)(result, arguments.device), flush=True)
            if arguments.output is not None:
                report = {"quick": arguments.quick, "machine": machine(arguments.device), "results": results}
                arguments.output.write_text(json.dumps(report, indent=1) + "\n")
            if directory and hasattr(module, "write"):
                module.write(result, Path(directory), arguments.device)
            missed |= "missed" in getattr(module, "verdicts", verdicts)(result)
    return int(missed)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks", description=main.__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, help="rounds to time; more of them narrow the interval")
    parser.add_argument("--cases", nargs="+", help="only those whose names contain one of these")
    parser.add_argument("--output", type=Path, help="JSON file for raw samples, conditions and the machine")
    parser.add_argument("--schedules", nargs="+", help="of `pipeline`; the first is the peer of the others")
    parser.add_argument("--microbatches", nargs="+", type=int, help="of `pipeline`")
    parser.add_argument("--ops", nargs="+", help="of `ops`")
    parser.add_argument("--sizes", nargs="+", type=float, help="of `ops`, as multiples of the shape; default: 1")
    parser.add_argument("--peers", choices=("best", "all"), default="all", help="of `train_step`")
    parser.add_argument(
        "--layers",
        type=int,
        help="of `fine_tune`, `step_in_backward`, `whole_model`, `expert_peers`: of the model",
    )
    parser.add_argument("--experts", nargs="+", help="of `fine_tune`: implementations of transformers")
    parser.add_argument("--seconds", type=int, help="of `fine_tune` and `expert_peers`: that a contender has")
    parser.add_argument(
        "--contenders", nargs="+", help="of `expert_peers` and `fine_tune`, here begins of names; default: all"
    )
    parser.add_argument("--methods", nargs="+", help="of `optimizer_loss`")
    parser.add_argument(
        "--rates", nargs="+", type=float, help="of `optimizer_loss` (a single one is taken untried) and `replica_loss`"
    )
    parser.add_argument("--steps", type=int, help="of `optimizer_loss`, `whole_model`, `expert_peers`, `replica_loss`")
    parser.add_argument("--jobs", type=int, help="of `optimizer_loss`: runs at a time, on all GPUs together")
    parser.add_argument("--file_gib", type=float, help="of `data`: size of the file of tokens; default: 40")
    parser.add_argument(
        "--memory", choices=("held", "free"), help="of `data`: whether others hold memory; default: held"
    )
    parser.add_argument(
        "--gpus", type=int, choices=(1, 2, 4, 8), help="of `whole_model`, `plan_runs` and `expert_peers`"
    )
    parser.add_argument(
        "--mesh",
        nargs="+",
        metavar="AXIS=RANKS",
        help="of `whole_model`: the axes of `MeshConfig`; default: the YAML's",
    )
    parser.add_argument("--schedule", help="of `whole_model`: that of a pipeline")
    parser.add_argument("--num_microbatches", type=int, help="of `whole_model`: those of a pipeline")
    parser.add_argument("--profile", type=int, help="of `whole_model`: the number of last steps that are profiled")
    parser.add_argument("--routing", choices=("natural", "even"), help="of `whole_model`; even forces the choices")
    parser.add_argument("--parts", nargs="+", help="of `whole_model`; default: all")
    parser.add_argument("--tokens", type=int, help="of `whole_model`: in a row")
    parser.add_argument(
        "--rows", type=int, help="of `whole_model`, `expert_peers`, `replica_loss`: in a batch of a rank"
    )
    parser.add_argument(
        "--recompute",
        help="of `whole_model` and `expert_peers`, as in `ParallelConfig`; of `fine_tune` several, with commas",
    )
    parser.add_argument("--states", choices=("bfloat16", "uint8"), help="of `whole_model`: dtype of optimizer states")
    parser.add_argument("--accumulate", type=int, help="of `whole_model`: batches of an optimizer step")
    parser.add_argument(
        "--deterministic", action="store_true", default=None, help="of `whole_model`: the same bits in each run"
    )
    parser.add_argument(
        "--folder", type=Path, help="of `whole_model` and `fine_tune`: keeps its files, for a command that goes on"
    )
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it runs, judges nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"unknown benchmark {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    return arguments


def machine(device_type: str) -> dict[str, Any]:
    """What ran it: processor, GPU, versions."""
    cpu_info = Path("/proc/cpuinfo")
    lines = cpu_info.read_text().splitlines() if cpu_info.exists() else []
    models = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    described: dict[str, Any] = {
        "system": platform.platform(),
        "cpu": " / ".join(sorted(models)) or platform.processor(),
        "num_cpus": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": version("lightning"),
    }
    if device_type == "cuda":
        gpu = torch.cuda.get_device_properties(0)
        described |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory, "num_gpus": torch.cuda.device_count()}
        described |= {"cuda": torch.version.cuda}
    return described


def verdicts(result: dict[str, Any]) -> list[str | None]:
    """Return the verdicts of all targets of a case."""
    kinds = [values[kind] for values in result["contenders"].values() for kind in ("ratio", "pair") if kind in values]
    return [kind.get("verdict") for kind in kinds]


def table(result: dict[str, Any], device_type: str) -> str:
    """What a person reads. Times and memory only on a GPU: on a CPU only ratios are claimed."""
    rounds = f"{result['repeats']} rounds of {result['block_steps']} steps"
    conditions = ", ".join(f"{key} {value}" for key, value in result["conditions"].items())
    rows = [["", "ratio", "interval", "limit", "", *(["ms/step", "quartiles", "GiB"] if device_type == "cuda" else [])]]
    for name, values in result["contenders"].items():
        row = [name, "1 (peer)", "", "", ""]
        if "ratio" in values:
            ratio = values["ratio"]
            interval = f"{ratio['low']:.4f} .. {ratio['high']:.4f} ({ratio['confidence']:.1%})"
            row = [name, f"{ratio['median']:.4f}", interval, str(ratio.get("limit", "")), ratio.get("verdict", "")]
        if device_type == "cuda":
            low, high = (f"{1e3 * seconds:.2f}" for seconds in values["quartiles_seconds"])
            memory = f"{values['peak_memory_bytes'] / 2**30:.2f}"
            row += [f"{1e3 * values['median_seconds']:.2f}", f"{low} .. {high}", memory]
        rows.append(row)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    peer_seconds = result["contenders"][result["peer"]]["median_seconds"]
    lengths = (
        f"steps of {'at least' if peer_seconds >= MIN_STEP_SECONDS else 'less than'} {MIN_STEP_SECONDS * 1e3:.0f} ms"
    )
    return "\n".join([f"\n{result['benchmark']}, {result['case']}: {rounds}, {lengths}", f"  {conditions}", *lines])


if __name__ == "__main__":
    sys.exit(main())
