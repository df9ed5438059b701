"""Chats for fine-tuning: rows of tokens in which those of the assistant count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import Dataset

from lightning_d9d.data.cache import folder_of_cache
from lightning_d9d.data.chat_cache import TokenizedChats, tokenized_chats
from lightning_d9d.data.epoch_sampler import EpochOrder, EpochSampler
from lightning_d9d.data.packing import GroupedOrder, PackedOrder
from lightning_d9d.data.samples import PackedRows, PaddedRows, Samples
from lightning_d9d.datamodules.rows import Loader, RowsDataModule
from lightning_d9d.errors import ConfigError, printable
from lightning_d9d.generation.sources import pretrained_tokenizer
from lightning_d9d.mesh.agreement import Ranks


class ChatDataModule(RowsDataModule):
    """Chats in files, as rows in which only the assistant's tokens are learned.

    A chat is `{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}`; `tools`,
    and further fields of messages, go to the tokenizer's chat template. Labels are shifted, and -100 where a token does
    not count. The tokens of the assistant's turns count, including the end-of-turn token. `ChatTokenizer` describes how
    chats that are too long or broken are treated. A line of the log gives their numbers.

    With packing a row has several samples: they are its documents (`document_ids`), do not see each other, and have
    separate positions. Without packing a row has one sample, and a batch has rows of similar length. Rows are shuffled
    by `seed` and epoch, and each data rank reads its own. An optimizer step has the same rows on any number of data
    ranks, if it has equally many. An epoch leaves out rows that do not fill a batch on every data rank. Validation,
    test and predict take each held-out row once. Under `D9DStrategy` a resumed run continues with the same batch as an
    uninterrupted one.

    One rank of a machine, or of those that share `cache_folder`, tokenizes the chats when training begins, in several
    processes. The samples are kept in that folder, 5 bytes a token, and all ranks map them into memory. Later runs find
    them by the content of the files, the tokenizer with its template, and `sequence_length`.

    Args:
        train: Path of a file or several: JSON lines (`.jsonl`, `.json`), Parquet (`.parquet`), or a directory that
            `datasets` saved. Files, relative to the working directory, for validation.
        tokenizer: A directory or a name that `transformers` knows, whose tokenizer has a chat template; or a tokenizer
            object.
        validation: Files for validation, in the formats of `train`. By default a part of `train` is held out.
        sequence_length: Tokens of a packed row, and maximum number of tokens of a sample.
        batch_size: Rows in a batch of one data rank; 16 by default.
        global_batch_size: Rows of an optimizer step, on all ranks and in all accumulated batches, in place of
            `batch_size`. Evaluation has batches of the same size.
        packing: Whether a row has several samples.
        pad_to_multiple_of: Without packing, rows are padded to a multiple of this, such as the number of ranks that
            share a sequence. 1 by default.
        validation_fraction: Share of the chats of `train` that is held out, between 0 and 1. 0.05 by default.
        seed: Seed of the shuffling, and of which chats are held out.
        num_workers: Loader processes of each rank; 0 makes rows in the training process.
        cache_folder: Folder that keeps the samples. By default the folder that the variable `LIGHTNING_D9D_CACHE`
            names, or `~/.cache/lightning_d9d`.

    Raises:
        ConfigError: A value is out of range or without effect, or a file or a chat has another form. Or there are too
            few rows for one batch on every data rank.
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
        cache_folder: str | None = None,
    ) -> None:
        if packing and pad_to_multiple_of is not None:
            raise ConfigError(
                f"pad_to_multiple_of={pad_to_multiple_of} has no effect with packing=True, because each row has "
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
        self.cache_folder = cache_folder
        self.train_samples: Samples | None = None
        """The samples that are trained on, after `setup`."""
        self.validation_samples: Samples | None = None
        """The held-out samples, after `setup`."""
        self._padding_id = 0

    @property
    def batch_shape(self) -> tuple[int, int] | None:
        """Rows, and tokens in each, as in `RowsDataModule`; None without packing, because rows may be shorter."""
        return super().batch_shape if self.packing else None

    def setup(self, stage: str | None = None) -> None:
        """Tokenize the files, or map samples that were tokenized before. Collective in a Trainer."""
        if self.train_samples is not None:
            return
        with self._on_all_ranks():
            tokenizer = pretrained_tokenizer(self.tokenizer) if isinstance(self.tokenizer, str) else self.tokenizer
            self._check_vocabulary(tokenizer)
        self._padding_id = getattr(tokenizer, "pad_token_id", None) or 0
        chats = self._tokenized(self.train, tokenizer)
        if self.validation is not None:
            self.validation_samples = self._tokenized(self.validation, tokenizer).samples
            self.train_samples = chats.samples
            return
        num_chats = len(chats.num_samples)
        is_held_out = torch.zeros(num_chats, dtype=torch.bool)
        mixed = torch.randperm(num_chats, generator=torch.Generator().manual_seed(self.seed))
        is_held_out[mixed[: int(num_chats * self.validation_fraction)]] = True
        of_samples = is_held_out.repeat_interleave(chats.num_samples)
        self.validation_samples = chats.samples.subset(of_samples.nonzero().flatten())
        self.train_samples = chats.samples.subset((~of_samples).nonzero().flatten())

    def train_dataloader(self) -> Loader:
        """Return this data rank's rows for training; an incomplete last batch is left out."""
        (dataset, order), (rank, num_ranks) = self._rows(self._required(self.train_samples), "training"), self.data_rank
        return self._training_loader(dataset, EpochSampler(order, num_ranks, rank, self.seed))

    def val_dataloader(self) -> Loader:
        """Return this data rank's held-out rows, in one order."""
        dataset, order = self._rows(self._required(self.validation_samples), "held-out")
        return self._held_out_loader(dataset, order(self.seed, epoch=0))

    def predict_dataloader(self) -> Loader:
        """Return the rows of `val_dataloader()`, but without packing in the order of the held-out samples."""
        samples = self._required(self.validation_samples)
        if self.packing:
            return self.val_dataloader()
        dataset, _ = self._rows(samples, "held-out")
        return self._held_out_loader(dataset, [(index,) for index in range(len(samples))])

    def _check_vocabulary(self, tokenizer: Any) -> None:
        vocab_size = self._vocab_size
        if vocab_size is not None and (last := max(tokenizer.get_vocab().values())) >= vocab_size:
            raise ConfigError(
                f"ids of the tokenizer of ChatDataModule go up to {last}, but the model has vocab_size={vocab_size}; "
                "give the model's tokenizer, or raise vocab_size"
            )

    def _tokenized(self, paths: str | Sequence[str], tokenizer: Any) -> TokenizedChats:
        files = [paths] if isinstance(paths, str) else list(paths)
        folder = folder_of_cache(self.cache_folder)
        # The last token is a label only. Without a Trainer nobody else need be there.
        chats = tokenized_chats(files, tokenizer, self.sequence_length + 1, folder, Ranks(alone=self.trainer is None))
        rank_zero_info(printable(f"{', '.join(files)}: {chats.report}"))
        return chats

    def _rows(self, samples: Samples, what: str) -> tuple[Dataset[dict[str, Tensor]], EpochOrder]:
        """Return rows of samples, and their order."""
        if not self.packing:
            accumulated = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
            group_size = self.rows_of_rank * self.data_rank.num_ranks * accumulated
            dataset = PaddedRows(samples, self.pad_to_multiple_of, self._padding_id)
            return dataset, GroupedOrder(samples.lengths, group_size)
        order = PackedOrder(samples.lengths, self.sequence_length)
        padding = 1 - sum(samples.lengths) / (max(1, len(order)) * self.sequence_length)
        rank_zero_info(f"{what}: {len(samples)} samples in {len(order)} rows, of which {padding:.1%} is padding")
        return PackedRows(samples, self.sequence_length, self._padding_id), order
