from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.log import logger
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig, refuse_checkpoint
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM
from lightning_d9d.modules.adapters import Adapter
from lightning_d9d.peft.merged import with_adapters
from lightning_d9d.state import (
    DTYPE_NAMES,
    MAX_SHARD_BYTES,
    Checks,
    Concatenate,
    Identity,
    LocalShard,
    MappedBox,
    Mapper,
    Parallel,
    SafetensorsReader,
    Select,
    Sequential,
    Spec,
    Split,
    check_names,
    complete_directory,
    fill_shards,
    inverted,
    write_json,
    write_tensors,
)
from lightning_d9d.state.format import reading, write_bytes
from lightning_d9d.state.places import MAX_SMALL_BYTES, Place, check_link, names_in, place_of, read_small
from lightning_d9d.state.threads import uncollected

_COPIED = {".json", ".txt", ".model", ".jinja"}
"""Endings of the small files beside weights."""
GENERATION_CONFIG = "generation_config.json"
_EMBEDDING, _HEAD = "model.embed_tokens.", "lm_head."
_EXPERTS, _DENSE = ".mlp.experts.", ".mlp.gate_proj."
_EMBEDDING_TENSOR, _HEAD_TENSOR = f"{_EMBEDDING}weight", f"{_HEAD}weight"


@torch.no_grad()
@uncollected()
def load_huggingface(
    model: nn.Module | Sequence[nn.Module],
    directory: str | Path,
    *,
    verify: bool = True,
    check_finite: bool = False,
    check_first: bool = True,
    progress: bool = False,
) -> None:
    """Fill a model with the weights of a Hugging Face directory, in place.

    It reads one `model.safetensors` or the files of an index. Each expert may be a separate tensor, as published, or
    all experts of a layer one tensor, as transformers 5 has them in memory. Values are cast to the dtype of each
    parameter. Each rank reads its own slices of DTensors, whatever their meshes and placements. One rank reads a
    replicated slice and broadcasts it. Almost no memory is needed besides the model.

    Collective over the default process group if there is one, also for models that are whole on every rank. All names,
    shapes and dtypes are checked before the first parameter changes on any rank. A failure on one rank raises on all.
    Any rank may hold any part of the model.

    Args:
        model: A `Qwen3MoeForCausalLM`, whole or a stage, or all stages of this rank. Or any module that has the whole
            model's `config` and some of its parameters, under their names in the whole model.
        directory: Directory that every rank can read; also a URL that fsspec knows.
        verify: Whether to compare checksums if the directory has a manifest, as those of `save_huggingface` have.
        check_finite: Whether to look for infinite numbers and NaN.
        check_first: Whether to make these checks before the first parameter changes, which reads the files once more,
            divided over the ranks. False makes them while parameters are read. That is faster, but after an error the
            model has some of the new weights.
        progress: Whether to show progress bars on the first rank.

    Adapters of the model stay unchanged: the weights are those of their base.

    Raises:
        StateError: A file is missing or damaged, its tensors are not those of the model, or another rank failed.
        ConfigError: Adapters of the model are merged.
    """
    ranks, failure = Ranks(), f"weights cannot be loaded from {str(directory)!r}"
    with ranks.agreed(failure):
        refuse_checkpoint(directory)
        stages, config = _stages(model)
        if any(isinstance(part, Adapter) and part.is_merged for stage in stages for part in stage.modules()):
            raise ConfigError(
                "adapters are merged into the weights that would be overwritten; call unmerge(model) first"
            )
        specs = parameter_specs(config)
        local = _local_shards(stages, specs)
        reader = SafetensorsReader(directory)
        in_files = _mapper(config, specs, stacked=reader.file_of).plan(specs)
        repeated = repeated_head(reader, config)
        check_tensor_names(
            reader, in_files, repeated, "build the model with Qwen3MoeConfig.from_json of the same directory"
        )
        views = inverted(in_files, specs)
        parts = [held for name, shard in local for part in views[name].boxes if (held := part.within(shard.box))]
        needed = {part.source for part in parts}
        checked = {tensor: view.shape for tensor, view in in_files.items() if tensor in needed}
        if repeated and _EMBEDDING_TENSOR in needed:
            checked[_HEAD_TENSOR] = in_files[_EMBEDDING_TENSOR].shape
        reader.check(checked, f"build the model with Qwen3MoeConfig.from_json({str(directory)!r})")
        if repeated:
            check_tied(reader, parts)
    fill_shards(reader, views, local, Checks(verify, check_finite, check_first), failure, progress)


