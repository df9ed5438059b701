"""The examples that train all of Qwen3-30B-A3B, as they stand, on made-up weights: every part of a run measured.

    python -m tests.benchmarks whole_model --gpus 1 --layers 20

Weights are written by this package's exporter. A job trains from `examples/qwen3_moe/30b_a3b_one_gpu.yaml`, or that for
more GPUs, and saves a checkpoint while it goes on. A second job resumes from it; its losses are compared. It exports.
Each row is printed as soon as it is known.

Only what has to differ from the YAML differs: data are made-up tokens, there is one checkpoint a quarter before the
end, and the learning rate is one of made-up weights. `--tokens`, `--rows`, `--recompute` and `--states` replace more.

Disks are small, so files go when they are not needed any more: the weights when they are read, the checkpoint before
the export. Without the part `directory` weights are drawn on the device, which takes seconds.

`--folder` keeps the files, so that two commands can share the parts of a large model: the first with `save`, the second
with `resume`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from torch import multiprocessing

from lightning_d9d import MeshConfig, ParallelConfig
from lightning_d9d.metrics import Convention, StepFlops
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig
from lightning_d9d.models.qwen3_moe.costs import model_costs
from lightning_d9d.schedule import resolve_schedule
from tests.benchmarks.frame import spread
from tests.benchmarks.options import check_choices, naming
from tests.benchmarks.whole_model_job import report, rows_of, write_config, write_tokens, write_weights

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "qwen3_moe"
PARTS = ("disk", "directory", "train", "save", "resume", "export")
"""The parts in their order. `train` also saves with the part `save`, and `export` is at the end of the last job."""
FIRST_STEPS = 5
"""The number of first steps that the median leaves out."""
MOST_OF_FALL = 0.05
"""Difference of the losses of a resumed run, as a share of what training took off the loss."""
LEAST_TOKENS_PER_S = {1: 13_000, 2: 13_500, 8: 15_000}
"""The least tokens/s of a GPU for the whole model, by the number of GPUs."""
_BLOCK = 2**24
_RAW_BYTES = 2**33
_MAX_SECONDS = 580


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """A model, a machine, and what is measured."""

    name: str
    config: Qwen3MoeConfig
    num_processes: int
    parts: tuple[str, ...] = PARTS
    steps: int = 20
    tokens: int = 4096
    rows: int | None = None
    """The rows of a GPU's batch; None for those of the YAML, or fewer if rows are longer."""
    recompute: str | None = None
    states: str | None = None
    accumulate: int = 1
    """Batches of an optimizer step. With more, gradients add up in float32."""
    deterministic: bool = False
    folder: Path | None = None
    """The folder of the files; None for one that is removed."""
    raw_bytes: int = _RAW_BYTES
    judges: bool = False
    mesh: Mapping[str, int] | None = None
    """The axes of the mesh that have more than one rank; None for those of the YAML."""
    schedule: str | None = None
    num_microbatches: int | None = None
    """The microbatches of a pipeline; None for those of the strategy."""
    routing: str = "natural"
    """`even` forces the choice of experts."""
    profile: int = 0
    """The number of last steps that are profiled on all ranks, into `profile` of `$OUT` or of the folder of the run."""
    expert_dispatch: str | None = None
    more_callbacks: tuple[Mapping[str, Any], ...] = ()
    conditions: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_of_checkpoint(self) -> int:
        """A quarter before the end, and the only one: twice as many steps are not taken."""
        return self.steps - self.steps // 4

    @property
    def share_of_tokens(self) -> float:
        """The tokens of a batch that are a GPU's, as a share: below 1 if several GPUs work on each row."""
        mesh = self.mesh or {"data_parallel_replicate": self.num_processes}
        ranks = mesh.get("data_parallel_replicate", 1) * mesh.get("data_parallel_shard", 1)
        return ranks / self.num_processes

    def profile_folder(self, folder: Path) -> Path:
        """Return the folder of profiles."""
        return Path(os.environ.get("OUT", folder)) / "profile"


