"""Tensor and context parallelism through a Trainer: all loops, fits in a row, checkpoints, precision, refusals."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any, ClassVar, NamedTuple

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_d9d import (
    ConfigError,
    D9DModule,
    D9DStrategy,
    MeshConfig,
    ParallelConfig,
    StageInfo,
    StageInputs,
    WeightedLoss,
)
from lightning_d9d.callbacks import HuggingFaceExport, TextSample
from lightning_d9d.models.qwen3_moe import (
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3MoePretraining,
    load_huggingface,
    save_huggingface,
)
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind, tolerance_for
from tests.meshes.equality import CONFIG, ROWS, Data, Steps, Watched, batch_of, on_one_process
from tests.strategy.plain import Plain, trainer
from tests.test_docs import ROOT, blocks

SMALL = replace(
    CONFIG,
    num_hidden_layers=2,
    mlp_only_layers=(1,),
    intermediate_size=24,
    shared_expert_intermediate_size=8,
    num_attention_heads=4,
    num_key_value_heads=2,
)
SHARED_HEADS = replace(SMALL, num_key_value_heads=1)
PP2 = {"pipeline_parallel": 2}
SHARD2 = {"data_parallel_shard": 2}
TP2 = {"tensor_parallel": 2}
TP4 = {"tensor_parallel": 4}
CP2 = {"context_parallel_shard": 2}
EP2 = {"data_parallel_replicate": 2, "expert_parallel": 2}
FOUR_RANKS = [pytest.mark.ranks(4), pytest.mark.meshes]
SEED = 1
QUIET: dict[str, Any] = {"use_distributed_sampler": False, "precision": "64-true", "gradient_clip_val": 0.5}


def rows_of(*batches: dict[str, Tensor]) -> DataLoader:
    """The batches one after the other."""
    rows = [{name: value[row] for name, value in batch.items()} for batch in batches for row in range(ROWS)]
    return DataLoader(rows, ROWS)  # type: ignore[arg-type]


def expected_of(length: int, packed: bool) -> tuple[Steps, Tensor, Tensor]:
    """Train with plain torch: two steps, then return loss and logits of two further batches."""
    L.seed_everything(SEED, verbose=False)
    steps = on_one_process(SMALL, data=Data(length, packed))
    module = Qwen3MoePretraining(SMALL)
    module.configure_model()
    model = module.model.double()
    model.load_state_dict(steps.weights[-1])
    batches = [batch_of(index, data=Data(length, packed)) for index in (7, 8)]
    with torch.no_grad():
        inputs = [{name: value for name, value in batch.items() if name != "labels"} for batch in batches]
        logits = [model(**each).logits for each in inputs]
        total = torch.stack([model(**batch, reduction="sum").loss for batch in batches]).sum()
    return steps, total / sum(int((batch["labels"] != -100).sum()) for batch in batches), torch.cat(logits)


@pytest.mark.parametrize(
    ("mesh", "length", "packed", "schedule"),
    [
        pytest.param(TP2, 7, True, "1f1b", marks=pytest.mark.ranks(2), id="tp padded, packed"),
        pytest.param(CP2, 6, True, "1f1b", marks=pytest.mark.ranks(2), id="cp padded, packed"),
        pytest.param(PP2 | TP2, 7, False, "zero_bubble", marks=FOUR_RANKS, id="pp, tp padded"),
        pytest.param(PP2 | CP2, 8, True, "1f1b", marks=FOUR_RANKS, id="pp, cp packed"),
        pytest.param(TP2 | CP2, 6, True, "1f1b", marks=FOUR_RANKS, id="tp, cp padded, packed"),
    ],
)
def test_all_loops_give_what_one_process_does(
    rank: RankContext, mesh: dict[str, int], length: int, packed: bool, schedule: str
) -> None:
    """Predictions are whole on every rank, without padding."""
    steps, loss, logits = rank.from_first_rank(expected_of, length, packed)
    data = rows_of(*(batch_of(index, data=Data(length, packed)) for index in (7, 8)))
    strategy = D9DStrategy(
        mesh=MeshConfig(**mesh), schedule=schedule, parallel=ParallelConfig(pad_sequences=True), microbatch_size=4
    )
    L.seed_everything(SEED, verbose=False)
    module = Watched(SMALL, len(steps.losses), data=Data(length, packed))
    run = trainer(strategy, rank.world_size, rank.device.type, max_epochs=1, **QUIET)
    run.fit(module, val_dataloaders=data)

    for ours, theirs in zip(module.seen.losses, steps.losses, strict=True):
        assert_close_named("train_loss", ours, theirs, kind=Kind.LOSS)
    for ours, theirs in zip(module.seen.weights, steps.weights, strict=True):
        assert_tensors_close(ours, {name: theirs[name] for name in ours})
    results = {
        "fit": {name: float(value) for name, value in run.callback_metrics.items()},
        "val": run.validate(module, data, verbose=False)[0],
        "test": run.test(module, data, verbose=False)[0],
    }
    for kind, result in results.items():
        name = "val" if kind == "fit" else kind
        assert result[f"{name}_loss"] == pytest.approx(float(loss), rel=1e-10)
        assert result[f"{name}_perplexity"] == pytest.approx(math.exp(float(loss)), rel=1e-6), kind
    predicted = run.predict(module, data)
    assert_close_named("logits", torch.cat(predicted).cpu(), logits, kind=Kind.OUTPUT)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        pytest.param(TP2, SHARED_HEADS, marks=pytest.mark.ranks(2), id="tp, heads in common"),
        pytest.param(
            SHARD2 | TP2,
            SHARED_HEADS,
            marks=[pytest.mark.ranks(4), pytest.mark.meshes],
            id="shard, tp, heads in common",
        ),
        pytest.param(CP2, SMALL, marks=pytest.mark.ranks(2), id="cp"),
    ],
)
def test_a_module_is_fitted_again(rank: RankContext, mesh: dict[str, int], config: Qwen3MoeConfig) -> None:
    """The module keeps its weights, and the mesh is made again."""
    L.seed_everything(SEED, verbose=False)
    module = Watched(config, 1, data=Data(8))
    for _ in range(2):
        run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), rank.world_size, rank.device.type, max_epochs=1, **QUIET)
        run.fit(module)
    again = Qwen3MoeForCausalLM(config).double()
    again.load_state_dict(module.seen.weights[0])
    batch = batch_of(0, data=Data(8))
    loss = again(**batch, reduction="sum").loss / (batch["labels"] != -100).sum()
    loss.backward()
    assert_close_named("loss", module.seen.losses[1], loss.detach(), kind=Kind.LOSS)
    gradients = {name: parameter.grad for name, parameter in again.named_parameters()}
    assert_tensors_close(module.seen.gradients[1], gradients)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [TP2, CP2], ids=["tp", "cp"])
def test_a_module_that_was_built_whole_is_spread(rank: RankContext, mesh: dict[str, int]) -> None:
    L.seed_everything(SEED, verbose=False)
    expected = on_one_process(SHARED_HEADS, steps=1, data=Data(8))
    L.seed_everything(SEED, verbose=False)
    module = Watched(SHARED_HEADS, 1, data=Data(8))
    torch.set_default_dtype(torch.float64)
    module.configure_model()
    torch.set_default_dtype(torch.float32)
    L.seed_everything(SEED + 1, verbose=False)
    trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_epochs=1, **QUIET).fit(module)
    assert_close_named("loss", module.seen.losses[0], expected.losses[0], kind=Kind.LOSS)
    assert_tensors_close(module.seen.weights[0], expected.weights[0])


@pytest.mark.parametrize(
    ("config", "meshes"),
    [
        pytest.param(
            *(SMALL, [SHARD2 | TP2, SHARD2 | CP2, TP2 | CP2, {"data_parallel_shard": 4}]),
            marks=FOUR_RANKS,
            id="every mesh",
        ),
        pytest.param(SMALL, [SHARD2 | TP2, TP2 | CP2], marks=FOUR_RANKS, id="2 heads"),
        pytest.param(SHARED_HEADS, [SHARD2 | TP2, TP2 | CP2, TP4], marks=FOUR_RANKS, id="1 head"),
        pytest.param(SHARED_HEADS, [SHARD2, TP2, CP2], marks=pytest.mark.ranks(2), id="1 head, two ranks"),
    ],
)
def test_checkpoints_go_from_mesh_to_mesh(
    rank: RankContext, config: Qwen3MoeConfig, meshes: list[dict[str, int]]
) -> None:
    """A step on each is as many on one process: weights, and the state of the optimizer."""
    L.seed_everything(SEED, verbose=False)
    expected = on_one_process(config, steps=len(meshes), data=Data(8))
    path = None
    for step, mesh in enumerate(meshes):
        saving = ModelCheckpoint(rank.tmp_dir, f"after {step}", save_top_k=-1, every_n_train_steps=1)
        L.seed_everything(SEED + step, verbose=False)
        module = Watched(config, len(meshes), data=Data(8))
        options = {**QUIET, "max_steps": step + 1, "enable_checkpointing": True, "callbacks": [saving]}
        run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), rank.world_size, rank.device.type, **options)
        run.fit(module, ckpt_path=path)
        path = saving.best_model_path
        (loss,), (weights,) = module.seen.losses, module.seen.weights
        assert_close_named(f"loss {step}", loss, expected.losses[step], kind=Kind.LOSS)
        assert_tensors_close(weights, expected.weights[step])
        alone = Qwen3MoePretraining.load_from_checkpoint(path)
        assert_tensors_close(dict(alone.model.named_parameters()), weights)


@pytest.mark.parametrize(
    ("mesh", "config"),
    [
        pytest.param(TP2, SHARED_HEADS, marks=pytest.mark.ranks(2), id="tp, heads in common"),
        pytest.param(
            SHARD2 | TP2, replace(SMALL, tie_word_embeddings=True), marks=pytest.mark.ranks(4), id="shard, tp"
        ),
        pytest.param(PP2 | TP2, SMALL, marks=[pytest.mark.ranks(4), pytest.mark.meshes], id="pp, tp"),
        pytest.param(CP2, SMALL, marks=pytest.mark.ranks(2), id="cp"),
    ],
)
def test_hugging_face_directories(rank: RankContext, mesh: dict[str, int], config: Qwen3MoeConfig) -> None:
    L.seed_everything(SEED, verbose=False)
    one = Qwen3MoeForCausalLM(config)
    save_huggingface(one, rank.tmp_dir / "one")
    module = Qwen3MoePretraining(config, pretrained=str(rank.tmp_dir / "one"), learning_rate=0.0)
    options = {**QUIET, "precision": "32-true", "max_steps": 1, "callbacks": [HuggingFaceExport(rank.tmp_dir / "many")]}
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), rank.world_size, rank.device.type, **options)
    run.fit(module, rows_of(batch_of(0, data=Data(8))))
    again = Qwen3MoeForCausalLM(config)
    load_huggingface(again, rank.tmp_dir / "many")
    for name, parameter in one.named_parameters():
        assert_bitwise_equal(name, again.get_parameter(name), parameter)


class NoSequences(Watched):
    sequence_dims: ClassVar = {}


class TakesAnything(Watched):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


class Mistyped(TakesAnything):
    sequence_dims: ClassVar = {"tokens": 1}


class Weighted(TakesAnything):
    sequence_dims: ClassVar = {**Watched.sequence_dims, "weights": 1}


class Refusal(NamedTuple):
    text: str
    mesh: dict[str, int] = TP2
    config: Qwen3MoeConfig = SMALL
    batch: Any = None
    module: type[L.LightningModule] = Watched
    parallel: dict[str, Any] = {}  # noqa: RUF012


def batch_with(**tensors: Tensor) -> dict[str, Tensor]:
    return {**batch_of(0, data=Data(8)), **tensors}


ODD = {name: value[:, :7] for name, value in batch_of(0, data=Data(8)).items()}
REFUSED = {
    "query heads": Refusal(
        r"tensor_parallel=2 does not divide the 3 attention heads \(num_attention_heads\); it can be 1, 3$",
        config=replace(SMALL, num_attention_heads=3, num_key_value_heads=3),
    ),
    "key heads": Refusal(
        r"tensor_parallel=2 and 3 heads of keys and values .* divide the other\. .* tensor_parallel can be 1, 3, 6$",
        config=replace(SMALL, num_attention_heads=6, num_key_value_heads=3),
    ),
    "vocabulary": Refusal(
        r"tensor_parallel=2 does not divide the 49 tokens of the vocabulary \(vocab_size\); it can be 1, 7, 49$",
        config=replace(SMALL, vocab_size=49),
    ),
    "parts of the vocabulary": Refusal(
        r"vocab_splits: text, more\) cannot be sharded .* tensor_parallel=2; leave one of the two out",
        config=replace(SMALL, vocab_splits={"text": 40, "more": 8}),
    ),
    "dense layers": Refusal(
        r"does not divide the 25 inner width of an MLP \(intermediate_size\); it can be 1, 5, 25$",
        config=replace(SMALL, intermediate_size=25),
    ),
    "heads of contexts": Refusal(
        r"context='heads' over 2 ranks: 4 query heads and 1 key/value heads .*\. 1 ranks can; .*'ring' take any",
        CP2,
        SHARED_HEADS,
        parallel={"context": "heads"},
    ),
    "tokens, tp": Refusal(
        r"sequences of 7 tokens, .* multiple of 2 \(tensor_parallel=2\), such as 6 or 8.*pad", batch=ODD
    ),
    "tokens, cp": Refusal(r"sequences of 7 tokens, .* multiple of 4 .*, such as 4 or 8.*pad_sequences", CP2, batch=ODD),
    "no mapping": Refusal(r"is a list of 1 .*, but it must be a mapping", CP2, batch=[ODD], module=TakesAnything),
    "lengths": Refusal(
        r"different lengths along sequence_dims: .*'weights': 7.*; pad them",
        CP2,
        batch=batch_with(weights=torch.zeros_like(ODD["labels"])),
        module=Weighted,
    ),
    "plain module": Refusal(r"context_parallel_shard=2: Plain is a plain LightningModule.*", CP2, module=Plain),
    "no sequences": Refusal(
        r"context_parallel_shard=2: NoSequences.sequence_dims is empty.*Set it", CP2, module=NoSequences
    ),
    "no sequences, tp": Refusal(
        r"tensor_parallel=2: NoSequences.sequence_dims is empty.*Set it.*no sequences.* "
        "LightningModule that calls torch's parallelize_module",
        module=NoSequences,
    ),
    "no dim": Refusal(
        r"'weights' of a batch has its tokens in dim 1, but its shape is \[8\]; name only tensors with tokens",
        batch=batch_with(weights=torch.zeros(8)),
        module=Weighted,
    ),
    "no tensor with tokens, tp": Refusal(
        r"input_ids, labels, but none of the tensors tokens that sequence_dims", module=Mistyped
    ),
    "no tensor with tokens": Refusal(
        r"input_ids, labels, but none of the tensors tokens that sequence_dims", CP2, module=Mistyped
    ),
    "other data": Refusal(r"ranks \[0, 1\] read different first train batches", CP2, batch="by rank"),
    "other data, tp": Refusal(r"ranks \[0, 1\] read different first train batches", TP2, batch="by rank"),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shared_is_refused(rank: RankContext, case: str) -> None:
    """It is refused on every rank, before the first message of a model or in its place."""
    text, mesh, config, batch, cls, parallel = REFUSED[case]
    if batch == "by rank":
        batch = batch_of(rank.rank, data=Data(8))
    batches: Any = DataLoader([batch_with() if batch is None else batch], None)  # type: ignore[arg-type]
    module = Plain() if cls is Plain else cls(config, 1)
    strategy = D9DStrategy(mesh=MeshConfig(**mesh), parallel=ParallelConfig(**parallel))
    run = trainer(strategy, 2, rank.device.type, max_steps=1, **QUIET)
    with pytest.raises(ConfigError, match=text):
        run.fit(module, batches)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("loop", ["validate", "predict"])
def test_other_loops_read_the_same_data(rank: RankContext, loop: str) -> None:
    batches: Any = DataLoader([batch_of(rank.rank, data=Data(8))], None)  # type: ignore[arg-type]
    run = trainer(D9DStrategy(mesh=MeshConfig(**CP2)), 2, rank.device.type, **QUIET)
    with pytest.raises(ConfigError, match=rf"ranks \[0, 1\] read different first {loop[:3]}.* batches"):
        getattr(run, loop)(Watched(SMALL, 1), batches)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [TP2, CP2], ids=["tp", "cp"])
def test_text_is_written(rank: RankContext, mesh: dict[str, int]) -> None:
    """The text is that of one process, with prompts of any length."""
    config = replace(SMALL, vocab_size=256)
    L.seed_everything(SEED, verbose=False)
    sample = TextSample(prompt="a = ", num_tokens=3, context_length=5, temperature=1e-6)
    texts = []

    class Asked(Watched):
        def on_train_end(self) -> None:
            super().on_train_end()
            texts.append(sample.generate(self))

    module = Asked(config, 1, data=Data(8))
    trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_steps=1, **QUIET).fit(module)
    one = Qwen3MoeForCausalLM(config).double()
    one.load_state_dict(module.seen.weights[-1])
    assert texts == [sample.generate(one)]


class FreezesLayer(L.Callback):
    """Freezes a layer and the embedding from the second epoch on."""

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, parameter in pl_module.named_parameters():
            if "layers.0." in name or "embed" in name:
                parameter.requires_grad_(trainer.current_epoch == 0)


class Breaks(Watched):
    """The loss of the second batch is infinite."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        self.factor = math.inf if batch_idx == 1 else 1.0

    def microbatch_loss(self, output: Any, microbatch: Any) -> WeightedLoss:
        loss = super().microbatch_loss(output, microbatch)
        return WeightedLoss(loss.value_sum * self.factor, loss.weight)


