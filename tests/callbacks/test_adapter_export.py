"""`AdapterExport`: adapters as a directory of `peft`, at the end of a fit and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.callbacks import AdapterExport
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoePretraining, save_huggingface
from lightning_d9d.peft import FullTune, LoRA, PeftMethod, Stack, load_adapter, save_adapter, trainable_parameters
from lightning_d9d.state import SafetensorsReader
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.meshes.cases import LAYERS
from tests.meshes.equality import CONFIG, on_mesh
from tests.strategy.plain import trainer
from tests.test_convert import SMALL, data


def fit(*callbacks: L.Callback, peft: PeftMethod | None = LAYERS, **arguments: Any) -> Qwen3MoePretraining:
    module = Qwen3MoePretraining(SMALL, learning_rate=0.1, warmup_steps=0, peft=peft, **arguments)
    options = {"enable_checkpointing": any(isinstance(each, ModelCheckpoint) for each in callbacks)}
    trainer(D9DStrategy(), max_epochs=1, callbacks=list(callbacks), **options).fit(module, data())
    return module


@pytest.mark.parametrize("layout", ["experts", "fused"])
def test_the_adapters_that_were_trained(tmp_path: Path, layout: Any) -> None:
    save_huggingface(Qwen3MoeForCausalLM(SMALL), tmp_path / "base")
    source = str(tmp_path / "base")
    module = fit(AdapterExport(tmp_path / "new" / "adapter", layout=layout), pretrained=source)
    config = json.loads((tmp_path / "new" / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == source
    assert (config["target_parameters"] is not None) == (layout == "fused")
    trained = {name: each.detach().clone() for name, each in trainable_parameters(module).items()}
    assert all(each.any() for each in trained.values())
    with torch.no_grad():
        for each in trainable_parameters(module).values():
            each.zero_()
    load_adapter(module, tmp_path / "new" / "adapter")
    for name, each in trainable_parameters(module).items():
        assert_bitwise_equal(name, each, trained[name])


def test_settings_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "old").touch()
    fit(AdapterExport(tmp_path / "adapter", overwrite=True, dtype="bfloat16", base_model="somebody/base"))
    reader = SafetensorsReader(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {spec.dtype for spec in reader.specs.values()} == {torch.bfloat16}
    assert "somebody/base" in (tmp_path / "adapter" / "adapter_config.json").read_text()
    assert not (tmp_path / "adapter" / "old").exists()


@pytest.mark.parametrize(
    ("make", "arguments", "expected"),
    [
        (lambda path: AdapterExport(path), {"peft": None}, "the model has no adapters; give it some"),
        (
            lambda path: AdapterExport(path),
            {"peft": Stack([LoRA(rank=2), FullTune("norm")])},
            r"model\.norm\.weight is trained whole, which a file of adapters cannot contain;.*HuggingFaceExport",
        ),
        (
            lambda path: AdapterExport(path),
            {"peft": LoRA(rank=2, targets=["experts.gate_up_proj"])},
            "down_proj beside it has none.*layout='fused'",
        ),
        (lambda path: AdapterExport(path.parent), {}, "the directory is not empty; choose another one"),
        (
            lambda path: AdapterExport(path.parent, overwrite=True),
            {"pretrained": "base"},
            "contains .*base, which is read; choose another target",
        ),
        (lambda path: AdapterExport(path, dtype="int8"), {}, r"AdapterExport\(dtype='int8'\) must be one of float64"),
    ],
)
def test_what_could_not_be_written_is_refused_before_the_training(
    tmp_path: Path, make: Any, arguments: dict[str, Any], expected: str
) -> None:
    save_huggingface(Qwen3MoeForCausalLM(SMALL), tmp_path / "base")
    if "pretrained" in arguments:
        arguments = {"pretrained": str(tmp_path / "base")}
    with pytest.raises(ConfigError, match=f"(?s){expected}"):
        fit(make(tmp_path / "adapter"), **arguments)
    assert not (tmp_path / "adapter").exists()
    assert (tmp_path / "base" / "config.json").exists()


def test_checkpoints_are_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"AdapterExport\(directory=.*: checkpoints are saved in .*another dirpath"):
        fit(AdapterExport(tmp_path / "out"), ModelCheckpoint(tmp_path / "out" / "checkpoints", save_last=True))


@pytest.mark.ranks(2)
def test_ranks_of_a_pipeline_write_together(rank: RankContext) -> None:
    L.seed_everything(1, verbose=False)
    export = AdapterExport(rank.tmp_dir / "callback")
    direct = Saving(rank.tmp_dir / "direct")
    mesh = MeshConfig(pipeline_parallel=2)
    on_mesh(rank, D9DStrategy(mesh=mesh), CONFIG, steps=1, peft=LAYERS, callbacks=[export, direct])
    for name in ("adapter_model.safetensors", "adapter_config.json"):
        assert (rank.tmp_dir / "callback" / name).read_bytes() == (rank.tmp_dir / "direct" / name).read_bytes()


class Saving(L.Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        save_adapter(pl_module, self.folder)
