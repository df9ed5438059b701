"""`lightning-d9d convert`: what it makes loads where it should, with the same values."""

from __future__ import annotations

import json
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader, TensorDataset

from lightning_d9d import CheckpointConfig, ConfigError, D9DStrategy, StateError
from lightning_d9d.checkpoint import is_directory, save_directory
from lightning_d9d.cli import main
from lightning_d9d.convert import _described
from lightning_d9d.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoePretraining,
    load_huggingface,
    save_huggingface,
)
from lightning_d9d.state import Spec
from lightning_d9d.state.format import MANIFEST_FILE
from tests.harness.compare import assert_bitwise_equal
from tests.state.test_files import within

SMALL = Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, head_dim=8, num_experts=3, num_experts_per_tok=2,
)  # fmt: skip


def convert(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "convert", *map(str, arguments)])
    main()


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    with pytest.raises(SystemExit) as end:
        convert(monkeypatch, *arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


def make_model(seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(SMALL)


def assert_loads(directory: Path, expected: torch.nn.Module) -> None:
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig.from_json(directory))
    load_huggingface(model, directory)
    for name, parameter in model.named_parameters():
        assert_bitwise_equal(name, parameter, expected.get_parameter(name).to(parameter.dtype))


def trainer(strategy: Any, **options: Any) -> L.Trainer:
    silent = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    return L.Trainer(strategy=strategy, devices=1, enable_checkpointing=False, **silent, **options)


def data() -> DataLoader[Any]:
    ids = torch.randint(32, (6, 9), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": ids[i : i + 2, :-1], "labels": ids[i : i + 2, 1:]} for i in range(0, 6, 2)]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint directory, saved after an epoch, and beside it `direct.ckpt`, a file of the same."""
    path = tmp_path_factory.mktemp("trained") / "job.ckpt"
    torch.manual_seed(0)
    run = trainer(D9DStrategy(), max_epochs=1)
    run.fit(Qwen3MoePretraining(SMALL, warmup_steps=1), data())
    run.save_checkpoint(path)
    assert is_directory(path)
    run.strategy.checkpoint_config = CheckpointConfig(mode="consolidated")  # type: ignore[attr-defined]
    run.save_checkpoint(path.with_name("direct.ckpt"))
    return path


def test_dtype_files_and_layout_of_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model()
    save_huggingface(model, tmp_path / "one")
    (tmp_path / "one" / "tokenizer.json").write_text("{}")
    convert(
        monkeypatch, tmp_path / "one", tmp_path / "fused", "--fused-experts", "--dtype", "bfloat16",
        "--max-shard-size", "4KB",
    )  # fmt: skip
    assert_loads(tmp_path / "fused", model.bfloat16())
    files = sorted(path.name for path in (tmp_path / "fused").iterdir())
    assert {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"} <= {*files}
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    names = json.loads((tmp_path / "fused" / "model.safetensors.index.json").read_text())["weight_map"]
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert json.loads((tmp_path / "fused" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    convert(monkeypatch, tmp_path / "fused", tmp_path / "back")
    assert_loads(tmp_path / "back", model)
    save_huggingface(model, tmp_path / "direct")
    for each in ("one", "direct"):
        assert load_file(tmp_path / each / "model.safetensors").keys() == (
            load_file(tmp_path / "back" / "model.safetensors").keys()
        )


def test_from_and_to_urls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make_model()
    save_huggingface(model, "memory://source/model")
    convert(monkeypatch, "memory://source/model", "memory://target/model", "--fused-experts")
    convert(monkeypatch, "memory://target/model", tmp_path / "back")
    assert_loads(tmp_path / "back", model)
    assert (tmp_path / "back" / "generation_config.json").exists()


def test_tied_embeddings_that_files_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(replace(SMALL, tie_word_embeddings=True))
    save_huggingface(model, tmp_path / "source")
    (tmp_path / "source" / MANIFEST_FILE).unlink()
    file = tmp_path / "source" / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file({**tensors, "lm_head.weight": embedding.clone()}, file)
    convert(monkeypatch, tmp_path / "source", tmp_path / "target")
    assert "lm_head.weight" not in load_file(tmp_path / "target" / "model.safetensors")
    assert_loads(tmp_path / "target", model)

    save_file({**tensors, "lm_head.weight": embedding + 1}, file)
    assert "lm_head.weight differs" in refused(monkeypatch, capsys, tmp_path / "source", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_transformers_opens_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    from transformers import Qwen3MoeForCausalLM as Reference

    convert(monkeypatch, trained, tmp_path / "hf", "--dtype", "float32")
    reference, info = Reference.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    module = Qwen3MoePretraining.load_from_checkpoint(trained)
    ids = torch.arange(16).view(2, 8)
    torch.testing.assert_close(reference(ids).logits, module.model(ids).logits, rtol=1e-4, atol=1e-5)
    assert_loads(tmp_path / "hf", module.model)


def test_stock_strategies_go_on_from_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: Path) -> None:
    """They resume from it as from a file that was saved as one."""
    convert(monkeypatch, trained, tmp_path / "whole.ckpt")
    ends = []
    for path in (trained.with_name("direct.ckpt"), tmp_path / "whole.ckpt"):
        run = trainer("auto", max_epochs=2)
        module = Qwen3MoePretraining(SMALL, warmup_steps=1)
        run.fit(module, data(), ckpt_path=path)
        assert run.global_step == 6
        ends.append(module.state_dict())
    for name, tensor in ends[0].items():
        assert_bitwise_equal(name, ends[1][name], tensor)
    convert(monkeypatch, tmp_path / "whole.ckpt", tmp_path / "hf")
    assert_loads(tmp_path / "hf", Qwen3MoePretraining.load_from_checkpoint(trained).model)


class Plain(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        return self.net(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        """Two groups, in another order than the parameters are in the module."""
        decay, others = [], []
        for name, parameter in self.named_parameters():
            (decay if "2." in name else others).append(parameter)
        optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.3}, {"params": others}], lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class Alike(Plain):
    """Two groups that do not differ, one with a frozen parameter; the second of two tied parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.net[0].weight.requires_grad_(False)
        self.again = self.net[2]

    def configure_optimizers(self) -> Any:
        parameters = [*self.parameters()]
        return torch.optim.AdamW([{"params": parameters[3:]}, {"params": parameters[:3]}], lr=0.1)


class TwoOptimizers(Plain):
    """A module with two optimizers, and a scheduler for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int = 0) -> torch.Tensor:
        loss = super().training_step(batch)
        self.manual_backward(loss)
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()
        self.lr_schedulers().step()  # type: ignore[union-attr,call-arg]
        return loss

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD(self.net[2].parameters(), lr=0.1, momentum=0.9)
        second = torch.optim.Adam(self.net[:2].parameters(), lr=0.1)
        return [first, second], [torch.optim.lr_scheduler.StepLR(second, 1)]


@pytest.mark.parametrize("kind", [Plain, Alike, TwoOptimizers])
def test_groups_of_an_optimizer_keep_their_order(
    kind: type[Plain], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = DataLoader(TensorDataset(torch.randn(8, 4, generator=torch.Generator().manual_seed(0))), batch_size=4)
    run = trainer(D9DStrategy(checkpoint=CheckpointConfig(mode="sharded")), max_epochs=2)
    run.fit(kind(), rows)
    run.save_checkpoint(tmp_path / "job.ckpt")
    run.strategy.checkpoint_config = CheckpointConfig(mode="consolidated")  # type: ignore[attr-defined]
    run.save_checkpoint(tmp_path / "direct.ckpt")
    convert(monkeypatch, tmp_path / "job.ckpt", tmp_path / "converted.ckpt")
    ends = []
    for name in ("direct.ckpt", "converted.ckpt"):
        module = kind()
        trainer("auto", max_epochs=3).fit(module, rows, ckpt_path=tmp_path / name)
        ends.append(module.state_dict())
    for name, tensor in ends[0].items():
        assert_bitwise_equal(name, ends[1][name], tensor)
    half = tmp_path / "half.ckpt"
    convert(monkeypatch, tmp_path / "job.ckpt", half, "--dtype", "bfloat16")
    assert torch.load(half, weights_only=True)["state_dict"]["net.0.weight"].dtype == torch.bfloat16


def test_what_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    save_huggingface(make_model(), tmp_path / "hf")
    new = tmp_path / "new"
    assert "neither model.safetensors nor" in refused(monkeypatch, capsys, trained.parent, new)
    assert "is not a size" in refused(monkeypatch, capsys, tmp_path / "hf", new, "--max-shard-size", "5 apples")
    no_effect = refused(monkeypatch, capsys, tmp_path / "hf", new, "--weights-only")
    assert f"--weights-only has no effect: {new} is Hugging Face's form, which has nothing but weights" in no_effect
    for options in (["--tokenizer", tmp_path], ["--fused-experts"], ["--max-shard-size", "1MB"], ["--no-verify"]):
        no_effect = refused(monkeypatch, capsys, trained, tmp_path / "new.ckpt", *options)
        assert f"{options[0]} has no effect: {tmp_path / 'new.ckpt'} is one .ckpt file; leave" in no_effect
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "add --overwrite" in refused(monkeypatch, capsys, tmp_path / "hf", tmp_path / "full")
    shutil.rmtree(tmp_path / "full")
    assert "which cannot become a .ckpt file" in refused(monkeypatch, capsys, tmp_path / "hf", tmp_path / "x.ckpt")
    assert "add --overwrite" in refused(monkeypatch, capsys, trained, trained.with_name("direct.ckpt"))
    assert "is a URL; a .ckpt file needs" in refused(monkeypatch, capsys, trained, "memory://test_refused/a.ckpt")
    assert "none://a: cannot be read" in refused(monkeypatch, capsys, "none://a", new)
    dangling, empty = tmp_path / "dangling.ckpt", tmp_path / "empty.ckpt"
    dangling.symlink_to(tmp_path / "nothing")
    empty.mkdir()
    for target in (dangling, empty):
        assert "add --overwrite" in refused(monkeypatch, capsys, trained, target)
    dangling.unlink()
    empty.rmdir()
    weights = tmp_path / "hf" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert "is damaged" in refused(monkeypatch, capsys, tmp_path / "hf", new)
    convert(monkeypatch, tmp_path / "hf", new, "--no-verify")
    torch.save({"state_dict": {}}, tmp_path / "other.ckpt")
    assert "not a checkpoint of Qwen3MoePretraining" in refused(
        monkeypatch, capsys, tmp_path / "other.ckpt", tmp_path / "y"
    )
    saved = {"tensors": [], "values": {}, "group": {"lr": 0.1}}
    named = {"optimizer_0": {"state": {}, "other": {}}, "optimizer_0.a": saved, "optimizer_0.b": {**saved, "group": {}}}
    save_directory(tmp_path / "stages", {}, {"optimizer_states": 1}, named_values={**named, "optimizer_0.c": saved})
    message = refused(monkeypatch, capsys, tmp_path / "stages", tmp_path / "z.ckpt")
    assert "did not save their order" in message
    assert "--weights-only" in message
    (tmp_path / "junk.ckpt").write_text("junk")
    assert "cannot be read" in refused(monkeypatch, capsys, tmp_path / "junk.ckpt", tmp_path / "y")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "junk.ckpt", "new", "other.ckpt", "stages"]


ARGUMENTS, EMBEDDING = "qwen3_moe_arguments", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"state_dict": [1]}, "has no 'state_dict' of names and tensors"),
        ({"state_dict": {1: torch.ones(1)}}, "has no 'state_dict' of names and tensors"),
        ({"state_dict": {}, ARGUMENTS: {}}, f"{ARGUMENTS} has no config"),
        ({"state_dict": {}, ARGUMENTS: 5}, f"{ARGUMENTS}=5 must be a table"),
        ({"state_dict": {}, ARGUMENTS: {"config": [1]}}, "[1] must be a table of names and values"),
        ({"state_dict": {}, ARGUMENTS: {"balance": {"zz": 1}}}, "balance={'zz': 1}, which is not a BalanceConfig"),
        ({"state_dict": {}, ARGUMENTS: {"balance": 7}}, "balance=7, which is not a BalanceConfig"),
    ],
)
def test_damaged_checkpoints_to_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], content: Any, message: str
) -> None:
    torch.save(content, tmp_path / "damaged.ckpt")
    found = refused(monkeypatch, capsys, tmp_path / "damaged.ckpt", tmp_path / "hf")
    assert f"{tmp_path}/damaged.ckpt" in found
    assert message in found
    if content.get(ARGUMENTS):
        with pytest.raises((StateError, ConfigError), match=re.escape(message)):
            Qwen3MoePretraining.load_from_checkpoint(tmp_path / "damaged.ckpt")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"optimizer_states": "x"}, "TypeError"),
        ({"optimizer_states": 1}, "'optimizer_0'"),
        ({"optimizer_states": 1, "optimizer_0": 3}, "TypeError"),
        ({"optimizer_states": 1, "optimizer_0": {}, "optimizer_0.a": 3}, "TypeError"),
        ({"optimizer_states": 0, "lightning_d9d_one_process": []}, "AttributeError"),
        ({"optimizer_states": 0, "lr_schedulers": [1], "lightning_d9d_one_process": {"scheduled": [4]}}, "IndexError"),
        ({3: 4}, "TypeError"),
    ],
)
def test_damaged_checkpoints_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], values: Any, message: str
) -> None:
    save_directory(tmp_path / "damaged", {}, values)
    found = refused(monkeypatch, capsys, tmp_path / "damaged", tmp_path / "whole.ckpt")
    assert f"{tmp_path}/damaged: its optimizers do not have a form that stock strategies load: " in found
    assert message in found
    assert not (tmp_path / "whole.ckpt").exists()