OPTIONS: dict[str, tuple[type[Watched], dict[str, Any], dict[str, Any]]] = {
    "accumulated, clipped by value": (
        Watched,
        {"accumulate_grad_batches": 2, "gradient_clip_algorithm": "value", "gradient_clip_val": 0.01},
        {"microbatch_size": 2},
    ),
    "frozen": (Watched, {"max_epochs": 2}, {}),
    "frozen, from the host": (Watched, {"max_epochs": 2}, {"parallel": ParallelConfig(offload=True)}),
    "left out": (Breaks, {}, {"skip_nonfinite": True}),
}
NUM_STEPS = dict(zip(OPTIONS, (1, 4, 4, 2), strict=True))


@pytest.mark.parametrize(
    ("case", "mesh"),
    [
        pytest.param("accumulated, clipped by value", CP2, marks=pytest.mark.ranks(2), id="accumulated, cp"),
        pytest.param("frozen", TP2, marks=pytest.mark.ranks(2), id="frozen, tp"),
        pytest.param("left out", TP2, marks=pytest.mark.ranks(2), id="left out, tp"),
        pytest.param("accumulated, clipped by value", CP2 | TP2, marks=FOUR_RANKS, id="accumulated, cp, tp"),
        pytest.param("frozen, from the host", SHARD2 | TP2, marks=FOUR_RANKS, id="frozen, shard, tp"),
        pytest.param("left out", SHARD2 | TP2, marks=FOUR_RANKS, id="left out, shard, tp"),
        pytest.param("left out", CP2 | TP2, marks=FOUR_RANKS, id="left out, cp, tp"),
    ],
)
def test_options_have_the_effect_that_they_have_on_replicas(rank: RankContext, case: str, mesh: dict[str, int]) -> None:
    cls, of_trainer, of_strategy = OPTIONS[case]

    def fit(mesh: dict[str, int], **of_strategy: Any) -> tuple[Steps, int]:
        L.seed_everything(SEED, verbose=False)
        module = cls(SHARED_HEADS, 2, data=Data(8))
        strategy = D9DStrategy(mesh=MeshConfig(**mesh), **of_strategy)
        options = {**QUIET, "max_epochs": 1, **of_trainer}
        callbacks = [FreezesLayer()] if "frozen" in case else []
        trainer(strategy, rank.world_size, rank.device.type, callbacks=callbacks, **options).fit(module)
        return module.seen, strategy.num_skipped_steps

    replicas = {"data_parallel_replicate": rank.world_size}
    expected, num_skipped = fit(replicas, skip_nonfinite="skip_nonfinite" in of_strategy)
    actual, num_skipped_here = fit(mesh, **of_strategy)
    assert num_skipped_here == num_skipped == (cls is Breaks)
    assert len(actual.weights) == len(expected.weights) == NUM_STEPS[case]
    for step, weights in enumerate(actual.weights):
        assert_tensors_close(weights, expected.weights[step])
        if cls is not Breaks or step == 0:
            trained = {name: g for name, g in actual.gradients[step].items() if g.any()}
            theirs = {name: g for name, g in expected.gradients[step].items() if g.any()}
            assert_tensors_close(trained, theirs)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param(TP2, marks=pytest.mark.ranks(2), id="tp"),
        pytest.param(SHARD2 | TP2, marks=FOUR_RANKS, id="shard, tp"),
        pytest.param(CP2, marks=pytest.mark.ranks(2), id="cp"),
    ],
)
def test_narrow_numbers_are_near_wide_ones(rank: RankContext, mesh: dict[str, int], precision: str) -> None:
    """Initial weights are rounded in both."""
    L.seed_everything(SEED, verbose=False)
    expected = on_one_process(SMALL, steps=1, dtype=torch.bfloat16, data=Data(8), device=rank.device)
    L.seed_everything(SEED, verbose=False)
    module = Watched(SMALL, 1, data=Data(8))
    options = {**QUIET, "max_epochs": 1, "precision": precision}
    trainer(D9DStrategy(mesh=MeshConfig(**mesh)), rank.world_size, rank.device.type, **options).fit(module)
    assert_tensors_close(module.seen.gradients[0], expected.gradients[0])
    rounded = tolerance_for(Kind.LOSS, torch.bfloat16)
    assert_close_named("loss", module.seen.losses[0], expected.losses[0], kind=Kind.LOSS, tolerance=rounded)


