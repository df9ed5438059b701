"""The manifest of an export: shape, dtype and checksum of each tensor."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.state.format import (
    ALL_DTYPE_NAMES,
    DTYPE_NAMES,
    MANIFEST_FILE,
    StoredTensor,
    read_json,
    reading,
    write_json,
)
from lightning_d9d.state.places import Place, check_link

_FORMAT = "lightning_d9d manifest 1"
_CHUNK_ELEMENTS = 2**20
_REMEDY = "fetch or export it again; if the change was meant, remove the manifest or load with verify=False"


def write_manifest(
    directory: Place, specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]], sums: Mapping[str, int]
) -> None:
    """Write the manifest of an export. Local.

    Args:
        directory: Directory of the files.
        specs: Shape and dtype of all tensors.
        sums: CRC-32 of the tensors' bytes.
    """
    tensors = {
        name: {"dtype": ALL_DTYPE_NAMES[dtype], "shape": shape, "crc32": f"{sums[name]:08x}"}
        for name, (shape, dtype) in specs.items()
    }
    write_json(directory / MANIFEST_FILE, {"format": _FORMAT, "tensors": tensors})


def read_manifest(directory: Place) -> dict[str, Any] | None:
    """Read the manifest's entry of each tensor; None without a manifest. Local.

    Raises:
        StateError: The manifest is damaged.
    """
    path = directory / MANIFEST_FILE
    with reading(path):
        if not path.exists():
            return None
    check_link(directory, MANIFEST_FILE, path)
    try:
        values = read_json(path)
        if values["format"] != _FORMAT:
            raise ValueError("it has another format")
        return {**values["tensors"]}  # a list of pairs is refused
    except (ValueError, KeyError, TypeError) as error:
        raise StateError(f"{path}: it is not a manifest ({error!r}); {_REMEDY}.") from error


class Check:
    """A check of one stored tensor against the manifest. Local.

    `see` gets all of its numbers in order; `finish` raises if they are wrong.

    Args:
        where: Name of the file and the tensor, for errors.
        name: Name in the manifest.
        stored: The tensor.
        manifest: Entries of the manifest. None compares no checksums.
        check_finite: Whether to check that its numbers are neither infinite nor NaN.

    Raises:
        StateError: The manifest has another shape or dtype.
    """

    def __init__(
        self, where: str, name: str, stored: StoredTensor, manifest: Mapping[str, Any] | None, check_finite: bool
    ) -> None:
        self._where, self._check_finite = where, check_finite
        self._expected = None if manifest is None else _expected_sum(where, stored, manifest.get(name))
        self._checksum, self._finite = 0, True

    def see(self, values: Tensor) -> None:
        """Check these numbers next; they are flat, contiguous, and on the CPU."""
        if self._expected is not None:
            self._checksum = zlib.crc32(values.view(torch.uint8).numpy().data, self._checksum)
        self._finite = self._finite and (not self._check_finite or _is_finite(values))

    def finish(self) -> None:
        """Raises a `StateError` if the numbers are not those of the manifest, or not finite."""
        if self._expected not in (None, f"{self._checksum:08x}"):
            raise StateError(
                f"{self._where} is damaged or was replaced: its checksum differs from the manifest's; {_REMEDY}."
            )
        if not self._finite:
            raise StateError(f"{self._where} has numbers that are not finite; use another checkpoint.")


def _is_finite(chunk: Tensor) -> bool:
    if not chunk.is_floating_point():
        return True
    parts = chunk.split(_CHUNK_ELEMENTS)
    return all(bool(torch.isfinite(each if each.dtype in DTYPE_NAMES else each.float()).all()) for each in parts)


def _expected_sum(where: str, stored: StoredTensor, expected: Any) -> str:
    """Return the checksum of the manifest, after a check of its other entries."""
    if not isinstance(expected, dict):
        raise StateError(f"{where} is not in the manifest; {_REMEDY}.")
    found = {"dtype": ALL_DTYPE_NAMES[stored.dtype], "shape": list(stored.shape)}
    for key, value in found.items():
        if expected.get(key) != value:
            raise StateError(f"{where} has {key} {value}, but the manifest has {expected.get(key)}; {_REMEDY}.")
    return str(expected.get("crc32"))
