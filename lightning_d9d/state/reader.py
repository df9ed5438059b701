from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.state.format import DTYPE_NAMES, INDEX_FILE, WEIGHTS_FILE
from lightning_d9d.state.layout import Index


class SafetensorsReader:
    """Reads the tensors of a directory with one `model.safetensors` or with the files of an index. Local.

    `file_of` has the names of all tensors and their files. Names outside of the directory are refused.

    Raises:
        StateError: In all methods; a file is missing or damaged.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self.file_of = _find_tensors(self.directory)

    def check(self, shapes: Mapping[str, tuple[int, ...]], remedy: str) -> None:
        """Opens the files of these tensors and checks that each is there, a float and of the given shape.

        Args:
            shapes: By name; others are not looked at.
            remedy: For a tensor of another shape: what to do, as the end of a sentence.
        """
        for path, names in self._by_file(shapes):
            with _open(path) as file:
                if lacking := set(names).difference(file.keys()):
                    raise StateError(
                        f"{path}: lacks {min(lacking)}, which the index puts there; fetch or export it again."
                    )
                for name in names:
                    stored = file.get_slice(name)
                    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                    if shape != shapes[name]:
                        raise StateError(f"{path}: {name} has shape {shape} and the model {shapes[name]}; {remedy}.")
                    if dtype not in DTYPE_NAMES.values():
                        legal = ", ".join(DTYPE_NAMES.values())
                        raise StateError(
                            f"{path}: {name} is {dtype}, not one of {legal}; use an unquantized checkpoint."
                        )

    def read(self, name: str, index: Index) -> Tensor:
        """A slice of a tensor, in the dtype of the file, on the CPU."""
        with _open(self.file_of[name]) as file:
            return file.get_slice(name)[index]

    def fill(self, targets: Mapping[str, Sequence[tuple[Index, Tensor]]]) -> None:
        """Copies slices of tensors into others, cast to their dtype; one slice at a time is in memory besides them."""
        for path, names in self._by_file(targets):
            with _open(path) as file:
                for name in names:
                    stored = file.get_slice(name)
                    for index, target in targets[name]:
                        target.copy_(stored[index])

    def _by_file(self, names: Iterable[str]) -> Iterable[tuple[Path, list[str]]]:
        names_in: dict[Path, list[str]] = defaultdict(list)
        for name in names:
            names_in[self.file_of[name]].append(name)
        return names_in.items()


def _find_tensors(directory: Path) -> dict[str, Path]:
    if (directory / WEIGHTS_FILE).exists():
        with _open(directory / WEIGHTS_FILE) as file:
            return dict.fromkeys(file.keys(), directory / WEIGHTS_FILE)
    index = directory / INDEX_FILE
    if not index.exists():
        raise StateError(
            f"{directory} has neither {WEIGHTS_FILE} nor {INDEX_FILE}; give the directory of a model saved as "
            "safetensors."
        )
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = {name: str(file) for name, file in weight_map.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise StateError(f"{index}: is no index of safetensors files ({error!r}); fetch or export it again.") from error
    for file in set(names.values()):
        # By name only: in the cache of Hugging Face's hub the files are links to elsewhere, which no index made.
        for path in (PurePosixPath(file), PureWindowsPath(file)):
            if path.is_absolute() or path.drive or ".." in path.parts:
                raise StateError(f"{index}: the file {file!r} is outside of the directory; do not use this checkpoint.")
    return {name: directory / file for name, file in names.items()}


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    """Opens a safetensors file; turns what goes wrong with it into a StateError that names it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except (SafetensorError, OSError) as error:
        raise StateError(f"{path}: cannot be read ({error}); fetch or export it again.") from error
