"""Qwen3MoePretraining: its optimizer, its learning rate and what it logs."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9d import ConfigError, D9DStrategy, StageInfo, StateError
from lightning_d9d.checkpoint import MODEL, save_directory
from lightning_d9d.generation.sources import load_model
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining, save_huggingface
from lightning_d9d.models.qwen3_moe.module import ARGUMENTS_KEY
from lightning_d9d.modules import BalanceConfig
from lightning_d9d.strategy.optimizers import first_names
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.strategy.plain import trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=16,
    moe_intermediate_size=8,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=4,
    num_experts_per_tok=2,
)


def rows(count: int) -> list[dict[str, Tensor]]:
    """Row i has i % 5 labels that do not count."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for index in range(count):
        tokens = torch.randint(0, 32, (9,), generator=generator)
        labels = tokens[1:].clone()
        labels[: index % 5] = -100
        result.append({"input_ids": tokens[:-1], "labels": labels})
    return result


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        yield from rows(8)


def test_learning_rate_warms_up_and_decays_and_vectors_and_embeddings_do_not() -> None:
    class Watch(Qwen3MoePretraining):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            rates.append(optimizer.param_groups[0]["lr"])
            names = first_names(self.state_dict(keep_vars=True))
            groups[:] = [
                {names[parameter]: parameter.ndim for parameter in g["params"]} for g in optimizer.param_groups
            ]
            decays[:] = [group["weight_decay"] for group in optimizer.param_groups]

    rates: list[float] = []
    groups: list[dict[str, int]] = []
    decays: list[float] = []
    module = Watch(CONFIG, learning_rate=0.5, weight_decay=0.1, warmup_steps=2, final_learning_rate_fraction=0.2)
    trainer(D9DStrategy(), max_epochs=1).fit(module, DataLoader(rows(12), batch_size=2))
    cosine = [0.5 * (0.2 + 0.8 * (1 + math.cos(math.pi * step / 4)) / 2) for step in range(4)]
    assert rates == pytest.approx([0.25, 0.5, *cosine])
    assert decays == [0.1, 0.0]
    assert min(groups[0].values()) >= 2
    assert [name for name, ndim in groups[1].items() if ndim > 1] == ["model.embed_tokens.weight"]


def test_documents_longer_than_the_window_are_refused() -> None:
    config = dataclasses.replace(CONFIG, max_position_embeddings=4)
    borders = {"document_ids": torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])}
    trainer(D9DStrategy(), max_epochs=1).fit(Qwen3MoePretraining(config), DataLoader([r | borders for r in rows(8)], 8))  # type: ignore[arg-type]
    for more, length in (({}, 8), ({"document_ids": torch.tensor([0, 0, 0, 1, 1, 1, 1, 1])}, 5)):
        data: Any = DataLoader([row | more for row in rows(8)], 8)  # type: ignore[arg-type]
        with pytest.raises(
            ConfigError, match=rf"a document of {length} tokens, but max_position_embeddings=4\. Shorten"
        ):
            trainer(D9DStrategy(), max_epochs=1).fit(Qwen3MoePretraining(config), data)


def test_negative_warmup_is_refused() -> None:
    with pytest.raises(ConfigError, match="warmup_steps=-3; it must be at least 0"):
        Qwen3MoePretraining(CONFIG, warmup_steps=-3)


@pytest.mark.parametrize("max_epochs", [1, -1])
def test_training_of_unknown_length_is_refused(max_epochs: int) -> None:
    loader = DataLoader(Endless(), batch_size=2)
    with pytest.raises(ConfigError, match=r"number of steps, which is unknown.*max_steps"):
        trainer(D9DStrategy(), max_epochs=max_epochs).fit(Qwen3MoePretraining(CONFIG), loader)
    run = trainer(D9DStrategy(), max_epochs=max_epochs, max_steps=2)
    run.fit(Qwen3MoePretraining(CONFIG), loader)
    assert run.global_step == 2


