"""`PredictionWriter` writes the results of `predict` to files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, SupportsIndex

import lightning as L
from lightning.fabric.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.pipeline.trees import children, described
from lightning_d9d.state import complete_directory
from lightning_d9d.state.format import ALL_DTYPE_NAMES
from lightning_d9d.state.rows import RowFiles
from lightning_d9d.strategy.module import D9DModule

_OFF = "or leave PredictionWriter out (lightning-d9d predict: --predictions.write false)"


class PredictionWriter(BasePredictionWriter):
    """Writes the results of `Trainer.predict`, batch by batch, as safetensors files in the order of the dataset.

    Predictions are tensors with the rows of the batch along dim 0, or dicts, lists and dataclasses of such tensors.
    None in them is left out. Each tensor in the files has consecutive rows of the dataset. Its name has the kind and
    the first row: `prediction.0`, or `logits.0` for a dict with `logits`. `rows.safetensors.index.json` has the names
    in order. With several dataloaders names begin with `loader_0.`, `loader_1.`, ...

    Rows are numbered as in the dataset, over any number of data ranks; copies that a sampler adds to fill batches are
    left out. If the numbers are unknown (an IterableDataset, or indices that are not integers), rows are in the order
    of batches. Among batches of several ranks with the same number, that of the lowest rank comes first. If ranks share
    a batch, one of them writes. Any LightningModule works, and so do Lightning's own strategies.

    The directory appears when it is complete. A prediction that fails leaves no files. If the rows of ranks alternate,
    they are written twice, the second time in order. This takes the space of both copies for a while. Call
    `Trainer.predict` with `return_predictions=False`; otherwise Lightning also keeps all predictions in memory.

    Args:
        directory: Directory for the files, which all ranks can reach; also a URL that fsspec knows.
        overwrite: Whether to replace an existing directory, with everything in it.
        max_shard_bytes: Size at which a new file begins. A rank holds about this much in memory.

    Raises:
        ConfigError: A prediction does not have this form. Raised in predict.
        StateError: The directory has files and `overwrite` is not set, or it cannot be written. Raised in predict, on
            every rank.
    """

    def __init__(self, directory: str | Path, overwrite: bool = False, max_shard_bytes: int = 2**28) -> None:
        super().__init__("batch")
        self.directory = directory
        self.overwrite = overwrite
        self.max_shard_bytes = max_shard_bytes
        self._failure = f"predictions cannot be written to {str(directory)!r}"
        self._opened = ExitStack()
        self._files: RowFiles | None = None
        self._last_indices: Sequence[int] | None = None

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Begin a prediction before its data are read: all ranks call this hook, also those without data."""
        super().setup(trainer, pl_module, stage)
        if stage == "predict":
            folder = self._opened.enter_context(complete_directory(self.directory, self.overwrite, self._failure))
            self._files = RowFiles(folder, self.max_shard_bytes)

    def write_on_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        prediction: Any,
        batch_indices: Sequence[int] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Keep a batch, and write a file when there is enough. Local."""
        rows = None if batch_indices is self._last_indices else batch_indices  # a loader without any leaves the last
        self._last_indices = batch_indices
        if not all(isinstance(row, SupportsIndex) for row in rows or ()):
            rows = None  # the sampler yields other indices, which do not number rows
        if prediction is None or not _writes(pl_module):
            return
        assert self._files is not None
        prefix = f"loader_{dataloader_idx}." if trainer.predict_loop.num_dataloaders > 1 else ""
        tensors = {f"{prefix}{name or 'prediction'}": each for name, each in _named_tensors(prediction, "")}
        _check_rows(tensors, rows, prediction)
        if tensors and len(next(iter(tensors.values()))):
            with Ranks(alone=True).agreed(self._failure):
                self._files.add(dataloader_idx, batch_idx, rows or None, tensors)

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Write the remaining rows, and publish the directory. Collective, unlike the end of an epoch: see `setup`."""
        files, self._files = self._files, None
        if files is None:
            return
        with self._opened.pop_all():
            num_rows = files.finish(self._failure)
        rank_zero_info(f"wrote {num_rows} rows of predictions to {self.directory}")
        if num_rows == 0:
            rank_zero_warn(f"nothing was predicted: {self.directory} is without rows")

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Remove what was written."""
        self._files = None
        self._opened.pop_all().__exit__(type(exception), exception, exception.__traceback__)


def _writes(module: L.LightningModule) -> bool:
    """Return whether this rank writes, among those that share a batch."""
    if not isinstance(module, D9DModule) or module.pipeline.mesh is None:
        return True
    places = module.pipeline.mesh.coordinates
    return module.pipeline.rank == module.pipeline.last_rank and places[Axis.CP] == places[Axis.TP] == 0


def _named_tensors(tree: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield name, tree
        return
    parts = children(tree)
    if parts is None and tree is not None:
        raise ConfigError(
            "PredictionWriter writes tensors, but predict returned "
            f"{described(tree)}{f' in {name!r}' if name else ''}; return tensors with the rows of the batch along dim "
            f"0, {_OFF}"
        )
    names, values = parts or ((), [])
    for key, value in zip(range(len(values)) if names is None else names, values, strict=True):
        yield from _named_tensors(value, f"{name}.{key}" if name else str(key))


def _check_rows(tensors: dict[str, Tensor], rows: Sequence[int] | None, prediction: Any) -> None:
    sizes = {name: len(tensor) if tensor.ndim else None for name, tensor in tensors.items()}
    expected = {len(rows)} if rows else {*sizes.values()}
    for name, tensor in tensors.items():
        if tensor.dtype not in ALL_DTYPE_NAMES:
            raise ConfigError(f"{name} is {tensor.dtype}, which safetensors files do not support; cast it, {_OFF}")
        if sizes[name] is None or {sizes[name]} != expected:
            wanted = f"the batch has {len(rows)} rows" if rows else "all tensors need the same rows"
            raise ConfigError(
                f"PredictionWriter writes rows, but predict returned {described(prediction)}, and {wanted}: return "
                f"tensors with the rows of the batch along dim 0, {_OFF}"
            )
