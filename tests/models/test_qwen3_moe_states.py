"""Hidden states of every layer, whole and as means over a mask: those of one process on every mesh, with gradients."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig, StageInfo, StageInputs, WeightedLoss
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM, Qwen3MoePretraining
from lightning_d9d.models.qwen3_moe.states import LayerStates
from lightning_d9d.parallel import TokenShard
from lightning_d9d.pipeline.transfer import Messages
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import TOLERANCES, Kind
from tests.meshes.cases import HEADS, RING, Case, parameters
from tests.meshes.equality import CLIP, ROWS, Data, Watched, batch_of
from tests.models.test_qwen3_moe_model import BASE, make_batch, make_pair
from tests.models.test_qwen3_moe_stages import (
    backward_as_pipeline,
    build,
    build_stages,
    run_as_pipeline,
)
from tests.strategy.plain import trainer

CONFIG = dataclasses.replace(BASE, num_hidden_layers=5, mlp_only_layers=(1, 3))
SEED = 1
PREDICTED = 7
"""Index of the batch for which states are predicted."""


def mask_of(input_ids: Tensor) -> Tensor:
    """About two thirds of the tokens; of some rows none."""
    return (input_ids % 3 != 0) & (input_ids[:, :1] % 4 != 0)


def means_of(states: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    """Means row by row, in float64."""
    rows = []
    for row, taken in enumerate(mask.bool()):
        found = [state[row][taken].double() for state in states]
        rows.append(torch.stack([each.mean(0) if len(each) else torch.zeros(each.shape[1]).double() for each in found]))
    return torch.stack(rows)


# On one device


def test_means_equal_those_of_transformers() -> None:
    model, reference = make_pair(BASE)
    ids, mask, _ = make_batch()
    expected = reference(ids, attention_mask=mask, output_hidden_states=True).hidden_states
    pooled = model(ids, pooling_mask=mask).pooled_states
    assert pooled.shape == (len(ids), BASE.num_hidden_layers + 1, BASE.hidden_size)
    assert_close_named("pooled states", pooled, means_of(expected, mask), kind=Kind.OUTPUT)
    assert model(ids).pooled_states is None


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_means_go_through_the_stages(num_stages: int) -> None:
    """Values and gradients; a stage hands on a number for each layer and column, and no states."""
    whole, stages = build(CONFIG), build_stages(CONFIG, num_stages)
    ids = make_batch()[0]
    mask = mask_of(ids)
    mask[1] = False
    output, received, outputs = run_as_pipeline(stages, {"input_ids": ids}, {"pooling_mask": mask})
    layers_so_far = 0
    for stage, handed in zip(stages[:-1], outputs[:-1], strict=True):
        layers_so_far += len(stage.model.layers)
        assert handed.keys() == {"hidden_states", "state_sums"}
        assert handed["state_sums"].shape == (len(ids), layers_so_far, CONFIG.hidden_size)

    states = whole(ids, output_hidden_states=True).hidden_states
    expected = torch.stack([torch.where(mask[..., None], state, 0).sum(1) for state in states], 1)
    expected = expected / mask.sum(1).clamp(min=1)[:, None, None]
    assert_close_named("pooled states", output.pooled_states, means_of(states, mask), kind=Kind.OUTPUT)
    assert output.hidden_states is None
    factors = torch.arange(1.0, expected.numel() + 1, dtype=torch.float64).view_as(expected)
    (expected.square() * factors).sum().backward()
    backward_as_pipeline((output.pooled_states.square() * factors).sum(), received, outputs)
    for stage in stages:
        for name, parameter in stage.named_parameters():
            theirs = whole.get_parameter(name).grad
            if theirs is None:
                assert parameter.grad is None, name
            else:
                assert parameter.grad is not None, name
                assert_close_named(name, parameter.grad, theirs)


def test_means_and_states_at_once() -> None:
    model = build(CONFIG)
    ids = make_batch()[0]
    output = model(ids, output_hidden_states="whole", pooling_mask=mask_of(ids).long())
    assert all(map(torch.equal, output.hidden_states, model(ids, output_hidden_states=True).hidden_states))
    assert_bitwise_equal("pooled", output.pooled_states, model(ids, pooling_mask=mask_of(ids)).pooled_states)


def test_whole_states_go_through_the_stages() -> None:
    stages = build_stages(CONFIG, 4)
    ids = make_batch()[0]
    output: Any = {"input_ids": ids, "output_hidden_states": "whole"}
    for stage in stages:
        output = stage(**output)
    expected = build(CONFIG)(ids, output_hidden_states=True).hidden_states
    for index, (ours, theirs) in enumerate(zip(output.hidden_states, expected, strict=True)):
        assert_bitwise_equal(f"hidden states {index}", ours, theirs)


def collected(x: Tensor, mask: Tensor) -> Tensor:
    """The means of one layer."""
    states = LayerStates(StageInfo(0, 1), TokenShard(), x.shape, False, mask, None, None)
    states.add(x)
    return states.results()["pooled_states"][:, 0]


def test_sums_are_float32() -> None:
    """There are more tokens than bfloat16 can count."""
    x = torch.randn(2, 3000, 8, generator=torch.Generator().manual_seed(0)).add(1).bfloat16().requires_grad_()
    mask = torch.arange(3000) < torch.tensor([[3000], [700]])
    means = collected(x, mask)
    assert means.dtype == torch.float32
    expected = torch.stack([x[0].double().mean(0), x[1, :700].double().mean(0)])
    assert_close_named("means", means, expected, tolerance=TOLERANCES[torch.float32][Kind.GRADIENT])
    means.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.bfloat16
    assert_close_named("gradient", x.grad, mask[..., None] / mask.sum(1)[:, None, None] * torch.ones_like(x))


def test_what_padding_has_stays_out() -> None:
    x = torch.ones(2, 4, 3, requires_grad=True)
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    means = collected(torch.where(mask[..., None] == 0, torch.nan, x), mask)
    assert means.tolist() == [[1.0] * 3, [0.0] * 3]
    means.sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


IDS = torch.arange(12).view(2, 6)
REFUSED: dict[str, tuple[str, StageInfo, dict[str, Any]]] = {
    "unknown": (
        "output_hidden_states='mean' must be False, True .* or 'whole' .* use pooling_mask",
        StageInfo(0, 1),
        {"input_ids": IDS, "output_hidden_states": "mean"},
    ),
    "a later stage alone, whole": (
        "stage 1 of 2 got output_hidden_states='whole', but no hidden states .* first stage, in StageInputs.first",
        StageInfo(1, 2),
        {"hidden_states": torch.zeros(2, 6, 64), "output_hidden_states": "whole"},
    ),
    "a later stage alone, means": (
        "stage 1 of 2 got pooling_mask without state_sums: give pooling_mask to all stages, in StageInputs.shared",
        StageInfo(1, 2),
        {"hidden_states": torch.zeros(2, 6, 64), "pooling_mask": torch.ones(2, 6)},
    ),
    "the first stage alone": (
        "stage 1 of 2 got state_sums without pooling_mask",
        StageInfo(1, 2),
        {"hidden_states": torch.zeros(2, 6, 64), "state_sums": torch.ones(2, 1, 64)},
    ),
    "fractions": (
        r"pooling_mask has dtype torch.float32, .* bool or integers, such as mask != 0",
        StageInfo(0, 1),
        {"input_ids": IDS, "pooling_mask": torch.ones(2, 6)},
    ),
    "a row for all": (
        r"pooling_mask has shape \[1, 6\], but the tokens of this rank have \[2, 6\].*sequence_dims",
        StageInfo(0, 1),
        {"input_ids": IDS, "pooling_mask": torch.ones(1, 6, dtype=torch.bool)},
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_asked_for_is_refused(case: str) -> None:
    text, stage, arguments = REFUSED[case]
    with pytest.raises(ConfigError, match=text):
        Qwen3MoeForCausalLM(BASE, stage)(**arguments)


def test_a_mask_of_another_length_is_refused_with_its_batch() -> None:
    module = Qwen3MoePretraining(BASE)
    with pytest.raises(
        ConfigError, match=r"in batch 0 of the data, pooling_mask is a tensor float32 \[2, 5\], but input_ids"
    ):
        module.prepare_batch({"input_ids": IDS, "pooling_mask": torch.ones(2, 5)})


# On a mesh


class Showing(Watched):
    """A module whose loss depends on whole and on pooled states, for each row as often as it has labels. It predicts
    both."""

    prediction_dim = None

    def prepare_batch(self, batch: Any) -> Any:
        return {**super().prepare_batch(batch), "pooling_mask": mask_of(batch["input_ids"])}

    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        inputs = super().microbatch_inputs(microbatch)
        return StageInputs({**inputs.first, "output_hidden_states": "whole"}, inputs.shared)

    def microbatch_loss(self, output: Any, microbatch: Any) -> WeightedLoss:
        loss = showing_loss(output, microbatch["labels"], self.data.length)
        return WeightedLoss(loss, self.microbatch_weight(microbatch))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.0, foreach=False)

    def predict_output(self, output: Any) -> Any:
        whole = torch.stack(output.hidden_states, 1)[:, :, : self.data.length]
        return {"pooled": output.pooled_states, "whole": whole}


def showing_loss(output: Any, labels: Tensor, length: int) -> Tensor:
    """States at different places and layers count differently."""
    whole = torch.stack(output.hidden_states, 1)[:, :, :length]
    places = torch.arange(1, 1 + length).to(whole)[:, None] / length
    layers = torch.arange(1, 1 + whole.shape[1]).to(whole)
    of_rows = (whole * places).square().mean((2, 3)) @ layers
    of_rows = of_rows + output.pooled_states.square().mean(2) @ layers.flip(0)
    return output.loss + (of_rows * (labels != -100).sum(1)).sum()


class Expected(NamedTuple):
    loss: Tensor
    gradients: dict[str, Tensor]
    norm: Tensor
    predicted: dict[str, Tensor]


def expected_of(config: Qwen3MoeConfig, data: Data) -> Expected:
    """A backward in plain torch, with the initial weights of a D9DModule; no step is taken."""
    L.seed_everything(SEED, verbose=False)
    module = Qwen3MoePretraining(config)
    torch.set_default_dtype(torch.float64)
    module.configure_model()
    torch.set_default_dtype(torch.float32)
    model = module.model

    def run(index: int) -> tuple[Any, Tensor]:
        batch = batch_of(index, data=data)
        mask = mask_of(batch["input_ids"])
        assert 0 < (mask.sum(1) == 0).sum() < ROWS
        output = model(**batch, reduction="sum", output_hidden_states=True, pooling_mask=mask)
        assert_close_named("pooled", output.pooled_states, means_of(output.hidden_states, mask), kind=Kind.OUTPUT)
        return output, batch["labels"]

    output, labels = run(0)
    loss = showing_loss(output, labels, data.length) / (labels != -100).sum()
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    with torch.no_grad():
        shown, _ = run(PREDICTED)
    predicted = {"pooled": shown.pooled_states, "whole": torch.stack(shown.hidden_states, 1)}
    return Expected(loss.detach(), gradients, norm, predicted)


PADDED = ParallelConfig(pad_sequences=True)
MESHES = [
    Case("pp2", microbatch_size=4, fast=True),
    Case("pp2", schedule="zero_bubble_v", microbatch_size=4, tied=True, fast=True),
    Case("rep2", data=Data(8), fast=True),
    Case("cp2", data=Data(8), parallel=RING, fast=True),
    Case("cp2", data=Data(8), heads=(2, 2), parallel=HEADS, fast=True),
    Case("cp2", data=Data(6), parallel=PADDED, fast=True),
    Case("tp2", data=Data(8), heads=(4, 2), fast=True),
    Case("tp2", data=Data(7), parallel=PADDED, fast=True),
    Case("pp2 cp2", data=Data(16, packed=True), schedule="interleaved_1f1b", microbatch_size=4, fast=True),
    Case("pp2 tp2", data=Data(8), schedule="zero_bubble", microbatch_size=4),
    Case("shard2 cp2", data=Data(8), parallel=RING),
    Case("shard2 tp2", data=Data(8)),
    Case("cp2 tp2", data=Data(8), heads=(4, 4), parallel=HEADS),
    Case("cp4", data=Data(16)),
]


@pytest.mark.parametrize("case", parameters(MESHES))
def test_states_on_a_mesh_are_those_of_one_process(rank: RankContext, case: Case) -> None:
    expected = rank.from_first_rank(expected_of, case.model, case.data)
    L.seed_everything(SEED, verbose=False)
    module = Showing(case.model, 1, data=case.data)
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "use_distributed_sampler": False}
    run = trainer(
        D9DStrategy(**case.strategy_options), rank.world_size, rank.device.type, gradient_clip_val=CLIP, **options
    )
    run.fit(module)
    gradients = module.seen.gradients[0]
    assert_close_named("loss", module.seen.losses[0], expected.loss, kind=Kind.LOSS)
    assert_tensors_close(gradients, {name: expected.gradients[name] for name in gradients})
    assert_close_named("norm", module.seen.norms[0], expected.norm)
    assert set().union(*rank.all_gather_object(set(gradients))) == set(expected.gradients)

    batch = batch_of(PREDICTED, data=case.data)
    rows = [{name: value[row] for name, value in batch.items()} for row in range(ROWS)]
    parts: Any = run.predict(module, DataLoader(rows, ROWS))  # type: ignore[arg-type]
    for name, theirs in expected.predicted.items():
        assert_close_named(name, parts[0][name].cpu(), theirs, kind=Kind.OUTPUT)


class Embedding(Qwen3MoePretraining):
    """Predicts pooled states where its batches have a mask."""

    prediction_dim = None

    def predict_output(self, output: Any) -> Any:
        return output.logits if output.pooled_states is None else output.pooled_states


@pytest.mark.ranks(2)
def test_means_add_little_to_a_message(rank: RankContext) -> None:
    """A mean adds one number a row for each layer of the first stage and column, where whole states add one a token."""
    config = Case("pp2").model
    module = Embedding(config)
    batch = batch_of(0, data=Data(16))
    sent: list[int] = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        send = Messages._send

        def counting(self: Messages, tensor: Tensor, *args: Any) -> None:
            sent[-1] += tensor.numel() if tensor.is_floating_point() else 0  # others are layouts
            send(self, tensor, *args)

        monkeypatch.setattr(Messages, "_send", counting)
        run = trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type)
        for each in (batch, {**batch, "pooling_mask": mask_of(batch["input_ids"])}):
            sent.append(0)
            batches: Any = DataLoader([each], None)  # type: ignore[arg-type]
            run.predict(module, batches)
    num_layers = rank.all_gather_object(len(module.stages[0].model.layers))[0]  # type: ignore[union-attr, arg-type]
    states, sums = ROWS * 16 * config.hidden_size, ROWS * num_layers * config.hidden_size
    assert sent == ([states, states + sums] if rank.rank == 0 else [0, 0])