def cases(
    device_type: str,
    quick: bool,
    *,
    layers: int | None = None,
    gpus: int = 1,
    parts: Sequence[str] = PARTS,
    steps: int = 20,
    tokens: int | None = None,
    rows: int | None = None,
    recompute: str | None = None,
    states: str | None = None,
    accumulate: int | None = None,
    deterministic: bool | None = None,
    folder: Path | None = None,
    mesh: Sequence[str] | None = None,
    schedule: str | None = None,
    num_microbatches: int | None = None,
    routing: str | None = None,
    profile: int | None = None,
) -> list[ModelCase]:
    """The 30b-a3b geometry with some of its layers, or all; on a CPU a tiny one."""
    _check_parts(parts, folder)
    if profile is not None and (profile > steps or "train" not in parts):
        raise ValueError(f"--profile {profile} must be at most the number of --steps, {steps}, of the part train")
    axes = None if mesh is None else _axes_of(mesh, gpus)
    _check_pipeline(axes or {}, schedule, num_microbatches)
    with naming(f"--recompute {recompute}"):
        ParallelConfig(recompute=recompute or "none")
    is_tiny = quick or device_type == "cpu"
    config = Qwen3MoeConfig.preset("tiny" if is_tiny else "30b-a3b")
    given: dict[str, Any] = {"tokens": tokens, "rows": rows, "recompute": recompute, "states": states}
    given |= {"accumulate": accumulate, "deterministic": deterministic, "folder": folder}
    given |= {"mesh": axes, "schedule": schedule, "num_microbatches": num_microbatches}
    given |= {"routing": routing, "profile": profile}
    case = ModelCase(
        name=f"{layers or config.num_hidden_layers} layers on {gpus} {'GPU' if gpus == 1 else 'GPUs'}",
        config=replace(
            config,
            num_hidden_layers=layers or config.num_hidden_layers,
            max_position_embeddings=max(config.max_position_embeddings, tokens or 0),
        ),
        num_processes=gpus,
        parts=tuple(parts),
        steps=steps,
        judges=not is_tiny and layers in (None, config.num_hidden_layers),
        tokens=64 if is_tiny else 4096,
        raw_bytes=2**24 if is_tiny else _RAW_BYTES,
    )
    return [replace(case, **{name: value for name, value in given.items() if value is not None})]


def _check_parts(parts: Sequence[str], folder: Path | None) -> None:
    check_choices("--parts", parts, PARTS)
    if "resume" in parts and not folder and not {"train", "save"} <= set(parts):
        raise ValueError("--parts resume needs train and save, or the --folder of a command that had them")
    if "save" in parts and "train" not in parts:
        raise ValueError("--parts save needs train")
    if "export" in parts and not {"train", "resume"} & set(parts):
        raise ValueError("--parts export needs train or resume")


def _axes_of(texts: Sequence[str], gpus: int) -> dict[str, int]:
    """Return the ranks along each axis that is given."""
    option = f"--mesh {' '.join(texts)}"
    given = {}
    for text in texts:
        name, _, ranks = text.partition("=")
        if not ranks.removeprefix("-").isdecimal():
            raise ValueError(f"--mesh {text!r} needs a number of ranks, such as expert_parallel=4")
        if name in given:
            raise ValueError(f"{option} has {name} twice")
        given[name] = int(ranks)
    check_choices("--mesh", given, [axis.name for axis in fields(MeshConfig)])
    with naming(option):
        mesh = MeshConfig(**given).resolve(gpus)
    return {name: getattr(mesh, name) for name in given}


def _check_pipeline(axes: Mapping[str, int], schedule: str | None, num_microbatches: int | None) -> None:
    for option, value in (("--schedule", schedule), ("--num_microbatches", num_microbatches)):
        if value is not None and axes.get("pipeline_parallel", 1) == 1:
            raise ValueError(f"{option} {value} needs a pipeline, such as --mesh pipeline_parallel=2")
    with naming(f"--schedule {schedule}"):
        resolve_schedule(schedule)


