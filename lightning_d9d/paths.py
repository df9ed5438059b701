"""Paths that a user names: whether they exist, and which one was meant."""

from __future__ import annotations

import os
from contextlib import suppress
from errno import EACCES, EISDIR, ENOTDIR
from pathlib import Path
from typing import Protocol, runtime_checkable

from lightning_d9d.errors import ConfigError, did_you_mean, reason


@runtime_checkable
class NamesPaths(Protocol):
    """A model, data module or callback that the command line asks for missing paths before a run begins."""

    def check_paths(self, *, resumes: bool) -> None:
        """Raise `ConfigError` if a path that the run will read does not exist. Local.

        Args:
            resumes: Whether the run begins with a checkpoint.
        """
        ...


def check_named(*owners: object, resumes: bool) -> None:
    """Refuse a missing path that a model, data module or callback names; see `NamesPaths`. Local.

    Args:
        owners: Any objects; only those that name paths are asked.
        resumes: Whether the run begins with a checkpoint.

    Raises:
        ConfigError: A path does not exist.
    """
    for each in owners:
        if isinstance(each, NamesPaths):
            each.check_paths(resumes=resumes)


def missing(path: str) -> str:
    """Return a message that a path does not exist, with the nearest name in its folder."""
    return path + "".join(_missing(path))


def _missing(path: str) -> tuple[str, str]:
    """Return that a path, which comes before, does not exist; and the nearest name."""
    folder, name = os.path.split(path)
    if os.path.isdir(folder or "."):
        return " does not exist", did_you_mean(name, os.listdir(folder or "."))
    above, name = os.path.split(folder)
    nearest = did_you_mean(name, os.listdir(above or ".")) if os.path.isdir(above or ".") else ""
    return " does not exist, nor does its folder", nearest


def is_path(name: str) -> bool:
    """Return whether a name cannot be on Hugging Face's hub, or its first part is a folder here."""
    folder, _, rest = name.partition("/")
    return name.startswith((".", "~")) or "/" in rest or (bool(rest) and os.path.isdir(folder)) or not folder


def check_directory(setting: str, path: str, remedy: str) -> None:
    """Refuse a path of weights or a tokenizer that does not exist; URLs are not checked. Local.

    Args:
        setting: The name of the setting.
        path: Its value.
        remedy: What to give.

    Raises:
        ConfigError: The path does not exist.
    """
    if "://" not in path and not os.path.exists(path):
        what, nearest = _missing(path)
        raise ConfigError(f"{setting}={path!r}{what}; {remedy}{nearest}")


def make_folder_of(path: str | Path) -> None:
    """Make the folder of a file that is written later, so that a mistake is found before the work for it. Local.

    Raises:
        ConfigError: The folder cannot be made, or the file cannot be written there.
    """
    path = Path(path)
    folder = path.parent
    try:
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
        is_writable = os.access(path if path.exists() else folder, os.W_OK)
        if problem := ENOTDIR if not folder.is_dir() else EISDIR if path.is_dir() else 0 if is_writable else EACCES:
            raise OSError(problem, os.strerror(problem))
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {reason(error)}; give another file") from error
