"""Gives storage and initial weights to a stage built on the meta device; each rank draws only its own part."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_d9d.dtypes import default_dtype
from lightning_d9d.errors import ConfigError
from lightning_d9d.log import logger
from lightning_d9d.mesh.seeds import derived
from lightning_d9d.mesh.sharding import local, local_ranges
from lightning_d9d.pipeline.recorded_values import RecordedValue, Recording
from lightning_d9d.startup import LONG_S, start_part

_WRAPPERS = frozenset({"_checkpoint_wrapped_module", "_orig_mod"})  # of checkpoint_wrapper and torch.compile


class InitialValue(Protocol):
    """An initial value of a tensor, such as `lightning_d9d.modules.Normal` and `Constant`."""

    def fill_slice_(self, target: Tensor, shape: Sequence[int], ranges: Sequence[range], key: int) -> None:
        """Write a rank's slice of a tensor of this shape, the indices `ranges`; `key` decides all values."""
        ...


def draw_local(
    value: InitialValue, tensor: Tensor, *, seed: int, name: str, device: torch.device | str = "cpu"
) -> Tensor:
    """Draw this rank's slice of a tensor's initial value, on a device in the tensor's dtype. Local.

    Each element follows from its place in the whole tensor, from the seed and from the name.

    Args:
        value: The initial value to draw from.
        tensor: Tensor with the shape, dtype and placements; it may be on the meta device.
        seed: Seed of the job.
        name: Name of the tensor in the whole model.
        device: Device of the result.
    """
    ranges = local_ranges(tensor)
    part = torch.empty([len(r) for r in ranges], dtype=tensor.dtype, device=device)
    value.fill_slice_(part, tensor.shape, ranges, derived(seed, name, bits=128))
    return part


def recorded_values(recording: Recording, stage: nn.Module) -> dict[str, RecordedValue]:
    """Return the values given to tensors of a stage while it was built, by their names in the whole model."""
    return recording.values_of((name, tensor) for name, _, _, tensor in _named(stage))


@start_part("initial weights", says=False)
def materialize(
    stage: nn.Module, device: torch.device, seed: int, recorded: Mapping[str, RecordedValue] | None = None
) -> list[str]:
    """Give every meta parameter and buffer of `stage` storage on `device` and its initial value, in place. Local.

    Values follow only from (seed, name, place). They are bitwise equal for any rank, device and sharding; each rank
    gets its own slice of a DTensor. Random numbers are drawn in float32, then cast.

    - A value given while the stage was built has precedence. See [Note: recorded values] in `recorded_values`.
    - A submodule with `initial_values()` gets these on the device, and only those that this rank holds.
    - Any other submodule has a `reset_parameters()`, which runs on the CPU on whole tensors. Torch's random state is
      seeded by (seed, submodule name); the slices are taken afterwards. The rest of the model takes no memory
      meanwhile.

    If a class has both of the last two, the one of the more derived class is used. Children come before their parents,
    so a parent's reset may set constants in them. Tensors that are not on the meta device (such as a pretrained part)
    keep their value and move to `device`. A tensor that several submodules share stays shared, and gets the value of
    the first of them.

    Args:
        stage: Stage on the meta device.
        device: Device for its tensors.
        seed: Seed of the job.
        recorded: Values given to tensors while the stage was built, by name.

    Returns:
        The names of recorded values that no tensor takes, because its name or shape has changed. Default values are
        left out.

    Raises:
        ConfigError: A submodule owns meta tensors but has neither method, or a method leaves some without a value. Or a
            recorded value cannot be made, or `initial_values()` returns an object that cannot fill slices.
    """
    start: float | None = time.monotonic()
    recorded = recorded or {}
    lost = {name for name, value in recorded.items() if not value.is_default}
    given: list[tuple[str, Tensor, int]] = []
    made: dict[int, tuple[Tensor, Tensor]] = {}  # by identity, which is valid while the meta tensor is kept
    for name, module in _children_first(stage, set()):
        for key, tensor in _owned(module).items():
            if id(tensor) in made:
                _assign(module, key, made[id(tensor)][1])
        metas = {key: tensor for key, tensor in _owned(module).items() if tensor.is_meta}
        values = {key: recorded[each] for key in metas if (each := _joined(name, key)) in recorded}
        values = {key: value for key, value in values.items() if _takes(module, metas[key], value)}
        for key, part in _initial_slices(module, name, metas, values, seed, device):
            meta = metas[key]
            if id(meta) not in made:
                made[id(meta)] = (meta, _stored_like(meta, part, device))
                if key in values:
                    stored = made[id(meta)][1]
                    given.append((_joined(name, key), stored, stored._version))
            _assign(module, key, made[id(meta)][1])
        if start is not None and time.monotonic() - start > LONG_S:
            _say_how_far(stage, made, start)
            start = None
    lost -= {name for name, _, _, tensor in _named(stage) if name in lost and tensor.shape == recorded[name].shape}
    for name, tensor, version in given:
        if tensor._version != version:  # a parent's reset has written to it
            with torch.no_grad():
                local(tensor).copy_(_slice(_made(recorded[name], name, seed), tensor))
    stage.to(device)  # moves tensors that were not on the meta device; `fully_shard` also sees its new parameters
    return sorted(lost)