def run_case(case: ModelCase, device_type: str) -> dict[str, Any]:
    """Run the parts one after the other.

    Raises:
        RuntimeError: A job failed or took too long.
    """
    print(f"\nwhole_model, {case.name}", flush=True)
    with ExitStack() as stack:
        if case.folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="whole_model")))
        else:
            folder = case.folder.resolve()
            folder.mkdir(parents=True, exist_ok=True)
        if "disk" in case.parts:
            measure_disk(folder, case.raw_bytes)
        if "directory" in case.parts:
            with least_memory(folder, "directory"):
                _in_process(write_weights, folder, case.config, device_type)
        elif not (folder / "base").exists():
            write_config(folder / "base", case.config)
        rows = case.rows or max(1, _yaml(case)["data"]["init_args"]["batch_size"] * 4096 // max(4096, case.tokens))
        num_rows = case.steps * case.accumulate * rows * case.num_processes
        case = replace(case, rows=rows)
        for part in ("train", "resume"):
            if part in case.parts:
                write_tokens(folder / "tokens", case.config.vocab_size, num_rows, case.tokens)
                _run_job(case, folder, device_type, part)
        return {"case": case.name, "contenders": {}, **summary(case, rows_of(folder))}


def measure_disk(folder: Path, num_bytes: int) -> None:
    """Write and read a file, a block after the other, past the memory of the system."""
    path, block = folder / "raw", os.urandom(_BLOCK)
    begin = time.perf_counter()
    with path.open("wb", buffering=0) as file:
        for _ in range(num_bytes // _BLOCK):
            file.write(block)
        os.fsync(file.fileno())
    report(folder, "disk", "raw write", time.perf_counter() - begin, bytes=num_bytes)
    forget(folder)
    begin = time.perf_counter()
    with path.open("rb", buffering=0) as file:
        while file.read(_BLOCK):
            pass
    report(folder, "disk", "raw read", time.perf_counter() - begin, bytes=num_bytes)
    path.unlink()


def forget(folder: Path) -> None:
    """Write all files below a folder to the disk, and let the system forget what is in them."""
    for path in folder.glob("**/*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


@contextmanager
def least_memory(folder: Path, part: str) -> Iterator[None]:
    """Report how much less memory the host had available meanwhile than before; files that it remembers count not."""
    before, done = _available(), threading.Event()
    least = [before]

    def watch() -> None:
        while not done.wait(0.2):
            least.append(min(least.pop(), _available()))

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        report(folder, part, "most memory taken from the host", host_bytes=before - least[0], of_bytes=before)


def _available() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def _in_process(target: Callable[..., None], *arguments: Any) -> None:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments)
    process.start()
    process.join(_MAX_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
    if process.exitcode:
        raise RuntimeError(f"{target.__name__} failed or took more than {_MAX_SECONDS} s: {process.exitcode}")


def _run_job(case: ModelCase, folder: Path, device_type: str, part: str) -> None:
    """Train by the command line, as a user does."""
    forget(folder)
    path = folder / f"{part}.yaml"
    path.write_text(yaml.safe_dump(settings(case, folder, device_type, part)))
    command = [sys.executable, "-m", "lightning_d9d.cli", "fit", "--config", str(path)]
    if part == "resume":
        command += ["--ckpt_path", str(folder / "output" / "checkpoints" / "last.ckpt")]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    begin = time.perf_counter()
    with least_memory(folder, part):
        result = subprocess.run(command, cwd=folder, env=environment, timeout=_MAX_SECONDS, check=False)
    if result.returncode:
        raise RuntimeError(f"{case.name}: {part} ended with exit code {result.returncode}")
    report(folder, part, "all of the job", time.perf_counter() - begin)


def _yaml(case: ModelCase) -> dict[str, Any]:
    name = {1: "one_gpu", 2: "two_gpus", 4: "four_gpus", 8: "eight_gpus"}[case.num_processes]
    found = yaml.safe_load((EXAMPLES / f"30b_a3b_{name}.yaml").read_text())
    if case.mesh is not None:
        found["trainer"]["strategy"]["init_args"]["mesh"] = dict(case.mesh)
    return found


def settings(case: ModelCase, folder: Path, device_type: str, part: str) -> dict[str, Any]:
    """Return the example's YAML with what differs in this part of the benchmark."""
    found = _yaml(case)
    model, trainer = found["model"]["init_args"], found["trainer"]
    model["optimizer"]["init_args"]["lr"] = 3e-4
    model["lr_scheduler"]["init_args"]["warmup_steps"] = 1
    if case.states is not None:
        model["optimizer"]["init_args"]["state_dtype"] = case.states
    if "directory" not in case.parts:
        model["pretrained"] = None
    data = {"files": str(folder / "tokens"), "sequence_length": case.tokens, "batch_size": case.rows}
    found["data"] = {"class_path": "TokenDataModule", "init_args": data | {"borders": False}}
    if case.accumulate > 1:
        trainer["accumulate_grad_batches"] = case.accumulate
        trainer["strategy"]["init_args"].pop("grad_sync", None)
    if case.deterministic:
        trainer["deterministic"] = True
    if case.recompute is not None:
        trainer["strategy"]["init_args"]["parallel"]["recompute"] = case.recompute
    trainer |= {"accelerator": device_type, "default_root_dir": str(folder / "output"), "max_steps": case.steps}
    trainer |= {"limit_val_batches": 0, "enable_progress_bar": False, "enable_model_summary": False}
    if case.expert_dispatch is not None:
        trainer["strategy"]["init_args"]["parallel"]["expert_dispatch"] = case.expert_dispatch
    of_pipeline = {"schedule": case.schedule, "num_microbatches": case.num_microbatches}
    trainer["strategy"]["init_args"] |= {name: value for name, value in of_pipeline.items() if value is not None}
    saves, exports = trainer["callbacks"]
    saves["init_args"]["every_n_train_steps"] = case.step_of_checkpoint
    is_last = part == "resume" or "resume" not in case.parts
    probe = {"folder": str(folder), "part": part, "keeps_checkpoints": part == "train"}
    trainer["callbacks"] = [{"class_path": "tests.benchmarks.whole_model_job.Probe", "init_args": probe}]
    if {"save", "resume"} & set(case.parts):
        trainer["callbacks"].append(saves)
    else:
        trainer["enable_checkpointing"] = False
        del trainer["strategy"]["init_args"]["checkpoint"]
    if "export" in case.parts and is_last:
        trainer["callbacks"].append(exports)
    if case.routing == "even":
        trainer["callbacks"].append({"class_path": "tests.benchmarks.even_routing.EvenRouting"})
    if case.profile and part == "train":
        steps = {"first_step": case.steps + 1 - case.profile, "last_step": case.steps}
        profile = {**steps, "directory": str(case.profile_folder(folder)), "ranks": "all", "memory": "never"}
        trainer["callbacks"].append({"class_path": "StepProfile", "init_args": profile})
    trainer["callbacks"] += case.more_callbacks
    return found


def summary(case: ModelCase, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what the rows say: tokens/s, losses, and verdicts."""
    found: dict[str, Any] = {"rows": list(rows), "verdicts": []}
    steps = {
        part: {int(row["what"].split()[1]): row for row in rows if row["part"] == part and row["what"][:5] == "step "}
        for part in ("train", "resume")
    }
    timed = range(FIRST_STEPS + 1, case.steps + 1 - case.profile)
    trained = [row for step, row in steps["train"].items() if step in timed and "kind" not in row]
    if trained:
        low, median, high = spread([row["seconds"] for row in trained])
        tokens = case.tokens * (case.rows or 1) * case.accumulate * case.share_of_tokens
        found["tokens_per_s"] = {"median": tokens / median, "low": tokens / high, "high": tokens / low}
        once, twice = (model_costs(case.config, length) for length in (case.tokens, 2 * case.tokens))
        of_row = {name: StepFlops(once, twice).count(name) for name in (Convention.CAUSAL, Convention.FULL)}
        found["flops_per_s"] = {name: tokens / median * flops / case.tokens for name, flops in of_row.items()}
        least = LEAST_TOKENS_PER_S.get(case.num_processes, 0)
        if case.judges and least:
            found["verdicts"].append("met" if tokens / median >= least else "missed")
    if steps["resume"]:
        pairs = [(steps["train"][step]["loss"], row["loss"]) for step, row in steps["resume"].items()]
        fall = steps["train"][1]["loss"] - steps["train"][case.steps]["loss"]
        difference = max(abs(ours - theirs) for ours, theirs in pairs)
        found["resumed"] = {
            "steps": len(pairs),
            "difference_of_first": abs(pairs[0][0] - pairs[0][1]),
            "difference": difference,
            "fall": fall,
        }
        found["verdicts"].append("met" if difference <= MOST_OF_FALL * fall else "missed")
    return found


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return the verdicts on tokens/s of the whole model, and on the losses of a resumed run."""
    return list(result["verdicts"])


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown. Steps are summed up."""
    lines = [f"\nwhole_model, {result['case']}", "", "| part | what | s | GiB | GB/s |", "|---|---|---|---|---|"]
    for row in result["rows"]:
        if row["what"].startswith("step "):
            continue
        sizes = ", ".join(
            f"{name.removesuffix('bytes').replace('_', ' ')}{value / 2**30:.2f}"
            for name, value in row.items()
            if name.endswith("bytes")
        )
        rate = f"{row['bytes_per_s'] / 1e9:.2f}" if "bytes_per_s" in row else ""
        seconds = f"{row['seconds']:.1f}" if "seconds" in row else ""
        lines.append(f"| {row['part']} | {row['what']} | {seconds} | {sizes} | {rate} |")
    if "tokens_per_s" in result and device_type == "cuda":
        speed = result["tokens_per_s"]
        quartiles = f"{speed['low']:.0f} .. {speed['high']:.0f}"
        rates = ", ".join(f"{flops / 1e12:.0f} ({name})" for name, flops in result["flops_per_s"].items())
        lines.append(f"\n{speed['median']:.0f} tokens/s a GPU (quartiles {quartiles}), {rates} TFLOP/s")
    if "resumed" in result:
        resumed = result["resumed"]
        lines.append(
            f"\nresumed: losses of {resumed['steps']} steps differ by {resumed['difference']:.2g} at most, the first "
            f"by {resumed['difference_of_first']:.2g}; training took {resumed['fall']:.3g} off the loss"
        )
    return "\n".join([*lines, f"\n{', '.join(result['verdicts'])}"])


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    name = str(result["case"]).replace(" ", "-")
    (directory / f"whole_model-{name}.md").write_text(table(result, device_type) + "\n")