@pytest.mark.parametrize("weight", [torch.ones(3), torch.ones(32, 16, dtype=torch.int64)])
def test_weights_that_are_not_those_of_the_configuration(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str], trained: Path, weight: torch.Tensor
) -> None:
    content = torch.load(trained.with_name("direct.ckpt"), weights_only=True)
    torch.save({**content, "state_dict": {**content["state_dict"], EMBEDDING: weight}}, tmp_path / "odd.ckpt")
    message = refused(monkeypatch, capsys, tmp_path / "odd.ckpt", tmp_path / "new")
    assert f"odd.ckpt: {EMBEDDING} is {weight.dtype} of shape {tuple(weight.shape)}, but its own config" in message


def test_weights_without_a_tensor(tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]) -> None:
    save_huggingface(make_model(), tmp_path / "hf")
    (tmp_path / "hf" / MANIFEST_FILE).unlink()
    save_file({}, tmp_path / "hf" / "model.safetensors")
    message = refused(monkeypatch, capsys, tmp_path / "hf", tmp_path / "new")
    assert re.search(
        rf"39 missing in the files: .*{EMBEDDING}.*replace .*hf/config\.json with that of these weights", message
    )


def test_the_dtype_of_most_of_many_tensors() -> None:
    specs = {str(i): Spec((1,), torch.bfloat16 if i % 3 else torch.float32) for i in range(60_000)}
    with within(2):
        assert json.loads(_described({"dtype": "float16"}, specs, None)) == {"dtype": "bfloat16"}


