"""Chats for fine-tuning: rows of tokens of which those of the assistant count."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_info
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d.data.chat_files import read_chats
from lightning_d9d.data.chat_masks import ChatReport, ChatTokenizer, ChatTokens
from lightning_d9d.data.epoch_sampler import EpochSampler
from lightning_d9d.data.packing import GroupedOrder, PackedOrder
from lightning_d9d.data.samples import PackedRows, PaddedRows, Samples
from lightning_d9d.datamodules.batch_size import check_sizes, rows_of_rank
from lightning_d9d.errors import ConfigError, printable
from lightning_d9d.generation.sources import pretrained_tokenizer

_OWNER = "ChatDataModule"
_DEFAULT_FRACTION = 0.05


class ChatDataModule(L.LightningDataModule):
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

    Every rank reads all files when training begins, and keeps all tokens, 5 bytes each. On a GPU batches come from
    pinned memory, so that their copies do not make the host wait.

    Args:
        train: Path of a file or several: JSON lines (`.jsonl`, `.json`), Parquet (`.parquet`), or a directory that
            `datasets` saved. Relative to the working directory.
        tokenizer: A directory or a name that `transformers` knows, whose tokenizer has a chat template; or a tokenizer.
        validation: As `train`. Default: a part of `train` is held out.
        sequence_length: Tokens of a packed row, and most tokens of a sample.
        batch_size: Rows in a batch of one data rank; 8 by default.
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
        super().__init__()
        multiple = 1 if pad_to_multiple_of is None else pad_to_multiple_of
        sizes = {"sequence_length": sequence_length, "pad_to_multiple_of": multiple}
        check_sizes(_OWNER, batch_size, global_batch_size, num_workers, **sizes)
        if packing and pad_to_multiple_of is not None:
            raise ConfigError(
                f"pad_to_multiple_of={pad_to_multiple_of} does nothing with packing=True, as each row has "
                f"sequence_length={sequence_length} tokens; leave it out"
            )
        if validation is not None and validation_fraction is not None:
            raise ConfigError(
                f"validation={validation!r} and validation_fraction={validation_fraction} both say what is held out; "
                "give one"
            )
        fraction = _DEFAULT_FRACTION if validation_fraction is None else validation_fraction
        if not 0 < fraction < 1:
            raise ConfigError(
                f"validation_fraction={fraction} of {_OWNER} must lie between 0 and 1, e.g. {_DEFAULT_FRACTION}."
            )
        self.train = train
        self.tokenizer = tokenizer
        self.validation = validation
        self.sequence_length = sequence_length
        self.batch_size = 8 if batch_size is None and global_batch_size is None else batch_size
        self.global_batch_size = global_batch_size
        self.packing = packing
        self.pad_to_multiple_of = multiple
        self.validation_fraction = fraction
        self.seed = seed
        self.num_workers = num_workers
        self.train_samples: Samples | None = None
        """The samples that are trained on, after `setup`."""
        self.validation_samples: Samples | None = None
        """The held-out samples, after `setup`."""
        self._padding_id = 0

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

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """This data rank's rows for training; an incomplete last batch is left out."""
        return self._dataloader(self._require(self.train_samples), "training", shuffle=True)

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """This data rank's held-out rows, in one order."""
        return self._dataloader(self._require(self.validation_samples), "held-out", shuffle=False)

    def test_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return `val_dataloader()`."""
        return self.val_dataloader()

    def predict_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Return `val_dataloader()`."""
        return self.val_dataloader()

    def _tokenized(self, paths: str | Sequence[str], tokenizer: Any) -> list[list[ChatTokens]]:
        """Return the samples of each chat."""
        files = [paths] if isinstance(paths, str) else list(paths)
        tokenize = ChatTokenizer(tokenizer, self.sequence_length + 1)  # the last token is a label only
        chats = [tokenize(chat, place) for place, chat in read_chats(files)]
        if not chats:
            raise ConfigError(f"{', '.join(map(str, files))} of {_OWNER} has no chat; correct the path, or give chats")
        _say(", ".join(map(str, files)), tokenize.finish())
        return chats

    def _dataloader(self, samples: Samples, what: str, shuffle: bool) -> DataLoader[dict[str, Tensor]]:
        # Not left to Lightning, whose sampler takes its seed from the job instead of from this data module.
        ranks = (self.trainer and self.trainer.distributed_sampler_kwargs) or {"num_replicas": 1, "rank": 0}
        rows, num_ranks = self._rows_of_rank, ranks["num_replicas"]
        if self.packing:
            order = PackedOrder(samples.lengths, self.sequence_length)
            dataset = PackedRows(samples, self.sequence_length, self._padding_id)
        else:
            accumulated = 1 if self.trainer is None else self.trainer.accumulate_grad_batches
            order = GroupedOrder(samples.lengths, self.global_batch_size or rows * num_ranks * accumulated)
            dataset = PaddedRows(samples, self.pad_to_multiple_of, self._padding_id)
        num_needed = num_ranks * (rows if shuffle else 1)
        if len(order) < num_needed:
            raise ConfigError(
                f"The {what} chats make {len(order)} rows, but {num_needed} are needed (batch_size={rows}, {num_ranks} "
                f"data ranks). Give more chats, lower the batch size or sequence_length={self.sequence_length}, or "
                f"change validation_fraction={self.validation_fraction}."
            )
        if self.packing:
            filled = sum(samples.lengths) / (len(order) * self.sequence_length)
            rank_zero_info(f"{what}: {len(samples)} samples in {len(order)} rows, of which {1 - filled:.1%} is padding")
        sampler = EpochSampler(order, ranks["num_replicas"], ranks["rank"], self.seed, shuffle)
        return DataLoader(
            dataset,
            batch_size=rows,
            sampler=sampler,
            drop_last=shuffle,
            num_workers=self.num_workers,
            pin_memory=self.trainer is not None and self.trainer.strategy.root_device.type == "cuda",
        )

    @property
    def _rows_of_rank(self) -> int:
        if self.global_batch_size is not None:
            return rows_of_rank(self.global_batch_size, self.trainer)
        assert self.batch_size is not None
        return self.batch_size

    def _require(self, samples: Samples | None) -> Samples:
        if samples is None:
            raise RuntimeError(f"{_OWNER} has read no chats yet: call setup() first (a Trainer does).")
        return samples


def _joined(chats: Iterable[Sequence[ChatTokens]]) -> Samples:
    return Samples(sample for chat in chats for sample in chat)


def _say(files: str, report: ChatReport) -> None:
    rank_zero_info(printable(f"{files}: {report}"))
