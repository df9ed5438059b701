"""Chats for fine-tuning: rows of tokens of which those of the assistant count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info

from lightning_d9d.data.chat_files import read_chats
from lightning_d9d.data.chat_masks import ChatReport, ChatTokenizer, ChatTokens
from lightning_d9d.data.epoch_sampler import EpochSampler
from lightning_d9d.data.packing import GroupedOrder, PackedOrder
from lightning_d9d.data.samples import PackedRows, PaddedRows, Samples
from lightning_d9d.datamodules.rows import Loader, RowsDataModule
from lightning_d9d.errors import ConfigError, printable
from lightning_d9d.generation.sources import pretrained_tokenizer


class ChatDataModule(RowsDataModule):
    """Chats in files, as rows in which only what the assistant says is learned.

    A chat is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`; `tools`,
    and further fields of messages, go to the tokenizer's chat template. Labels are shifted, and -100 where a token does
    not count. The tokens of the assistant's turns count, their end-of-turn token included: see `ChatTokenizer`, which
    says what becomes of chats that are too long or broken. A line of the log has the numbers.

    With packing a row has several samples: they are its documents (`document_ids`), do not see each other, and have
    positions of their own. Without, a row has one sample, and rows of similar length are in a batch. Rows are shuffled
    by `seed` and epoch, and each data rank reads its own. An optimizer step has the same rows on any number of data
    ranks, if it has as many. Under `D9DStrategy` a resumed run goes on with the batch that an uninterrupted one would
    have read.

    Every rank reads all files when training begins, and keeps all tokens, 5 bytes each.

    Args:
        train: Path of a file or several: JSON lines (`.jsonl`, `.json`), Parquet (`.parquet`), or a directory that
            `datasets` saved. Relative to the working directory.
        tokenizer: A directory or a name that `transformers` knows, whose tokenizer has a chat template; or a tokenizer.
        validation: As `train`. Default: a part of `train` is held out.
        sequence_length: Tokens of a packed row, and most tokens of a sample.
        batch_size: Rows in a batch of one data rank; 16 by default.
        global_batch_size: Rows of an optimizer step, on all ranks and in all accumulated batches, in place of
            `batch_size`. Evaluation has batches of the same size.
        packing: Whether a row has several samples.
        pad_to_multiple_of: Without packing, rows are padded to a multiple of it, such as the number of ranks that
            share a sequence. 1 by default.
        validation_fraction: Share of the chats of `train` that is held out, between 0 and 1. 0.05 by default.
        seed: Seed of the shuffling, and of which chats are held out.
        num_workers: Loader processes of each rank; 0 makes rows in the training process.

    Raises:
        ConfigError: A value is out of range or without effect, or a file or a chat is not as it must be. Or there are
            too few rows for one batch on every data rank.
    """

    def __init__(
        self,
        train: str | list[str],
        tokenizer: Any,
        validation: str | list[str] | None = None,
        sequence_length: int = 1024,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        packing: bool = True,
        pad_to_multiple_of: int | None = None,
        validation_fraction: float | None = None,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        if packing and pad_to_multiple_of is not None:
            raise ConfigError(
                f"pad_to_multiple_of={pad_to_multiple_of} does nothing with packing=True, as each row has "
                f"sequence_length={sequence_length} tokens; leave it out"
            )
        multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            validation_fraction=validation_fraction,
            validation_files=validation,
            seed=seed,
            num_workers=num_workers,
            pad_to_multiple_of=multiple,
        )
        self.train = train
        self.tokenizer = tokenizer
        self.validation = validation
        self.packing = packing
        self.pad_to_multiple_of = multiple
        self.train_samples: Samples | None = None
        """The samples that are trained on, after `setup`."""
        self.validation_samples: Samples | None = None
        """The held-out samples, after `setup`."""
        self._padding_id = 0

    @property
    def batch_shape(self) -> tuple[int, int] | None:
        """Rows and tokens in each, as `RowsDataModule` has them; None without packing, as rows may be shorter."""
        return super().batch_shape if self.packing else None

    def setup(self, stage: str | None = None) -> None:
        """Reads the files and makes tokens of them, once; every rank reads all of them."""
        if self.train_samples is not None:
            return
        tokenizer = pretrained_tokenizer(self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer
        self._padding_id = getattr(tokenizer, "pad_token_id", None) or 0
        chats = self._tokenized(self.train, tokenizer)
        if self.validation is not None:
            self.validation_samples = _joined(self._tokenized(self.validation, tokenizer))
        else:
            mixed = torch.randperm(len(chats), generator=torch.Generator().manual_seed(self.seed)).tolist()
            num_held_out = int(len(chats) * self.validation_fraction)
            self.validation_samples = _joined(chats[index] for index in sorted(mixed[:num_held_out]))
            chats = [chats[index] for index in sorted(mixed[num_held_out:])]
        self.train_samples = _joined(chats)

    def train_dataloader(self) -> Loader:
        """This data rank's rows for training; an incomplete last batch is left out."""
        return self._dataloader(self._required(self.train_samples), trains=True)

    def val_dataloader(self) -> Loader:
        """This data rank's held-out rows, in one order."""
        return self._dataloader(self._required(self.validation_samples), trains=False)

    def predict_dataloader(self) -> Loader:
        """Return `val_dataloader()`."""
        return self.val_dataloader()

    def _tokenized(self, paths: str | Sequence[str], tokenizer: Any) -> list[list[ChatTokens]]:
        """Return the samples of each chat."""
        files = [paths] if isinstance(paths, str) else list(paths)
        tokenize = ChatTokenizer(tokenizer, self.sequence_length + 1)  # the last token is a label only
        chats = [tokenize(chat, place) for place, chat in read_chats(files)]
        if not chats:
            raise ConfigError(
                f"{', '.join(map(str, files))} of ChatDataModule has no chat; correct the path, or give chats"
            )
        _say(", ".join(map(str, files)), tokenize.finish())
        return chats

    def _dataloader(self, samples: Samples, trains: bool) -> Loader:
        rank, num_ranks = self.data_rank
        if self.packing:
            order = PackedOrder(samples.lengths, self.sequence_length)
            dataset = PackedRows(samples, self.sequence_length, self._padding_id)
            padding = 1 - sum(samples.lengths) / (max(1, len(order)) * self.sequence_length)
            what = "training" if trains else "held-out"
            rank_zero_info(f"{what}: {len(samples)} samples in {len(order)} rows, of which {padding:.1%} is padding")
        else:
            accumulated = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
            order = GroupedOrder(samples.lengths, self.rows_of_rank * num_ranks * accumulated)
            dataset = PaddedRows(samples, self.pad_to_multiple_of, self._padding_id)
        return self._loader(dataset, EpochSampler(order, num_ranks, rank, self.seed, shuffle=trains), trains)


def _joined(chats: Iterable[Sequence[ChatTokens]]) -> Samples:
    return Samples(sample for chat in chats for sample in chat)


def _say(files: str, report: ChatReport) -> None:
    rank_zero_info(printable(f"{files}: {report}"))
