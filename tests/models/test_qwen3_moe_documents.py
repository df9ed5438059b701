"""Rows with several documents, or with padding, against transformers and against the documents alone."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig, StageInfo
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining, parallelize_qwen3_moe, save_huggingface
from lightning_d9d.modules import document_positions
from lightning_d9d.ops import attention
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import TOLERANCES, Kind
from tests.models.test_qwen3_moe_model import BASE, make_pair, shift
from tests.models.test_qwen3_moe_stages import backward_as_pipeline, build, gradients_of, run_as_pipeline
from tests.strategy.plain import trainer

CONFIG = dataclasses.replace(BASE, mlp_only_layers=(1,))
DENSE = dataclasses.replace(BASE, num_experts=0)  # rounding to bfloat16 sends some tokens to other experts
LENGTHS = [[12, 1, 20], [33], [5, 28], [1, 1, 15, 16]]
"""The lengths of the documents in each row."""


def packed() -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, labels in which no document predicts the next one, and document ids."""
    generator = torch.Generator().manual_seed(1)
    input_ids = torch.randint(CONFIG.vocab_size, (4, 33), generator=generator)
    document_ids = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    ends = torch.nn.functional.pad(document_ids.diff(dim=1) != 0, (0, 1), value=True)
    labels = input_ids.roll(-1, 1).masked_fill(ends, -100)
    return input_ids, labels, document_ids


def padded(side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Token ids, labels, and what says which tokens are no padding: document ids, too."""
    input_ids, _, _ = packed()
    is_token = torch.arange(33) < torch.tensor([[33], [20], [32], [1]])
    if side == "left":
        is_token = is_token.flip(1)
    before_token = is_token[:, 1:] & is_token[:, :-1]
    labels = input_ids.roll(-1, 1).masked_fill(~torch.nn.functional.pad(before_token, (0, 1)), -100)
    return input_ids, labels, is_token.long()


def run(model: Any, input_ids: Tensor, labels: Tensor, **options: Any) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Mean loss, whose gradients are in the model, and hidden states."""
    output = model(input_ids, labels, reduction="sum", output_hidden_states=True, **options)
    loss = output.loss / (labels != -100).sum()
    loss.backward()
    return loss.detach(), output.hidden_states


def looking_loss(output: Any) -> Tensor:
    """Return a loss that also depends on the hidden states of every layer."""
    return output.loss + sum((index + 1) * each.square().sum() for index, each in enumerate(output.hidden_states))


def run_transformers(
    reference: Any, input_ids: Tensor, labels: Tensor, **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    unshifted = torch.nn.functional.pad(labels[:, :-1], (1, 0), value=-100)
    assert torch.equal(shift(unshifted), labels)
    output = reference(input_ids, labels=unshifted, output_hidden_states=True, use_cache=False, **options)
    output.loss.backward()
    return output.loss.detach(), output.hidden_states


def gradients(model: Any) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_packed_rows_equal_transformers(implementation: str) -> None:
    """Which takes each place where positions begin again for the border of a document."""
    model, reference = make_pair(CONFIG)
    reference.set_attn_implementation(implementation)
    input_ids, labels, document_ids = packed()
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in LENGTHS])
    expected_loss, expected_states = run_transformers(reference, input_ids, labels, position_ids=positions)
    loss, states = run(model, input_ids, labels, document_ids=document_ids)
    assert_close_named("loss", loss, expected_loss, kind=Kind.LOSS)
    for index, (ours, theirs) in enumerate(zip(states, expected_states, strict=True)):
        assert_close_named(f"hidden states {index}", ours, theirs, kind=Kind.OUTPUT)
    assert_tensors_close(gradients(model), gradients(reference))


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("positions_are_given", [False, True])
def test_padded_rows_equal_transformers(side: str, implementation: str, positions_are_given: bool) -> None:
    """Which counts positions from the row's begin; they turn queries and keys alike, so that makes no difference."""
    model, reference = make_pair(CONFIG)
    reference.set_attn_implementation(implementation)
    input_ids, labels, is_token = padded(side)
    expected_loss, expected_states = run_transformers(reference, input_ids, labels, attention_mask=is_token)
    options = {"position_ids": torch.arange(33).unsqueeze(0)} if positions_are_given else {}
    loss, states = run(model, input_ids, labels, document_ids=is_token, **options)
    assert_close_named("loss", loss, expected_loss, kind=Kind.LOSS)
    for index, (ours, theirs) in enumerate(zip(states, expected_states, strict=True)):
        assert_close_named(f"hidden states {index}", ours[is_token == 1], theirs[is_token == 1], kind=Kind.OUTPUT)
    assert_tensors_close(gradients(model), gradients(reference))