class FromLogits(Watched):
    """The loss of the base class, made here."""

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        return StageInputs(first={"input_ids": microbatch["input_ids"]})

    def microbatch_loss(self, output: Any, microbatch: Any) -> WeightedLoss:
        logits, labels = output.logits.flatten(0, 1), microbatch["labels"].flatten()
        return WeightedLoss(F.cross_entropy(logits, labels, reduction="sum"), self.microbatch_weight(microbatch))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [TP2, CP2], ids=["tp", "cp"])
def test_losses_may_be_made_from_logits(rank: RankContext, mesh: dict[str, int]) -> None:
    data = Data(8)
    L.seed_everything(SEED, verbose=False)
    expected = on_one_process(SMALL, steps=2, data=data)
    L.seed_everything(SEED, verbose=False)
    module = FromLogits(SMALL, 2, data=data)
    trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_epochs=1, **QUIET).fit(module)
    for ours, theirs in zip(module.seen.gradients, expected.gradients, strict=True):
        assert_tensors_close(ours, theirs)


@functools.cache
def page() -> dict[str, Any]:
    """What the page about one's own model defines."""
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(ROOT / "docs" / "how-to" / "parallelise-your-own-model.md"):
        if block.language == "python":
            block.execute(namespace)
    return namespace


def own_model(without_attention: bool = False, mean: bool = False) -> Any:
    """Return the model of the page. Its first stage may have only the embedding, and its loss may be a mean."""

    class Recorded(page()["LanguageModel"]):
        losses: list[Tensor]

        def configure_stage(self, stage: StageInfo) -> nn.Module:
            decoder = super().configure_stage(stage)
            if without_attention and stage.num_stages > 1:
                indices = [] if stage.is_first else range(4)
                decoder.blocks = nn.ModuleDict({str(index): page()["Block"]() for index in indices})
            return decoder

        def microbatch_loss(self, output: Tensor, microbatch: Any) -> Any:
            loss = super().microbatch_loss(output, microbatch)
            return loss.value_sum / microbatch["labels"].numel() if mean else loss

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.losses = [*getattr(self, "losses", []), outputs["loss"]]

    return Recorded()