def _say_how_far(stage: nn.Module, made: Mapping[int, tuple[Tensor, Tensor]], start: float) -> None:
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    done = sum(local(stored).numel() for _, stored in made.values())
    rest = sum(local(meta).numel() for meta in {tensor for _, _, _, tensor in _named(stage) if tensor.is_meta})
    logger.warning(
        "initial weights: %.2f B of %.2f B values of this rank after %.0f s; the rest follows",
        done / 1e9,
        (done + rest) / 1e9,
        time.monotonic() - start,
    )


def share_equal_names(stages: Iterable[nn.Module]) -> None:
    """Make the stages of a rank share the parameters and buffers whose names are equal.

    Raises:
        ConfigError: Their shapes or dtypes differ.
    """
    first: dict[str, Tensor] = {}
    for stage in stages:
        for name, module, key, tensor in list(_named(stage)):
            known = first.setdefault(name, tensor)
            if (known.shape, known.dtype) != (tensor.shape, tensor.dtype):
                raise ConfigError(
                    f"two stages name tensors of shapes {list(known.shape)} {known.dtype} and {list(tensor.shape)} "
                    f"{tensor.dtype} {name!r}; names are global: a layer keeps its index in the whole model"
                )
            _assign(module, key, known)


def take_tensors(stages: Iterable[nn.Module], earlier: Iterable[nn.Module]) -> list[str]:
    """Give stages built on the meta device the parameters and buffers of earlier ones, by name. Local.

    They get the tensors themselves, not copies. If a whole tensor becomes a DTensor, they get a copy of this rank's
    slice. A DTensor is taken only if its sharding is the same. Call `stage.to(device)` afterwards, so that
    `fully_shard` sees the tensors.

    Returns:
        The names of tensors that are still on the meta device.
    """
    known = {name: tensor for stage in earlier for name, _, _, tensor in _named(stage)}
    slices: dict[int, Tensor] = {}
    missing = []
    for stage in stages:
        for name, module, key, tensor in list(_named(stage)):
            taken = known.get(name)
            if taken is None or not _can_become(taken, tensor):
                if tensor.is_meta:
                    missing.append(name)
                continue
            if isinstance(tensor, DTensor) and not isinstance(taken, DTensor):
                if id(taken) not in slices:
                    slices[id(taken)] = _stored_like(tensor, _slice(taken.detach(), tensor), taken.device)
                    slices[id(taken)].requires_grad_(taken.requires_grad)
                taken = slices[id(taken)]
            _assign(module, key, taken)
    return missing


def _can_become(tensor: Tensor, target: Tensor) -> bool:
    if tensor.shape != target.shape or not isinstance(tensor, DTensor):
        return tensor.shape == target.shape
    lies_on = (tensor.device_mesh, tensor.placements)
    return isinstance(target, DTensor) and lies_on == (target.device_mesh, target.placements)


def _slice(whole: Tensor, target: Tensor) -> Tensor:
    """Return this rank's slice of a tensor, sharded like the target."""
    return whole[tuple(slice(r.start, r.stop) for r in local_ranges(target))]


