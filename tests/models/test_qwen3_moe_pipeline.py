"""Qwen3MoePretraining on the ranks of a pipeline: weights in and out, text, and what is counted."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import CheckpointConfig, ConfigError, D9DStrategy, MeshConfig, StageInputs, WeightedLoss
from lightning_d9d.callbacks import HuggingFaceExport, TextSample
from lightning_d9d.loop.launch import Launcher, check_model
from lightning_d9d.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoePretraining,
    load_huggingface,
    save_huggingface,
)
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind
from tests.strategy.plain import trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=256,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=4,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
    initializer_range=0.3,
)
PRETRAINED_SEED = 4


class Kept(TextSample):
    """Keeps what it wrote."""

    text = ""

    def generate(self, module: nn.Module) -> str:
        self.text = super().generate(module)
        return self.text


class Watched(Qwen3MoePretraining):
    """Keeps the names that each of its stages has, and what `.model` says."""

    def load_pretrained(self) -> None:
        super().load_pretrained()
        self.weights = [{name: p.detach().clone() for name, p in stage.named_parameters()} for stage in self.stages]
        with pytest.raises(ConfigError, match="of the network's"):
            _ = self.model


def batches(batch_size: int = 4) -> DataLoader:
    ids = torch.randint(256, (8, 9), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in ids], batch_size)  # type: ignore[arg-type]


def pretrained(config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    torch.manual_seed(PRETRAINED_SEED)
    return Qwen3MoeForCausalLM(config).double()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble_v"])
def test_weights_come_in_and_go_out_and_text_is_that_of_the_whole_model(
    rank: RankContext, schedule: str, tied: bool
) -> None:
    """The last stage is on rank 1 with interleaved_1f1b. With zero_bubble_v it is on rank 0, beside the first."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    start, end = rank.tmp_dir / "start", rank.tmp_dir / "end"
    save_huggingface(pretrained(config), start)
    module = Watched(config, pretrained=str(start), learning_rate=0.01, warmup_steps=0)
    options: dict[str, Any] = {"prompt": "a = ", "num_tokens": 12, "context_length": 8}
    sample = Kept(**options)
    run = trainer(
        D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule=schedule),
        2,
        rank.device.type,
        precision="64-true",
        max_epochs=1,
        callbacks=[HuggingFaceExport(end), sample],
    )
    run.fit(module, batches())

    for stage in module.weights:
        for name, weight in stage.items():
            assert_bitwise_equal(name, weight, pretrained(config).get_parameter(name))
    trained = Qwen3MoeForCausalLM(config).double().to(rank.device)
    load_huggingface(trained, end)
    for stage in module.stages:
        for name, weight in stage.named_parameters():
            assert_bitwise_equal(name, weight, trained.get_parameter(name))
            if name.endswith("gate.weight"):
                assert not torch.equal(weight.cpu(), pretrained(config).get_parameter(name))
    assert len(sample.text) > 0
    assert sample.text == TextSample(**options).generate(trained)


class Counted(Qwen3MoePretraining):
    """Counts how often pretrained weights are loaded."""

    num_loaded = 0

    def load_pretrained(self) -> None:
        super().load_pretrained()
        self.num_loaded += 1


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_a_run_that_goes_on_reads_pretrained_weights_only_for_what_its_checkpoint_lacks(
    rank: RankContext, mode: Any
) -> None:
    start, saved = rank.tmp_dir / "start", rank.tmp_dir / "saved.ckpt"
    save_huggingface(pretrained(CONFIG), start)

    def new_trainer() -> L.Trainer:
        mesh, checkpoint = MeshConfig(pipeline_parallel=2), CheckpointConfig(mode=mode)
        strategy = D9DStrategy(mesh=mesh, checkpoint=checkpoint)
        return trainer(strategy, 2, rank.device.type, precision="64-true", max_epochs=1)

    def without_head(checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("lm_head.weight", None)

    first = Counted(CONFIG, pretrained=str(start))
    run = new_trainer()
    run.fit(first, batches())
    run.save_checkpoint(saved)
    again, part = Counted(CONFIG, pretrained=str(start)), Counted(CONFIG, pretrained=str(start))
    new_trainer().fit(again, batches(), ckpt_path=saved)
    part.strict_loading = False
    first.on_save_checkpoint = without_head  # type: ignore[method-assign]
    run.save_checkpoint(saved, weights_only=True)
    new_trainer().validate(part, batches(), ckpt_path=saved)
    assert [first.num_loaded, again.num_loaded, part.num_loaded] == [1, 0, 1]
    for module, of_head in ((again, first), (part, None)):
        for stage, trained in zip(module.stages, first.stages, strict=True):
            for name, weight in stage.named_parameters():
                is_head = of_head is None and name == "lm_head.weight"
                wanted = pretrained(CONFIG).get_parameter(name) if is_head else trained.get_parameter(name)
                assert_bitwise_equal(name, weight, wanted.to(weight.device))


@pytest.mark.ranks(2)
def test_pretrained_weights_that_one_rank_lacks_are_refused_on_all(rank: RankContext) -> None:
    save_huggingface(pretrained(CONFIG), rank.tmp_dir / "start")
    module = Counted(CONFIG, pretrained=str(rank.tmp_dir / ("start" if rank.rank == 0 else "stort")))
    refused = r"^Counted cannot begin: rank 1: pretrained='.*stort' does not exist; .*; did you mean 'start'\?$"
    with pytest.raises(ConfigError, match=refused):
        trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type).fit(module, batches())
    assert module.num_loaded == 0


