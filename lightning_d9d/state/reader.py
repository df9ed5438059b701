from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath, PureWindowsPath
from threading import Semaphore
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.state.boxes import Index, MappedBox, whole_box
from lightning_d9d.state.format import (
    ALL_DTYPE_NAMES,
    DTYPE_NAMES,
    INDEX_FILE,
    ROWS_INDEX_FILE,
    WEIGHTS_FILE,
    SafetensorsFile,
    StoredTensor,
    read_json,
    reading,
)
from lightning_d9d.state.manifest import Check, read_manifest
from lightning_d9d.state.places import Place, UrlPath, check_link, place_of
from lightning_d9d.state.progress import Progress
from lightning_d9d.state.threads import in_threads
from lightning_d9d.state.views import Spec

_MAX_OPEN_FILES = 16
_MAX_FILES = 10_000
"""Largest number of files that an index may name. Published models have some hundreds."""
_LARGE_BYTES = 2**24
"""Size of a large tensor; two tensors of this size are in memory at a time."""
_SUFFIX = ".safetensors"
Targets = Mapping[str, Sequence[tuple[MappedBox, Tensor]]]
"""Parts of each tensor in the files, and the tensors to which they are copied."""


class Checks(NamedTuple):
    """The checks of tensors in files."""

    checksums: bool = True
    """If True, compare checksums, if the files have a manifest."""
    finite: bool = False
    """If True, refuse numbers that are infinite or NaN."""
    first: bool = True
    """If True, check before the first tensor changes, which reads all tensors once more. False checks while reading."""


NO_CHECKS = Checks(checksums=False)


class _Seen:
    """A stored tensor that passes the numbers read from it to a check."""

    def __init__(self, stored: StoredTensor, check: Check) -> None:
        self.shape, self.dtype, self._stored, self._check = stored.shape, stored.dtype, stored, check

    def __getitem__(self, index: Index) -> Tensor:
        return self._stored[index]

    def copy_to(self, index: Index, target: Tensor, casts: Sequence[torch.dtype] = ()) -> None:
        self._stored.copy_to(index, target, casts, self._check.see)