def test_names_of_files_do_not_steer_a_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    save_huggingface(make_model(), tmp_path / "hf")
    (tmp_path / "hf" / "a\x1b[31mb.json").write_text("{}")
    convert(monkeypatch, tmp_path / "hf", tmp_path / "new")
    assert "a\\x1b[31mb.json" in capsys.readouterr().out
    assert (tmp_path / "new" / "a\x1b[31mb.json").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_target_that_meets_the_source_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    """Nothing of it is changed, whatever the names of the two."""
    home, blobs = tmp_path / "hub" / "snapshots", tmp_path / "hub" / "blobs"
    save_huggingface(make_model(), home / "hf")
    shutil.copytree(trained, home / "job.ckpt")
    save_huggingface(make_model(), "memory://test_meets/models/hf")
    (tmp_path / "link").symlink_to(home)
    blobs.mkdir()
    (home / "hf" / "model.safetensors").rename(blobs / "0")
    (home / "hf" / "model.safetensors").symlink_to(blobs / "0")
    for source, target in [
        (home / "hf", home / "hf"),
        (home / "hf", f"file://{home}/hf/"),
        (f"file://{tmp_path}/link/hf", home / "hf"),
        (home / "hf", tmp_path / "link" / "hf"),
        (home / "hf", tmp_path / "link"),
        (home / "hf", home),
        (home / "hf", home / "hf" / "new"),
        (home / "hf", blobs),
        (home / "job.ckpt", home / "job.ckpt"),
        (home / "job.ckpt", home / "job.ckpt" / "whole.ckpt"),
        (home / "job.ckpt", tmp_path / "link" / "job.ckpt" / "hf"),
        (f"local://{home}/job.ckpt", home),
        ("memory://test_meets/models/hf", "memory://test_meets/models/hf/"),
        ("memory://test_meets/models/hf", "memory:///test_meets//models/other/../hf"),
        ("memory://test_meets/models/hf", "memory://test_meets/models"),
        ("memory://test_meets/models/hf", "memory://test_meets/models/hf/new"),
        ("memory://test_meets/models/hf", "simplecache::memory://test_meets/models/hf"),
    ]:
        before = contents(tmp_path)
        message = refused(monkeypatch, capsys, source, target, "--overwrite")
        assert re.search(r"the target .* (is|contains|lies in) .*, which is read; choose another target", message)
        assert contents(tmp_path) == before
    assert_loads(home / "hf", make_model())
    load_huggingface(make_model(1), "memory://test_meets/models/hf")
    convert(monkeypatch, "memory://test_meets/models/hf", "memory://test_meets/models/hf2", "--overwrite")
    convert(monkeypatch, f"file://{home}/job.ckpt", home / "job2.ckpt", "--weights-only")