class Fetching(Counted):
    """Could fetch weights before they are read."""

    def prepare_data(self) -> None:
        pass


@pytest.mark.parametrize("missing", ["start", "index"])
def test_missing_pretrained_weights_are_found_before_other_ranks_are_launched(tmp_path: Path, missing: str) -> None:
    start = tmp_path / "start"
    if missing == "index":
        start.mkdir()
    run = trainer(D9DStrategy(), 2, "cpu")
    with pytest.raises(ConfigError, match=r"^pretrained='.*start' (does not exist|cannot be read: .* has neither)"):
        run.fit(Counted(CONFIG, pretrained=str(start)), batches())
    assert isinstance(run.strategy.launcher, Launcher)
    assert run.strategy.launcher.procs == []
    check_model(run._fit_impl, Counted(CONFIG, pretrained=str(start)), batches(), ckpt_path="last.ckpt")
    check_model(run._fit_impl, Fetching(CONFIG, pretrained=str(start)), batches())


def test_pretrained_weights_are_loaded_under_a_stock_strategy(tmp_path: Path) -> None:
    save_huggingface(pretrained(CONFIG), tmp_path)
    module = Counted(CONFIG, pretrained=str(tmp_path))
    trainer("auto", max_epochs=1).validate(module, batches())
    assert module.num_loaded == 1
    assert_bitwise_equal("head", module.model.lm_head.weight, pretrained(CONFIG).lm_head.weight.float())


@pytest.mark.ranks(2)
def test_tokens_of_a_pipeline_are_counted_once(rank: RankContext) -> None:
    now = 0.0

    class Ticking(Qwen3MoePretraining):
        def on_after_backward(self) -> None:
            nonlocal now
            now += 1.0

    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2))
    run = trainer(strategy, 2, rank.device.type, max_epochs=1)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("lightning_d9d.models.qwen3_moe.module.time.perf_counter", lambda: now)
        run.fit(Ticking(CONFIG), batches())
    assert run.callback_metrics["tokens_per_s"] == 4 * 8


@pytest.mark.ranks(2)
def test_perplexity_and_predictions_are_those_of_the_whole_model(rank: RankContext) -> None:
    L.seed_everything(1, verbose=False)
    run = trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type, precision="64-true")
    module = Qwen3MoePretraining(CONFIG)
    (result,) = run.validate(module, batches(), verbose=False)
    predicted = torch.cat(run.predict(module, batches()))  # type: ignore[arg-type]
    whole = Qwen3MoeForCausalLM(CONFIG).double().to(rank.device)
    save_huggingface(list(module.stages), rank.tmp_dir / "whole")
    load_huggingface(whole, rank.tmp_dir / "whole")
    batch = torch.utils.data.default_collate(list(batches().dataset))
    with torch.no_grad():
        logits = whole(batch["input_ids"].to(rank.device)).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).cpu(), batch["labels"].flatten())
    assert_close_named("logits", predicted, logits, kind=Kind.OUTPUT)  # one row a microbatch
    assert result["val_loss"] == pytest.approx(float(loss), rel=1e-10)
    assert result["val_perplexity"] == pytest.approx(float(loss.exp()), rel=1e-5)


class Looking(Qwen3MoePretraining):
    """A module whose loss depends on the hidden states of every layer."""

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        inputs = super().microbatch_inputs(microbatch)
        return StageInputs({**inputs.first, "output_hidden_states": True}, inputs.shared)

    def microbatch_loss(self, output: Any, microbatch: Any) -> WeightedLoss:
        return WeightedLoss(looking_loss(output), self.microbatch_weight(microbatch))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        stages = [dict(stage.named_parameters()) for stage in self.stages]
        self.gradients = [{name: p.grad.clone() for name, p in stage.items()} for stage in stages]


def looking_loss(output: Any) -> Tensor:
    return output.loss + sum((index + 1) * each.square().sum() for index, each in enumerate(output.hidden_states))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved_1f1b", "zero_bubble_v"])
def test_hidden_states_of_every_layer_reach_the_loss(rank: RankContext, schedule: str) -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    save_huggingface(pretrained(config), rank.tmp_dir / "start")
    module = Looking(config, pretrained=str(rank.tmp_dir / "start"))
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule=schedule)
    trainer(strategy, 2, rank.device.type, precision="64-true", max_epochs=1).fit(module, batches(8))
    whole = pretrained(config).to(rank.device)
    batch = torch.utils.data.default_collate(list(batches().dataset))
    ids, labels = batch["input_ids"].to(rank.device), batch["labels"].to(rank.device)
    (looking_loss(whole(ids, labels, reduction="sum", output_hidden_states=True)) / labels.numel()).backward()
    for gradients in module.gradients:
        for name, gradient in gradients.items():
            expected = whole.get_parameter(name).grad
            assert expected is not None
            assert_close_named(name, gradient, expected)