@torch.no_grad()
def save_huggingface(
    model: nn.Module | Sequence[nn.Module],
    directory: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    fused_experts: bool = False,
    progress: bool = False,
    files: Mapping[str, bytes] | None = None,
) -> None:
    """Write a model as a directory that `transformers` loads: config, generation config and safetensors files.

    The directory appears when it is complete; until then the files are in a hidden directory beside it. A manifest has
    a checksum of each tensor, which `load_huggingface` compares.

    Adapters are added to their weights, as in `lightning_d9d.peft.merge`, and not written separately; the model itself
    does not change.

    Collective over the default process group if there is one, also for models that are whole on every rank. The files
    are the same on any mesh. Ranks that hold parts of a file write files in turns, all at the same time, and tied
    embeddings are written once. Besides the model a rank has one tensor of the files in memory: an expert's matrix,
    unless the experts are fused. It also has slices of this tensor from other ranks, and its own slices of the tensors
    that they write.

    The bias of `BalanceConfig(bias_rate=...)` is left out, because Hugging Face's Qwen3-MoE does not support it. A
    warning is logged if the bias is not zero: without it some tokens visit different experts. Checkpoints of the
    strategy contain the bias.

    Args:
        model: As in `load_huggingface`; the stages of all ranks make up the whole model.
        directory: Directory that does not exist yet, or is empty. The path on rank 0 is used; all ranks that write must
            reach it under this name.
        dtype: Dtype of the files; None keeps each parameter's own.
        max_shard_bytes: Size at which a new file begins; a larger tensor gets a file of its own. A group's timeout
            limits how long writing a file may take.
        overwrite: Whether to replace an existing directory, with everything in it.
        fused_experts: Whether to write all experts of a layer as one tensor, as transformers 5 has them in memory.
            Otherwise each expert is a separate tensor, as in published models and transformers 4.
        progress: Whether to show a progress bar on the first rank.
        files: Names and contents of further files, such as `files_beside_weights` of the base model. Those of the first
            rank are written. A `config.json` among them is replaced by this model's, and a `generation_config.json` is
            kept.

    Raises:
        StateError: The directory has files and `overwrite` is not set, or it cannot be written. Or a parameter is on no
            rank or on the meta device, or another rank failed. The directory is then removed.
        ConfigError: The dtype is not float64, float32, float16 or bfloat16, or a dense model has no experts to fuse.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        legal = ", ".join(map(str, DTYPE_NAMES))
        raise ConfigError(f"save_huggingface: dtype={dtype} must be one of {legal}, or None for the model's own.")
    ranks, failure = Ranks(), f"weights cannot be saved to {str(directory)!r}"
    with ranks.agreed(failure):
        stages, config = _stages(model)
        if fused_experts:
            config.refuse_without_experts("fused_experts=True")
        specs = parameter_specs(config)
        local = dict(_local_shards(stages, specs))
        biased = {name: "" for stage in stages for name, value in stage.named_buffers() if _is_biased(name, value)}
    local = with_adapters(stages, local, dtype)
    biased = ranks.merge(biased)
    if biased and ranks.is_first:
        logger.warning(
            "%s does not get the bias of the choice of experts in %d layers, which Hugging Face's Qwen3-MoE does not "
            "know: from there some tokens visit other experts than here. A checkpoint has it",
            repr(str(directory)),
            len(biased),
        )
    views = huggingface_mapper(config, fused_experts).plan(specs)
    with complete_directory(directory, overwrite, failure) as folder:
        stored_dtype = write_tensors(folder, local, views, dtype, max_shard_bytes, failure, progress)
        with ranks.agreed(failure):
            if ranks.is_first:
                for name, content in (files or {}).items():
                    write_bytes(folder / name, content)
                write_configs(folder, config, stored_dtype, files or {})


def write_configs(folder: Place, config: Qwen3MoeConfig, dtype: torch.dtype, present: Collection[str] = ()) -> None:
    """Write `config.json` and `generation_config.json` beside the weights. Local.

    Args:
        folder: Folder of the weights.
        config: Config of the whole model. The generation config gets its token ids, if it has some.
        dtype: Dtype of the weights.
        present: Files that exist already. A generation config among them is kept.
    """
    write_json(folder / "config.json", {**config.to_dict(), "torch_dtype": str(dtype).removeprefix("torch.")})
    if GENERATION_CONFIG not in present:
        write_json(folder / GENERATION_CONFIG, generation_config(config))


def generation_config(config: Qwen3MoeConfig) -> dict[str, Any]:
    """Return the content of a `generation_config.json`: the ids of tokens that begin and end a text."""
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    return {key: value for key, value in ids.items() if value is not None}


def files_beside_weights(directory: str | Path | Place) -> dict[str, bytes]:
    """Return the small files of a Hugging Face directory: tokenizer, chat template, generation config. Local.

    Args:
        directory: Path of the directory, or a URL that fsspec knows.

    Returns:
        Names and contents, without `config.json`.

    Raises:
        StateError: A file cannot be read, is a link that leads elsewhere, or all together are too large.
    """
    folder, files = place_of(directory), dict[str, bytes]()
    with reading(folder):
        names = sorted(names_in(folder))
    for name in names:
        if Path(name).suffix not in _COPIED or ".safetensors." in name or name == "config.json":
            continue
        check_link(folder, name, folder)
        with reading(folder / name):
            files[name] = read_small(folder / name)
        if sum(map(len, files.values())) > MAX_SMALL_BYTES:
            raise StateError(
                f"{folder}: the files beside the weights, up to {name}, are larger than {MAX_SMALL_BYTES} bytes "
                "together, the limit for files that are copied. Move files that do not belong to the model."
            )
    return files


def huggingface_mapper(config: Qwen3MoeConfig, fused_experts: bool = False) -> Mapper:
    """Return the mapper from the parameters of a `Qwen3MoeForCausalLM` to the tensors in Hugging Face's files.

    `mapper.inverse(specs)` is the reverse.

    Args:
        config: Config of the whole model.
        fused_experts: Whether all experts of a layer are one tensor instead of separate tensors.
    """
    specs = parameter_specs(config)
    return _mapper(config, specs, stacked=specs if fused_experts else ())


def _stages(model: nn.Module | Sequence[nn.Module]) -> tuple[list[nn.Module], Qwen3MoeConfig]:
    stages = list(model) if isinstance(model, Sequence | nn.ModuleList) else [model]
    config = getattr(stages[0], "config", None)
    if not isinstance(config, Qwen3MoeConfig):
        raise ConfigError(
            f"a {type(stages[0]).__name__} without a Qwen3MoeConfig as its `config` is neither a Qwen3MoeForCausalLM "
            "nor one of its stages; give one of these."
        )
    return stages, config


def parameter_specs(config: Qwen3MoeConfig) -> dict[str, Spec]:
    """Return the name and shape of each parameter of the whole model."""
    with torch.device("meta"):
        whole = Qwen3MoeForCausalLM(config)
    return {name: Spec(tuple(parameter.shape)) for name, parameter in whole.named_parameters()}


def _local_shards(stages: Iterable[nn.Module], specs: Mapping[str, Spec]) -> list[tuple[str, LocalShard]]:
    """Return this rank's parameters. A name occurs twice if two stages have it without sharing the parameter."""
    local: dict[nn.Parameter, tuple[str, LocalShard]] = {}
    for stage in stages:
        adapters = {each for part in stage.modules() if isinstance(part, Adapter) for each in part.parameters()}
        for name, parameter in stage.named_parameters():
            if parameter in adapters:
                continue
            expected = specs[name].shape if name in specs else None
            if tuple(parameter.shape) != expected:
                raise StateError(
                    f"the model has a parameter {name} of shape {tuple(parameter.shape)}, but its config expects "
                    f"{expected or 'none'} there. Build the model, or its stage, with its config."
                )
            local[parameter] = name, LocalShard.of(name, parameter)
    return list(local.values())


