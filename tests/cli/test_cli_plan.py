"""`lightning-d9d plan --search --yaml`: a later `--config` reads the settings of the best plan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_d9d.cli import main

CONFIG = """
model: {{class_path: Qwen3MoePretraining, init_args: {{preset: tiny}}}}
data: {{class_path: ByteTextDataModule, init_args: {{sequence_length: 64, {rows}}}}}
trainer:
  strategy: {{class_path: D9DStrategy, init_args: {{mesh: {{data_parallel_replicate: -1}}, {strategy}}}}}
  accumulate_grad_batches: {accumulated}
"""


def planned(monkeypatch: pytest.MonkeyPatch, *options: str) -> object:
    arguments = ("--world_size", "8", "--gpu", "h100", "--json", "plan.json")
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "plan", "--config", "run.yaml", *options, *arguments])
    main()
    return json.loads(Path("plan.json").read_text())


@pytest.mark.parametrize(
    ("rows", "strategy", "accumulated"),
    [
        ("batch_size: 4", "microbatch_size: 1", 1),
        ("batch_size: 4", "num_microbatches: 2, schedule: zero_bubble_v", 1),
        ("global_batch_size: 64", "microbatch_size: 1", 2),
        ("global_batch_size: 32", "num_microbatches: 4", 1),
    ],
)
def test_the_best_plan_is_that_of_the_file_with_its_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: str, strategy: str, accumulated: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG.format(rows=rows, strategy=strategy, accumulated=accumulated))
    best = planned(monkeypatch, "--search", "--yaml", "best.yaml")
    assert planned(monkeypatch, "--config", "best.yaml") == best
    written = yaml.safe_load(Path("best.yaml").read_text())
    sizes, before = written["data"]["init_args"], yaml.safe_load(f"{{{rows}}}")
    assert sizes.keys() == before.keys()
    assert "batch_size" in before or sizes == before  # a batch of one data rank is another one on another mesh
    assert planned(monkeypatch, "--config", "best.yaml", "--yaml", "again.yaml") == best
    assert yaml.safe_load(Path("again.yaml").read_text())["data"] == written["data"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--trainer.devices", "[0, 2]"), {"devices": [0, 2], "num_nodes": 1}),
        (("--trainer.devices", "4", "--trainer.num_nodes", "2", "--world_size", "8"), {"devices": 4, "num_nodes": 2}),
        (("--trainer.devices", "4", "--world_size", "2"), {"devices": 2, "num_nodes": 1}),
        (("--trainer.devices", "4", "--trainer.num_nodes", "2", "--world_size", "32"), {"devices": 4, "num_nodes": 8}),
        (("--world_size", "32"), {"devices": 8, "num_nodes": 4}),
        (("--world_size", "8", "--gpus_per_node", "4"), {"devices": 4, "num_nodes": 2}),
        (("--world_size", "8", "--gpus_per_node", "6"), {}),
    ],
)
def test_the_written_settings_have_the_ranks_where_they_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...], expected: dict[str, object]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG.format(rows="batch_size: 4", strategy="microbatch_size: 1", accumulated=1))
    written = ("--yaml", "best.yaml", "--gpu", "h100")
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "plan", "--config", "run.yaml", *options, *written])
    main()
    settings = yaml.safe_load(Path("best.yaml").read_text())["trainer"]
    assert {name: value for name, value in settings.items() if name != "strategy"} == expected
    assert settings["strategy"]["class_path"] == "D9DStrategy"


@pytest.mark.parametrize(
    ("devices", "num_ranks"),
    [
        ("4", 8),
        ("[0, 1]", 4),
        ("auto", "--trainer.devices: trainer.devices='auto' does not say how many ranks run; pass --world_size"),
    ],
)
def test_the_ranks_and_nodes_are_those_of_the_trainer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    devices: str,
    num_ranks: int | str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG.format(rows="batch_size: 4", strategy="microbatch_size: 1", accumulated=1))
    trainer = ("--trainer.devices", devices, "--trainer.num_nodes", "2")
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "plan", "--config", "run.yaml", *trainer, "--json", "plan.json"])
    if isinstance(num_ranks, int):
        main()
        plan = json.loads(Path("plan.json").read_text())
        assert plan["world_size"] == num_ranks
        assert plan["machine"]["gpus_per_node"] == num_ranks // 2
        assert re.search(r"data_parallel_replicate +\d +network\n", capsys.readouterr().out)
    else:
        with pytest.raises(SystemExit):
            main()
        assert num_ranks in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--trainer.devices", "--world_size"])
def test_the_option_with_the_number_of_ranks_is_named_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.chdir(tmp_path)
    run = CONFIG.format(rows="batch_size: 4", strategy="microbatch_size: 1", accumulated=1)
    Path("run.yaml").write_text(run.replace("data_parallel_replicate: -1", "pipeline_parallel: 2"))
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "plan", "--config", "run.yaml", option, "3"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {option}, beside run.yaml, line 5: MeshConfig.pipeline_parallel=2 does not divide 3 ranks: the "
        "nearest that fit are 1 and 3"
    )


@pytest.mark.jobs
def test_a_plan_ends_its_process_at_once_and_imports_no_more_than_it_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imports take most of a plan's time. Lightning's own are not ours to leave out.

    Other commands end as Python does, which calls what is registered, and frees all objects.
    """
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG.format(rows="batch_size: 4", strategy="microbatch_size: 1", accumulated=1))
    script = (
        "import atexit, os, sys; atexit.register(print, 'freed'); end = os._exit; "
        "os._exit = lambda code: (print('imported', *sys.modules, flush=True), end(code)); "
        "from lightning_d9d.cli import program; program()"
    )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", script, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)

    assert run("doctor", "--help").stdout.endswith("freed\n")
    shown = run("plan", "--config", "run.yaml", "--world_size", "8", "--json", "plan.json")
    *_, rates, last = shown.stdout.splitlines()
    assert rates.startswith("rates: ")
    assert "leaked" not in shown.stderr
    word, *imported = last.split()
    assert word == "imported"
    assert "lightning_d9d.plan.planning" in imported
    unused = {
        *("torch.distributed.checkpoint", "torch.distributed.elastic", "torch.distributed.pipelining"),
        *("torch._inductor.compile_fx", "torch._inductor.codecache", "torchdata", "datasets", "pyarrow", "plotly"),
    }
    assert not unused.intersection(imported)
    assert json.loads(Path("plan.json").read_text())["world_size"] == 8


@pytest.mark.parametrize("option", ["--tokens", "--rows"])
@pytest.mark.parametrize("value", ["0", "-1"])
def test_counts_below_one_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text(CONFIG.format(rows="batch_size: 4", strategy="microbatch_size: 1", accumulated=1))
    with pytest.raises(SystemExit, match="2"):
        planned(monkeypatch, option, value)
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: {option}: plan got {option[2:]}={value}, which must be a whole number of at least 1"
    )
