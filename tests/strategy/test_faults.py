"""Every fault in every phase of a run: how it ends, how soon, and that nothing saved before is lost.

`TABLE` says what tests each cell, or why there is nothing to test. docs/explanation/faults.md shows it with the times
that `python -m tests.strategy.fault_times` measures.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import zipfile
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_d9d import StateError, TimeoutConfig
from lightning_d9d.cli import main
from tests.harness.ranks import RankContext
from tests.loop.test_shutdown import ENDING_SECONDS
from tests.strategy import fault_job as job
from tests.strategy.fault_job import INIT_SECONDS, NUM_STEPS, SAVE_EVERY, SHUTDOWN_SECONDS, STEP_SECONDS, Fault, saved
from tests.strategy.fault_table import BODY_SECONDS, ROOT, ByTest, Job, LeftOut, Table

FILE = "tests/strategy/test_faults.py"
PYTEST_SECONDS = 300.0  # pyproject.toml

FAULTS = ("kill", "stop", "slow", "disk full", "NaN", "corrupt file", "bad YAML")
PHASES = ("setup", "forward", "backward", "save", "load", "teardown")


SILENT = "no answer from rank 1"
NO_STORE = "rank 0 failed: it does not answer; its process or the network is down"
NO_DISK = "step=4.ckpt' cannot be saved: [Errno 27] File too large; free space, raise the limit"
NO_DISK_FOR_DIRECTORY = "step=4.ckpt' cannot be saved: rank 0: [Errno 27] File too large; free space, raise the limit"
ANY_FAILURE = "tests/loop/test_shutdown.py::test_rank_that_raises_ends_the_other"
NOTHING_WRITTEN = (
    "the package writes nothing here; what user code writes fails as any user code, see forward of this row"
)
ALL_READ = "files are read, checked and built into objects before setup"

CELLS: dict[tuple[str, str], Job | ByTest | LeftOut] = {
    ("kill", "setup"): Job(1, job.kill, -signal.SIGKILL, SILENT, ()),
    ("kill", "forward"): ByTest(
        "tests/loop/test_shutdown.py::test_rank_that_ends_without_a_word[kill--9]",
        ENDING_SECONDS,
        f"rank 0 ends: `{SILENT}`",
    ),
    ("kill", "backward"): Job(1, job.kill, -signal.SIGKILL, SILENT, (2,)),
    ("kill", "save"): Job(0, job.kill_in_write, -signal.SIGXFSZ, NO_STORE, (2,)),
    ("kill", "load"): Job(1, job.kill, -signal.SIGKILL, SILENT, ()),
    ("kill", "teardown"): Job(1, job.kill, -signal.SIGKILL, SILENT, (2, 4, 6), STEP_SECONDS),
    ("stop", "setup"): Job(1, job.stop, -signal.SIGKILL, SILENT, (), INIT_SECONDS),
    ("stop", "forward"): Job(1, job.stop, -signal.SIGKILL, SILENT, (2,), STEP_SECONDS),
    ("stop", "backward"): Job(0, job.stop, -signal.SIGKILL, NO_STORE, (2,), STEP_SECONDS + SHUTDOWN_SECONDS),
    ("stop", "save"): Job(1, job.stop, -signal.SIGKILL, SILENT, (2,), STEP_SECONDS),
    ("stop", "load"): Job(1, job.stop, -signal.SIGKILL, SILENT, (), INIT_SECONDS),
    ("stop", "teardown"): Job(1, job.stop, -signal.SIGKILL, SILENT, (2, 4, 6), STEP_SECONDS),
    **{
        ("slow", phase): ByTest(
            f"{FILE}::test_slow_rank_changes_nothing[{phase}]",
            BODY_SECONDS,
            "the others wait; the same weights as without it",
        )
        for phase in PHASES
    },
    ("disk full", "setup"): LeftOut(NOTHING_WRITTEN),
    ("disk full", "forward"): ByTest(
        f"{ANY_FAILURE}[raise_in_train]", ENDING_SECONDS, "the package writes nothing here; user code that raises"
    ),
    ("disk full", "backward"): LeftOut(NOTHING_WRITTEN),
    ("disk full", "save"): Job(0, job.fill_disk, 1, NO_DISK, (2,)),
    ("disk full", "load"): LeftOut("reading needs no space"),
    ("disk full", "teardown"): LeftOut(NOTHING_WRITTEN),
    ("NaN", "setup"): ByTest(
        f"{FILE}::test_nan_in_initial_weights",
        BODY_SECONDS,
        "on rank 1: rank 0's weights replace them; on rank 0: with `skip_nonfinite` every step is left out and counted",
    ),
    **{
        ("NaN", phase): ByTest(
            f"{FILE}::test_nan_on_one_rank[{phase}-plain]",
            BODY_SECONDS,
            "with `skip_nonfinite` all ranks leave out the step; without it all weights of all ranks are NaN from then "
            "on, and the run goes on",
        )
        for phase in ("forward", "backward")
    },
    ("NaN", "save"): ByTest(
        f"{FILE}::test_nan_is_not_the_best_checkpoint",
        BODY_SECONDS,
        "weights are saved as they are; with `monitor` the best checkpoint stays one from before",
    ),
    ("NaN", "load"): ByTest(
        f"{FILE}::test_nan_in_a_checkpoint",
        BODY_SECONDS,
        "weights are loaded as they are; with `skip_nonfinite` every step is left out and counted",
    ),
    ("NaN", "teardown"): LeftOut("nothing is computed"),
    ("corrupt file", "setup"): LeftOut("checkpoints are read in load, which comes first"),
    ("corrupt file", "forward"): ByTest(
        f"{ANY_FAILURE}[raise_in_dataloader]", ENDING_SECONDS, "only data are read here: a DataLoader that raises"
    ),
    ("corrupt file", "backward"): LeftOut("nothing is read"),
    ("corrupt file", "save"): ByTest(
        f"{FILE}::test_saving_over_a_corrupt_file", BODY_SECONDS, "the file is replaced and can be resumed from"
    ),
    ("corrupt file", "load"): ByTest(
        f"{FILE}::test_damaged_checkpoint_is_refused_and_the_one_before_is_good",
        BODY_SECONDS,
        "all ranks raise a `StateError` that names the file and its damaged part, also of a single bit; the checkpoint "
        "before is good",
    ),
    ("corrupt file", "teardown"): LeftOut("nothing is read"),
    ("bad YAML", "setup"): ByTest(
        f"{FILE}::test_bad_yaml_ends_every_rank",
        BODY_SECONDS,
        "all ranks end with exit code 2 and a message that names key, value and what fits",
    ),
    ("bad YAML", "forward"): LeftOut(ALL_READ),
    ("bad YAML", "backward"): LeftOut(ALL_READ),
    ("bad YAML", "save"): LeftOut(ALL_READ),
    ("bad YAML", "load"): ByTest(
        "tests/cli/test_cli.py::test_refused",
        PYTEST_SECONDS,
        "`ckpt_path` of something else: exit code 2 and a message with the path",
    ),
    ("bad YAML", "teardown"): LeftOut(ALL_READ),
}
TABLE = Table(CELLS, f"{FILE}::test_job_whose_other_rank_ends")
JOBS = TABLE.jobs | {  # the checkpoints of a D9DModule are directories
    "kill-save-staged": replace(TABLE.jobs["kill-save"], kind="staged"),
    "disk full-save-staged": replace(TABLE.jobs["disk full-save"], kind="staged", text=NO_DISK_FOR_DIRECTORY),
}


def test_every_cell_is_tested_or_left_out_with_a_reason(request: pytest.FixtureRequest) -> None:
    assert list(TABLE.cells) == list(product(FAULTS, PHASES))
    check_that_tests_exist(TABLE, request)


def check_that_tests_exist(table: Table, request: pytest.FixtureRequest) -> None:
    collected: set[str] = set()
    for file in {test.partition("::")[0] for test in table.node_ids}:
        for item in pytest.Module.from_parent(request.session, path=ROOT / file).collect():
            collected |= {item.nodeid, item.nodeid.partition("[")[0]}
    assert set(table.node_ids) <= collected


def test_the_page_shows_the_table() -> None:
    assert TABLE.shown() == TABLE.page_rows(lambda test: "?")


def resume(directory: Path, kind: str, checkpoint: Path) -> None:
    """A new job, of one process, trains to the end from there."""
    resumed = job.fit(directory / f"resumed from {checkpoint.stem}", 1, kind=kind, checkpoint=checkpoint)
    assert resumed.trainer.global_step == NUM_STEPS
    assert resumed.weights.isfinite().all()


@pytest.mark.jobs
@pytest.mark.parametrize("name", JOBS)
def test_job_whose_other_rank_ends(name: str, tmp_path: Path) -> None:
    phase, cell = name.split("-")[1], JOBS[name]
    if phase == "load":
        job.fit(tmp_path / job.BEFORE, 1, kind=cell.kind)
    ended = cell.run(tmp_path, phase)
    kept = cell.check(ended, tmp_path)
    for path in [saved(tmp_path / job.BEFORE, SAVE_EVERY)] if phase == "load" else kept:
        resume(tmp_path, cell.kind, path)


on_ranks = pytest.mark.ranks(2, timeout_seconds=BODY_SECONDS)


def fit(rank: RankContext, name: str, **options: Any) -> job.Fitted:
    return job.fit(rank.tmp_dir / name, rank.world_size, str(rank.device), timeouts=TimeoutConfig(), **options)


@on_ranks
@pytest.mark.parametrize("phase", PHASES)
def test_slow_rank_changes_nothing(rank: RankContext, phase: str) -> None:
    """The rank is slower than `shutdown_seconds`, which limits only ranks that end."""
    undisturbed = fit(rank, "undisturbed")
    options: dict[str, Any] = {}
    if phase == "load":
        options["checkpoint"] = saved(rank.tmp_dir / "undisturbed", SAVE_EVERY)
        undisturbed = fit(rank, "loaded", **options)
    fault = Fault(phase, 0 if phase == "save" else 1, job.be_slow)
    timeouts = TimeoutConfig(shutdown_seconds=job.SLOW_SECONDS / 2)
    slow = job.fit(rank.tmp_dir / "slow", rank.world_size, str(rank.device), fault=fault, timeouts=timeouts, **options)
    assert rank.all_gather_object(fault.has_acted) == [phase == "save", phase != "save"]
    torch.testing.assert_close(slow.weights, undisturbed.weights, rtol=0, atol=0)
    assert slow.trainer.global_step == NUM_STEPS


@on_ranks
def test_nan_in_initial_weights(rank: RankContext) -> None:
    undisturbed = fit(rank, "undisturbed")
    repaired = fit(rank, "on rank 1", fault=Fault("setup", 1, job.spoil_weights))
    torch.testing.assert_close(repaired.weights, undisturbed.weights, rtol=0, atol=0)
    lost = fit(rank, "on rank 0", fault=Fault("setup", 0, job.spoil_weights), skip_nonfinite=True)
    assert lost.weights.isnan().all()
    assert lost.strategy.num_skipped_steps == NUM_STEPS


@on_ranks
@pytest.mark.parametrize("kind", ["plain", "staged"])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_nan_on_one_rank(rank: RankContext, phase: str, kind: str) -> None:
    """NaN is in an input of the first layer, or in a gradient of the last one while the loss is finite."""
    left_out = fit(rank, "left out", kind=kind, fault=Fault(phase, 1, job.spoil), skip_nonfinite=True)
    assert left_out.strategy.num_skipped_steps == 1
    assert left_out.weights.isfinite().all()
    taken = fit(rank, "taken", kind=kind, fault=Fault(phase, 1, job.spoil))
    assert taken.trainer.global_step == NUM_STEPS
    assert taken.weights.isnan().all()
    for weights in (left_out.weights, taken.weights):
        torch.testing.assert_close(*rank.all_gather_object(weights), rtol=0, atol=0, equal_nan=True)


@on_ranks
def test_nan_is_not_the_best_checkpoint(rank: RankContext) -> None:
    """The loss is NaN from the step after the bad gradient on, and so is what would be saved."""
    best = {"monitor": "loss_step", "save_top_k": 1, "every_n_train_steps": 1}
    ended = fit(rank, "best", fault=Fault("backward", 1, job.spoil), **best)
    assert ended.weights.isnan().all()
    assert ended.trainer.callback_metrics["loss_step"].isnan()
    (path,) = (rank.tmp_dir / "best" / "saved").iterdir()
    assert int(path.stem.removeprefix("step=")) <= job.AT_STEP + 1
    weights = torch.load(path, weights_only=True)["state_dict"].values()
    assert all(tensor.isfinite().all() for tensor in weights)
    assert fit(rank, "resumed", checkpoint=path).weights.isfinite().all()


@on_ranks
def test_nan_in_a_checkpoint(rank: RankContext) -> None:
    fit(rank, "before")
    path = saved(rank.tmp_dir / "before", SAVE_EVERY)
    if rank.rank == 0:
        checkpoint = torch.load(path, weights_only=True)
        for tensor in checkpoint["state_dict"].values():
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
        torch.save(checkpoint, path)
    rank.barrier()
    loaded = fit(rank, "loaded", checkpoint=path, skip_nonfinite=True)
    assert loaded.weights.isnan().all()
    assert loaded.strategy.num_skipped_steps == NUM_STEPS - SAVE_EVERY


@on_ranks
@pytest.mark.parametrize("damage", ["bit", "half"])
def test_damaged_checkpoint_is_refused_and_the_one_before_is_good(rank: RankContext, damage: str) -> None:
    """torch alone would load weights with a flipped bit without a word."""
    fit(rank, "first")
    older, path = (saved(rank.tmp_dir / "first", step) for step in (4, 6))
    if rank.rank == 0:
        content = bytearray(path.read_bytes())
        with zipfile.ZipFile(path) as file:
            weight = (
                torch.load(path, map_location="cpu", weights_only=True)["state_dict"]["net.0.weight"].numpy().tobytes()
            )
            assert weight in [file.read(name) for name in file.namelist()]
        content[content.index(weight) + 3] ^= 1 << 6
        path.write_bytes(content if damage == "bit" else content[: len(content) // 2])
    rank.barrier()
    reason = r"the checksum of its part '.*data/\d+' is wrong" if damage == "bit" else ".*"
    with pytest.raises(StateError, match=rf"step=6.ckpt' cannot be read \({reason}\): .*; give another ckpt_path"):
        fit(rank, "refused", checkpoint=path)
    assert fit(rank, "resumed", checkpoint=older).trainer.global_step == NUM_STEPS


@on_ranks
def test_saving_over_a_corrupt_file(rank: RankContext) -> None:
    path = rank.tmp_dir / "last.ckpt"
    if rank.rank == 0:
        path.write_bytes(b"hello")
    rank.barrier()
    first = fit(rank, "first")
    first.trainer.save_checkpoint(path)
    resumed = fit(rank, "resumed", checkpoint=path)
    torch.testing.assert_close(resumed.weights, first.weights, rtol=0, atol=0)


DEGREES = "    mesh: {data_parallel_replicate: 3}"
BAD_YAML = {
    "wrong key": ("    mesh: {data_paralel: 2}", "data_paralel"),
    "wrong type": ("    skip_nonfinite: 3", "skip_nonfinite"),
    "wrong degree": (DEGREES, "data_parallel_replicate=3 does not divide 2 ranks: at most 2 fits"),
}


@on_ranks
@pytest.mark.parametrize("mistake", BAD_YAML)
def test_bad_yaml_ends_every_rank(rank: RankContext, mistake: str) -> None:
    lines, message = BAD_YAML[mistake]
    config = rank.tmp_dir / f"{rank.rank}.yaml"
    config.write_text(
        f"trainer:\n  accelerator: cpu\n  devices: 2\n  default_root_dir: {rank.tmp_dir}\n  logger: false\n"
        f"  strategy:\n    class_path: D9DStrategy\n    init_args:\n    {lines}\n"
        "model: tests.strategy.plain.Plain\n"
    )
    with pytest.MonkeyPatch.context() as monkeypatch, contextlib.redirect_stderr(io.StringIO()) as errors:
        monkeypatch.setattr(sys, "argv", ["lightning-d9d", "fit", "--config", str(config)])
        with pytest.raises(SystemExit, match="2"):
            main()
    assert message in errors.getvalue()