def test_bfloat16_equals_transformers() -> None:
    model, reference = make_pair(DENSE, torch.bfloat16)
    input_ids, labels, document_ids = packed()
    expected, _ = run_transformers(reference, input_ids, labels, position_ids=document_positions(document_ids))
    loss, _ = run(model, input_ids, labels, document_ids=document_ids)
    assert_close_named("loss", loss, expected, tolerance=TOLERANCES[torch.bfloat16][Kind.LOSS])
    assert_tensors_close(gradients(model), gradients(reference))


def test_autocast_equals_bfloat16_of_transformers() -> None:
    model, reference = make_pair(DENSE)
    input_ids, labels, document_ids = packed()
    run_transformers(reference, input_ids, labels, position_ids=document_positions(document_ids))
    with torch.autocast("cpu", torch.bfloat16):
        run(model, input_ids, labels, document_ids=document_ids)
    bfloat16 = TOLERANCES[torch.bfloat16][Kind.GRADIENT]
    assert_tensors_close(gradients(model), gradients(reference), tolerance=bfloat16)


@pytest.mark.parametrize("recompute", ["none", "full", "selective", "attention"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_packed_rows_equal_the_documents_alone(num_stages: int, recompute: str) -> None:
    input_ids, labels, document_ids = packed()
    stages = [build(CONFIG, StageInfo(index, num_stages)) for index in range(num_stages)]
    for stage in stages:
        parallelize_qwen3_moe(stage, None, ParallelConfig(recompute=recompute))
    shared = {"labels": labels, "reduction": "sum", "document_ids": document_ids}
    first = {"input_ids": input_ids, "output_hidden_states": True}
    output, received, outputs = run_as_pipeline(stages, first, shared)
    backward_as_pipeline(looking_loss(output), received, outputs)

    alone, loss = build(CONFIG), torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(LENGTHS):
        for start, length in zip((sum(lengths[:i]) for i in range(len(lengths))), lengths, strict=True):
            places = (slice(row, row + 1), slice(start, start + length))
            each = alone(input_ids[places], labels[places], reduction="sum", output_hidden_states=True)
            looking_loss(each).backward()
            loss += each.loss.detach()
            for index, (ours, expected) in enumerate(zip(output.hidden_states, each.hidden_states, strict=True)):
                assert_close_named(f"row {row} from {start}, {index}", ours[places], expected, kind=Kind.OUTPUT)
    assert_close_named("loss", output.loss, loss)
    assert_tensors_close(gradients_of(stages), gradients_of([alone]))


def test_recomputation_changes_no_bit() -> None:
    results: list[dict[str, Tensor | None]] = []
    for recompute in ("none", "full", "selective", "attention"):
        model, _ = make_pair(CONFIG)
        parallelize_qwen3_moe(model, None, ParallelConfig(recompute=recompute))
        input_ids, labels, document_ids = packed()
        run(model, input_ids, labels, document_ids=document_ids)
        results.append(gradients(model))
    for name, expected in results[0].items():
        for result in results[1:]:
            assert_bitwise_equal(name, result[name], expected)


def test_padding_reaches_no_token() -> None:
    model = build(CONFIG)
    input_ids, _, is_token = padded("left")
    others = torch.where(is_token == 1, input_ids, (input_ids + 1) % CONFIG.vocab_size)
    logits, changed = (model(ids, document_ids=is_token).logits for ids in (input_ids, others))
    assert_close_named("logits", changed[is_token == 1], logits[is_token == 1], kind=Kind.OUTPUT)


def test_attention_of_ones_own_gets_the_ids() -> None:
    got = []

    def attend(q: Tensor, k: Tensor, v: Tensor, documents: Tensor | None) -> Tensor:
        got.append(documents)
        return attention(q, k, v, documents)

    input_ids, _, document_ids = packed()
    model = build(CONFIG)
    expected = model(input_ids, document_ids=document_ids).logits
    model.model.layers["1"].self_attn.attend = attend  # type: ignore[union-attr]
    assert_bitwise_equal("logits", model(input_ids, document_ids=document_ids).logits, expected)
    assert got == [document_ids]
    model(input_ids)
    assert got == [document_ids, None]


def test_positions_begin_with_each_document() -> None:
    ids = torch.tensor([[3, 3, 3, 1, 1, 3, 0], [0, 0, 0, 0, 0, 0, 0]])
    assert document_positions(ids).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 1, 2, 3, 4, 5, 6]]


