from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.log import logger
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.sharding import local_ranges
from lightning_d9d.models.qwen3_moe.config import Qwen3MoeConfig
from lightning_d9d.models.qwen3_moe.model import Qwen3MoeForCausalLM
from lightning_d9d.state import (
    DTYPE_NAMES,
    Index,
    LocalShard,
    Piece,
    SafetensorsReader,
    complete_directory,
    tensor_shapes,
    whole_box,
    write_json,
    write_tensors,
)

_EMBEDDING, _HEAD = "model.embed_tokens.", "lm_head."
_EMBEDDING_TENSOR, _HEAD_TENSOR = f"{_EMBEDDING}weight", f"{_HEAD}weight"


@torch.no_grad()
def load_huggingface(model: nn.Module | Sequence[nn.Module], directory: str | Path) -> None:
    """Fills a model with the weights of a Hugging Face directory, in place.

    Reads one `model.safetensors` or the files of an index, with an expert a tensor (as published) or all experts of a
    layer in one (as in the memory of transformers 5). Values are cast to the dtype of each parameter. Of DTensors each
    rank reads its own slices, whatever their meshes and placements: no values travel, and besides the model one slice
    is in memory. Of tied embeddings first and last stage each read their own.

    Collective over the default process group where there is one, also for models that are whole on every rank: all
    names, shapes and dtypes are checked on all ranks before the first parameter changes on any, and what fails on one
    rank raises on all. It does not matter which rank holds what.

    Args:
        model: A `Qwen3MoeForCausalLM`, whole or a stage; or any module with some of its parameters, under the names
            that they have in the whole model, and the whole model's `config`; or all stages of this rank.
        directory: On every rank.

    Raises:
        StateError: a file is missing or damaged, its tensors are not those of the model, or another rank failed.
    """
    ranks, failure = Ranks(), f"weights cannot be loaded from {str(directory)!r}"
    with ranks.agreed(failure):
        stages, config = _stages(model)
        whole = _parameter_shapes(config)
        local = _local_shards(stages, whole)
        reader = SafetensorsReader(directory)
        layout = _layout(config, whole, stacked=reader.file_of)
        shapes = tensor_shapes(piece for pieces in layout.values() for piece in pieces)
        repeated_head = {_HEAD_TENSOR} & reader.file_of.keys() if config.tie_word_embeddings else set()
        _check_names(directory, expected=shapes, stored=reader.file_of.keys() - repeated_head)
        targets = _targets(layout, local)
        checked = {tensor: shapes[tensor] for tensor in targets}
        if repeated_head and _EMBEDDING_TENSOR in targets:
            checked[_HEAD_TENSOR] = shapes[_EMBEDDING_TENSOR]
        reader.check(checked, f"build the model with Qwen3MoeConfig.from_json({str(directory)!r})")
        if repeated_head and _EMBEDDING_TENSOR in targets:
            _check_tied(reader, [index for index, _ in targets[_EMBEDDING_TENSOR]])
    with ranks.agreed(failure):
        reader.fill(targets)


