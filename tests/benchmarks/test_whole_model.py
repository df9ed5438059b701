"""What `whole_model` changes in the examples, and what it says of a run. `tests/cli/test_30b_examples.py` trains."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_d9d.datamodules import TokenDataModule
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, load_huggingface
from tests.benchmarks.whole_model import PARTS, cases, measure_disk, settings, summary, table, verdicts
from tests.benchmarks.whole_model_job import rows_of, write_tokens, write_weights


def test_parts_decide_what_the_jobs_do() -> None:
    (case,) = cases("cuda", quick=False, layers=20, tokens=65_536, recompute="offload")
    train, resume = (settings(replace(case, rows=1), Path("folder"), "cuda", part) for part in ("train", "resume"))
    assert (case.config.num_hidden_layers, case.judges, case.num_processes) == (20, False, 1)
    assert train["model"]["init_args"]["pretrained"] == "base"
    assert train["trainer"]["strategy"]["init_args"]["parallel"]["recompute"] == "offload"
    assert train["data"]["init_args"]["sequence_length"] == 65_536
    assert [each["class_path"].rpartition(".")[2] for each in train["trainer"]["callbacks"]] == [
        "Probe",
        "ModelCheckpoint",
    ]
    assert resume["trainer"]["callbacks"][-1]["class_path"] == "HuggingFaceExport"
    (alone,) = cases("cuda", quick=False, gpus=2, parts=["train"], states="uint8")
    of_two = settings(replace(alone, rows=4), Path("folder"), "cuda", "train")
    assert of_two["model"]["init_args"]["pretrained"] is None
    assert of_two["model"]["init_args"]["optimizer"]["init_args"]["state_dtype"] == "uint8"
    assert "checkpoint" not in of_two["trainer"]["strategy"]["init_args"]
    assert alone.judges
    with pytest.raises(ValueError, match="--parts 'load' is unknown; choose from 'disk', 'directory'"):
        cases("cuda", quick=False, parts=["load"])
    with pytest.raises(ValueError, match="needs train and save, or the --folder"):
        cases("cuda", quick=False, parts=["resume"])


def test_meshes_and_pipelines_of_several_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OUT", raising=False)
    (of_file,) = cases("cuda", quick=False, gpus=4, parts=["train"])
    found = settings(replace(of_file, rows=4), Path("folder"), "cuda", "train")["trainer"]
    assert found["strategy"]["init_args"]["mesh"] == {"data_parallel_replicate": 4, "expert_parallel": 4}
    assert (found["devices"], of_file.share_of_tokens, len(found["callbacks"])) == (4, 1.0, 1)
    mesh = ["pipeline_parallel=2", "data_parallel_shard=2", "expert_parallel=2"]
    of_pipeline = {"mesh": mesh, "schedule": "zero_bubble_v", "num_microbatches": 8}
    (case,) = cases("cuda", quick=False, gpus=4, parts=["train"], routing="even", profile=2, rows=32, **of_pipeline)
    found = settings(case, Path("folder"), "cuda", "train")["trainer"]
    strategy = found["strategy"]["init_args"]
    assert strategy["mesh"] == {"pipeline_parallel": 2, "data_parallel_shard": 2, "expert_parallel": 2}
    assert (strategy["schedule"], strategy["num_microbatches"], case.share_of_tokens) == ("zero_bubble_v", 8, 0.5)
    with pytest.raises(ValueError, match="--mesh 'expert_parallel' needs a number of ranks"):
        cases("cuda", quick=False, gpus=4, mesh=["expert_parallel"])
    even, profile = found["callbacks"][1:]
    assert even["class_path"].endswith("EvenRouting")
    chosen = {"first_step": 19, "last_step": 20, "directory": "folder/profile", "ranks": "all", "memory": "never"}
    assert profile["init_args"] == chosen
    steps = [{"part": "train", "what": f"step {step}", "seconds": 1.0 + (step > 18)} for step in range(1, 21)]
    found = summary(case, steps)
    assert found["tokens_per_s"] == {"median": 65_536, "low": 65_536, "high": 65_536}
    causal, full = found["flops_per_s"].values()
    assert causal == pytest.approx(65_536 * case.config.flops_per_token(4096), rel=1e-3)
    assert full - causal == pytest.approx(65_536 * 6 * 48 * 4096 * 4096, rel=1e-3)
    table_of_case = table({"case": case.name, **found}, "cuda")
    assert "65536 tokens/s a GPU (quartiles 65536 .. 65536), 1513 (causal), 1829 (full) TFLOP/s" in table_of_case


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mesh": ["nosuch=4"]}, "--mesh 'nosuch' is unknown; choose from 'pipeline_parallel', "),
        ({"mesh": ["tensor_parallel=3"]}, "--mesh tensor_parallel=3: MeshConfig.tensor_parallel=3 does not divide 4"),
        ({"mesh": ["expert_parallel=2", "expert_parallel=4"]}, "expert_parallel=4 has expert_parallel twice"),
        ({"schedule": "1f1b"}, "--schedule 1f1b needs a pipeline, such as --mesh pipeline_parallel=2"),
        ({"num_microbatches": 8, "mesh": ["data_parallel_shard=-1"]}, "--num_microbatches 8 needs a pipeline"),
        ({"schedule": "nosuch", "mesh": ["pipeline_parallel=4"]}, "--schedule nosuch: schedule='nosuch' is unknown"),
        ({"parts": ["save"]}, "--parts save needs train"),
        ({"parts": ["disk", "export"]}, "--parts export needs train or resume"),
        ({"profile": 21}, "--profile 21 must be at most the number of --steps, 20, of the part train"),
        ({"profile": 1, "parts": ["disk"]}, "--profile 1 must be at most the number of --steps, 20, of the part train"),
    ],
)
def test_settings_that_do_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        cases("cuda", quick=False, gpus=4, **options)


def rows(difference: float) -> list[dict[str, Any]]:
    """Return the rows of 20 steps of a second each, except the first. From the 16th on they are in both jobs."""
    trained = [
        {"part": "train", "what": f"step {step}", "seconds": 9.0 if step < 6 else 1.0, "loss": 12 - step / 10}
        for step in range(1, 21)
    ]
    resumed = [{**row, "part": "resume", "loss": row["loss"] + difference} for row in trained[15:]]
    return [*trained, {"part": "train", "what": "checkpoint written", "seconds": 2.0, "bytes": 2**31}, *resumed]


def test_losses_of_a_resumed_run_are_judged_by_what_was_learned() -> None:
    (case,) = cases("cuda", quick=False)
    case = replace(case, rows=4)
    found = summary(case, rows(0.01))
    assert found["tokens_per_s"]["median"] == 16_384
    assert verdicts(found) == ["met", "met"]
    assert verdicts(summary(case, rows(0.1))) == ["met", "missed"]
    text = table({"case": case.name, **found}, "cuda")
    assert "16384 tokens/s a GPU" in text
    assert "| train | checkpoint written | 2.0 | 2.00 |" in text


def test_files_that_jobs_read(tmp_path: Path) -> None:
    (case,) = cases("cpu", quick=True, layers=1)
    assert case.parts == PARTS
    measure_disk(tmp_path, 2**24)
    write_weights(tmp_path, case.config, "cpu")
    load_huggingface(Qwen3MoeForCausalLM(case.config), tmp_path / "base")
    write_tokens(tmp_path / "tokens", case.config.vocab_size, num_rows=8, length=64)
    data = TokenDataModule(str(tmp_path / "tokens"), sequence_length=64, batch_size=4, borders=False)
    data.setup("fit")
    assert len(data.train_dataloader()) == 2
    assert [row["what"] for row in rows_of(tmp_path)] == ["raw write", "raw read", "weights drawn", "weights written"]