@pytest.mark.parametrize("options", [{}, {"microbatch_size": 1}], ids=str)
def test_loss_and_perplexity_weigh_every_label_that_counts_the_same(options: dict[str, Any]) -> None:
    L.seed_everything(1, verbose=False)
    module = Qwen3MoePretraining(CONFIG)
    run = trainer(D9DStrategy(**options), precision="64-true")
    (result,) = run.validate(module, DataLoader(rows(7), batch_size=3), verbose=False)
    batch = torch.utils.data.default_collate(rows(7))
    with torch.no_grad():
        logits = module.model(batch["input_ids"]).logits
    expected = float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))
    assert result["val_loss"] == pytest.approx(expected, rel=1e-10)
    assert result["val_perplexity"] == pytest.approx(math.exp(expected), rel=1e-5)


class Clock:
    """Stands still but for one second a batch of `Ticking`."""

    now = 0.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("lightning_d9d.models.qwen3_moe.module.time.perf_counter", lambda: clock.now)
    return clock


class Ticking(Qwen3MoePretraining):
    def __init__(self, clock: Clock) -> None:
        super().__init__(CONFIG)
        self.clock = clock

    def on_after_backward(self) -> None:
        self.clock.now += 1.0


def test_tokens_per_second_starts_anew_with_each_fit(clock: Clock) -> None:
    module = Ticking(clock)
    for _ in range(2):
        run = trainer(D9DStrategy(), max_epochs=1)
        run.fit(module, DataLoader(rows(4), batch_size=2))
        assert run.callback_metrics["tokens_per_s"] == 16
        clock.now += 3600


class ThreeDataRanks(D9DStrategy):
    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        return {"num_replicas": 3, "rank": 0}


@pytest.mark.parametrize(("strategy", "expected"), [(D9DStrategy, 16), (ThreeDataRanks, 48), (lambda: "auto", 16)])
def test_tokens_per_second_count_each_data_rank_once(clock: Clock, strategy: Any, expected: float) -> None:
    run = trainer(strategy(), max_epochs=1, use_distributed_sampler=False)
    run.fit(Ticking(clock), DataLoader(rows(4), batch_size=2))
    assert run.callback_metrics["tokens_per_s"] == expected


def stages_of(module: Qwen3MoePretraining, num_stages: int) -> list[list[str]]:
    """Which layers each stage has."""
    with torch.device("meta"):
        stages = [module.configure_stage(StageInfo(index, num_stages)) for index in range(num_stages)]
    assert [hasattr(stage, "lm_head") for stage in stages] == [False] * (num_stages - 1) + [True]
    return [list(stage.model.layers) for stage in stages]  # type: ignore[union-attr, operator]


def test_stages_are_cut_by_default_with_virtual_layers_or_by_hand() -> None:
    config = dataclasses.replace(CONFIG, num_hidden_layers=5)
    wide = dataclasses.replace(config, vocab_size=500)  # the head has the products of 4.4 layers, the time of 1.8
    assert stages_of(Qwen3MoePretraining(config), 2) == [["0", "1", "2"], ["3", "4"]]
    assert stages_of(Qwen3MoePretraining(wide), 2) == [["0", "1", "2", "3"], ["4"]]
    assert stages_of(Qwen3MoePretraining(wide, virtual_layers_after=0), 2) == [["0", "1", "2"], ["3", "4"]]
    before = Qwen3MoePretraining(config, virtual_layers_before=3, virtual_layers_after=0)
    assert stages_of(before, 2) == [["0"], ["1", "2", "3", "4"]]
    by_hand = Qwen3MoePretraining(config, layers_per_stage=[1, 1, 3])
    assert stages_of(by_hand, 3) == [["0"], ["1"], ["2", "3", "4"]]
    assert stages_of(by_hand, 1) == [["0", "1", "2", "3", "4"]]  # the same module on one rank
    with pytest.raises(ConfigError, match=r"layers_per_stage=\[1, 1, 3\] has 3 stages.*pipeline has 2 stages"):
        by_hand.configure_stage(StageInfo(0, 2))
    stage = by_hand.configure_stage(StageInfo(1, 3, layers=range(2, 4)))  # as a schedule that cuts
    assert list(stage.model.layers) == ["2", "3"]  # type: ignore[union-attr]


