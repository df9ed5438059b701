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
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch

from tests.benchmarks.frame import MIN_STEP_SECONDS, run_case
from tests.benchmarks.options import check_choices, count, folder, naming, new_file, positive

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
COMMON = ("names", "device", "repeats", "cases", "output", "quick")
"""The options of all benchmarks; each of the others is a parameter of some `cases`."""

Chosen = tuple[str, ModuleType, Any]
"""A benchmark's name and module, and one of its cases."""


def main(words: Sequence[str] | None = None) -> int:
    """Runs benchmarks one after another, prints a table for each case and writes the JSON. 1 if a target is missed."""
    parser = _parser()
    arguments = parser.parse_args(words)
    try:
        chosen = _chosen(arguments)
    except ValueError as error:
        parser.error(str(error))
    results, missed = [], False
    directory = os.environ.get("OUT")
    if directory and not Path(directory).is_dir():
        parser.error(f"$OUT {directory!r} is not a folder that exists")
    for name, module, case in chosen:
        if arguments.device == "cuda" and torch.cuda.device_count() < case.num_processes:
            print(f"{name}, {case.name}: left out, needs {case.num_processes} GPUs", flush=True)
            continue
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


def _chosen(arguments: argparse.Namespace) -> list[Chosen]:
    """Return the cases to run.

    Raises:
        ValueError: An option has an illegal value, or does nothing.
    """
    check_choices("benchmark", arguments.names, NAMES)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU; choose cpu")
    modules = {name: import_module(f"tests.benchmarks.{name}") for name in arguments.names or NAMES}
    given = {name: value for name, value in vars(arguments).items() if name not in COMMON and value is not None}
    taken = {name: [*signature(module.cases).parameters][2:] for name, module in modules.items()}
    legal = {option: f"--{option}" for options in taken.values() for option in options}
    for option in given.keys() - legal.keys():
        takes = f"takes {', '.join(legal.values())}" if legal else "has no options of its own"
        raise ValueError(f"--{option} {given[option]} does nothing: {' '.join(modules)} {takes}")
    found = []
    for name, module in modules.items():
        options = {option: value for option, value in given.items() if option in taken[name]}
        with naming(name):
            found += [(name, module, case) for case in module.cases(arguments.device, arguments.quick, **options)]
    return _with_rounds(_with_words(found, arguments.cases), arguments.repeats)


def _with_words(found: list[Chosen], words: Sequence[str] | None) -> list[Chosen]:
    """Return the cases whose names have one of these words; without any, all."""
    names = {case.name: repr(case.name) for _, _, case in found}
    for word in words or ():
        if not any(word in name for name in names):
            raise ValueError(f"--cases {word!r} is in no name of a case; choose from {', '.join(names.values())}")
    return [each for each in found if words is None or any(word in each[2].name for word in words)]


def _with_rounds(found: list[Chosen], repeats: int | None) -> list[Chosen]:
    """Return the cases with this number of rounds, where they have any."""
    if repeats is None:
        return found
    if not any(hasattr(case, "repeats") for _, _, case in found):
        raise ValueError(
            f"--repeats {repeats} does nothing: {' '.join({name: 0 for name, _, _ in found})} has no rounds"
        )
    return [
        (name, module, dataclasses.replace(case, repeats=repeats) if hasattr(case, "repeats") else case)
        for name, module, case in found
    ]


class _Parser(argparse.ArgumentParser):
    """Reads arguments; a mistake is one line, without usage."""

    def error(self, message: str) -> NoReturn:
        """End the process with the exit code 2."""
        self.exit(2, f"{self.prog}: {message}\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m tests.benchmarks", description=main.__doc__, allow_abbrev=False)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=count, help="rounds to time; more of them narrow the interval")
    parser.add_argument("--cases", nargs="+", help="only those whose names contain one of these")
    parser.add_argument("--output", type=new_file, help="JSON file for raw samples, conditions and the machine")
    parser.add_argument("--quick", action="store_true", help="small and short: shows that it runs, judges nothing")
    _add_options(parser)
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of single benchmarks."""
    parser.add_argument("--schedules", nargs="+", help="of `pipeline`; the first is the peer of the others")
    parser.add_argument("--microbatches", nargs="+", type=count, help="of `pipeline`")
    parser.add_argument("--ops", nargs="+", help="of `ops`")
    parser.add_argument("--sizes", nargs="+", type=positive, help="of `ops`, as multiples of the shape; default: 1")
    parser.add_argument("--peers", choices=("best", "all"), help="of `train_step`; default: all")
    parser.add_argument(
        "--layers",
        type=count,
        help="of `fine_tune`, `step_in_backward`, `whole_model`, `expert_peers`: of the model",
    )
    parser.add_argument("--experts", nargs="+", help="of `fine_tune`: implementations of transformers")
    parser.add_argument("--seconds", type=count, help="of `fine_tune` and `expert_peers`: that a contender has")
    parser.add_argument(
        "--contenders", nargs="+", help="of `expert_peers` and `fine_tune`, here begins of names; default: all"
    )
    parser.add_argument("--methods", nargs="+", help="of `optimizer_loss`")
    parser.add_argument(
        "--rates",
        nargs="+",
        type=positive,
        help="of `optimizer_loss` (a single one is taken untried) and `replica_loss`",
    )
    parser.add_argument(
        "--steps", type=count, help="of `optimizer_loss`, `whole_model`, `expert_peers`, `replica_loss`"
    )
    parser.add_argument("--jobs", type=count, help="of `optimizer_loss`: runs at a time, on all GPUs together")
    parser.add_argument("--file_gib", type=positive, help="of `data`: size of the file of tokens; default: 40")
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
    parser.add_argument("--num_microbatches", type=count, help="of `whole_model`: those of a pipeline")
    parser.add_argument("--profile", type=count, help="of `whole_model`: the number of last steps that are profiled")
    parser.add_argument("--routing", choices=("natural", "even"), help="of `whole_model`; even forces the choices")
    parser.add_argument("--parts", nargs="+", help="of `whole_model`; default: all")
    parser.add_argument("--tokens", type=count, help="of `whole_model`: in a row")
    parser.add_argument(
        "--rows", type=count, help="of `whole_model`, `expert_peers`, `replica_loss`: in a batch of a rank"
    )
    parser.add_argument(
        "--recompute",
        help="of `whole_model` and `expert_peers`, as in `ParallelConfig`; of `fine_tune` several, with commas",
    )
    parser.add_argument("--states", choices=("bfloat16", "uint8"), help="of `whole_model`: dtype of optimizer states")
    parser.add_argument("--accumulate", type=count, help="of `whole_model`: batches of an optimizer step")
    parser.add_argument(
        "--deterministic", action="store_true", default=None, help="of `whole_model`: the same bits in each run"
    )
    parser.add_argument(
        "--folder", type=folder, help="of `whole_model` and `fine_tune`: keeps its files, for a command that goes on"
    )


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
