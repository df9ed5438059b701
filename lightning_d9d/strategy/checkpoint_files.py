"""Lightning's own checkpoint files: written in one step, with clear errors for damaged ones."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import lightning as L
import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from lightning_d9d.checkpoint import check_tied_parameters, is_directory, open_directory, tied_names
from lightning_d9d.checkpoint.directory import refuse_others, what_differs
from lightning_d9d.checkpoint.torch_files import check_archive, is_archive, read_saved
from lightning_d9d.errors import StateError, StateNotFoundError, printable_arguments, reason
from lightning_d9d.mesh.agreement import MAX_NAMED, Ranks, first_of
from lightning_d9d.state.directory import make_directory, publish
from lightning_d9d.state.owner import owned
from lightning_d9d.state.regular import open_regular

UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    LookupError,
    ValueError,
    TypeError,
    AssertionError,
    AttributeError,
    ArithmeticError,
    struct.error,
    zipfile.BadZipFile,
)
"""Errors that torch raises for a file that is not a checkpoint."""


class AtomicFileIO(TorchCheckpointIO):
    """A `TorchCheckpointIO` whose files take their place in one step.

    A file is written beside its final path, flushed to the disk, and renamed at the end. If the process ends or the
    disk is full, the former content stays whole: a file, a link or a checkpoint directory. On some file systems a file
    cannot replace a directory in one step; see `publish`. Lightning itself writes to the folder of temporary files. If
    that is on another file system, the file is copied from there.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save a file. URLs are left to Lightning.

        Raises:
            StateError: The file could not be written; an earlier file is still there.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            failure = f"checkpoint {str(path)!r} cannot be saved"
            Ranks(alone=True).together(failure, lambda: _write(checkpoint, Path(path)))


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    refuse_others(path)
    make_directory(path.parent)
    with owned(path) as owner:
        with open(owner.hidden("partial"), "xb") as file:
            torch.save(checkpoint, file)
        publish(owner, overwrite=True)


def with_atomic_files(io: CheckpointIO) -> CheckpointIO:
    """Return a plugin; if it wraps Lightning's own, that one is replaced by `AtomicFileIO`."""
    if type(getattr(io, "checkpoint_io", None)) is TorchCheckpointIO:
        cast(Any, io).checkpoint_io = AtomicFileIO()
    return io


def is_checkpoint(source: str | Path) -> bool:
    """Return whether a checkpoint is there, a file or a directory. Checkpoints of Hugging Face do not count."""
    return "://" not in str(source) and (is_directory(source) or Path(source).is_file())


def never_runs_code(path: object, weights_only: bool | None) -> bool | None:
    """Return `weights_only` for Lightning's loading: a file from http also runs code only if the user said so.

    Otherwise Lightning changes None to False for http, and passes None to torch for other files, where it means True.
    """
    is_from_http = isinstance(path, str | Path) and str(path).startswith("http")  # as Lightning asks
    return True if weights_only is None and is_from_http else weights_only


def unreadable(path: str | Path, error: BaseException) -> StateError:
    """Return the error of a checkpoint file that cannot be read.

    Its cause, which a traceback also shows, is made printable.
    """
    error.args = printable_arguments(error.args)
    if "://" not in str(path) and not os.path.lexists(path):
        return StateNotFoundError(f"Checkpoint file not found: {path}; give another ckpt_path")
    if (Path(path) / "config.json").is_file():
        return StateError(
            f"checkpoint {str(path)!r} is a Hugging Face directory: leave ckpt_path out, and start from its weights "
            f"with Qwen3MoePretraining(preset={str(path)!r}, pretrained={str(path)!r})"
        )
    if Path(path).is_dir():
        found = sorted(each.name for each in Path(path).iterdir() if is_directory(each) or each.suffix == ".ckpt")
        what = f"no checkpoint, but {', '.join(found[:MAX_NAMED])} in it may be" if found else "none, or incomplete"
        return StateError(
            f"checkpoint {str(path)!r} is a directory without values.pt: it is {what}; give another ckpt_path"
        )
    if named := re.search(r"GLOBAL (\S+)|add_safe_globals\(\[(\S+)\]\)", str(error)):
        return StateError(
            f"checkpoint {str(path)!r} holds an object of {named[1] or named[2]}, and loading it could run code. "
            "If you trust the file, pass weights_only=False; in what you save, keep numbers, texts and tensors"
        )
    why = (reason(error).splitlines() or [type(error).__name__])[0]
    return StateError(
        f"checkpoint {str(path)!r} cannot be read ({why}): it is damaged, incomplete or no Lightning checkpoint; "
        "give another ckpt_path"
    )


