"""Lightning's own checkpoint files: written in one step, and what is wrong with one is named."""

from __future__ import annotations

import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from torch import Tensor

from lightning_d9d.checkpoint import check_ties, is_directory, open_directory, tied_names
from lightning_d9d.errors import StateError, StateNotFoundError
from lightning_d9d.mesh.agreement import MAX_NAMED, Ranks, first_of
from lightning_d9d.state.directory import hidden, publish, tidy

UNREADABLE = (
    OSError,
    RuntimeError,
    EOFError,
    pickle.UnpicklingError,
    LookupError,
    ValueError,
    TypeError,
    AssertionError,
    struct.error,
)
"""What torch raises for a file that is no checkpoint."""


class AtomicFileIO(TorchCheckpointIO):
    """Lightning's, but for how a file gets its name.

    It is written beside the place, flushed to the disk, and takes the place at the end: whenever the process ends or
    the disk is full, what was there before, a file, a link or a checkpoint directory, stays whole (see `publish` for
    file systems on which a file cannot take a directory's place in one step). Lightning writes to the folder of
    temporary files, from where a file is copied if that is on another file system.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Save a file. URLs are left to Lightning.

        Raises:
            StateError: It could not be written; what was there before still is.
        """
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            failure = f"checkpoint {str(path)!r} cannot be saved"
            Ranks(alone=True).together(failure, lambda: _write(checkpoint, Path(path)))


def _write(checkpoint: dict[str, Any], path: Path) -> None:
    if path.is_dir() and not path.is_symlink() and not is_directory(path):
        raise StateError("a directory with other files is there; remove it or give another path")
    path.parent.mkdir(parents=True, exist_ok=True)
    tidy(path)
    partial = hidden(path, "partial")
    try:
        with open(partial, "wb") as file:
            torch.save(checkpoint, file)
        publish(partial, path, overwrite=True)
    finally:
        with suppress(OSError):  # that of the body says more
            tidy(path)


def is_checkpoint(source: str | Path) -> bool:
    """Whether a checkpoint is there, a file or a directory; not one of Hugging Face's."""
    return "://" not in str(source) and (is_directory(source) or Path(source).is_file())


def never_runs_code(path: object, weights_only: bool | None) -> bool | None:
    """`weights_only` for Lightning's loading: what comes over http, too, runs code only if the user said so.

    Lightning turns None into False there, and leaves it to torch, where it is True, for other files.
    """
    is_from_http = isinstance(path, str | Path) and str(path).startswith("http")  # as Lightning asks
    return True if weights_only is None and is_from_http else weights_only


def unreadable(path: str | Path, error: BaseException) -> StateError:
    """The error of a checkpoint file that cannot be read."""
    if "://" not in str(path) and not os.path.lexists(path):
        return StateNotFoundError(f"Checkpoint file not found: {path}; give another ckpt_path")
    if Path(path).is_dir():
        found = sorted(each.name for each in Path(path).iterdir() if is_directory(each) or each.suffix == ".ckpt")
        what = f"no checkpoint, but {', '.join(found[:MAX_NAMED])} in it may be" if found else "none, or incomplete"
        return StateError(f"checkpoint {str(path)!r} is a directory without values.pt: it is {what}")
    if named := re.search(r"GLOBAL (\S+)|add_safe_globals\(\[(\S+)\]\)", str(error)):
        return StateError(
            f"checkpoint {str(path)!r} holds an object of {named[1] or named[2]}, and loading it could run code. "
            "If you trust the file, pass weights_only=False; in what you save, keep numbers, texts and tensors"
        )
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    return StateError(
        f"checkpoint {str(path)!r} cannot be read ({reason}): it is damaged, incomplete or no Lightning checkpoint; "
        "give another ckpt_path"
    )


def read_checkpoint(read: Callable[[], dict[str, Any]], path: str | Path) -> dict[str, Any]:
    """What `read` returns.

    Raises:
        StateError: The file is damaged, or none that Lightning wrote.
    """
    _check_sums(path)
    try:
        checkpoint = read()
    except UNREADABLE as error:
        raise unreadable(path, error) from error
    if not isinstance(checkpoint, dict) or "state_dict" not in checkpoint:
        raise StateError(f"checkpoint {str(path)!r} has no 'state_dict': Lightning did not write it; give another one")
    return checkpoint


def read_value(path: Any, name: str) -> Any:
    """One value of a checkpoint, file or directory; None if it has none of that name, or is unreadable. Not collective.

    Raises:
        StateError: A directory is damaged.
    """
    if not isinstance(path, str | Path):
        return None
    if is_directory(path):
        return open_directory(path, alone=True).values.get(name)
    try:
        content = mapped(path)
    except UNREADABLE:
        return None
    return content.get(name) if isinstance(content, dict) else None


def mapped(path: str | Path) -> Any:
    """The content of a file, without running code; of tensors only what is used is read, and nothing held twice."""
    return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def _check_sums(path: str | Path) -> None:
    """Torch writes checksums into its files but does not look at them: flipped bits would become wrong weights."""
    if not (torch.serialization.get_crc32_options() and zipfile.is_zipfile(path)):  # the latter also: not a local file
        return
    try:
        with zipfile.ZipFile(path) as file:
            damaged = file.testzip()
    except (zipfile.BadZipFile, *UNREADABLE) as error:
        raise unreadable(path, error) from error
    if damaged is not None:
        raise unreadable(path, ValueError(f"the checksum of its part {damaged!r} is wrong"))


def load_weights(module: L.LightningModule, state: Mapping[str, Any], strict: bool, path: str | Path) -> None:
    """Load a checkpoint's weights. Collective.

    Raises:
        StateError: They are another model's: names, shapes or ties differ.
    """
    Ranks().together(f"checkpoint {str(path)!r} cannot be loaded", lambda: check_ties(tied_names(module), state))
    try:
        module.load_state_dict(state, strict=strict)
    except RuntimeError as error:
        ours = {k: list(v.shape) for k, v in module.state_dict().items() if isinstance(v, Tensor)}
        theirs = {k: list(v.shape) for k, v in state.items() if isinstance(v, Tensor)}
        both = [name for name in ours if name in theirs]
        differences = [
            *(f"{k} has shape {theirs[k]} in the file, {ours[k]} in the model" for k in both if ours[k] != theirs[k]),
            *(f"{name} is not in the file" for name in ours if name not in theirs),
            *(f"{name} is not in the model" for name in theirs if name not in ours),
        ] or [str(error)]
        raise StateError(
            f"checkpoint {str(path)!r} is of another model: {first_of(differences)}. Build the module as it was when "
            "it was saved, or give another ckpt_path"
        ) from error
