"""Token files as rows for training: mixtures of texts, documents with borders, any size."""

from __future__ import annotations

import glob
import json
from collections import Counter
from collections.abc import Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import torch
from torch.utils.data import ConcatDataset

from lightning_d9d.data.epoch_sampler import EpochSampler
from lightning_d9d.data.litdata_rows import LitDataRows, is_litdata
from lightning_d9d.data.permutation import PermutedOrder
from lightning_d9d.data.records import has_records
from lightning_d9d.data.token_files import BorderToken, TokenFile, bin_path
from lightning_d9d.data.token_rows import Mixture, Span, TokenRows
from lightning_d9d.datamodules.rows import Loader, RowsDataModule
from lightning_d9d.datamodules.text import unigram_entropy
from lightning_d9d.datamodules.texts import Texts
from lightning_d9d.errors import ConfigError, printable
from lightning_d9d.log import logger
from lightning_d9d.mesh.agreement import Ranks

_TOKENS = (".bin", ".idx")
_TEXTS = (".txt", ".md")
"""Suffixes of texts, besides those of records. With a tokenizer, all files that are not token files are texts."""
_COUNTED_TOKENS = 1 << 22
Files = str | list[str] | dict[str, float]


class TokenDataModule(RowsDataModule):
    """Token files, with a part held out for validation and test.

    The module reads Megatron's `.bin` with `.idx`, nanoGPT's `.bin` (uint16 without a header) and llm.c's `.bin`, as
    `lightning-d9d prepare-data` and other programs write them. The files are mapped into memory, and may be larger than
    it. With a tokenizer it also reads texts: JSON lines, Parquet, Arrow, directories that `datasets` saved, and UTF-8
    files. One rank of a machine makes a token file of them, in several processes, as `prepare-data` does. The token
    file is kept in `cache_folder`, where later runs find it by the content of the texts, the tokenizer and `column`.

    Documents follow each other in rows of `sequence_length`. With borders, a row's `document_ids` separate them, and
    the last token of each has no label. Training rows are shuffled by `seed` and epoch. The order takes no memory, and
    is the same for any number of workers. With `global_batch_size`, the rows of a step are the same for any number of
    data ranks, too. Under `D9DStrategy` a resumed run continues after the last row that was trained on, also with
    another number of workers or data ranks.

    Args:
        files: A path; or several paths, which make one text; or texts with the weight of each. A path may be a pattern
            such as `data/part-*.bin`, and its files are one text. A folder that litdata has written for its
            `TokensLoader` is a separate text. With weights an epoch has as many rows as all texts have together, in
            these proportions: texts with more weight than rows are repeated.
        sequence_length: Tokens in a row.
        batch_size: Rows in a batch of one data rank; 16 by default.
        global_batch_size: Rows of an optimizer step, on all ranks and in all accumulated batches, in place of
            `batch_size`.
        validation_fraction: Share of each text that is held out, between 0 and 1: whole documents at the end of its
            last files. By default 0.01, or nothing if there are `validation_files`.
        validation_files: Files for validation in place of a share; every row of them counts once.
        borders: Whether documents are kept apart.
        first_token: Id of the token that begins each document, for files that do not store the borders of documents.
        last_token: Id of the token that ends each document in such files.
        seed: Seed of the order.
        num_workers: Loader processes of each rank; 0 reads in the training process.
        tokenizer: Tokenizer of texts: a directory or a name that `transformers` knows, or "bytes". Its end-of-text
            token ends each document.
        column: The field or column with the text, "text" by default.
        cache_folder: Folder that keeps the tokens of texts. By default the folder that the variable
            `LIGHTNING_D9D_CACHE` names, or `~/.cache/lightning_d9d`.

    Raises:
        ConfigError: A value is out of range, or a file is missing, damaged or of another tokenizer. Or there is too
            little text for one batch on every data rank.
    """

    def __init__(
        self,
        files: Files,
        sequence_length: int = 1024,
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        validation_fraction: float | None = None,
        validation_files: str | list[str] | None = None,
        borders: bool = True,
        first_token: int | None = None,
        last_token: int | None = None,
        seed: int = 0,
        num_workers: int = 0,
        tokenizer: str | None = None,
        column: str | None = None,
        cache_folder: str | None = None,
    ) -> None:
        super().__init__(
            sequence_length=sequence_length,
            batch_size=batch_size,
            global_batch_size=global_batch_size,
            validation_fraction=validation_fraction,
            default_fraction=0.01,
            validation_files=validation_files,
            seed=seed,
            num_workers=num_workers,
        )
        if first_token is not None and last_token is not None:
            raise ConfigError(
                f"first_token={first_token} and last_token={last_token} of TokenDataModule both mark borders of "
                "documents; set one"
            )
        token = last_token if first_token is None else first_token
        if token is not None and not borders:
            raise ConfigError(f"borders=False of TokenDataModule does not use the token {token}; leave one of them out")
        if tokenizer is None and (column is not None or cache_folder is not None):
            raise ConfigError(
                f"column={column!r} and cache_folder={cache_folder!r} of TokenDataModule are for texts, which need a "
                "tokenizer; name one"
            )
        self.files = files
        self.tokenizer = tokenizer
        self._texts = None if tokenizer is None else Texts(tokenizer, column, cache_folder)
        self.validation_files = validation_files
        self.borders = borders
        self._border = None if token is None else BorderToken(token, is_first=first_token is not None)
        self._prepared: dict[tuple[Path, ...], Path] = {}
        """The files of tokens of texts, of each part of the mixture."""
        self._training: Mixture | None = None
        self._held_out: list[TokenRows | LitDataRows] = []

    def setup(self, stage: str | None = None) -> None:
        """Open the files, once, and log their contents. Collective in a Trainer."""
        if self._training is not None:
            return
        if self._texts is not None:
            self._prepare(self._texts)
        with self._on_all_ranks():
            self._open_all()

    def _parts(self) -> list[list[str]]:
        """Return paths and patterns of each part of the mixture."""
        paths = [self.files] if isinstance(self.files, str) else list(self.files)
        is_mixture = isinstance(self.files, dict) or any(map(is_litdata, paths))
        return [[path] for path in paths] if is_mixture else [paths]

    def _held_out_paths(self) -> list[str]:
        return [self.validation_files] if isinstance(self.validation_files, str) else self.validation_files or []

    def _prepare(self, texts: Texts) -> None:
        """Make token files of all texts. Collective in a Trainer."""
        with self._on_all_ranks():
            found = [self._found(part, "files") for part in self._parts() if not any(map(is_litdata, part))]
            if self.validation_files is not None:
                found.append(self._found(self._held_out_paths(), "validation_files"))
        for paths in found:
            if sources := self._texts_of(paths):
                self._prepared[tuple(sources)] = texts.prepared(sources, Ranks(alone=self.trainer is None))

    def _open_all(self) -> None:
        training: list[TokenRows | LitDataRows] = []
        held_out_rows: list[TokenRows | LitDataRows] = []
        for part in self._parts():
            if any(map(is_litdata, part)):
                rows, held_out_part = self._open_litdata(part[0])
                training.append(rows)
                held_out_rows.append(held_out_part)
                continue
            name, spans = self._open(part, "files")
            if self.validation_files is None:
                spans, held_out = _split(spans, self.validation_fraction)
                held_out_rows.append(self._rows(f"the held-out part of {name}", held_out))
            training.append(self._rows(name, spans))
        if self.validation_files is not None:
            held_out_rows.append(self._rows(*self._open(self._held_out_paths(), "validation_files")))
        weights = list(self.files.values()) if isinstance(self.files, dict) else None
        self._training, self._held_out = Mixture(training, weights), held_out_rows
        if self._texts is not None:
            self._texts.check_used()
        self._describe(training)

    @cached_property
    def unigram_entropy(self) -> float:
        """Nats per token of the training text: the loss of a model that knows only how often each token occurs.

        At most four million tokens are counted, in rows that are spread evenly over the text.
        """
        rows = self._required(self._training)
        number = min(len(rows), max(1, _COUNTED_TOKENS // self.sequence_length))
        return unigram_entropy(torch.cat([rows[index * len(rows) // number]["input_ids"] for index in range(number)]))

    def train_dataloader(self) -> Loader:
        """Return this data rank's training rows; an incomplete last batch is left out."""
        rows, (rank, num_ranks) = self._required(self._training), self.data_rank
        return self._training_loader(rows, EpochSampler(PermutedOrder(len(rows)), num_ranks, rank, self.seed))

    def val_dataloader(self) -> Loader:
        """Return this data rank's held-out rows in one mixed order, so `limit_val_batches` takes a fair sample."""
        self._required(self._training)
        rows = ConcatDataset(self._held_out)
        return self._held_out_loader(rows, PermutedOrder(len(rows))(self.seed, epoch=0))

    def _found(self, paths: Sequence[str], setting: str) -> list[Path]:
        """Return the files that paths and patterns name, sorted by name."""
        if not paths:
            raise ConfigError(f"{setting} of TokenDataModule is empty; name a file of tokens")
        found = [path for each in paths for path in _matching(each, setting, self._texts is not None)]
        if twice := [str(path) for path, count in Counter(found).items() if count > 1]:
            raise ConfigError(f"{setting} of TokenDataModule names {', '.join(twice)} more than once; leave one out")
        return found

    def _texts_of(self, paths: Sequence[Path]) -> list[Path]:
        return [path for path in paths if self._is_text(path)]

    def _open(self, paths: Sequence[str], setting: str) -> tuple[str, list[Span]]:
        """Open the files that paths and patterns name; the token file of texts takes the place of the first text."""
        found, spans = self._found(paths, setting), []
        if texts := self._texts_of(found):
            place = found.index(texts[0])
            found = [path for path in found if path not in texts]
            found.insert(place, self._prepared[tuple(texts)])
        for path in found:
            has_index = path.with_suffix(".idx").is_file()
            file = TokenFile(path, None if has_index else self._border)
            self._check_tokenizer(path)
            spans.append(Span(file, 0, len(file)))
        if self._border is not None and not any(span.file.border for span in spans):
            raise ConfigError(
                f"the token {self._border.token} has no effect: all of {', '.join(paths)} store where documents begin; "
                "leave first_token and last_token out"
            )
        return ", ".join(paths), spans

    def _is_text(self, path: Path) -> bool:
        """Return whether a file or directory has texts instead of tokens."""
        is_text = has_records(path) or path.suffix in _TEXTS or (self._texts is not None and path.suffix not in _TOKENS)
        if is_text and self._texts is None:
            raise ConfigError(
                f"{path} has texts; name their tokenizer (tokenizer of TokenDataModule), or prepare them with "
                "lightning-d9d prepare-data"
            )
        return is_text

    def _open_litdata(self, folder: str) -> tuple[LitDataRows, LitDataRows]:
        """Open a folder of litdata; its last blocks are held out unless there are validation files."""
        if self.borders and self._border is None:
            raise ConfigError(
                f"{folder} does not store where documents begin. Name the token that ends or begins each (last_token "
                "or first_token), or let tokens see other documents with borders=False"
            )
        about = (folder, self.sequence_length, self._border, self._vocab_size)
        num_blocks = len(LitDataRows(*about))
        cut = num_blocks - (0 if self.validation_files else int(num_blocks * self.validation_fraction))
        return LitDataRows(*about, blocks=range(cut)), LitDataRows(*about, blocks=range(cut, num_blocks))

    def _rows(self, name: str, spans: Sequence[Span]) -> TokenRows:
        return TokenRows(name, spans, self.sequence_length, self.borders, self._vocab_size)

    def _check_tokenizer(self, path: Path) -> None:
        """Compare the tokenizer that `prepare-data` has recorded with the model."""
        notes, vocab_size = path.with_suffix(".json"), self._vocab_size
        if vocab_size is None or not notes.is_file():
            return
        try:
            about = json.loads(notes.read_text(encoding="utf-8"))
            num_ids, tokenizer = int(about["vocab_size"]), str(about["tokenizer"])
        except (OSError, ValueError, KeyError, TypeError):
            return  # somebody else's file
        if num_ids > vocab_size:
            raise ConfigError(
                f"{path} was made by the tokenizer {tokenizer!r}, whose ids go up to {num_ids - 1}, but the model has "
                f"vocab_size={vocab_size}. Prepare the data with the model's tokenizer, or raise vocab_size"
            )

    def _describe(self, texts: Sequence[TokenRows | LitDataRows]) -> None:
        if self.trainer is not None and not self.trainer.is_global_zero:
            return
        shares = dict(zip(self._required(self._training).texts, self._required(self._training).shares, strict=True))
        for rows in texts:
            files = {id(span.file): span.file for span in rows.spans} if isinstance(rows, TokenRows) else {}
            num_documents = num_split = num_empty = 0
            for lengths in chain.from_iterable(file.document_lengths() for file in files.values()):
                num_documents += len(lengths)
                num_split += int((lengths > self.sequence_length).sum())
                num_empty += int((lengths == 0).sum())
            logger.info(
                "%s: %d training rows, %d in an epoch; %d tokens at ends of files left out; %d documents in its .idx, "
                "%d longer than a row, which are split, %d empty",
                *(printable(rows.name), len(rows), shares.get(rows, 0), rows.num_left_out),
                *(num_documents, num_split, num_empty),
            )


def _matching(path: str, setting: str, has_tokenizer: bool) -> list[Path]:
    """Return the files that a path or a pattern names; without a tokenizer, only token files of a pattern."""
    given = Path(path).expanduser()
    if not glob.has_magic(path):
        is_text = has_records(given) or (given.suffix not in _TOKENS and given.is_file())
        return [given if is_text else bin_path(path)]
    found = sorted(map(Path, glob.glob(str(given), recursive=True)))
    chosen = [
        bin_path(each) if each.suffix in _TOKENS else each for each in found if each.is_file() or has_records(each)
    ]
    chosen = [each for each in dict.fromkeys(chosen) if has_tokenizer or each.suffix in _TOKENS]
    if not chosen:
        raise ConfigError(f"{setting} of TokenDataModule: no .bin file matches {path!r}; correct the path")
    return chosen


def _split(spans: Sequence[Span], fraction: float) -> tuple[list[Span], list[Span]]:
    """Divide a text into a part for training and a part at its end for validation, at the beginning of a document."""
    left = int(sum(span.stop - span.start for span in spans) * (1 - fraction))
    training, held_out = [], []
    for span in spans:
        border = span.stop if left >= span.stop else span.file.next_document(max(0, left))
        training.append(Span(span.file, 0, border))
        held_out.append(Span(span.file, border, span.stop))
        left -= span.stop
    return [span for span in training if span.stop], [span for span in held_out if span.stop > span.start]
