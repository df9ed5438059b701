from __future__ import annotations

import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM

_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPE_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@torch.no_grad()
def load_huggingface(model: Qwen3MoeForCausalLM, directory: str | Path) -> None:
    """Fills a model with the weights of a Hugging Face directory, in place, one tensor after the other.

    Reads one `model.safetensors` or the shards of an index, with an expert a tensor (as published) or all experts of a
    layer in one (as in the memory of transformers 5). Values are cast to the dtype of each parameter. All names, shapes
    and dtypes are checked before the first parameter changes. Not collective.

    Raises:
        StateError: a file is missing or damaged, or its tensors are not those of the model.
    """
    directory = Path(directory)
    file_of = _find_tensors(directory)
    parts_of = _parts_by_tensor(model, stored=file_of)
    for name, parts in parts_of.items():
        if any(part.is_meta for part in parts):
            raise StateError(f"The parameter of {name} is on the meta device: call model.to_empty(device=...) first.")
    ignored = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    _check_names(directory, expected=parts_of, stored=file_of.keys() - ignored)

    names_in: dict[Path, list[str]] = {}
    for name in parts_of:
        names_in.setdefault(file_of[name], []).append(name)
    for path, names in names_in.items():
        with _open(path) as file:
            if lacking := set(names).difference(file.keys()):
                raise StateError(f"{path}: lacks {min(lacking)}, which the index puts there; fetch or export it again.")
            for name in names:
                _check_tensor(file, path, name, parts_of[name])
    if ignored & file_of.keys():
        _check_tied(file_of)
    for path, names in names_in.items():
        with _open(path) as file:
            for name in names:
                parts = parts_of[name]
                for part, rows in zip(parts, file.get_tensor(name).split([len(part) for part in parts]), strict=True):
                    part.copy_(rows)


