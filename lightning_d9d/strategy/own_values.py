"""Files beside a checkpoint, with the values of each rank of replicas that mix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import fsspec
import torch
from torch import Tensor

from lightning_d9d.errors import StateError
from lightning_d9d.mesh.sharding import local


class OwnValues:
    """The file of one rank.

    A checkpoint has the mean of all replicas; with these files each resumes from its own values.

    Args:
        path: The checkpoint.
        rank: Whose file.
    """

    def __init__(self, path: str | Path, rank: int) -> None:
        self.folder = folder_of(path)
        self.path = f"{self.folder}/rank{rank:05}.pt"

    def save(self, round_of: Mapping[str, Any], tensors: Sequence[Tensor]) -> None:
        """Write the file. Local.

        Args:
            round_of: Information of the checkpoint about the round.
            tensors: Tensors, always in the same order.
        """
        system, folder = fsspec.core.url_to_fs(self.folder)
        system.makedirs(folder, exist_ok=True)
        values = [local(tensor).detach().cpu() for tensor in tensors]
        path = f"{folder}/{self.path.rpartition('/')[2]}"  # as its file system names it
        with system.open(f"{path}.part", "wb") as file:
            torch.save({"round": dict(round_of), "tensors": values}, file)
        system.mv(f"{path}.part", path)

    def fit(self, round_of: Mapping[str, Any], num_replicas: int, num_ranks: int) -> bool:
        """Return whether the file exists, for this step and for as many replicas and ranks. Local."""
        if (round_of["num_replicas"], round_of["num_ranks"]) != (num_replicas, num_ranks):
            return False
        system, path = fsspec.core.url_to_fs(self.path)
        return bool(system.exists(path)) and self._read()["round"] == dict(round_of)

    def load(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite tensors by those in the file. Local.

        Args:
            tensors: Tensors, in the order in which they were saved.

        Raises:
            StateError: The file has other tensors.
        """
        values: list[Tensor] = self._read()["tensors"]
        shapes = [[(each.shape, each.dtype) for each in some] for some in (values, map(local, tensors))]
        if shapes[0] != shapes[1]:
            raise StateError(
                f"{self.path!r} has {len(values)} tensors of another model or mesh; remove the folder {self.folder!r} "
                "to continue from the mean of all replicas"
            )
        with torch.no_grad():
            for tensor, value in zip(tensors, values, strict=True):
                local(tensor).copy_(value)

    def _read(self) -> dict[str, Any]:
        try:
            with fsspec.open(self.path, "rb") as file:
                return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[arg-type]
        except Exception as error:
            raise StateError(
                f"{self.path!r} cannot be read ({type(error).__name__}); remove the folder {self.folder!r} to continue "
                "from the mean of all replicas"
            ) from error


def folder_of(path: str | Path) -> str:
    """Return the folder of the files beside a checkpoint. Local."""
    return f"{str(path).rstrip('/')}.replicas"


def remove_beside(path: str | Path) -> None:
    """Remove the files beside a checkpoint. Local; does nothing if there are none."""
    system, folder = fsspec.core.url_to_fs(folder_of(path))
    if system.exists(folder):
        system.rm(folder, recursive=True)
