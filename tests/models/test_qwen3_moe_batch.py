"""Ids, labels and lengths of the batches of Qwen3MoePretraining."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, RankError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.models.qwen3_moe.batch import BatchCheck
from tests.harness.ranks import RankContext
from tests.models.test_qwen3_moe_module import CONFIG
from tests.strategy.plain import trainer

TWO_LAYERS = dataclasses.replace(CONFIG, num_hidden_layers=2)
BAD = 2
"""The batch that is refused."""


def batches(**changes: Any) -> list[dict[str, Tensor]]:
    """Four of two rows; the changes are those of `BAD`: a value of its last token, or a tensor."""
    generator = torch.Generator().manual_seed(0)
    result = []
    for index in range(4):
        ids = torch.randint(CONFIG.vocab_size, (2, 9), generator=generator)
        batch = {"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()}
        for name, change in changes.items() if index == BAD else ():
            if isinstance(change, Tensor):
                batch[name] = change
            else:
                batch[name][-1, -1] = change
        result.append(batch)
    return result


OUTSIDE = [("input_ids", 32), ("input_ids", -1), ("input_ids", -100), ("labels", 32), ("labels", -1), ("labels", -101)]


@pytest.mark.parametrize(("name", "value"), OUTSIDE)
@pytest.mark.parametrize("strategy", [lambda: D9DStrategy(microbatch_size=1), lambda: "auto"], ids=["d9d", "auto"])
def test_a_value_outside_of_the_vocabulary_is_refused_in_any_batch(strategy: Any, name: str, value: int) -> None:
    data: Any = DataLoader(batches(**{name: value}), batch_size=None)  # type: ignore[arg-type]
    text = f"batch 2 of training has the value {value} in {name}, but vocab_size=32: ids go from 0 to 31"
    run = trainer(strategy(), max_epochs=1)
    with pytest.raises(ConfigError, match=text):
        run.fit(Qwen3MoePretraining(CONFIG), data)
    assert run.global_step == BAD


@pytest.mark.parametrize(("method", "kind"), [("validate", "validation"), ("test", "test"), ("predict", "prediction")])
def test_a_value_is_refused_in_every_run(method: str, kind: str) -> None:
    data: Any = DataLoader(batches(input_ids=32), batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"batch 2 of {kind} has the value 32 in input_ids"):
        getattr(trainer(D9DStrategy()), method)(Qwen3MoePretraining(CONFIG), data)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("labels", (2, 7)),
        ("labels", (1, 8)),
        ("position_ids", (2, 9)),
        ("position_ids", (8,)),
        ("document_ids", (2, 7)),
    ],
)
def test_lengths_that_do_not_agree_are_refused_in_any_batch(name: str, shape: tuple[int, ...]) -> None:
    data: Any = DataLoader(batches(**{name: torch.zeros(shape, dtype=torch.int64)}), batch_size=None)  # type: ignore[arg-type]
    text = rf"in batch 2 of training, {name} is a tensor int64 \[{', '.join(map(str, shape))}\], but "
    run = trainer(D9DStrategy(), max_epochs=1)
    with pytest.raises(ConfigError, match=text):
        run.fit(Qwen3MoePretraining(CONFIG), data)
    assert run.global_step == BAD


def test_a_long_document_is_refused_in_any_batch() -> None:
    long = torch.zeros(2, CONFIG.max_position_embeddings + 1, dtype=torch.int64)
    data: Any = DataLoader(batches(input_ids=long, labels=long), batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=rf"batch 2 of training has a document of {long.shape[1]} tokens"):
        trainer(D9DStrategy(), max_epochs=1).fit(Qwen3MoePretraining(CONFIG), data)


def test_positions_behind_the_window_are_refused_in_a_short_batch() -> None:
    check = BatchCheck("training", vocab_size=10, window=8, shift_labels=False)
    ids = torch.tensor([[1, 2, 3], [4, 5, 6]])
    batch = {"input_ids": ids, "labels": ids + 1, "position_ids": torch.tensor([[5, 6, 7], [0, 1, 2]])}
    check(batch, 0)
    with pytest.raises(ConfigError, match=r"batch 1 of training has a document of 9 tokens.*max_position_embeddings=8"):
        check({**batch, "position_ids": batch["position_ids"] + 1}, 1)


def test_the_first_wrong_value_is_named() -> None:
    check = BatchCheck("training", vocab_size=10, window=8, shift_labels=False)
    ids = torch.tensor([[1, 2, 11], [13, 2, 3]])
    with pytest.raises(ConfigError, match=r"batch 5 .* the value 11 in input_ids"):
        check({"input_ids": ids, "labels": ids + 100}, 5)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", [{"pipeline_parallel": 2}, {"context_parallel_shard": 2}], ids=str)
@pytest.mark.parametrize(("name", "value"), OUTSIDE[:4])
def test_every_rank_of_a_batch_refuses_it(rank: RankContext, mesh: dict[str, int], name: str, value: int) -> None:
    data: Any = DataLoader(batches(**{name: value}), batch_size=None)  # type: ignore[arg-type]
    config = CONFIG if "context_parallel_shard" in mesh else TWO_LAYERS
    run = trainer(D9DStrategy(mesh=MeshConfig(**mesh)), 2, rank.device.type, max_epochs=1)
    text = rf"batch 2 of training has the value {value} in {name}, but vocab_size=32"
    with pytest.raises((ConfigError, RankError), match=text):  # a rank that is late hears of another's
        run.fit(Qwen3MoePretraining(config), data)


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "value"), OUTSIDE)
def test_cuda_refuses_a_value_late_and_never_waits(name: str, value: int) -> None:
    check = BatchCheck("training", CONFIG.vocab_size, 8, shift_labels=False)
    on_device = [{key: tensor.cuda() for key, tensor in batch.items()} for batch in batches(**{name: value})]
    check(on_device[0], 0)
    torch.cuda.set_sync_debug_mode("error")
    try:
        checked = [check(batch, index) for index, batch in enumerate(on_device[: BAD + 1])]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert checked[BAD][name][-1, -1].item() == (0 if name == "input_ids" else -100)
    with pytest.raises(ConfigError, match=f"batch 2 of training has the value {value} in {name}"):
        check.finish()


@pytest.mark.gpu
def test_a_run_on_cuda_ends_with_the_value() -> None:
    data: Any = DataLoader(batches(input_ids=32), batch_size=None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="batch 2 of training has the value 32 in input_ids, but vocab_size=32"):
        trainer(D9DStrategy(), device="cuda", max_epochs=1).fit(Qwen3MoePretraining(CONFIG), data)
