"""What `Qwen3MoePretraining` says of batches that it cannot use: the key, what is there, and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoePretraining
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer

CONFIG = Qwen3MoeConfig(
    vocab_size=32, hidden_size=16, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2,
)  # fmt: skip
TOKENS = torch.arange(36).view(4, 9) % 32
IDS, LABELS = TOKENS[:, :-1], TOKENS[:, 1:]
GOOD = {"input_ids": IDS, "labels": LABELS}
MAKE = "in the DataLoader's collate_fn"
BOTH = "make a dict with 'input_ids' and 'labels' of it"

TABLE: dict[str, tuple[Any, str]] = {
    "no labels": (
        {"input_ids": IDS},
        "batch 0 of training has no 'labels': it is a dict with input_ids: tensor int64 [4, 8]. Add labels, "
        "[batch, seq], the input_ids one place further on; or a copy of input_ids as labels, with "
        "Qwen3MoePretraining(shift_labels=True)",
    ),
    "no input_ids": (
        {"tokens": IDS, "labels": None},
        "batch 0 of training has no 'input_ids': it is a dict with tokens: tensor int64 [4, 8], labels: None. Give the "
        f"tokens under this name {MAKE}, integers [batch, seq]",
    ),
    "texts": (
        {"text": ["a b", "c", "d"]},
        "batch 0 of training has no 'input_ids': it is a dict with text: a list of 3 with str 'a b', str 'c', .... "
        f"Tokenize 'text' {MAKE}: give its tokens as input_ids, integers [batch, seq]",
    ),
    "a tuple": (
        (IDS, LABELS),
        "batch 0 of training is a tuple of 2 with tensor int64 [4, 8], tensor int64 [4, 8], but it must be a mapping: "
        f"make {{'input_ids': batch[0], 'labels': batch[1]}} of it {MAKE}",
    ),
    "a tensor": (
        IDS,
        f"batch 0 of training is a tensor int64 [4, 8], but it must be a mapping: {BOTH} {MAKE}",
    ),
    "a text": ("hello", f"batch 0 of training is a str 'hello', but it must be a mapping: {BOTH} {MAKE}"),
    "longer labels": (
        {"input_ids": IDS, "labels": TOKENS},
        "in batch 0 of training, labels is a tensor int64 [4, 9], but input_ids are [4, 8]: give a number for each "
        "token, [batch, seq] of both. The batch is a dict with input_ids: tensor int64 [4, 8], labels: tensor int64 "
        "[4, 9]",
    ),
    "floats": (
        {"input_ids": IDS.float(), "labels": LABELS},
        "in batch 0 of training, input_ids is a tensor float32 [4, 8], but it must be int64 or int32: give "
        f"input_ids.long() {MAKE}. The batch is a dict with input_ids: tensor float32 [4, 8], labels: tensor int64 "
        "[4, 8]",
    ),
    "float labels": (
        {"input_ids": IDS, "labels": LABELS.half()},
        "in batch 0 of training, labels is a tensor float16 [4, 8], but it must be int64 or int32: give labels.long() "
        f"{MAKE}. The batch is a dict with input_ids: tensor int64 [4, 8], labels: tensor float16 [4, 8]",
    ),
    "a row": (
        {"input_ids": IDS[0], "labels": LABELS[0]},
        "in batch 0 of training, input_ids is a tensor int64 [8], but it must be [batch, seq]: add a dim in front "
        f"{MAKE}. The batch is a dict with input_ids: tensor int64 [8], labels: tensor int64 [8]",
    ),
    "nothing": (
        {"input_ids": IDS[:0], "labels": LABELS[:0]},
        "in batch 0 of training, input_ids is a tensor int64 [0, 8], but it has no token: leave empty batches and rows "
        "out of the data. The batch is a dict with input_ids: tensor int64 [0, 8], labels: tensor int64 [0, 8]",
    ),
    "lists": (
        {"input_ids": IDS[:2, :3].tolist(), "labels": LABELS},
        "in batch 0 of training, input_ids is a list of 2 with a list of 3 with int 0, int 1, ..., a list of 3 with "
        "int 9, int 10, ..., but it must be a tensor [batch, seq]: make one of its rows, padded to one length, "
        f"{MAKE}. The batch is a dict with input_ids: a list of 2 with a list of 3, a list of 3, labels: tensor int64 "
        "[4, 8]",
    ),
    "lists after default_collate": (
        {"input_ids": [*IDS.T], "labels": LABELS},
        "in batch 0 of training, input_ids is a list of 8 with tensor int64 [4], tensor int64 [4], ..., but it must be "
        "a tensor [batch, seq]: make the lists tensors in the dataset's __getitem__, as default_collate turns lists "
        "round. The batch is a dict with input_ids: a list of 8 with tensor int64 [4], tensor int64 [4], ..., labels: "
        "tensor int64 [4, 8]",
    ),
    "input_ids that are texts": (
        {"input_ids": ["a b", "c"], "labels": LABELS},
        "in batch 0 of training, input_ids is a list of 2 with str 'a b', str 'c', but it must be a tensor [batch, "
        f"seq]: tokenize it {MAKE}. The batch is a dict with input_ids: a list of 2 with str 'a b', str 'c', labels: "
        "tensor int64 [4, 8]",
    ),
}  # fmt: skip


class Stream(IterableDataset[Any]):
    """Batches without a length: ranks look at them before they are trained on."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def loader(*batches: Any) -> DataLoader[Any]:
    return DataLoader(Stream([*batches]), batch_size=None, collate_fn=lambda batch: batch)


