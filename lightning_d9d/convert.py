"""`lightning-d9d convert` converts weights between formats from the shell, without a GPU.

Between Hugging Face directories it changes dtype, size of files and layout of experts. A checkpoint, a file or a
directory of many ranks, becomes a Hugging Face directory. A checkpoint directory can also become one `.ckpt` file,
which Lightning's own strategies load. Adapters of a checkpoint, or of a directory of `peft`, are merged into the
weights of a Hugging Face directory.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_d9d.checkpoint import (
    MODEL,
    OF_ADAPTER,
    Checkpoint,
    StoredTensor,
    is_directory,
    open_directory,
    whole_checkpoint,
)
from lightning_d9d.errors import ConfigError, StateError, printable
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.config import read_description, refuse_checkpoint
from lightning_d9d.models.qwen3_moe.huggingface import (
    GENERATION_CONFIG,
    check_tensor_names,
    check_tied,
    files_beside_weights,
    generation_config,
    huggingface_mapper,
    parameter_specs,
    repeated_head,
)
from lightning_d9d.models.qwen3_moe.module import ARGUMENTS_KEY, saved_arguments
from lightning_d9d.peft import PeftMethod, inject
from lightning_d9d.peft.inject import apply_plan
from lightning_d9d.peft.merged import ViewedWeight, merged_weights
from lightning_d9d.peft.saved import SavedAdapter
from lightning_d9d.peft.sites import Site
from lightning_d9d.state import DTYPE_NAMES, Checks, Mapper, SafetensorsReader, Sequential, Spec, save_tensors
from lightning_d9d.state.boxes import Index, Readable
from lightning_d9d.state.format import reading
from lightning_d9d.state.places import (
    UrlPath,
    is_occupied,
    names_in,
    place_of,
    refuse_overlap,
)
from lightning_d9d.strategy.checkpoint_files import AtomicFileIO, is_checkpoint, mapped, read_checkpoint
from lightning_d9d.strategy.trained_only import BASE, check_base, check_base_given

_SHARD_SIZE = "5GB"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def main(chosen: argparse.Namespace) -> None:
    """Run the command.

    Args:
        chosen: Arguments as `lightning_d9d.cli.commands.convert_parser` reads them.

    Raises:
        StateError: The source is missing, damaged or of another kind, or the target cannot be written.
        ConfigError: The arguments ask for something impossible.
    """
    dtype = getattr(torch, chosen.dtype) if chosen.dtype else None
    with reading(chosen.source):
        source = place_of(chosen.source)
    with reading(chosen.target):
        target = place_of(chosen.target)
        file = target if chosen.target.endswith(".ckpt") else None
        is_there = os.path.lexists(str(file)) if file else is_occupied(target)
    _refuse_without_effect(chosen, is_file=file is not None)
    refuse_overlap(source, target)
    for other in filter(None, (chosen.tokenizer, chosen.adapter, chosen.base)):
        with reading(other):
            refuse_overlap(place_of(other), target)
    if is_there and not chosen.overwrite:
        raise StateError(f"{chosen.target} exists; choose another target or add --overwrite")
    if isinstance(file, UrlPath):
        raise ConfigError(f"{file} is a URL; a .ckpt file needs a path on a file system")
    if file:
        _write_file(str(source), file, dtype, chosen.weights_only)
        return
    options: dict[str, Any] = {
        "dtype": dtype,
        "max_shard_bytes": _num_bytes(chosen.max_shard_size or _SHARD_SIZE),
        "overwrite": chosen.overwrite,
        "verify": not chosen.no_verify,
        "progress": sys.stderr.isatty(),
    }
    convert = _from_checkpoint if is_checkpoint(str(source)) else _from_huggingface
    convert(str(source), chosen, options)
    _say_directory(chosen.target)


def _refuse_without_effect(chosen: argparse.Namespace, *, is_file: bool) -> None:
    names = (
        ("max_shard_size", "fused_experts", "tokenizer", "adapter", "base", "no_verify")
        if is_file
        else ("weights_only",)
    )
    if given := [f"--{name.replace('_', '-')}" for name in names if getattr(chosen, name)]:
        form = "one .ckpt file" if is_file else "Hugging Face's form, which has nothing but weights"
        raise ConfigError(f"{given[0]} has no effect: {chosen.target} is {form}; leave {given[0]} out")


def _opened(source: str) -> tuple[SafetensorsReader, dict[str, Any], Qwen3MoeConfig, Mapper]:
    """Return the reader of a Hugging Face directory, its `config.json` in two forms, and the way to parameters."""
    refuse_checkpoint(source)
    reader = SafetensorsReader(source)
    described = read_description(reader.path / "config.json")
    config = Qwen3MoeConfig.from_dict(described, source=source)
    are_fused = any(name.endswith(".mlp.experts.gate_up_proj") for name in reader)
    specs = parameter_specs(config)
    stored = huggingface_mapper(config, are_fused)
    repeated = repeated_head(reader, config)
    remedy = f"replace {reader.path / 'config.json'} with that of these weights"
    check_tensor_names(reader, stored.plan(specs), repeated, remedy)
    to_parameters = stored.inverse(specs)
    if repeated:
        views = to_parameters.plan(reader.specs).values()
        check_tied(reader, [box for view in views for box in view.boxes])
        reader.leave_out(repeated)
    return reader, described, config, to_parameters


def _weights_of(
    reader: SafetensorsReader, to_parameters: Mapper, options: Mapping[str, Any]
) -> dict[str, ViewedWeight]:
    """Return the parameters of a Hugging Face directory, which are read when they are needed."""
    reader.verify(sorted(reader), Checks(options["verify"]), options["progress"])
    return {name: ViewedWeight(view, reader) for name, view in to_parameters.plan(reader.specs).items()}


def _from_huggingface(source: str, chosen: argparse.Namespace, options: Mapping[str, Any]) -> None:
    check_base_given(None, chosen.base, source)
    reader, described, config, to_parameters = _opened(source)
    _refuse_fused(config, chosen.fused_experts)
    to_files = huggingface_mapper(config, chosen.fused_experts)
    files = files_beside_weights(reader.path) | _tokenizer_files(chosen)
    files["config.json"] = _described(described, reader.specs, options["dtype"])
    if chosen.adapter is None:
        save_tensors(reader, chosen.target, Sequential([to_parameters, to_files]), files=files, **options)
        return
    weights = _weights_of(reader, to_parameters, options)
    weights = _with_adapter(weights, config, chosen.adapter, options)
    save_tensors(weights, chosen.target, to_files, files=files, **options)


def _refuse_fused(config: Qwen3MoeConfig, fused_experts: bool) -> None:
    if fused_experts:
        config.refuse_without_experts("--fused-experts")


def _with_adapter(
    weights: Mapping[str, Readable], config: Qwen3MoeConfig, adapter: str, options: Mapping[str, Any]
) -> dict[str, Readable]:
    """Return the weights of a model, with the adapters of a directory added when they are read."""
    model = _on_meta(config)
    saved = SavedAdapter(adapter)
    saved.check_values(checksums=options["verify"])
    apply_plan(model, saved.plan(model))
    return merged_weights(weights, model, saved.matrices, options["dtype"])


def _with_own_adapters(
    weights: Mapping[str, Readable],
    config: Qwen3MoeConfig,
    method: PeftMethod | None,
    stored: Mapping[str, Readable],
    source: str,
    file_dtype: torch.dtype | None,
) -> dict[str, Readable]:
    """Return the weights of a checkpoint, with its adapters added when they are read."""
    model = _on_meta(config)
    if method is not None:
        inject(model, method)
    expected = {name for name, _ in model.named_parameters()}
    if unknown := [name for name in stored if OF_ADAPTER.search(name) and name not in expected]:
        raise StateError(
            f"{source} has the adapter {unknown[0]}, which its own peft setting does not have; write the weights from "
            "the run, with the callback HuggingFaceExport or save_huggingface"
        )

    def matrices(site: Site) -> tuple[Tensor, Tensor]:
        names = [f"{site.prefix}{each}" for each in "ab"]
        if missing := [name for name in names if name not in stored]:
            raise StateError(f"{source} lacks {missing[0]}, which its own peft setting needs; give another checkpoint")
        a, b = (stored[name][(slice(None),) * len(stored[name].shape)] for name in names)
        return a, b

    return merged_weights(weights, model, matrices, file_dtype)


def _on_meta(config: Qwen3MoeConfig) -> Qwen3MoeForCausalLM:
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(config)


def _tokenizer_files(chosen: argparse.Namespace) -> dict[str, bytes]:
    source = chosen.tokenizer or chosen.base
    return {} if source is None else files_beside_weights(source)


def _from_checkpoint(source: str, chosen: argparse.Namespace, options: Mapping[str, Any]) -> None:
    values, weights = _read(source)
    if ARGUMENTS_KEY not in values:
        raise ConfigError(
            f"{source} is not a checkpoint of Qwen3MoePretraining, so it cannot be exported to Hugging Face's format. "
            "Give a target that ends with .ckpt, or save its weights with lightning_d9d.state.save_tensors"
        )
    arguments = saved_arguments(values[ARGUMENTS_KEY], source)
    config, method = arguments.get("config"), arguments.get("peft")
    if config is None:
        raise StateError(f"{source}: {ARGUMENTS_KEY} has no config; give another checkpoint")
    _refuse_fused(config, chosen.fused_experts)
    parameters = parameter_specs(config)
    check_base_given(values.get(BASE), chosen.base, source)
    if chosen.base is not None:
        check_base(values[BASE], argparse.Namespace(pretrained=chosen.base), None, source)
        reader, _, theirs, to_parameters = _opened(chosen.base)
        if parameter_specs(theirs) != parameters:
            raise StateError(f"{chosen.base} has other weights than those that {source} adapts; give another base")
        weights = {**_weights_of(reader, to_parameters, options), **weights}
    missing = [name for name in parameters if name not in weights]
    if missing and BASE in values:
        raise StateError(
            f"{source} lacks {missing[0]}: it has only trained parameters (CheckpointConfig.trainable_only), on "
            "initial weights. Write the weights from the run, with the callback HuggingFaceExport"
        )
    if missing:
        raise StateError(f"{source} lacks {missing[0]}, which its own configuration needs; give another checkpoint")
    for name, spec in parameters.items():
        shape, stored_dtype = tuple(weights[name].shape), weights[name].dtype
        if shape != spec.shape or stored_dtype not in DTYPE_NAMES:
            raise StateError(
                f"{source}: {name} is {stored_dtype} of shape {shape}, but its own configuration needs a weight of "
                f"shape {spec.shape}; give another checkpoint"
            )
    used = {name: weights[name] for name in parameters}  # without what Hugging Face's Qwen3-MoE does not know
    specs = {name: Spec(tuple(weight.shape), weight.dtype) for name, weight in used.items()}
    files = {
        GENERATION_CONFIG: (json.dumps(generation_config(config), indent=2) + "\n").encode(),
        **_tokenizer_files(chosen),
        "config.json": _described(config.to_dict(), specs, options["dtype"]),
    }
    used = _with_own_adapters(used, config, method, weights, source, options["dtype"])
    if chosen.adapter is not None:
        used = _with_adapter(used, config, chosen.adapter, options)
    save_tensors(used, chosen.target, huggingface_mapper(config, chosen.fused_experts), files=files, **options)


def _described(config: Mapping[str, Any], specs: Mapping[str, Spec], dtype: torch.dtype | None) -> bytes:
    """Return `config.json` for weights of a dtype; by default the dtype that most of them have."""
    counts = Counter(spec.dtype for spec in specs.values())
    most = max(counts, key=counts.__getitem__, default=torch.float32)  # without any, saving says what is missing
    name = str(dtype or most).removeprefix("torch.")
    key = "dtype" if "dtype" in config else "torch_dtype"
    return (json.dumps({**config, key: name}, indent=2) + "\n").encode()


# Checkpoints


class _Saved:
    """A tensor of a checkpoint directory, which is read whole.

    The last tensor that was read is kept, because slices come one by one.
    """

    def __init__(self, read: Callable[[str], Tensor], name: str, spec: StoredTensor) -> None:
        self._read, self._name = read, name
        self.shape, self.dtype = spec

    def __getitem__(self, index: Index) -> Tensor:
        return self._read(self._name)[index]


def _read(source: str) -> tuple[dict[str, Any], Mapping[str, Readable]]:
    """Return the values and the weights of a checkpoint; weights of a directory are read when they are needed."""
    if not is_directory(source):
        values = read_checkpoint(functools.partial(mapped, source), source)
        return values, {name: each for name, each in values["state_dict"].items() if isinstance(each, Tensor)}
    checkpoint = open_directory(source, alone=True)
    read = functools.lru_cache(1)(functools.partial(_whole, checkpoint))
    names = [name for name in checkpoint.tensors if name.startswith(MODEL)]
    weights = {name.removeprefix(MODEL): _Saved(read, name, checkpoint.tensors[name]) for name in names}
    return checkpoint.values, weights


def _whole(checkpoint: Checkpoint, name: str) -> Tensor:
    shape, dtype = checkpoint.tensors[name]
    tensor = torch.empty(shape, dtype=dtype)
    checkpoint.load({name: tensor}, strict=False)
    return tensor


def _write_file(source: str, target: Path, dtype: torch.dtype | None, weights_only: bool) -> None:
    """Write a checkpoint directory as Lightning's own file. The whole checkpoint is then in memory."""
    if (Path(source) / "config.json").is_file():
        raise ConfigError(
            f"{source} is a Hugging Face directory, which cannot become a .ckpt file. Start a training from it with "
            f"Qwen3MoePretraining(preset={source!r}, pretrained={source!r})"
        )
    if not is_directory(source):
        raise ConfigError(
            f"{source} is not a checkpoint directory, and {target} can be made only from one. Give one, or a target "
            "without .ckpt for a Hugging Face directory"
        )
    checkpoint = open_directory(source, alone=True)
    values = dict(checkpoint.values)
    if weights_only:
        values = {name: value for name, value in values.items() if name not in ("optimizer_states", "lr_schedulers")}
    try:
        whole = whole_checkpoint(values, checkpoint.read(MODEL if weights_only else ""))
    except StateError as error:
        raise StateError(f"{source}: {error}. Add --weights-only, for a file without optimizers") from error
    if dtype is not None:
        whole["state_dict"] = {name: _cast(value, dtype) for name, value in whole["state_dict"].items()}
    AtomicFileIO().save_checkpoint(whole, target)
    weights = [each.dtype for each in whole["state_dict"].values() if isinstance(each, Tensor)]
    sys.stdout.write(
        f"{target}: {_in_words(weights)} {'with' if whole.get('optimizer_states') else 'without'} optimizers, "
        f"{target.stat().st_size:,} bytes\nGo on with it with ckpt_path={str(target)!r}\n"
    )


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _say_directory(target: str) -> None:
    """Print the contents of a Hugging Face directory."""
    reader = SafetensorsReader(target)
    stored = [reader[name] for name in reader]
    others = sorted(name for name in names_in(reader.path) if not name.endswith(".safetensors"))
    num_files = len({*map(str, reader.file_of.values())})
    sys.stdout.write(
        f"{target}: {_in_words([each.dtype for each in stored])}, {sum(each.num_bytes for each in stored):,} bytes in "
        f"{num_files} file{'s' * (num_files > 1)}; beside them {printable(', '.join(others))}\n"
        f"Start a training from it with Qwen3MoePretraining(preset={target!r}, pretrained={target!r})\n"
    )


def _in_words(dtypes: Sequence[torch.dtype]) -> str:
    """Return how many tensors have each dtype, as text."""
    counts = Counter(str(dtype).removeprefix("torch.") for dtype in dtypes)
    return " and ".join(f"{number} tensors in {name}" for name, number in counts.items())


def _num_bytes(text: str) -> int:
    parsed = re.fullmatch(r"(\d+(?:\.\d+)?) *([KMG]I?B|)", text.upper())
    if parsed is None or (number := int(float(parsed[1]) * _UNITS[parsed[2]])) == 0:
        raise ConfigError(f"--max-shard-size {text} is not a size; give one such as 500MB or 2GiB")
    return number