@torch.no_grad()
def save_huggingface(
    model: nn.Module | Sequence[nn.Module],
    directory: str | Path,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5 * 1000**3,
    overwrite: bool = False,
    fused_experts: bool = False,
) -> None:
    """Writes a model as a directory that `transformers` loads: config, generation config and safetensors files.

    The directory appears when it is complete; until then the files are in a hidden one beside it.

    Collective over the default process group where there is one, also for models that are whole on every rank. The
    first rank that holds a parameter writes it, and tied embeddings are written once. Besides the model, a writing rank
    has two copies of one tensor of the files in memory (an expert's matrix, unless the experts are fused), any other
    rank its slice of it.

    The bias of `BalanceConfig(bias_rate=...)`, which Hugging Face's Qwen3-MoE does not know, is left out, and if it is
    not zero there is a warning: without it some tokens visit other experts. Checkpoints of the strategy have it.

    Args:
        model: As in `load_huggingface`; the stages of all ranks make up the whole model.
        directory: Does not exist yet, or is empty. Of rank 0; all ranks that write reach it under the same name.
        dtype: Of the files; None keeps each parameter's own.
        max_shard_bytes: Size at which a new file begins; a larger tensor gets a file of its own. A group's timeout is
            the longest that writing a file may take.
        overwrite: Replace an existing directory, with everything in it.
        fused_experts: Write all experts of a layer as one tensor, as transformers 5 has them in memory, and not each as
            a tensor of its own, as published models (and transformers 4) have them.

    Raises:
        StateError: The directory has files and `overwrite` is not set, it cannot be written, a parameter is on no rank
            or on the meta device, or another rank failed. Nothing is left of the directory then.
        ConfigError: A dtype that is none of float64, float32, float16, bfloat16.
    """
    if dtype is not None and dtype not in DTYPE_NAMES:
        legal = ", ".join(map(str, DTYPE_NAMES))
        raise ConfigError(f"save_huggingface: dtype={dtype} must be one of {legal}, or None for the model's own.")
    ranks, failure = Ranks(), f"weights cannot be saved to {str(directory)!r}"
    with ranks.agreed(failure):
        stages, config = _stages(model)
        whole = _parameter_shapes(config)
        local = dict(_local_shards(stages, whole))
        biased = {name: "" for stage in stages for name, value in stage.named_buffers() if _is_biased(name, value)}
    biased = ranks.merge(biased)
    if biased and ranks.is_first:
        logger.warning(
            "%s does not get the bias of the choice of experts in %d layers, which Hugging Face's Qwen3-MoE does not "
            "know: from there some tokens visit other experts than here. A checkpoint has it",
            repr(str(directory)),
            len(biased),
        )
    layout = _layout(config, whole, stacked=whole if fused_experts else ())
    with complete_directory(Path(directory), overwrite, failure) as folder:
        stored_dtype = write_tensors(folder, local, layout, dtype, max_shard_bytes, failure)
        with ranks.agreed(failure):
            if ranks.is_first:
                torch_dtype = str(stored_dtype).removeprefix("torch.")
                write_json(folder / "config.json", {**config.to_dict(), "torch_dtype": torch_dtype})
                ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
                known = {key: value for key, value in ids.items() if value is not None}
                write_json(folder / "generation_config.json", known)


def _stages(model: nn.Module | Sequence[nn.Module]) -> tuple[list[nn.Module], Qwen3MoeConfig]:
    stages = list(model) if isinstance(model, Sequence | nn.ModuleList) else [model]
    config = getattr(stages[0], "config", None)
    if not isinstance(config, Qwen3MoeConfig):
        raise ConfigError(
            f"a {type(stages[0]).__name__} without a Qwen3MoeConfig as its `config` is no Qwen3MoeForCausalLM and no "
            "stage of one; give one of these."
        )
    return stages, config


def _parameter_shapes(config: Qwen3MoeConfig) -> dict[str, tuple[int, ...]]:
    """Of the whole model."""
    with torch.device("meta"):
        whole = Qwen3MoeForCausalLM(config)
    return {name: tuple(parameter.shape) for name, parameter in whole.named_parameters()}


def _local_shards(stages: Iterable[nn.Module], whole: Mapping[str, tuple[int, ...]]) -> list[tuple[str, LocalShard]]:
    """This rank's parameters. A name comes twice if two stages of the rank have it without sharing the parameter."""
    local: dict[nn.Parameter, tuple[str, LocalShard]] = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            if tuple(parameter.shape) != whole.get(name):
                raise StateError(
                    f"the model has a parameter {name} of shape {tuple(parameter.shape)}, but one of its config has "
                    f"there {whole.get(name, 'none')}; build the model, or the stage of one, with its config."
                )
            values = (parameter.to_local() if isinstance(parameter, DTensor) else parameter).detach()
            if values.is_meta:
                raise StateError(
                    f"The parameter of {name} is on the meta device: call model.to_empty(device=...) first."
                )
            local[parameter] = name, LocalShard(values, tuple(local_ranges(parameter)))
    return list(local.values())


