"""Plain text files as byte tokens: no tokenizer, no download, vocabulary 256."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from lightning_d9d.datamodules.rows import Loader, RowsDataModule
from lightning_d9d.errors import ConfigError, printable, reason
from lightning_d9d.generation.sources import BYTES
from lightning_d9d.log import logger

END_OF_FILE = b"\0"  # closes every file; a NUL byte never occurs in text
STDLIB_FOLDERS_LEFT_OUT = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test"})


class ByteWindows(Dataset[dict[str, Tensor]]):
    """Consecutive windows of `sequence_length` bytes from one text, without overlap.

    Args:
        tokens: The text, `[num_bytes]` uint8. The dataset keeps this tensor, so that loader workers share its memory.
        sequence_length: Bytes in a window.
        labels: Whether an item has labels.

    Item `i` holds `input_ids` and `labels`, `[sequence_length]` int64. `labels` are the bytes one place further on. So
    every byte of the text but the first is predicted once, up to the end of the last whole window.
    """

    def __init__(self, tokens: Tensor, sequence_length: int, labels: bool = True) -> None:
        self.tokens = tokens
        self.sequence_length = sequence_length
        self.labels = labels

    def __len__(self) -> int:
        return max(0, len(self.tokens) - 1) // self.sequence_length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        start = index * self.sequence_length
        window = self.tokens[start : start + self.sequence_length + 1].long()
        return {"input_ids": window[:-1]} | ({"labels": window[1:]} if self.labels else {})


class ByteTextDataModule(RowsDataModule):
    """Text files as byte tokens, with a part held out for validation, test and predict.

    The files are sorted by a hash of their paths. This order is the same on every machine and mixes the folders. The
    last `validation_fraction` of the bytes is held out (at most one file lies on both sides). Training windows are
    shuffled by `seed` and epoch, and every data rank reads its own. Under `D9DStrategy` a resumed run continues with
    the same batch as an uninterrupted one.

    Args:
        directory: Folder to read; default: the sources of Python's own standard library, without its tests.
        pattern: Glob pattern of the files in `directory`.
        sequence_length: Bytes in a window.
        batch_size: Windows in a batch of one data rank; 16 by default.
        global_batch_size: Windows of an optimizer step, on all ranks and in all accumulated batches, in place of
            `batch_size`. Evaluation has batches of the same size.
        validation_fraction: Share of the bytes that is held out, between 0 and 1.
        seed: Seed of the shuffling.
        num_workers: Loader processes of each rank; 0 reads in the training process.

    Raises:
        ConfigError: A value is out of range, or there is too little text for one batch on every data rank.
    """

    tokenizer = BYTES

    def __init__(
        self,
        directory: str | None = None,
        pattern: str = "**/*.py",
        sequence_length: int = 256,
        batch_size: int | None = None,
        validation_fraction: float = 0.05,
        seed: int = 0,
        num_workers: int = 0,
        global_batch_size: int | None = None,
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            validation_fraction=validation_fraction,
            seed=seed,
            num_workers=num_workers,
        )
        self.directory = directory
        self.pattern = pattern
        self.train_tokens: Tensor | None = None
        """The training text, `[num_bytes]` uint8, after `setup`."""
        self.validation_tokens: Tensor | None = None
        """The held-out text, `[num_bytes]` uint8, after `setup`."""

    def setup(self, stage: str | None = None) -> None:
        """Read the files, once; every rank reads all of them. Collective in a Trainer."""
        if self.train_tokens is not None:
            return
        with self._on_all_ranks():
            text = read_text(text_files(self.directory, self.pattern))
            if not len(text):
                raise ConfigError(
                    f"directory={self.directory!r} and pattern={self.pattern!r} of ByteTextDataModule match no "
                    f"readable UTF-8 text in {source_directory(self.directory)}; correct the path or the pattern (e.g. "
                    "'**/*.txt')."
                )
        num_training = len(text) - int(len(text) * self.validation_fraction)
        self.train_tokens, self.validation_tokens = text[:num_training], text[num_training:]

    @property
    def unigram_entropy(self) -> float:
        """Nats per byte of the training text: the loss of a model that knows only how often each byte occurs."""
        return unigram_entropy(self._required(self.train_tokens))

    def train_dataloader(self) -> Loader:
        """Return this data rank's training windows; an incomplete last batch is left out."""
        windows = ByteWindows(self._required(self.train_tokens), self.sequence_length)
        rank, num_ranks = self.data_rank
        sampler = DistributedSampler(windows, num_ranks, rank, seed=self.seed, drop_last=True)
        return self._training_loader(windows, sampler)

    def val_dataloader(self) -> Loader:
        """Return this data rank's held-out windows in one mixed order, so `limit_val_batches` takes a fair sample."""
        windows = ByteWindows(self._required(self.validation_tokens), self.sequence_length)
        order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(self.seed))
        return self._held_out_loader(windows, order.tolist())

    def predict_dataloader(self) -> Loader:
        """Return this data rank's held-out windows without labels, in the order of the text."""
        windows = ByteWindows(self._required(self.validation_tokens), self.sequence_length, labels=False)
        return self._held_out_loader(windows, range(len(windows)))


def source_directory(directory: str | None) -> Path:
    """Return the folder to read: `directory`, or that of Python's standard library."""
    return Path(directory).expanduser() if directory else Path(sysconfig.get_path("stdlib"))


def text_files(directory: str | None, pattern: str) -> list[Path]:
    """Return the matching files, sorted by a hash of their paths relative to the directory."""
    root = source_directory(directory)
    left_out = frozenset() if directory else STDLIB_FOLDERS_LEFT_OUT
    paths = (path.relative_to(root) for path in root.glob(pattern) if path.is_file())
    chosen = [path for path in paths if not left_out.intersection(path.parts)]
    return [root / path for path in sorted(chosen, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest())]


def read_text(files: Iterable[Path]) -> Tensor:
    """Return all readable files one after the other, each closed by a NUL byte, `[num_bytes]` uint8."""
    text = bytearray()
    for path in files:
        try:
            content = path.read_bytes()
            content.decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            logger.warning("left out %s: %s", printable(str(path)), reason(error))
            continue
        text += content + END_OF_FILE
    return torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)


def unigram_entropy(tokens: Tensor) -> float:
    """Return the entropy of single-token frequencies in `tokens` (`[num_tokens]` integers), in nats per token."""
    counts = torch.bincount(tokens, minlength=256).double()
    return torch.special.entr(counts / counts.sum()).sum().item()
