"""Stages of Qwen3-MoE: one after the other they are the whole model, bit for bit; snapshots are transformers'."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeModel, layers_of_stages
from lightning_d9d.pipeline.initial_weights import materialize
from lightning_d9d.pipeline.types import StageInfo
from tests.harness.compare import assert_bitwise_equal, assert_close_named
from tests.harness.tolerances import Kind
from tests.models.test_qwen3_moe_model import BASE, make_batch, make_pair, shift

CONFIG = dataclasses.replace(BASE, num_hidden_layers=5, mlp_only_layers=(1, 3))
EMBEDDING = "model.embed_tokens.weight"
SPLITS = {"text": 60, "image": 30, "special": 6}
VARIANTS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "split": {"vocab_splits": SPLITS},
    "tied and split": {"tie_word_embeddings": True, "vocab_splits": SPLITS},
}


def build(config: Qwen3MoeConfig, stage: StageInfo = StageInfo(0, 1)) -> Qwen3MoeForCausalLM:
    """A stage with its initial weights of seed 3, in float64."""
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config, stage).double()
    materialize(model, torch.device("cpu"), seed=3)
    return model


def build_stages(config: Qwen3MoeConfig, num_stages: int) -> list[Qwen3MoeForCausalLM]:
    return [build(config, StageInfo(index, num_stages)) for index in range(num_stages)]


def tensors_of(tree: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def run_as_pipeline(
    stages: list[Qwen3MoeForCausalLM], first: dict[str, Any], shared: dict[str, Any]
) -> tuple[Any, list[dict[str, Any]], list[dict[str, Any]]]:
    """Forward through stages that share no graph. Returns the output, and what each stage got and returned."""
    received: list[dict[str, Any]] = [first]
    outputs: list[Any] = []
    for stage in stages:
        outputs.append(stage(**received[-1], **shared))
        if stage is not stages[-1]:
            cut = torch.utils._pytree.tree_map(lambda t: t.detach().requires_grad_(), outputs[-1])
            received.append(cut)
    return outputs[-1], received, outputs


def backward_as_pipeline(loss: Tensor, received: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
    loss.backward()
    for got, returned in reversed(list(zip(received[1:], outputs[:-1], strict=True))):
        torch.autograd.backward(tensors_of(returned), [tensor.grad for tensor in tensors_of(got)])


def gradients_of(stages: list[Qwen3MoeForCausalLM]) -> dict[str, Tensor]:
    """Return gradients by name; those of a parameter in two stages are summed."""
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = gradients[name] + parameter.grad if name in gradients else parameter.grad
    return gradients


def positions() -> Tensor:
    return torch.randint(3000, (4, 33), generator=torch.Generator().manual_seed(2))


def document_ids() -> Tensor:
    return torch.randint(3, (4, 33), generator=torch.Generator().manual_seed(3)).sort(1).values


OPTIONS = {"in order": {}, "positions": {"position_ids": positions()}, "documents": {"document_ids": document_ids()}}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_are_the_whole_model(num_stages: int, variant: str, options: dict[str, Any]) -> None:
    config = dataclasses.replace(CONFIG, **VARIANTS[variant])
    whole, stages = build(config), build_stages(config, num_stages)
    ids, _, labels = make_batch()
    output, _, _ = run_as_pipeline(stages, {"input_ids": ids}, options)
    assert_bitwise_equal("logits", output.logits, whole(ids, **options).logits)

    shared = {"labels": shift(labels), "reduction": "sum", **options}
    output, received, outputs = run_as_pipeline(stages, {"input_ids": ids}, shared)
    expected = whole(ids, **shared)
    assert output.hidden_states is None
    assert_bitwise_equal("loss", output.loss, expected.loss)
    expected.loss.backward()
    backward_as_pipeline(output.loss, received, outputs)
    gradients, expected_gradients = gradients_of(stages), gradients_of([whole])
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        assert_bitwise_equal(name, gradient, expected_gradients[name])


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("num_stages", [2, 5])
def test_stages_start_with_the_weights_of_the_whole_model(num_stages: int, variant: str) -> None:
    config = dataclasses.replace(CONFIG, **VARIANTS[variant])
    expected = build(config).state_dict()
    stages = build_stages(config, num_stages)
    names = [name for stage in stages for name in stage.state_dict()]
    assert set(names) == expected.keys()
    for stage in stages:
        for name, tensor in stage.state_dict().items():
            assert_bitwise_equal(name, tensor, expected[name])
    held_twice = {name for name in names if names.count(name) > 1}
    assert held_twice == ({name for name in expected if "embed_tokens" in name} if "tied" in variant.split() else set())
    for stage in stages[1:-1]:
        assert all(name.startswith("model.layers.") for name in stage.state_dict())


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}, {"mlp_only_layers": (0, 2)}], ids=str)
def test_snapshots_equal_transformers(changes: dict[str, Any]) -> None:
    model, reference = make_pair(dataclasses.replace(BASE, **changes))
    ids, mask, labels = make_batch()
    expected = reference(ids, attention_mask=mask, output_hidden_states=True)
    output = model(ids, output_hidden_states=True)
    assert len(output.hidden_states) == len(expected.hidden_states) == BASE.num_hidden_layers + 1
    for index, (ours, theirs) in enumerate(zip(output.hidden_states, expected.hidden_states, strict=True)):
        assert_close_named(f"hidden states {index}", ours[mask == 1], theirs[mask == 1], kind=Kind.OUTPUT)
    with_labels = model(ids, labels=shift(labels), output_hidden_states=True)
    assert all(map(torch.equal, with_labels.hidden_states, output.hidden_states))
    assert model(ids).hidden_states is None


@pytest.mark.parametrize("num_stages", [2, 4])
def test_snapshots_go_through_the_stages(num_stages: int) -> None:
    """Values and gradients, of a loss that looks at every layer."""
    whole, stages = build(CONFIG), build_stages(CONFIG, num_stages)
    ids, _, labels = make_batch()
    first, shared = {"input_ids": ids, "output_hidden_states": True}, {"labels": shift(labels), "reduction": "sum"}
    output, received, outputs = run_as_pipeline(stages, first, shared)
    expected = whole(**first, **shared)
    assert len(output.hidden_states) == CONFIG.num_hidden_layers + 1
    for index, (ours, theirs) in enumerate(zip(output.hidden_states, expected.hidden_states, strict=True)):
        assert_bitwise_equal(f"hidden states {index}", ours, theirs)
    for before, after in pairwise(received[1:]):
        assert len(after["snapshots"]) > len(before["snapshots"])

    def loss(output: Any) -> Tensor:
        return output.loss + sum((index + 1) * each.square().sum() for index, each in enumerate(output.hidden_states))

    loss(expected).backward()
    backward_as_pipeline(loss(output), received, outputs)
    expected_gradients = gradients_of([whole])
    for name, gradient in gradients_of(stages).items():
        assert_close_named(name, gradient, expected_gradients[name])  # sums come in another order


def test_the_model_without_head_is_cut_too() -> None:
    config = dataclasses.replace(CONFIG, tie_word_embeddings=True)
    stages = [Qwen3MoeModel(config, StageInfo(index, 2)) for index in range(2)]
    assert [list(stage.layers) for stage in stages] == [["0", "1", "2"], ["3", "4"]]
    assert not any("embed_tokens" in name for name in stages[1].state_dict())
    ids, _, _ = make_batch()
    output = stages[1](**stages[0](ids))
    assert output["hidden_states"].shape == (*ids.shape, config.hidden_size)


# Where the model is cut


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("tiny", [2, 2]),
        ("30b-a3b", [48]),
        ("30b-a3b", [25, 23]),  # the head has the products of 5.5 layers, and takes the time of 2.2
        ("30b-a3b", [7, 7, 6, 6, 6, 6, 6, 4]),
        ("30b-a3b", [4, 4, *[3] * 13, 1]),
        ("30b-a3b", [*[2] * 23, 1, 1]),  # as much of the head as leaves the last stage a layer
        ("30b-a3b", [1] * 48),
        ("235b-a22b", [24, 24, 24, 22]),
    ],
)
def test_the_head_counts_as_layers(preset: Any, expected: list[int]) -> None:
    config = Qwen3MoeConfig.preset(preset)
    assert [len(layers) for layers in layers_of_stages(config, len(expected))] == expected
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert layers_of_stages(tied, len(expected)) == layers_of_stages(config, len(expected))


def test_virtual_layers_can_be_given() -> None:
    config = Qwen3MoeConfig.preset("30b-a3b")
    assert [len(layers) for layers in layers_of_stages(config, 4, before=1, after=1)] == [12, 13, 12, 11]
    assert [len(layers) for layers in layers_of_stages(config, 4, after=0)] == [12] * 4
    with pytest.raises(ConfigError, match="48 layers cannot be split into 49 stages"):
        layers_of_stages(config, 49)
    with pytest.raises(ConfigError, match="Stage 3 would have no real layer"):
        layers_of_stages(config, 4, after=20)


def test_layers_of_the_strategy_win() -> None:
    stage = Qwen3MoeForCausalLM(CONFIG, StageInfo(1, 3, layers=range(1, 4)))
    assert list(stage.model.layers) == ["1", "2", "3"]
    with pytest.raises(ConfigError, match=r"layers range\(3, 6\).*with 5 layers.*out of range\(0, 5\)"):
        Qwen3MoeForCausalLM(CONFIG, StageInfo(1, 3, layers=range(3, 6)))


def test_a_stage_without_its_input_says_what_it_takes() -> None:
    ids, _, _ = make_batch()
    with pytest.raises(
        ConfigError, match=r"stage 1 of 2 was called without hidden_states\. The first stage takes input_ids"
    ):
        Qwen3MoeForCausalLM(CONFIG, StageInfo(1, 2))(ids)
    with pytest.raises(ConfigError, match="stage 0 of 1 was called without input_ids"):
        Qwen3MoeForCausalLM(CONFIG)(hidden_states=torch.zeros(1, 2, 64))
