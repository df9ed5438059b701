"""Texts that are tokenized to files when training begins, with the code of `lightning-d9d prepare-data`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from lightning_d9d.data.cache import Progress, digest_of_files, folder_of_cache, made_once
from lightning_d9d.data.documents import DocumentReader
from lightning_d9d.data.processes import num_processes_here
from lightning_d9d.data.records import has_records
from lightning_d9d.data.token_files import TokenFile
from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.prepare import Encoder, Settings, description, prepare


class Texts:
    """Makes token files of texts, each once for all ranks and later runs.

    Args:
        tokenizer: As for `Encoder`.
        column: The field or column with the text; None for "text".
        cache_folder: As for `folder_of_cache`.
    """

    def __init__(self, tokenizer: str, column: str | None, cache_folder: str | None) -> None:
        self._column = column
        self._settings = Settings(DocumentReader(column or "text"), tokenizer, ends=True, begins=False)
        self._folder = folder_of_cache(cache_folder)
        self._read: list[Path] = []

    def prepared(self, sources: Sequence[Path], ranks: Ranks) -> Path:
        """Return the token file of texts. Collective over `ranks`; raises the errors of `prepare` and `made_once`."""
        self._read += sources
        paths = [str(path) for path in sources]
        return made_once(self._folder, partial(self._name, paths), partial(self._make, paths), ranks)

    def check_used(self) -> None:
        """Check that the settings had an effect.

        Raises:
            ConfigError: No text was read, or a column was named and no file has columns.
        """
        if not self._read:
            raise ConfigError(
                f"the tokenizer {self._settings.tokenizer!r} has no effect: all files have tokens; leave it out"
            )
        if self._column is not None and not any(map(has_records, self._read)):
            raise ConfigError(f"column={self._column!r} has no effect: none of the files has fields; leave it out")

    def _name(self, paths: Sequence[str], tell: Progress) -> str:
        Encoder(self._settings.tokenizer)  # refuses what cannot be used
        about = [description(self._settings), digest_of_files(paths, self._folder, tell)]
        return f"tokens-{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]}.bin"

    def _make(self, paths: Sequence[str], path: Path, tell: Progress) -> None:
        if path.is_file() and path.with_suffix(".json").is_file():
            try:
                TokenFile(path)
            except ConfigError as error:
                logger.warning("%s; its texts are tokenized again", error)
            else:
                return
        prepare(path, paths, self._settings, num_processes_here(), tell)