def _is_biased(name: str, buffer: Tensor) -> bool:
    return name.endswith(".gate.balance.bias") and not buffer.is_meta and bool(buffer.any())


def _mapper(config: Qwen3MoeConfig, names: Iterable[str], stacked: Collection[str]) -> Mapper:
    """Map each expert to a separate tensor, unless `stacked` has the name of the parameter."""
    return Parallel(mapper for name in names if (mapper := _mapper_of(config, name, is_stacked=name in stacked)))


def _mapper_of(config: Qwen3MoeConfig, name: str, is_stacked: bool) -> Mapper | None:
    """Return the mapper of a parameter; the parts of a vocabulary share one mapper, at the first of them."""
    owner, _, last = name.rpartition(".")
    if owner.endswith(".mlp.experts") and not is_stacked:
        return _of_experts(config, owner, last)
    for tensor in (_EMBEDDING, _HEAD):
        if name.startswith(tensor) and config.vocab_splits:
            parts = [f"{tensor}{part}.weight" for part in config.vocab_splits]
            return Concatenate(parts, f"{tensor}weight") if name == parts[0] else None
    return Identity([name])


def _of_experts(config: Qwen3MoeConfig, owner: str, stack: str) -> Mapper:
    """Return the mapper of the gate and up projections, which are one stack here, or of the down projections."""
    experts = range(config.num_experts)
    if stack != "gate_up_proj":
        return Select(f"{owner}.{stack}", {f"{owner}.{expert}.{stack}.weight": expert for expert in experts})
    both = {f"{owner}.{expert}.{stack}": expert for expert in experts}
    half = config.moe_intermediate_size
    halves = [{f"{owner}.{expert}.{matrix}.weight": half for matrix in ("gate_proj", "up_proj")} for expert in experts]
    return Sequential([Select(f"{owner}.{stack}", both), Parallel(map(Split, both, halves))])