@pytest.mark.parametrize("place", ["out/tok", "out", "out/../out/tok/", "memory://test_tokenizer/out"])
def test_a_target_that_meets_the_tokenizer_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: Path, place: str
) -> None:
    is_url = "://" in place
    tokenizer, target = (place, "memory://test_tokenizer") if is_url else (tmp_path / place, tmp_path / "out")
    save_huggingface(make_model(), tokenizer, overwrite=True)
    for source in (trained, with_files_beside(tmp_path)):
        before = contents(tmp_path)
        message = refused(monkeypatch, capsys, source, target, "--tokenizer", tokenizer, "--overwrite")
        assert re.search(r"the target .* (is|contains) .*, which is read; choose another target", message)
        assert contents(tmp_path) == before
    load_huggingface(make_model(1), tokenizer)


def with_files_beside(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    save_huggingface(make_model(), source)
    (source / "tokenizer.json").write_text("{}")
    (tmp_path / "secret").write_text("secret")
    return source


@pytest.mark.parametrize("link", ["tokenizer_config.json", "config.json", "chat_template.jinja"])
def test_links_out_of_the_source_are_refused(tmp_path, monkeypatch, capsys, link):
    source = with_files_beside(tmp_path)
    secret = tmp_path / "secret"
    if (source / link).exists():
        (source / link).replace(secret)
    (source / link).symlink_to("../secret")
    message = refused(monkeypatch, capsys, source, tmp_path / "target")
    assert f"the file '{link}' is a link out of the directory" in message
    assert not (tmp_path / "target").exists()


def test_links_of_the_hub_and_within_the_source_are_copied(tmp_path, monkeypatch):
    source = with_files_beside(tmp_path)
    snapshot = tmp_path / "models--a--b" / "snapshots" / "1"
    snapshot.parent.mkdir(parents=True)
    source.rename(snapshot)
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (blobs / "hash").write_text("of the hub")
    (snapshot / "vocab.txt").symlink_to("../../blobs/hash")
    (snapshot / "same.txt").symlink_to("vocab.txt")
    convert(monkeypatch, snapshot, tmp_path / "target")
    assert (tmp_path / "target" / "vocab.txt").read_text() == "of the hub"
    assert not (tmp_path / "target" / "vocab.txt").is_symlink()
    assert (tmp_path / "target" / "same.txt").read_text() == "of the hub"


@pytest.mark.parametrize("sizes", [(100_000_001,), (60_000_000, 60_000_000)], ids=["one", "together"])
def test_large_files_beside_the_weights_are_refused(tmp_path, monkeypatch, capsys, sizes):
    source = with_files_beside(tmp_path)
    for number, size in enumerate(sizes):
        with (source / f"log{number}.txt").open("wb") as file:
            file.truncate(size)
    message = refused(monkeypatch, capsys, source, tmp_path / "target")
    assert f"log{len(sizes) - 1}.txt" in message
    assert "100000000 bytes" in message
    assert not (tmp_path / "target").exists()


def test_it_says_what_it_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], trained: Path
) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer" / "generation_config.json").write_text('{"eos_token_id": 7}')
    convert(monkeypatch, trained, tmp_path / "hf", "--dtype", "bfloat16", "--tokenizer", tmp_path / "tokenizer")
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    num_bytes = sum(each.nbytes for each in weights.values())
    assert capsys.readouterr().out == (
        f"{tmp_path}/hf: {len(weights)} tensors in bfloat16, {num_bytes:,} bytes in 1 file; beside them config.json, "
        "generation_config.json, model.safetensors.manifest.json, tokenizer.json\n"
        f"Start a training from it with Qwen3MoePretraining(preset='{tmp_path}/hf', pretrained='{tmp_path}/hf')\n"
    )
    assert json.loads((tmp_path / "hf" / "generation_config.json").read_text()) == {"eos_token_id": 7}
    convert(monkeypatch, tmp_path / "hf", tmp_path / "split", "--dtype", "float32", "--max-shard-size", "8KB")
    num_files = len([*(tmp_path / "split").glob("*.safetensors")])
    assert f"{len(weights)} tensors in float32, {2 * num_bytes:,} bytes in {num_files} files" in capsys.readouterr().out
    whole = tmp_path / "whole.ckpt"
    for options, optimizers in (((), "with"), (("--weights-only",), "without")):
        convert(monkeypatch, trained, whole, "--overwrite", *options)
        state = torch.load(whole, weights_only=True)["state_dict"]
        num_tensors = sum(isinstance(value, torch.Tensor) for value in state.values())
        assert capsys.readouterr().out == (
            f"{whole}: {num_tensors} tensors in float32 {optimizers} optimizers, {whole.stat().st_size:,} bytes\n"
            f"Go on with it with ckpt_path='{whole}'\n"
        )
    assert (
        f"error: {tmp_path}/hf is a Hugging Face directory, which cannot become a .ckpt file. Start a training from it "
        f"with Qwen3MoePretraining(preset='{tmp_path}/hf', pretrained='{tmp_path}/hf')\n"
    ) in refused(monkeypatch, capsys, tmp_path / "hf", tmp_path / "of_hf.ckpt")
