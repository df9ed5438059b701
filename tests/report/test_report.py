"""Pages about runs: from the logs of real fits, and from files that are damaged, interrupted or of several jobs."""

from __future__ import annotations

import base64
import csv
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import lightning as L
import pytest
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, Logger
from PIL import Image

from lightning_d9d import ConfigError, D9DStrategy, StateError, cli
from lightning_d9d.callbacks import RunMetrics
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from lightning_d9d.modules import BalanceConfig
from lightning_d9d.report import Chart, charts_of, find_files, make_report, read_run
from lightning_d9d.report.charts import MAX_POINTS, thinned
from lightning_d9d.report.svg import ticks

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
    norm_topk_prob=True,
)


def fit(folder: Path, max_steps: int, logger: Logger, checkpoint: Path | None = None) -> Path:
    """Train up to so many steps, and return the checkpoint of the last one."""
    (folder / "texts").mkdir(exist_ok=True)
    (folder / "texts" / "a.txt").write_text("to be or not to be, that is the question. " * 40)
    saving = ModelCheckpoint(folder / "checkpoints", "{step}", every_n_train_steps=2, save_top_k=-1)
    run = L.Trainer(
        strategy=D9DStrategy(microbatch_size=2),
        accelerator="cpu",
        max_steps=max_steps,
        limit_val_batches=1,
        val_check_interval=3,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        logger=logger,
        callbacks=[RunMetrics(norm_groups={"experts": "*.experts.*"}), saving],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = ByteTextDataModule(folder / "texts", sequence_length=8, batch_size=4, pattern="*.txt")
    run.fit(Qwen3MoePretraining(CONFIG, balance=BalanceConfig()), data, ckpt_path=checkpoint, weights_only=False)
    return folder / "checkpoints" / f"step={max_steps}.ckpt"


def write(folder: Path, names: str, *rows: str, end: str = "\n") -> Path:
    """Write a file as CSVLogger does."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "metrics.csv"
    path.write_text("\n".join([names, *rows]) + end)
    return path


def titles(page: Path) -> list[str]:
    """The page is XML, and a title is that of a picture."""
    return [each.text or "" for each in ElementTree.parse(page).iter("figcaption")]


def steps(points: Iterable[tuple[int, float]]) -> list[int]:
    return [step for step, _ in points]


def command(monkeypatch: pytest.MonkeyPatch, *words: Any) -> int:
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "report", *map(str, words)])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_a_fit_that_went_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two jobs of four steps, the second from the checkpoint behind step 4, where the first had got to 6."""
    fit(tmp_path, 6, CSVLogger(tmp_path))
    fit(tmp_path, 8, CSVLogger(tmp_path), tmp_path / "checkpoints" / "step=4.ckpt")
    logs = [tmp_path / "lightning_logs" / f"version_{number}" for number in (0, 1)]
    (tmp_path / "hang-20260102-101500-1.txt").write_text("rank 1 waits for <lock>\x1b[2J")
    Image.new("RGB", (2, 2)).save(tmp_path / "stragglers.png")
    capsys.readouterr()
    assert command(monkeypatch, tmp_path, "--pictures", tmp_path / "drawn") == 0
    printed = capsys.readouterr().out.splitlines()

    expected = {}
    for folder in logs:
        for row in csv.DictReader((folder / "metrics.csv").open()):
            if row["train_loss"]:
                expected[int(row["step"])] = float(row["train_loss"])
    run = read_run(find_files(tmp_path).logs)
    assert run.folders == logs
    assert run.restarts == [4]
    assert run.values["train_loss"] == sorted(expected.items())
    assert len(run.values["val_loss"]) > 0

    page = tmp_path / "report.html"
    shown = titles(page)
    assert printed[0] == f"{page}: {len(shown) - 1} charts of version_0, version_1"
    assert shown[:3] == ["Loss", "Learning rate", "Norm of the gradients"]
    assert {"Tokens per second", "Parts of a step (s)", "Tokens of the busiest expert over the mean"} <= {*shown}
    assert not [title for title in shown if "Memory" in title or "MFU" in title]  # not logged on a CPU
    root = ElementTree.parse(page).getroot()
    sources = [each.get("src", "") for each in root.iter("img")]
    assert [base64.b64decode(each.partition(",")[2]) for each in sources] == [
        (tmp_path / "stragglers.png").read_bytes()
    ]
    assert [each.text for each in root.iter("pre")] == ["rank 1 waits for <lock>\\x1b[2J"]
    assert not list(root.iter("script"))
    text = page.read_text()
    assert "http" not in text.replace("http-equiv", "")
    assert len([each for each in root.iter("path") if each.get("class") == "restart"]) > 0

    pictures = sorted((tmp_path / "drawn").iterdir())
    assert printed[1:] == [str(each) for each in pictures]
    assert [each.name for each in pictures[:2]] == ["00_loss.png", "01_learning_rate.png"]
    with Image.open(pictures[0]) as image:
        assert image.size == (800, 350)


@pytest.mark.loggers
def test_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.utils.tensorboard import SummaryWriter

    folder = tmp_path / "version_0"
    for first in (0, 4):  # two jobs that wrote into one folder
        with SummaryWriter(folder) as writer:
            for step in range(first, first + 6):
                writer.add_scalar("train_loss", first + step / 8, step)
                writer.add_scalar("epoch", 0, step)
    (folder / "x_events").mkdir()  # of `add_scalars`
    (folder / "x_events" / "events.out.tfevents.1").touch()
    run = read_run(find_files(tmp_path).logs)
    assert dict(run.values) == {
        "train_loss": [(step, step / 8) for step in range(4)] + [(step, 4 + step / 8) for step in range(4, 10)]
    }
    assert run.restarts == [4]
    monkeypatch.setitem(sys.modules, "tensorboard.backend.event_processing.event_accumulator", None)
    with pytest.raises(ConfigError, match=r"version_0 has event files of TensorBoard.*pip install tensorboard"):
        make_report(tmp_path)


def test_jobs_that_begin_afresh_are_other_runs(tmp_path: Path) -> None:
    rows = [f"{step},{step / 10}" for step in range(9, 50, 10)]
    for name in ("version_2", "version_9", "version_10"):
        write(tmp_path / name, "step,train_loss", *rows)
    write(tmp_path / "version_11", "step,train_loss", "29,7", "39,8")
    write(tmp_path / "version_12", "step,train_loss", "49,9")
    write(tmp_path / "version_14", "step,val_loss", "0,3")  # of `validate`
    (tmp_path / "version_13").mkdir()
    write(tmp_path / ".hidden" / "version_0", "step,train_loss", *rows)
    report = make_report(tmp_path)
    assert [each.name for each in report.run.folders] == ["version_10", "version_11", "version_12"]
    assert report.run.values["train_loss"] == [(9, 0.9), (19, 1.9), (29, 7), (39, 8), (49, 9)]
    assert report.run.restarts == [29, 49]
    assert report.run.notes == [
        "Not drawn: version_2, version_9, version_14, of other runs. Give the folder of one to draw it."
    ]
    for name in ("version_9", "version_14"):
        assert read_run(find_files(tmp_path / name).logs).folders == [tmp_path / name]


def test_a_line_that_a_kill_cut_is_left_out(tmp_path: Path) -> None:
    path = write(tmp_path, "step,train_loss", "0,1.5", "1,1.25", end="")
    report = make_report(tmp_path)
    assert report.run.values == {"train_loss": [(0, 1.5)]}
    assert report.run.notes == [f"The last line of {path} has no end, as where a job was killed. It is left out."]
    assert report.run.notes[0] in report.page.read_text()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["step,a,b", "0,1,2", "1,2"], "line 3: 2 values under 3 names; delete the line"),
        (["step,a", "0,1", "1,x" + "y" * 40], "line 3: a is 'xy{19}...', not a number; delete the line"),
        (["step,a", ",1"], "line 2: the step is None, not a whole number"),
        (["step,a", "nan,1"], "line 2: the step is nan, not a whole number"),
        (["epoch,a", "0,1"], "line 1: a column 'step' is missing"),
        (["step,a", "0," + "1" * 200_000], "line 2: field larger than field limit"),
        (["step,a", "0,\udcff"], "line 2: a is '.', not a number"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, rows: Sequence[str], message: str) -> None:
    path = tmp_path / "metrics.csv"
    path.write_bytes("".join(f"{row}\n" for row in rows).encode(errors="surrogateescape"))
    with pytest.raises(StateError, match=rf"metrics\.csv, {message}"):
        make_report(tmp_path)