def test_document_ids_of_another_shape_are_refused() -> None:
    input_ids, _, document_ids = packed()
    for wrong in (document_ids[:1], document_ids[:, 1:], document_ids[0]):
        with pytest.raises(ConfigError, match=r"document_ids have shape \[.*\], but input_ids \[4, 33\]"):
            build(CONFIG)(input_ids, document_ids=wrong)


# In the LightningModule


def rows_of(*columns: Tensor) -> list[dict[str, Tensor]]:
    return [dict(zip(("input_ids", "labels", "document_ids"), row, strict=True)) for row in zip(*columns, strict=True)]


class Kept(Qwen3MoePretraining):
    """Keeps its gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.gradients = {name: p.grad.clone() for stage in self.stages for name, p in stage.named_parameters()}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble_v"])
def test_a_pipeline_of_packed_rows(rank: RankContext, schedule: str) -> None:
    """One row a microbatch."""
    config = dataclasses.replace(CONFIG, num_hidden_layers=4)
    whole = build(config)
    save_huggingface(whole, rank.tmp_dir / "start")
    whole.to(rank.device)
    module = Kept(config, pretrained=str(rank.tmp_dir / "start"))
    strategy = D9DStrategy(mesh=MeshConfig(pipeline_parallel=2), schedule=schedule)
    batches = DataLoader(rows_of(*packed()), 4)  # type: ignore[arg-type]
    trainer(strategy, 2, rank.device.type, precision="64-true", max_epochs=1).fit(module, batches)
    input_ids, labels, document_ids = (column.to(rank.device) for column in packed())
    run(whole, input_ids, labels, document_ids=document_ids)
    assert module.gradients
    for name, gradient in module.gradients.items():
        expected = whole.get_parameter(name).grad
        assert expected is not None
        assert_close_named(name, gradient, expected)


def test_packed_and_padded_rows_have_the_perplexity_of_the_documents() -> None:
    """Each document in a padded row of its own, or several in a row."""
    input_ids, labels, document_ids = packed()
    alone = torch.full((3, sum(map(len, LENGTHS)), 33), -100)
    alone[0], alone[2], index = 5, 1, 0
    for row, lengths in enumerate(LENGTHS):
        for document, length in enumerate(lengths):
            places = document_ids[row] == document
            for column, values in zip(alone, (input_ids[row], labels[row], torch.zeros(33)), strict=True):
                column[index, :length] = values[places]
            index += 1
    losses = []
    for rows in (rows_of(input_ids, labels, document_ids), rows_of(*alone)):
        torch.manual_seed(0)
        module = Qwen3MoePretraining(CONFIG)
        loader = DataLoader(rows, 2)  # type: ignore[arg-type]
        (result,) = trainer(D9DStrategy(), precision="64-true").validate(module, loader, verbose=False)
        assert result["val_perplexity"] == pytest.approx(math.exp(result["val_loss"]), rel=1e-5)
        losses.append(result["val_loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