class SafetensorsReader(Mapping[str, StoredTensor]):
    """The tensors of a directory with one `model.safetensors` or with the files of an index, or of one file. Local.

    `file_of` has the names of all tensors and their files. Names outside of the directory are refused. Links that lead
    out of it are refused, too, except in the cache of Hugging Face's hub. Files are opened when they are needed. As a
    mapping it has a `StoredTensor` for each name, from which slices can be read.

    Args:
        path: Path on a file system, or a URL that fsspec knows.
        only_file: Name of the only file of the directory, as for `save_tensors`; by default the files are found.

    Raises:
        StateError: A file is missing or damaged; all methods may raise it.
    """

    def __init__(self, path: str | Path | UrlPath, only_file: str | None = None) -> None:
        self._open = lru_cache(_MAX_OPEN_FILES)(SafetensorsFile)
        self._only_file = only_file
        self._left_out: set[str] = set()
        with reading(path):
            self.path = place_of(path)
            self.file_of = self._find_tensors()

    def __getitem__(self, name: str) -> StoredTensor:
        file = self._open(self.file_of[name])
        if name not in file.entries:
            raise StateError(f"{file.path}: lacks {name}, which the index puts there; fetch or export it again.")
        return file[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.file_of)

    def __len__(self) -> int:
        return len(self.file_of)

    def leave_out(self, names: Iterable[str]) -> None:
        """Hide these tensors, as if the files did not have them."""
        self.__dict__.pop("specs", None)
        for name in names:
            del self.file_of[name]
            self._left_out.add(name)

    @cached_property
    def specs(self) -> dict[str, Spec]:
        """Return shapes and dtypes of all tensors. Opens all files."""
        found = {name: Spec(self[name].shape, self[name].dtype) for name in self._in_order(self.file_of)}
        return {name: found[name] for name in self.file_of}

    def check(self, shapes: Mapping[str, tuple[int, ...]], remedy: str) -> None:
        """Open the files of these tensors; check that each is there, with the given shape and a float dtype of weights.

        Args:
            shapes: Shapes by name; other tensors are ignored.
            remedy: Remedy for a tensor of another shape, as the end of a sentence.
        """
        for name in self._in_order(shapes):
            stored, where = self[name], f"{self.file_of[name]}: {name}"
            if stored.shape != shapes[name]:
                raise StateError(f"{where} has shape {stored.shape}, but the model has {shapes[name]}; {remedy}.")
            if stored.dtype not in DTYPE_NAMES:
                legal = ", ".join(DTYPE_NAMES.values())
                raise StateError(
                    f"{where} is {ALL_DTYPE_NAMES[stored.dtype]}, not one of {legal}; use an unquantized checkpoint."
                )

    def verify(self, names: Iterable[str], checks: Checks, progress: bool = False) -> None:
        """Compare tensors with the manifest, if there is one, or search for numbers that are not finite.

        Args:
            names: Names of the tensors. Each is read whole.
            checks: The checks to make.
            progress: Whether to show a progress bar.
        """
        if (new_check := self._checking(checks)) is None:
            return
        num_bytes = {name: self[name].num_bytes for name in self._in_order(names)}

        def check(name: str) -> None:
            stored, ours = self[name], new_check(name)
            for chunk in stored.chunks():
                ours.see(chunk)
            ours.finish()

        with Progress(progress, f"checking {self.path}", sum(num_bytes.values())) as bar:
            in_threads(check, num_bytes, bar)

    def fill(self, targets: Targets, progress: bool = False, checks: Checks = NO_CHECKS) -> None:
        """Copy parts of tensors into others, cast to their dtype, in several threads.

        Tensors that are fetched or changed on their way need extra memory: that of two tensors, and of some small ones.

        Args:
            targets: Parts to copy and their targets, by name.
            progress: Whether to show a progress bar.
            checks: Checks of the tensors that are read whole, `names_of_whole`, while they are read.
        """
        new_check = self._checking(checks)
        num_bytes = {
            name: sum(target.numel() for _, target in targets[name]) * self[name].dtype.itemsize
            for name in self._in_order(targets)
        }
        two_at_a_time = Semaphore(2)

        def copy(name: str) -> None:
            stored = self[name]
            whole = self._whole(name, targets[name]) if new_check is not None else None
            with two_at_a_time if num_bytes[name] > _LARGE_BYTES else nullcontext():
                for place, (mapped, target) in enumerate(targets[name]):
                    if new_check is None or place != whole:
                        mapped.copy(stored, target)
                        continue
                    ours = new_check(name)
                    mapped.copy(_Seen(stored, ours), target)
                    ours.finish()

        with Progress(progress, f"reading {self.path}", sum(num_bytes.values())) as bar:
            in_threads(copy, num_bytes, bar)

    def names_of_whole(self, targets: Targets) -> list[str]:
        """Return the tensors that `fill` reads whole."""
        return [name for name in self._in_order(targets) if self._whole(name, targets[name]) is not None]

    def _whole(self, name: str, parts: Sequence[tuple[MappedBox, Tensor]]) -> int | None:
        """Return the index of the part that is the whole tensor."""
        box = whole_box(self[name].shape)
        return next((place for place, (mapped, _) in enumerate(parts) if mapped.box == box), None)

    def _checking(self, checks: Checks) -> Callable[[str], Check] | None:
        """Make the function that begins the check of a tensor; None if nothing is checked."""
        manifest = read_manifest(self.path) if checks.checksums and not self._is_file else None
        if manifest is None and not checks.finite:
            return None
        if lost := (manifest or {}).keys() - self.file_of.keys() - self._left_out:
            raise StateError(f"{self.path}: lacks {min(lost)}, which the manifest has; fetch or export it again.")
        return lambda name: Check(f"{self.file_of[name]}: {name}", name, self[name], manifest, checks.finite)

    def _in_order(self, names: Iterable[str]) -> list[str]:
        """Order names file by file."""
        names_in: dict[Place, list[str]] = defaultdict(list)
        for name in names:
            names_in[self.file_of[name]].append(name)
        return [name for those in names_in.values() for name in those]

    @property
    def _is_file(self) -> bool:
        return str(self.path).endswith(_SUFFIX) and not (isinstance(self.path, Path) and self.path.is_dir())

    def _find_tensors(self) -> dict[str, Place]:
        if self._is_file:
            return dict.fromkeys(self._open(self.path).entries, self.path)
        if self._only_file is not None:
            return dict.fromkeys(self._open(self.path / self._only_file).entries, self.path / self._only_file)
        if (self.path / WEIGHTS_FILE).exists():
            check_link(self.path, WEIGHTS_FILE, self.path)
            return dict.fromkeys(self._open(self.path / WEIGHTS_FILE).entries, self.path / WEIGHTS_FILE)
        index = next((p for name in (INDEX_FILE, ROWS_INDEX_FILE) if (p := self.path / name).exists()), None)
        if index is None:
            if isinstance(self.path, Path) and not self.path.exists():
                raise StateError(f"{self.path} does not exist; give the directory of a model saved as safetensors.")
            raise StateError(
                f"{self.path} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; give the directory of a model saved as "
                "safetensors."
            )
        check_link(self.path, index.name, index)
        try:
            names = {name: str(file) for name, file in read_json(index)["weight_map"].items()}
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise StateError(
                f"{index}: is not an index of safetensors files ({error!r}); fetch or export it again."
            ) from error
        files = set(names.values())
        if len(files) > _MAX_FILES:
            raise StateError(f"{index}: names {len(files)} files, but the limit is {_MAX_FILES}; export larger files.")
        for file in files:
            for path in (PurePosixPath(file), PureWindowsPath(file)):
                if path.is_absolute() or path.drive or ".." in path.parts or "\0" in file:
                    raise StateError(
                        f"{index}: the file {file!r} is outside of the directory; do not use this checkpoint."
                    )
            check_link(self.path, file, index)
        places = {file: self.path / file for file in files}
        return {name: places[file] for name, file in names.items()}