def repeated_head(reader: SafetensorsReader, config: Qwen3MoeConfig) -> set[str]:
    """Return the name of the head's matrix if embeddings are tied but the files contain it, as some exports do."""
    return {_HEAD_TENSOR} & reader.file_of.keys() if config.tie_word_embeddings else set()


def check_tensor_names(reader: SafetensorsReader, expected: Collection[str], repeated: set[str], remedy: str) -> None:
    """Check that files have the tensors of a model, and no others. Local.

    Args:
        reader: Reader of the files.
        expected: Names of the model's tensors.
        repeated: Further names that the files may have.
        remedy: The remedy, as the end of a sentence. A remedy for tied embeddings or experts comes before it.

    Raises:
        StateError: A tensor is missing, or there is an unexpected one.
    """
    missing = [name for name in expected if name not in reader.file_of]
    unexpected = [name for name in reader if name not in expected and name not in repeated]
    found, lacking = (
        {kind for kind in (_EXPERTS, _DENSE) if any(kind in name for name in names)} for names in (unexpected, missing)
    )
    if _EXPERTS in found and _DENSE in lacking:
        remedy = f"the files have experts, the model none: set num_experts and model_type='qwen3_moe', or {remedy}"
    elif _DENSE in found and _EXPERTS in lacking:
        remedy = f"the model has experts, the files none: set num_experts=0 and model_type='qwen3', or {remedy}"
    elif _HEAD_TENSOR in missing:
        remedy = f"the embeddings are tied, set tie_word_embeddings=True, or {remedy}"
    check_names(missing, unexpected, remedy)


def check_tied(reader: SafetensorsReader, parts: Iterable[MappedBox]) -> None:
    """Check that a repeated head equals the embedding: a head of its own must not be dropped silently. Local.

    Args:
        reader: Reader of files that have both.
        parts: Parts of tensors of the files; those of the embedding are compared.

    Raises:
        StateError: The head differs from the embedding.
    """
    for part in (part for part in parts if part.source == _EMBEDDING_TENSOR):
        if not torch.equal(*(part.take(reader[tensor]) for tensor in (_EMBEDDING_TENSOR, _HEAD_TENSOR))):
            raise StateError(
                f"{reader.file_of[_HEAD_TENSOR]}: {_HEAD_TENSOR} differs from {_EMBEDDING_TENSOR}, but the model's "
                "embeddings are tied; build it with tie_word_embeddings=False."
            )