def with_stages(module: Qwen3MoePretraining, *stages: StageInfo) -> Qwen3MoePretraining:
    module.stages.extend(map(module.configure_stage, stages))
    return module


def test_the_whole_network_is_not_on_a_rank_of_a_pipeline() -> None:
    module = with_stages(Qwen3MoePretraining(preset="tiny"), StageInfo(0, 4), StageInfo(3, 4))
    with pytest.raises(ConfigError, match=r"2 of the network's 4 stages.*save_huggingface\(list\(module.stages\)"):
        _ = module.model
    with pytest.raises(ConfigError, match="is built when a Trainer starts"):
        _ = Qwen3MoePretraining(CONFIG).model


@pytest.mark.parametrize("tied", [False, True])
def test_stages_start_from_pretrained_weights(tmp_path: Path, tied: bool) -> None:
    config = dataclasses.replace(CONFIG, num_hidden_layers=3, tie_word_embeddings=tied)
    whole = Qwen3MoeForCausalLM(config)
    save_huggingface(whole, tmp_path / "whole")
    module = Qwen3MoePretraining(config, pretrained=str(tmp_path / "whole"))
    with_stages(module, StageInfo(0, 3), StageInfo(1, 3), StageInfo(2, 3)).load_pretrained()
    names = [name for stage in module.stages for name, _ in stage.named_parameters()]
    assert set(names) == {name for name, _ in whole.named_parameters()}
    assert names.count("model.embed_tokens.weight") == 1 + tied
    for stage in module.stages:
        for name, parameter in stage.named_parameters():
            assert_bitwise_equal(name, parameter, whole.get_parameter(name))


def test_a_sequence_without_labels_gives_logits() -> None:
    run = trainer(D9DStrategy())
    (logits,) = run.predict(Qwen3MoePretraining(CONFIG), DataLoader([{"input_ids": torch.arange(8)}]))  # type: ignore[misc]
    assert logits.shape == (1, 8, 32)


@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_a_checkpoint_has_what_load_from_checkpoint_needs(tmp_path, mode):
    from lightning_d9d import CheckpointConfig

    cut = {"layers_per_stage": [3, 1], "virtual_layers_before": 1, "virtual_layers_after": 2}
    module = Qwen3MoePretraining(preset="tiny", learning_rate=0.125, **cut)
    run = L.Trainer(
        strategy=D9DStrategy(checkpoint=CheckpointConfig(mode=mode)),
        accelerator="cpu",
        max_steps=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
    )
    ids = torch.arange(32).reshape(2, 16)
    batches = DataLoader([{"input_ids": ids, "labels": ids.roll(-1, 1)}], batch_size=None)
    run.validate(module, batches, verbose=False)  # its metric was then made in inference mode
    run.fit(module, batches, batches)
    run.save_checkpoint(tmp_path / "step.ckpt")
    loaded = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "step.ckpt")
    assert loaded.config == module.config
    assert loaded.learning_rate == 0.125
    assert {name: getattr(loaded, name) for name in cut} == cut
    assert all(torch.equal(weight, module.state_dict()[name]) for name, weight in loaded.state_dict().items())
    other = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "step.ckpt", learning_rate=0.5)
    assert (other.learning_rate, other.config) == (0.5, module.config)
    if mode == "consolidated":  # as of a module that kept no arguments
        file = torch.load(tmp_path / "step.ckpt", weights_only=True)
        del file["qwen3_moe_arguments"]
        torch.save(file, tmp_path / "stock.ckpt")
        stock = Qwen3MoePretraining.load_from_checkpoint(tmp_path / "stock.ckpt", preset="tiny")
        assert stock.config == module.config
    logits = run.predict(module, batches)  # labels in the batch do no harm
    assert logits[0].shape == (2, 16, module.config.vocab_size)


