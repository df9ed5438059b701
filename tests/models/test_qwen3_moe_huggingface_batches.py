"""Batches of Hugging Face's collators as they are, against transformers given the same."""

from __future__ import annotations

import dataclasses
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining, save_huggingface
from tests.harness.compare import assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import TOLERANCES, Kind
from tests.models.test_qwen3_moe_documents import Kept, gradients
from tests.models.test_qwen3_moe_model import BASE, make_pair
from tests.strategy.plain import trainer

CONFIG = dataclasses.replace(BASE, num_hidden_layers=2, mlp_only_layers=(1,))
EVEN = [24] * 8
"""Tokens of each row."""


RAGGED = [24, 3, 17, 1, 20, 8, 24, 11]


def collator(side: str = "right") -> Callable[[list[Any]], Any]:
    """Pads to the longest row; labels are the ids, and -100 where there is padding."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"<pad>": 0, "<unk>": 1}, unk_token="<unk>"))  # type: ignore[call-arg]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", padding_side=side)
    return DataCollatorForLanguageModeling(tokenizer, mlm=False)


def texts(lengths: list[int]) -> list[dict[str, list[int]]]:
    """Rows of token ids, none of which is padding."""
    generator = torch.Generator().manual_seed(7)
    return [
        {"input_ids": torch.randint(2, CONFIG.vocab_size, (length,), generator=generator).tolist()}
        for length in lengths
    ]


def left_padded(rows: list[Any]) -> Any:
    """A row's first label does not count, which transformers would predict from padding."""
    batch = collator("left")(rows)
    batch["labels"][torch.arange(len(rows)), batch["attention_mask"].argmax(1)] = -100
    return batch


class Losses(Kept):
    """Keeps the loss of the last batch, too."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        self.last_loss = outputs["loss"]


def check_equals_transformers(
    lengths: list[int],
    strategy: Any,
    tmp_path: Any,
    *,
    data_ranks: int = 1,
    devices: int = 1,
    device: str = "cpu",
    collate: Callable[[list[Any]], Any] | None = None,
) -> None:
    """One step of all rows, and their validation loss."""
    collate = collate or collator()
    model, reference = make_pair(CONFIG, torch.float64)
    expected = reference(**collate(texts(lengths)), use_cache=False)
    expected.loss.backward()
    save_huggingface(model, tmp_path / "start")
    module = Losses(CONFIG, pretrained=str(tmp_path / "start"), learning_rate=0.0, shift_labels=True)
    batches: Any = DataLoader(texts(lengths), len(lengths) // data_ranks, collate_fn=collate)  # type: ignore[arg-type]
    run = trainer(strategy, devices, device, precision="64-true", max_epochs=1)
    run.fit(module, batches, batches)
    assert module.gradients
    found = {name: module.gradients[name].cpu() for name in module.gradients}
    single = TOLERANCES[torch.float32]  # in which transformers has its norms, routers and losses
    expected_gradients = {name: gradients(reference)[name] for name in found}
    assert_tensors_close(found, expected_gradients, tolerance=single[Kind.GRADIENT])
    loss = expected.loss.detach()
    assert_close_named("train_loss", module.last_loss, loss, tolerance=single[Kind.LOSS])
    assert_close_named("val_loss", run.callback_metrics["val_loss"], loss, tolerance=single[Kind.LOSS])


@pytest.mark.parametrize("microbatch_size", [None, 1, 4])
def test_a_batch_encoding_has_the_loss_and_gradients_of_transformers(
    tmp_path: Any, microbatch_size: int | None
) -> None:
    check_equals_transformers(EVEN, D9DStrategy(microbatch_size=microbatch_size), tmp_path)


def test_a_batch_encoding_under_a_stock_strategy(tmp_path: Any) -> None:
    check_equals_transformers(EVEN, "auto", tmp_path)


class Features(UserDict):
    """A mapping of somebody's own."""


def test_any_mapping_is_cut(tmp_path: Any) -> None:
    collate = collator()
    check_equals_transformers(EVEN, D9DStrategy(microbatch_size=2), tmp_path, collate=lambda r: Features(collate(r)))


@pytest.mark.parametrize("microbatch_size", [None, 1, 4])
@pytest.mark.parametrize("collate", [collator(), left_padded], ids=["right", "left"])
def test_padded_rows_equal_transformers(tmp_path: Any, microbatch_size: int | None, collate: Any) -> None:
    check_equals_transformers(RAGGED, D9DStrategy(microbatch_size=microbatch_size), tmp_path, collate=collate)


def test_padded_rows_under_a_stock_strategy(tmp_path: Any) -> None:
    check_equals_transformers(RAGGED, "auto", tmp_path)


