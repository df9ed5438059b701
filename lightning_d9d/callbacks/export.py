"""Exports a trained model, or its adapters, as a directory that `transformers` or `peft` loads."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import lightning as L
import torch
from torch import nn

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.generation.sources import TOKENIZER_FILES
from lightning_d9d.loop.progress import is_watched
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, save_huggingface
from lightning_d9d.models.qwen3_moe.huggingface import files_beside_weights
from lightning_d9d.paths import check_directory
from lightning_d9d.peft import save_adapter
from lightning_d9d.peft.files import Layout, adapter_config
from lightning_d9d.state import DTYPE_NAMES
from lightning_d9d.state.directory import make_directory
from lightning_d9d.state.places import is_occupied, lies_in, place_of, refuse_overlap


class DirectoryExport(L.Callback):
    """Writes a part of a trained Qwen3 model to a directory when `fit` ends. This is the base of the callbacks below.

    Args:
        directory: Directory for the files; also a URL that fsspec knows.
        overwrite: Whether to replace an existing directory with everything in it. A directory that the training reads
            is never replaced.
        dtype: Dtype of the files, such as "bfloat16"; None keeps each parameter's own.

    Raises:
        ConfigError: `dtype` is not one of float64, float32, float16, bfloat16, or fsspec does not know the URL.
    """

    def __init__(self, directory: str | Path, overwrite: bool, dtype: str | None) -> None:
        if dtype is not None and getattr(torch, dtype, None) not in DTYPE_NAMES:
            legal = ", ".join(str(each).removeprefix("torch.") for each in DTYPE_NAMES)
            raise ConfigError(f"{type(self).__name__}(dtype={dtype!r}) must be one of {legal}, or None")
        self._text = f"{type(self).__name__}(directory={str(directory)!r})"
        with _usable(self._text):
            self.directory = place_of(directory)
        self.overwrite = overwrite
        self.dtype: torch.dtype | None = None if dtype is None else getattr(torch, dtype)

    def _check_place(self, trainer: L.Trainer, sources: Iterable[str | Path | None]) -> None:
        """Make the parent folder of the directory, and check it.

        Args:
            trainer: Trainer of the fit that starts.
            sources: Directories that the training reads.

        Raises:
            ConfigError: The export cannot be written, or would replace files that the training reads or saves.
        """
        with _usable(self._text):
            occupied = is_occupied(self.directory)
        if occupied and not self.overwrite:
            raise ConfigError(
                f"{self._text}: the directory is not empty; choose another one, or set overwrite=True to replace it "
                "with everything in it."
            )
        for callback in trainer.checkpoint_callbacks:
            folder = getattr(callback, "dirpath", None)
            if folder is not None and lies_in(place_of(folder), self.directory):
                raise ConfigError(
                    f"{self._text}: checkpoints are saved in {str(folder)!r}, which overlaps with the export; choose "
                    f"another directory, or another dirpath of {type(callback).__name__}"
                )
        for source in filter(None, sources):
            with _usable(self._text):
                read = place_of(source)
            try:
                refuse_overlap(read, self.directory)
            except StateError as error:
                raise ConfigError(f"{self._text}: {error}") from None
        if isinstance(self.directory, Path):
            make_folder(trainer, self.directory.parent, self._text)


class HuggingFaceExport(DirectoryExport):
    """Writes a Qwen3-MoE or dense Qwen3 in Hugging Face's layout when `fit` ends, with the tokenizer of its base.

    Args:
        directory: Directory for `config.json` and the safetensors files; also a URL that fsspec knows.
        overwrite: Whether to replace an existing directory with everything in it. A directory that the training reads
            is never replaced.
        dtype: Dtype of the files, such as "bfloat16"; None keeps each parameter's own.
        fused_experts: Whether to write all experts of a layer as one tensor instead of one tensor for each. Refused for
            a dense model.
        tokenizer: A directory (or URL) whose small files are copied: tokenizer, chat template and
            `generation_config.json`. By default the module's `pretrained`, if it has one. If neither has a generation
            config, one is written with the ids of the model's config.

    Raises:
        ConfigError: `dtype` is not one of float64, float32, float16, bfloat16, or fsspec does not know the URL.
    """

    def __init__(
        self,
        directory: str | Path,
        overwrite: bool = False,
        dtype: str | None = None,
        fused_experts: bool = False,
        tokenizer: str | Path | None = None,
    ) -> None:
        super().__init__(directory, overwrite, dtype)
        self.fused_experts = fused_experts
        self.tokenizer = tokenizer
        self._files: dict[str, bytes] = {}
        """The files beside the weights. They are read before the training, because they may be gone after it."""

    def check_paths(self, *, resumes: bool) -> None:
        """Raise `ConfigError` if the directory of the tokenizer does not exist. Local."""
        if self.tokenizer is not None:
            check_directory("tokenizer", str(self.tokenizer), "give the directory in which a tokenizer was saved")

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Raise `ConfigError` before the training if the export could not be written after it."""
        stages = qwen3_moe_stages(pl_module, self)
        if self.fused_experts:
            stages[0].config.refuse_without_experts("HuggingFaceExport.fused_experts=True")
        self._check_place(trainer, [self.tokenizer, getattr(pl_module, "pretrained", None)])
        if trainer.is_global_zero:
            self._read_files(pl_module)

    def _read_files(self, module: L.LightningModule) -> None:
        source = self.tokenizer or getattr(module, "pretrained", None)
        self._files = {} if source is None else files_beside_weights(source)
        if self.tokenizer is not None and not self._files.keys() & {*TOKENIZER_FILES}:
            raise ConfigError(
                f"{self._text}: tokenizer={str(self.tokenizer)!r} has none of {', '.join(TOKENIZER_FILES)}; give the "
                "directory in which a tokenizer was saved"
            )

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the export; on all ranks, because `save_huggingface` is collective."""
        save_huggingface(
            qwen3_moe_stages(pl_module, self),
            str(self.directory),
            dtype=self.dtype,
            overwrite=self.overwrite,
            fused_experts=self.fused_experts,
            progress=is_watched(trainer),
            files=self._files,
        )


class AdapterExport(DirectoryExport):
    """Writes the adapters of a Qwen3-MoE or dense Qwen3 when `fit` ends, as `lightning_d9d.peft.save_adapter` does.

    Args:
        directory: Directory for `adapter_config.json` and the safetensors file; also a URL that fsspec knows.
        overwrite: Whether to replace an existing directory with everything in it. A directory that the training reads
            is never replaced.
        dtype: Dtype of the file, such as "bfloat16"; None keeps each parameter's own.
        layout: Layout of experts: "experts", a tensor for each matrix of each expert, or "fused".
        base_model: Name or directory of the base model, which readers of the file may need. By default the module's
            `pretrained`.

    Raises:
        ConfigError: `dtype` is not one of float64, float32, float16, bfloat16, or fsspec does not know the URL.
    """

    def __init__(
        self,
        directory: str | Path,
        overwrite: bool = False,
        dtype: str | None = None,
        layout: Layout = "experts",
        base_model: str | None = None,
    ) -> None:
        super().__init__(directory, overwrite, dtype)
        self.layout: Layout = layout
        self.base_model = base_model

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Check before the training whether adapters can be written after it. Collective.

        Raises:
            ConfigError: The directory cannot be written, the model has no adapters, or other weights are trained, too.
        """
        stages = qwen3_moe_stages(pl_module, self)
        adapter_config(stages, self._text, layout=self.layout)
        self._check_place(trainer, [getattr(pl_module, "pretrained", None)])

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write the adapters. Collective."""
        save_adapter(
            qwen3_moe_stages(pl_module, self),
            str(self.directory),
            layout=self.layout,
            base_model=self.base_model or getattr(pl_module, "pretrained", None),
            dtype=self.dtype,
            overwrite=self.overwrite,
        )


def make_folder(trainer: L.Trainer, folder: Path, callback: str) -> None:
    """Make the folder that a callback will write to, on rank 0; raise `ConfigError` if that fails."""
    if trainer.is_global_zero:
        make_local_folder(folder, callback)


def make_local_folder(folder: Path, callback: str) -> None:
    """Make the folder that a callback will write to. Local.

    Raises:
        ConfigError: The folder cannot be made, or this user may not write there.
    """
    with _usable(callback):
        make_directory(folder)
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{callback} cannot be written: no permission to write to {folder}; give another place")


@contextmanager
def _usable(callback: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{callback} cannot be written: {error}; give another place") from error


def qwen3_moe_stages(module: nn.Module, callback: L.Callback) -> list[Qwen3MoeForCausalLM]:
    """Return the Qwen3-MoE inside a module: the whole one, or this rank's stages of it.

    Raises:
        ConfigError: The module holds no Qwen3-MoE; the message names the callback.
    """
    found = [part for part in module.modules() if isinstance(part, Qwen3MoeForCausalLM)]
    if not found:
        raise ConfigError(
            f"{type(callback).__name__} needs a module that holds a Qwen3MoeForCausalLM, or stages of one, on every "
            f"rank, but {type(module).__name__} does not; leave the callback out."
        )
    return found if found[0].stage.num_stages > 1 else found[:1]