def fit(strategy: Any, *batches: Any, devices: int = 1, device: str = "cpu") -> Any:
    run = trainer(strategy, devices, device, max_steps=2)
    run.fit(Qwen3MoePretraining(CONFIG, warmup_steps=1), loader(*batches))
    return run


@pytest.mark.parametrize("name", TABLE)
def test_the_whole_message(name: str) -> None:
    batch, message = TABLE[name]
    for strategy in (D9DStrategy(), D9DStrategy(microbatch_size=2), "auto"):
        with pytest.raises(ConfigError) as raised:
            fit(strategy, batch)
        assert str(raised.value) == message


def test_a_later_batch_and_an_evaluation() -> None:
    with pytest.raises(ConfigError, match=r"^batch 1 of training has no 'labels': it is a dict"):
        fit(D9DStrategy(), GOOD, {"input_ids": IDS})
    run, module = trainer(D9DStrategy()), Qwen3MoePretraining(CONFIG)
    with pytest.raises(ConfigError, match=r"^batch 0 of validation has no 'labels': it is a dict"):
        run.validate(module, loader({"input_ids": IDS}), verbose=False)
    with pytest.raises(
        ConfigError, match=r"^batch 0 of prediction is a tuple of 1 with .*make {'input_ids': batch\[0\]} of"
    ):
        run.predict(module, loader((IDS,)))
    assert run.predict(module, loader({"input_ids": IDS}))[0].shape == (4, 8, 32)  # type: ignore[index]
    assert module({"input_ids": IDS}).logits.shape == (4, 8, 32)


MESHES = {
    "pipeline": MeshConfig(pipeline_parallel=2),
    "sharded": MeshConfig(data_parallel_shard=2),
    "replicated": MeshConfig(data_parallel_replicate=2),
    "tensor": MeshConfig(tensor_parallel=2),
    "context": MeshConfig(context_parallel_shard=2),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", MESHES)
def test_every_rank_of_a_mesh_says_the_same(rank: RankContext, mesh: str) -> None:
    for name in ("no labels", "a tuple", "longer labels", "floats"):
        batch, message = TABLE[name]
        with pytest.raises(ConfigError) as raised:
            fit(D9DStrategy(mesh=MESHES[mesh]), batch, devices=2, device=rank.device.type)
        assert message.replace("tensor ", "").split(", but")[0] in str(raised.value).replace("tensor ", "")