MESHES = {
    "data parallel": MeshConfig(data_parallel_replicate=2),
    "fully sharded": MeshConfig(data_parallel_shard=2),
    "pipeline": MeshConfig(pipeline_parallel=2),
    "context parallel": MeshConfig(context_parallel_shard=2),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("lengths", [EVEN, RAGGED], ids=["even", "padded"])
def test_a_batch_encoding_on_ranks(rank: RankContext, mesh: str, lengths: list[int]) -> None:
    """Data ranks pad to lengths of their own: rank 0 to 24, rank 1 to 11."""
    check_equals_transformers(
        lengths,
        D9DStrategy(mesh=MESHES[mesh], microbatch_size=2),
        rank.tmp_dir,
        data_ranks=2 if "data" in mesh else 1,
        devices=2,
        device=rank.device.type,
    )


def token_batch(labels: Callable[[Tensor], Tensor]) -> DataLoader:
    ids = torch.randint(CONFIG.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    return DataLoader([{"input_ids": ids, "labels": labels(ids)}], batch_size=None)  # type: ignore[arg-type]


def shifted(ids: Tensor) -> Tensor:
    return torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)


@pytest.mark.parametrize("strategy", [D9DStrategy, lambda: "auto"], ids=["d9d", "auto"])
@pytest.mark.parametrize("method", ["fit", "validate", "test"])
def test_labels_that_are_not_shifted_are_refused(strategy: Any, method: str) -> None:
    module = Qwen3MoePretraining(CONFIG)
    for labels in (lambda ids: ids, lambda ids: torch.where(torch.arange(8) < 3, -100, ids)):  # of a prompt, none
        with pytest.raises(ConfigError, match=r"labels of a batch are its input_ids.*shift_labels=True"):
            getattr(trainer(strategy(), max_epochs=1), method)(module, token_batch(labels))
    getattr(trainer(strategy(), max_epochs=1), method)(module, token_batch(shifted))


def test_a_later_batch_tells_what_the_first_one_does_not() -> None:
    """All labels of the first are a prompt's."""
    ids = torch.randint(CONFIG.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    batches: Any = [{"input_ids": ids, "labels": torch.full_like(ids, -100)}, {"input_ids": ids, "labels": ids}]
    run = trainer(D9DStrategy(), max_epochs=1)
    with pytest.raises(ConfigError, match=r"labels of a batch are its input_ids.*shift_labels=True"):
        run.fit(Qwen3MoePretraining(CONFIG), DataLoader(batches, batch_size=None))


def test_labels_that_are_shifted_are_not_shifted_again() -> None:
    with pytest.raises(ConfigError, match="already shifted, but shift_labels=True"):
        trainer(D9DStrategy(), max_epochs=1).fit(Qwen3MoePretraining(CONFIG, shift_labels=True), token_batch(shifted))


@pytest.mark.parametrize("shift_labels", [False, True])
def test_labels_that_do_not_tell_are_taken(shift_labels: bool) -> None:
    for labels in (torch.zeros_like, lambda ids: torch.full_like(ids, -100)):
        batches = token_batch(labels)
        batches.dataset[0]["input_ids"].zero_()  # every token is the next one, too
        run = trainer(D9DStrategy(), max_epochs=1)
        run.fit(Qwen3MoePretraining(CONFIG, shift_labels=shift_labels), batches)


def test_no_label_moves_over_a_border() -> None:
    from lightning_d9d.models.qwen3_moe.batch import shift

    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert shift(ids).tolist() == [[6, 7, 8, 9, -100]]
    assert shift(ids, torch.tensor([[0, 0, 1, 1, 1]])).tolist() == [[6, -100, 8, 9, -100]]


def test_padding_is_a_document_whose_labels_do_not_count() -> None:
    from lightning_d9d.models.qwen3_moe.batch import prepared

    ids, mask = torch.tensor([[7, 5, 6, 8, 9]]), torch.tensor([[0, 1, 1, 1, 0]])
    batch = Features(input_ids=ids, labels=ids, attention_mask=mask)
    shifted_here = prepared(batch, shift_labels=True)
    assert type(shifted_here) is Features
    assert shifted_here["labels"].tolist() == [[-100, 6, 8, -100, -100]]
    assert shifted_here["document_ids"].tolist() == mask.tolist()
    assert "attention_mask" not in shifted_here
    assert prepared(batch, shift_labels=False)["labels"].tolist() == [[-100, 5, 6, 8, -100]]
    packed = prepared(batch | {"document_ids": torch.tensor([[-1, -1, -1, 3, 3]])}, shift_labels=True)
    assert packed["labels"].tolist() == [[-100, 6, -100, -100, -100]]
    assert packed["document_ids"].tolist() == [[-2, -1, -1, 3, -2]]
    assert batch["labels"] is ids


def test_padding_reaches_no_token() -> None:
    ids = torch.randint(2, CONFIG.vocab_size, (2, 8), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(8) < torch.tensor([[5], [8]])).long()
    module = Qwen3MoePretraining(CONFIG)
    run = trainer(D9DStrategy(microbatch_size=1), precision="64-true")
    batches = [{"input_ids": torch.where(mask == 1, ids, pad), "attention_mask": mask} for pad in (0, 1)]
    logits: Any = run.predict(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert_close_named("logits", logits[0][mask == 1], logits[1][mask == 1], kind=Kind.OUTPUT)


def test_a_mask_of_another_shape_is_refused() -> None:
    ids = torch.arange(16).view(2, 8)
    batch = {"input_ids": ids, "labels": shifted(ids), "attention_mask": torch.ones(2, 1, 8, 8)}
    with pytest.raises(
        ConfigError, match=r"attention_mask is a tensor .* \[2, 1, 8, 8\], but it must be \[batch, seq\]"
    ):
        trainer(D9DStrategy(), max_epochs=1).fit(Qwen3MoePretraining(CONFIG), DataLoader([batch], batch_size=None))  # type: ignore[arg-type]


def test_the_setting_is_kept_in_checkpoints(tmp_path: Any) -> None:
    run = trainer(D9DStrategy(), max_epochs=1)
    run.fit(Qwen3MoePretraining(CONFIG, shift_labels=True), token_batch(lambda ids: ids))
    run.save_checkpoint(tmp_path / "one.ckpt")
    assert Qwen3MoePretraining.load_from_checkpoint(tmp_path / "one.ckpt").shift_labels