def test_what_cannot_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "runs" / "a", "step,train_loss", "0,1")
    assert command(monkeypatch, tmp_path / "run") == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/run does not exist; did you mean 'runs'?\n")
    with pytest.raises(ConfigError, match=r"metrics\.csv is a file; give the directory"):
        make_report(path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"nothing is logged below .*empty: no metrics\.csv"):
        make_report(tmp_path / "empty")
    (tmp_path / "empty" / "metrics.csv").touch()
    with pytest.raises(ConfigError, match=r"nothing is logged in .*empty yet"):
        make_report(tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"must end in \.html"):
        make_report(tmp_path / "runs", path)
    with pytest.raises(ConfigError, match=r"metrics\.csv/x\.html cannot be written: File exists"):
        make_report(tmp_path / "runs", path / "x.html")
    with pytest.raises(ConfigError, match=r"metrics\.csv cannot be written: File exists"):
        make_report(tmp_path / "runs", pictures=path)
    write(tmp_path / "runs" / "deep" / "b", "step,train_loss", "0,1")
    with pytest.raises(ConfigError, match=r"has logs of several runs; give one of .*runs, .*deep$"):
        make_report(tmp_path / "runs")


def test_without_matplotlib_there_is_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "step,train_loss", "0,1")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert make_report(tmp_path).page.exists()
    with pytest.raises(ConfigError, match=r"PNG files need matplotlib.*lightning-d9d\[viz\]"):
        make_report(tmp_path, pictures=tmp_path / "drawn")