@pytest.mark.parametrize(
    ("mesh", "without_attention", "mean"),
    [
        pytest.param(PP2 | TP2, True, False, marks=pytest.mark.ranks(4), id="pp, tp"),
        pytest.param(CP2, False, True, marks=pytest.mark.ranks(2), id="cp, mean"),
        pytest.param(TP2 | CP2, False, True, marks=FOUR_RANKS, id="tp, cp, mean"),
        pytest.param(SHARD2 | TP2, False, False, marks=FOUR_RANKS, id="shard, tp"),
    ],
)
def test_a_model_of_ones_own(rank: RankContext, mesh: dict[str, int], without_attention: bool, mean: bool) -> None:
    """The model is that of the page. Heads may be shared, and a stage of the pipeline may have none."""
    batch = batch_of(0, data=Data(8))
    L.seed_everything(SEED, verbose=False)
    one = own_model()
    torch.set_default_dtype(torch.float64)
    one.configure_model()
    torch.set_default_dtype(torch.float32)
    (stage,), expected = one.stages, []
    optimizer = one.configure_optimizers()
    for _ in range(2):
        divisor = batch["labels"].numel() if mean else (batch["labels"] != -100).sum()
        loss = stage(batch["input_ids"], labels=batch["labels"]) / divisor
        expected.append(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    strategy = D9DStrategy(mesh=MeshConfig(**mesh))
    rows = ROWS // strategy.mesh_config.domains()["batch"]["dp"]
    first = rank.rank // 2 * rows if "data_parallel_shard" in mesh else 0
    mine = {name: value[first : first + rows] for name, value in batch.items()}
    data: Any = DataLoader([mine], None)  # type: ignore[arg-type]
    L.seed_everything(SEED, verbose=False)
    module = own_model(without_attention, mean)
    run = trainer(strategy, rank.world_size, rank.device.type, max_epochs=2, **{**QUIET, "gradient_clip_val": None})
    run.fit(module, data)
    for ours, theirs in zip(module.losses, expected, strict=True):
        assert_close_named("loss", ours, theirs, kind=Kind.LOSS)
    (result,) = run.validate(module, data, verbose=False)
    divisor = mine["labels"].numel() if mean else (mine["labels"] != -100).sum()
    loss = float(stage(mine["input_ids"], labels=mine["labels"]) / divisor)
    if "data_parallel_shard" not in mesh:
        assert result["val_loss"] == pytest.approx(loss, rel=1e-10)
    (predicted,) = run.predict(module, data)  # type: ignore[misc]
    assert_close_named("logits", predicted, stage(mine["input_ids"]).detach(), kind=Kind.OUTPUT)  # type: ignore[arg-type]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        (CP2, r"blocks.0.attention attends only to this rank's part\. .*shard_context"),
        (TP2, r"tensor_parallel=2, but no parameter .*shard_tensors\(stage, mesh\) in its parallelize_stage"),
        (EP2, r"expert_parallel=2, but no parameter .*SparseMoE; .* has its own parallelize_stage.* at 1"),
    ],
    ids=["cp", "tp", "ep"],
)
def test_a_model_that_is_not_spread_is_refused(rank: RankContext, mesh: dict[str, int], text: str) -> None:
    module = own_model()
    module.parallelize_stage = functools.partial(D9DModule.parallelize_stage, module)
    data: Any = DataLoader([batch_of(0, data=Data(8))], None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=text):
        trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_steps=1, **QUIET).fit(module, data)