def read_checkpoint(
    read: Callable[[], dict[str, Any]], path: str | Path, weights_only: bool | None = True
) -> dict[str, Any]:
    """Read a checkpoint file, and return the result of `read`.

    Args:
        read: Function that reads the file.
        path: The file.
        weights_only: As for `check_file`.

    Raises:
        StateError: The file is damaged, or Lightning did not write it.
    """
    check_file(path, weights_only)
    try:
        checkpoint = read()
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    state = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    if not isinstance(state, Mapping) or not all(isinstance(name, str) for name in state):
        raise StateError(
            f"checkpoint {str(path)!r} has no 'state_dict' of names and tensors: Lightning did not write it; give "
            "another one"
        )
    return checkpoint


def read_value(path: Any, name: str) -> Any:
    """Return a value of a checkpoint, file or directory; None if it has no such name, or is unreadable. Not collective.

    Raises:
        StateError: A directory is damaged.
    """
    if not isinstance(path, str | Path):
        return None
    if is_directory(path):
        return open_directory(path, alone=True).values.get(name)
    try:
        check_file(path)
        content = mapped(path)
    except UNREADABLE:
        return None
    return content.get(name) if isinstance(content, dict) else None


def mapped(path: str | Path) -> Any:
    """Return the content of a file, without running code; tensors are read only when used, and not held twice."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def check_file(path: object, weights_only: bool | None = True) -> None:
    """Check a file before torch reads it; files under URLs are not checked. Not collective.

    Torch writes checksums into its files but does not compare them: flipped bits would become wrong weights. It also
    does not check whether parts are compressed, or whether tensors are as long as they claim.

    Args:
        path: The file, or a link to it.
        weights_only: If False, the file may run code, so the names that it imports are not checked.

    Raises:
        StateError: The file is damaged, foreign, not a regular file, or would join a process group.
    """
    if not isinstance(path, str | Path) or "://" in str(path):
        return
    try:
        with open_regular(path, follow_links=True) as file:
            if is_archive(file):
                check_archive(file)
                _check_sums(file)
            if weights_only is not False:
                read_saved(file, old_format=True)
    except UNREADABLE as error:
        raise unreadable(path, error) from error


def _check_sums(file: BinaryIO) -> None:
    if torch.serialization.get_crc32_options():
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise StateError(f"the checksum of its part {damaged!r} is wrong")


def load_weights(module: L.LightningModule, state: Mapping[str, Any], strict: bool, path: str | Path) -> None:
    """Load a checkpoint's weights. Collective.

    Raises:
        StateError: The weights belong to another model: names, shapes or tied parameters differ.
    """
    Ranks().together(
        f"checkpoint {str(path)!r} cannot be loaded", lambda: check_tied_parameters(tied_names(module), state)
    )
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        ours = {k: list(v.shape) for k, v in module.state_dict().items() if isinstance(v, Tensor)}
        theirs = {k: list(v.shape) for k, v in state.items() if isinstance(v, Tensor)}
        misfits = [name for name in ours if name in theirs and ours[name] != theirs[name]]
        missing = [name for name in ours if name not in theirs]
        unexpected = [name for name in theirs if name not in ours]
        differences = [
            *(f"{name} has shape {theirs[name]} in the file, {ours[name]} in the model" for name in misfits),
            *(f"{name} is not in the file" for name in missing),
            *(f"{name} is not in the model" for name in unexpected),
        ]
        raise StateError(
            f"checkpoint {str(path)!r} {what_differs(misfits, missing + unexpected)}: "
            f"{first_of(differences or [str(error)])}. Build the module as it was when it was saved, or give another "
            "ckpt_path"
        ) from error