class WithArguments(Qwen3MoePretraining):
    """Saves its arguments in Lightning's way, too."""

    def __init__(self, config: Qwen3MoeConfig, width: int = 1, **more: Any) -> None:
        super().__init__(config, **more)
        self.save_hyperparameters()
        self.width = width


FORMATS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "file": torch.save,
    "directory": lambda content, path: save_directory(
        path,
        {f"{MODEL}{name}": weight for name, weight in content["state_dict"].items()},
        {name: value for name, value in content.items() if name != "state_dict"},
    ),
}


@pytest.mark.parametrize("save", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("keep_arguments", [True, False])
def test_a_checkpoint_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[dict[str, Any], Path], None], keep_arguments: bool
) -> None:
    """Such a checkpoint says how Lightning makes the object, and has dataclasses as dicts."""
    monkeypatch.setattr(sys, "argv", ["lightning-d9d"])
    sizes = dataclasses.asdict(CONFIG)
    arguments = {"config": sizes, "balance": {"bias_rate": 0.5}, "width": 3, "betas": [0.5, 0.75]}
    chosen = {"class_path": f"{__name__}.WithArguments", "init_args": arguments}
    module = LightningCLI(
        Qwen3MoePretraining,
        subclass_mode_model=True,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args={"model": chosen},
        trainer_defaults={"logger": False, "accelerator": "cpu"},
    ).model
    module.configure_model()
    content: dict[str, Any] = {"state_dict": module.state_dict(), "hyper_parameters": dict(module.hparams)}
    if keep_arguments:
        module.on_save_checkpoint(content)
    names = {name: content["hyper_parameters"][name] for name in ("_instantiator", "_class_path")}
    assert [*names.values()] == ["lightning.pytorch.cli.instantiate_module", chosen["class_path"]]
    save({**content, "pytorch-lightning_version": L.__version__}, tmp_path / "a.ckpt")
    loaded = WithArguments.load_from_checkpoint(tmp_path / "a.ckpt", learning_rate=0.25)
    assert (loaded.config, loaded.balance) == (CONFIG, BalanceConfig(bias_rate=0.5))
    assert (loaded.width, loaded.betas, loaded.learning_rate) == (3, (0.5, 0.75), 0.25)
    assert_tensors_close(loaded.state_dict(), module.state_dict())


FOREIGN: dict[str, dict[str, Any]] = {
    "argument": {"balance": {"class_path": "foreign.Balance", "init_args": {}}},
    "name of an argument": {"balance": "foreign.Balance"},
    "class": {"_class_path": "foreign.Module"},
    "instantiator": {"_instantiator": "foreign.build"},
}


@pytest.mark.parametrize("save", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("case", FOREIGN)
def test_a_checkpoint_imports_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, save: Callable[[dict[str, Any], Path], None], case: str
) -> None:
    (tmp_path / "foreign.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    module = Qwen3MoePretraining(CONFIG)
    module.configure_model()
    content: dict[str, Any] = {"state_dict": module.state_dict(), "pytorch-lightning_version": L.__version__}
    module.on_save_checkpoint(content)
    del content[ARGUMENTS_KEY]["balance"]
    instantiator = "lightning.pytorch.cli.instantiate_module"
    save({**content, "hyper_parameters": {"_instantiator": instantiator, **FOREIGN[case]}}, tmp_path / "a.ckpt")
    if "balance" in FOREIGN[case]:
        with pytest.raises(
            StateError, match=r"the checkpoint has balance=.*foreign\.Balance.* pass balance to load_fr"
        ):
            load_model(tmp_path / "a.ckpt")
    else:
        assert_tensors_close(load_model(tmp_path / "a.ckpt").state_dict(), module.state_dict())
    assert "foreign" not in sys.modules