def _is_biased(name: str, buffer: Tensor) -> bool:
    return name.endswith(".gate.balance.bias") and not buffer.is_meta and bool(buffer.any())


def _layout(
    config: Qwen3MoeConfig, whole: Mapping[str, tuple[int, ...]], stacked: Collection[str]
) -> dict[str, list[Piece]]:
    """The pieces of each parameter. Experts are a tensor each unless `stacked` has the name of the parameter."""
    return {name: list(_pieces(config, name, shape, name in stacked)) for name, shape in whole.items()}


def _pieces(config: Qwen3MoeConfig, name: str, shape: tuple[int, ...], is_stacked: bool) -> Iterator[Piece]:
    owner, _, last = name.rpartition(".")
    box = whole_box(shape)
    if owner.endswith(".mlp.experts") and not is_stacked:
        experts, rows, columns = box
        half = config.moe_intermediate_size
        matrices = {"gate_proj": rows[:half], "up_proj": rows[half:]} if last == "gate_up_proj" else {last: rows}
        for expert in experts:
            for matrix, part in matrices.items():
                place = whole_box((len(part), len(columns)))
                yield Piece((range(expert, expert + 1), part, columns), f"{owner}.{expert}.{matrix}.weight", place)
    elif name.startswith((_EMBEDDING, _HEAD)):
        splits = config.vocab_splits or {}
        starts = dict(zip(splits, accumulate(splits.values(), initial=0), strict=False))
        start = starts.get(owner.rpartition(".")[2], 0)
        tensor = _EMBEDDING_TENSOR if name.startswith(_EMBEDDING) else _HEAD_TENSOR
        yield Piece(box, tensor, (range(start, start + shape[0]), *box[1:]))
    else:
        yield Piece(box, name, box)


def _targets(
    layout: Mapping[str, Sequence[Piece]], local: Iterable[tuple[str, LocalShard]]
) -> dict[str, list[tuple[Index, Tensor]]]:
    """What this rank needs of each tensor of the files, and where it goes."""
    targets: dict[str, list[tuple[Index, Tensor]]] = {}
    for name, shard in local:
        for piece in layout[name]:
            if overlap := piece.overlap(shard.box):
                in_box, in_tensor = overlap
                targets.setdefault(piece.tensor, []).append((in_tensor, shard.values[in_box]))
    return targets


def _check_names(directory: str | Path, expected: Collection[str], stored: Collection[str]) -> None:
    missing = [name for name in expected if name not in stored]
    unexpected = [name for name in stored if name not in expected]
    if not missing and not unexpected:
        return
    message = f"{directory} does not have the tensors of this model."
    for kind, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            message += f" {len(names)} {kind}: {', '.join(sorted(names)[:3])}{', ...' if len(names) > 3 else ''}."
    if _HEAD_TENSOR in missing:
        message += " Its embeddings are tied: set tie_word_embeddings=True."
    raise StateError(f"{message} Build the model with Qwen3MoeConfig.from_json of the same directory.")


def _check_tied(reader: SafetensorsReader, indices: Iterable[Index]) -> None:
    """Some exports repeat the tied matrix as the head's; a head of its own must not be dropped without a word."""
    for index in indices:
        if not torch.equal(*(reader.read(name, index) for name in (_EMBEDDING_TENSOR, _HEAD_TENSOR))):
            raise StateError(
                f"{reader.file_of[_HEAD_TENSOR]}: {_HEAD_TENSOR} differs from {_EMBEDDING_TENSOR}, and the model's "
                "embeddings are tied; build it with tie_word_embeddings=False."
            )