def _named(stage: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Yield each tensor with its name in the whole model, its owner, and its name in the owner."""
    for path, module in stage.named_modules(remove_duplicate=False):
        name = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        for key, tensor in _owned(module).items():
            yield _joined(name, key), module, key, tensor


def _joined(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _children_first(module: nn.Module, seen: set[nn.Module], name: str = "") -> Iterator[tuple[str, nn.Module]]:
    if module in seen:
        return
    seen.add(module)
    for key, child in module.named_children():
        yield from _children_first(child, seen, name if key in _WRAPPERS else _joined(name, key))
    yield name, module


def _takes(module: nn.Module, meta: Tensor, value: RecordedValue) -> bool:
    """Return whether a meta tensor takes the recorded value: it was set on purpose, or the module has no better one."""
    return value.shape == meta.shape and not (value.is_default and (_has_initial_values(module) or _reset_of(module)))


def _made(value: RecordedValue, name: str, seed: int) -> Tensor:
    """Compute the whole recorded value, on the CPU."""
    with _seeded_on_cpu(seed):
        whole = value.make(seed)
    if whole.is_floating_point() and whole.isnan().any():
        raise ConfigError(
            f"configure_stage sets only a part of {name!r}, which was built on the meta device. Set all of its "
            "values there, or in reset_parameters() of the submodule that owns it"
        )
    return whole


def _initial_slices(
    module: nn.Module,
    name: str,
    metas: Mapping[str, Tensor],
    recorded: Mapping[str, RecordedValue],
    seed: int,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Compute this rank's slice of each meta tensor of the module: on the device if possible, else on the CPU."""
    for key, value in recorded.items():
        yield key, _slice(_made(value, _joined(name, key), seed), metas[key]).to(metas[key].dtype)
    metas = {key: meta for key, meta in metas.items() if key not in recorded}
    if not metas:
        return
    if _has_initial_values(module):
        values: Mapping[str, InitialValue] = module.initial_values()  # type: ignore[operator]
        for key, meta in metas.items():
            if key not in values:
                raise ConfigError(
                    f"initial_values() of submodule {name!r} ({type(module).__name__}) lacks {key!r}, which was "
                    "built on the meta device; add it"
                )
            if not hasattr(values[key], "fill_slice_"):
                raise ConfigError(
                    f"initial_values() of submodule {name!r} ({type(module).__name__}) gives {key!r} a "
                    f"{type(values[key]).__name__}, which cannot fill slices. Return {{{key!r}: Normal(std=0.02)}} or "
                    f"{{{key!r}: Constant(0.0)}} of lightning_d9d.modules. An object of your own needs "
                    "fill_slice_(target, shape, ranges, key) instead of draw(generator, shape). Or write "
                    "reset_parameters() instead of initial_values()"
                )
            yield key, draw_local(values[key], meta, seed=seed, name=_joined(name, key), device=device)
    else:
        for key, whole in _reset_on_cpu(module, name, metas, seed).items():
            yield key, _slice(whole, metas[key]).to(metas[key].dtype)


def _has_initial_values(module: nn.Module) -> bool:
    for ancestor in type(module).__mro__:
        if "initial_values" in vars(ancestor):
            return True
        if "reset_parameters" in vars(ancestor):
            return False
    return False


def _reset_of(module: nn.Module) -> Callable[[], None] | None:
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)


def _reset_on_cpu(module: nn.Module, name: str, metas: Mapping[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Compute the whole initial values of the meta tensors; the module's own tensors stay unchanged."""
    reset = _reset_of(module)
    if reset is None:
        raise ConfigError(
            f"submodule {name!r} ({type(module).__name__}) owns {', '.join(metas)} on the meta device but lacks a "
            "reset_parameters() to set them, and configure_stage does not set them. Add one, or build that part "
            "under torch.device('cpu')"
        )
    owned = _owned(module)
    scratch = {id(tensor): _scratch(tensor) for tensor in owned.values()}
    for key, tensor in owned.items():
        _assign(module, key, scratch[id(tensor)])
    with _seeded_on_cpu(derived(seed, name)):
        reset()
    after = _owned(module)
    for key, tensor in owned.items():
        _assign(module, key, tensor)
    for key in metas:
        value = after[key]
        if value.is_floating_point() and value.numel() > 0 and value.isnan().all():
            raise ConfigError(
                f"reset_parameters() of submodule {name!r} ({type(module).__name__}) does not set {key!r}, which "
                "was built on the meta device; set it there"
            )
    return {key: after[key].detach() for key in metas}


def _scratch(tensor: Tensor) -> Tensor:
    """Make a whole CPU tensor for a reset to write to; its dtype gives the random numbers of a float32 model."""
    is_parameter, dtype = isinstance(tensor, nn.Parameter), tensor.dtype
    if tensor.is_floating_point():
        dtype = torch.float32 if is_parameter else torch.promote_types(dtype, torch.float32)
    if tensor.is_meta or isinstance(tensor, DTensor):
        whole = torch.full(tensor.shape, float("nan") if dtype.is_floating_point else 0, dtype=dtype, device="cpu")
    else:
        whole = tensor.detach().to("cpu", dtype, copy=True)
    return nn.Parameter(whole, tensor.requires_grad) if is_parameter else whole


@contextmanager
def _seeded_on_cpu(seed: int) -> Generator[None]:
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    with default_dtype(dtype), torch.random.fork_rng(devices=[]), torch.no_grad(), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        yield


def _stored_like(meta: Tensor, local: Tensor, device: torch.device) -> Tensor:
    if local.untyped_storage().nbytes() != local.nbytes:  # a slice would keep the whole tensor alive
        local = local.clone()
    stored: Any = local.to(device)
    if isinstance(meta, DTensor):
        stored = DTensor.from_local(
            stored, meta.device_mesh, meta.placements, run_check=False, shape=meta.shape, stride=meta.stride()
        )
    return nn.Parameter(stored, meta.requires_grad) if isinstance(meta, nn.Parameter) else stored


def _owned(module: nn.Module) -> dict[str, Tensor]:
    return {k: t for k, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}


def _assign(module: nn.Module, key: str, tensor: Tensor) -> None:
    (module._parameters if key in module._parameters else module._buffers)[key] = tensor  # type: ignore[index]