def chart(values: dict[str, list[float]]) -> Chart:
    (found,) = charts_of({name: list(enumerate(each)) for name, each in values.items()})
    return found


def test_parts_of_a_step_are_stacked() -> None:
    parts = {"step/data_seconds": [4.0, 5.0], "step/compute_seconds": [1.0, 2.0], "step/host_seconds": [0.5, 0.25]}
    lines = chart(parts).lines
    assert [line.name for line in lines] == ["step/compute_seconds", "step/host_seconds", "step/data_seconds"]
    assert [line.base for line in lines] == [[0, 0], [1, 2], [1.5, 2.25]]
    assert lines[-1].points == [(0, 5.5), (1, 7.25)]


def test_names_are_sorted_by_number_and_drawn_together() -> None:
    many = {f"expert_load/layer_{layer}": [1.0, 2.0] for layer in (10, 2, 9)}
    assert [line.name.removeprefix("expert_load/layer_") for line in chart(many).lines] == ["2", "9", "10"]
    found = charts_of({"mine/<b>": [(0, 1.0)], "train_loss": [(0, 2.0)], "val_router_loss": [(0, 3.0)]})
    assert [each.title for each in found] == ["Loss", "mine/<b>"]


@pytest.mark.parametrize(
    "values",
    [
        [0.0, 0.0],
        [5.0],
        [-3.0, -3.0],
        [1e-320, 2e-320],
        [1e299, -1e299],
        [float("nan"), 1.0, float("inf"), 2.0],
        [1.0, 1.0 + 1e-15],
        [0.1] * 3000,
    ],
)
def test_every_line_lies_in_its_picture(values: list[float], tmp_path: Path) -> None:
    for name in ("train_loss", "grad_norm", "other"):
        write(tmp_path, f"step,{name}", *(f"{step},{value!r}" for step, value in enumerate(values)))
        report = make_report(tmp_path, pictures=tmp_path / "drawn" if len(values) == 1 else None)
        svg = next(ElementTree.parse(report.page).iter("svg"))
        (path,) = [each for each in svg.iter("path") if each.get("stroke")]
        numbers = [float(each) for each in (path.get("d") or "").replace("M", " ").replace("L", " ").split()]
        assert len(numbers) == 2 * sum(abs(value) < 1e300 for value in thinned_values(values))
        assert report.charts[0].steps == (0, len(values) - 1)
        assert all(72 <= x <= 628 for x in numbers[::2])
        assert all(10 <= y <= 204 for y in numbers[1::2])


def thinned_values(values: list[float]) -> list[float]:
    return [value for _, value in thinned([*enumerate(values)])]


def test_a_page_without_a_finite_value_says_so(tmp_path: Path) -> None:
    write(tmp_path, "step,train_loss", "0,nan", "1,inf")
    report = make_report(tmp_path)
    assert report.charts == []
    assert "train_loss is NaN or infinite at 2 of 2 steps, first at step 0." in report.page.read_text()


def test_thinned_lines_keep_their_peaks() -> None:
    points = [(step, float(step % 7)) for step in range(100_000)]
    points[54_321] = (54_321, 99.0)
    points[12_345] = (12_345, -99.0)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS
    assert {(54_321, 99.0), (12_345, -99.0)} <= {*kept}
    assert steps(kept) == sorted(steps(kept))


def test_ticks_are_round() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(9, 2999) == [500, 1000, 1500, 2000, 2500]
    assert ticks(-0.3, 0.31) == pytest.approx([-0.2, -0.1, 0, 0.1, 0.2, 0.3])