@torch.no_grad()
def save_huggingface(
    model: Qwen3MoeForCausalLM,
    directory: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 1000**3,
    overwrite: bool = False,
) -> None:
    """Writes a model as a directory that `transformers` loads.

    It has config, generation config and safetensors files in which each expert is a tensor. The directory appears when
    it is complete; until then the files are in a hidden one beside it. Holds one tensor in memory besides the model.
    Not collective: call it on one rank, with a model that is whole there.

    Args:
        model: on any device but meta.
        directory: does not exist yet, or is empty.
        dtype: of the files; None keeps each parameter's own.
        max_shard_bytes: size at which a new file begins; a larger tensor gets a file of its own.
        overwrite: replace an existing directory, with everything in it.

    Raises:
        StateError: the directory has files and `overwrite` is not set.
        ConfigError: a dtype that is none of float64, float32, float16, bfloat16.
    """
    if dtype is not None and dtype not in _DTYPE_NAMES:
        legal = ", ".join(map(str, _DTYPE_NAMES))
        raise ConfigError(f"save_huggingface: dtype={dtype} must be one of {legal}, or None for the model's own.")
    tensors = {name: _StoredTensor.of(parts, dtype) for name, parts in _parts_by_tensor(model).items()}
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.num_bytes > max_shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.num_bytes

    with _complete_directory(Path(directory), overwrite) as folder:
        weight_map = {}
        for number, names in enumerate(shards, start=1):
            file_name = _WEIGHTS if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write_safetensors(folder / file_name, {name: tensors[name] for name in names})
            weight_map |= dict.fromkeys(names, file_name)
        if len(shards) > 1:
            total = sum(tensor.num_bytes for tensor in tensors.values())
            _write_json(folder / _INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        stored_dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        _write_json(folder / "config.json", {**model.config.to_dict(), "torch_dtype": stored_dtype})
        ids = {"bos_token_id": model.config.bos_token_id, "eos_token_id": model.config.eos_token_id}
        _write_json(folder / "generation_config.json", {key: value for key, value in ids.items() if value is not None})


def _parts_by_tensor(model: Qwen3MoeForCausalLM, stored: Collection[str] = ()) -> dict[str, list[Tensor]]:
    """The tensors of a file and the views of parameters that, one below the other, make up each.

    Experts are one tensor each unless `stored` has the name of the stacked one.
    """
    parts_of: dict[str, list[Tensor]] = {}
    for name, part in _pieces(model, stored):
        parts_of.setdefault(name, []).append(part)
    return parts_of


def _pieces(model: Qwen3MoeForCausalLM, stored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    intermediate = model.config.moe_intermediate_size
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        owner, _, last = name.rpartition(".")
        if owner.endswith(".mlp.experts") and name not in stored:
            for index, matrix in enumerate(parameter.unbind()):
                if last == "gate_up_proj":
                    yield f"{owner}.{index}.gate_proj.weight", matrix[:intermediate]
                    yield f"{owner}.{index}.up_proj.weight", matrix[intermediate:]
                else:
                    yield f"{owner}.{index}.{last}.weight", matrix
        elif model.config.vocab_splits is not None and name.startswith(("model.embed_tokens.", "lm_head.")):
            yield f"{owner.rpartition('.')[0]}.weight", parameter
        else:
            yield name, parameter


def _find_tensors(directory: Path) -> dict[str, Path]:
    """Which file has each tensor."""
    if (directory / _WEIGHTS).exists():
        with _open(directory / _WEIGHTS) as file:
            return dict.fromkeys(file.keys(), directory / _WEIGHTS)
    index = directory / _INDEX
    if not index.exists():
        raise StateError(
            f"{directory} has neither {_WEIGHTS} nor {_INDEX}; give the directory of a model saved as safetensors."
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


def _check_names(directory: Path, expected: Collection[str], stored: Collection[str]) -> None:
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    if not missing and not unexpected:
        return
    message = f"{directory} does not have the tensors of this model."
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            message += f" {len(names)} {kind}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}."
    if "lm_head.weight" in missing:
        message += " Its embeddings are tied: set tie_word_embeddings=True."
    raise StateError(f"{message} Build the model with Qwen3MoeConfig.from_json of the same directory.")


def _check_tensor(file: Any, path: Path, name: str, parts: Sequence[Tensor]) -> None:
    stored, expected = file.get_slice(name), _StoredTensor.of(parts)
    shape = tuple(stored.get_shape())
    if shape != expected.shape:
        raise StateError(
            f"{path}: {name} has shape {shape} and the model {expected.shape}; build the model with "
            f"Qwen3MoeConfig.from_json({str(path.parent)!r})."
        )
    if stored.get_dtype() not in _DTYPE_NAMES.values():
        legal = ", ".join(_DTYPE_NAMES.values())
        raise StateError(f"{path}: {name} is {stored.get_dtype()}, not one of {legal}; use an unquantized checkpoint.")


def _check_tied(file_of: dict[str, Path]) -> None:
    """Some exports repeat the tied matrix as the head's; a head of its own must not be dropped without a word."""
    matrices = []
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        with _open(file_of[name]) as file:
            matrices.append(file.get_tensor(name))
    if not torch.equal(*matrices):
        raise StateError(
            f"{file_of['lm_head.weight']}: lm_head.weight differs from model.embed_tokens.weight, and the model's "
            "embeddings are tied; build it with tie_word_embeddings=False."
        )


class _StoredTensor(NamedTuple):
    """A tensor as a file has it."""

    parts: Sequence[Tensor]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, parts: Sequence[Tensor], dtype: torch.dtype | None = None) -> _StoredTensor:
        return cls(parts, (sum(len(part) for part in parts), *parts[0].shape[1:]), dtype or parts[0].dtype)

    @property
    def num_bytes(self) -> int:
        return sum(part.numel() for part in self.parts) * self.dtype.itemsize


def _write_safetensors(path: Path, tensors: dict[str, _StoredTensor]) -> None:
    """Writes one file, one part of a tensor in memory at a time (https://github.com/huggingface/safetensors#format)."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.num_bytes
        dtype_name = _DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype_name, "shape": tensor.shape, "data_offsets": [begin, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)  # the data begins at a multiple of 8 bytes
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in tensors.values():
            for part in tensor.parts:
                values = part.to(device="cpu", dtype=tensor.dtype).contiguous()
                file.write(values.view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


@contextmanager
def _complete_directory(target: Path, overwrite: bool) -> Iterator[Path]:
    """A folder to write into that takes the target's place at the end, or vanishes if the body raises."""
    target = target.absolute()
    if target.exists() and (not target.is_dir() or (not overwrite and any(target.iterdir()))):
        raise StateError(f"{target} exists and is not an empty directory; choose another one or set overwrite=True.")
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    replaced = target.with_name(f".{target.name}.{os.getpid()}.replaced")
    for leftover in (partial, replaced):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        if target.exists():
            target.rename(replaced)
        partial.rename(target)
    finally:
        for leftover in (partial, replaced):
            shutil.rmtree(leftover, ignore_errors=True)
