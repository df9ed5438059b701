"""Finds what mixes the tokens of a rank alone, where ranks share sequences.

Attention, a convolution or a mean that is not made for it sees the tokens of its own rank, and counts places from the
first of those. Nothing fails, and the loss is that of another model. So stages run apart before the first batch, on a
microbatch of it:

1. As it is, to see what comes out of modules that are made for parts of sequences.
2. With NaN in the numbers of one token. Modules made for parts give random numbers in place of results, with NaN for
   that token. If another token becomes NaN, the innermost module in whose output it does mixes tokens. NaN survives
   masks that multiply, and weights that are zero.
3. With NaN in the numbers of all tokens. A module with NaN in a matrix of one vector for each row has made that of its
   own tokens: their mean, or the last of them. Losses, numbers or one number for each row, may be summed.
4. With the same numbers on all ranks, forwards and with the tokens reversed. A module whose output is not reversed with
   its input goes by the places of tokens. If its output is the same on all ranks, it counts places on each from 0.
   `microbatch_inputs` is looked at in the same way.
5. The last stage, `microbatch_loss` and `microbatch_metrics`, with every second token exchanged for that of the
   reversed order, with the others exchanged, and with all. A loss that adds up what each token has with its label
   changes by as much in the third run as in the first two together. One whose labels are shifted there does not, nor
   that of a mean over tokens. A number that is the same in all runs, such as the share of rows in which every token is
   right, shows nothing.

What ranks compute together (`gather_dim` and the like, `TokenShard`, torch's functional collectives), or are going to
(`TokenShard.summand`), has no NaN and other numbers on each rank, so what is made of it is not noticed.

Modules that ask other ranks in other ways have an attribute `takes_sharded_sequences = True`. They are believed if they
make no other tokens of the first rank NaN where its middle one is, or if some token of another rank becomes NaN where
all of the first rank are. So are subclasses of ours that have a forward of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh import Axis, MeshDomains
from lightning_d9d.mesh.collectives import all_gather_object, broadcast_tensors
from lightning_d9d.modules import GroupedQueryAttention, SparseMoE
from lightning_d9d.parallel import tensor
from lightning_d9d.parallel.context import ContextAttention
from lightning_d9d.parallel.data import class_name
from lightning_d9d.parallel.token_axis import (
    SEED,
    TokenAxis,
    is_any,
    is_even,
    is_middle,
    is_none,
    is_odd,
    mapped,
    tensors_of,
)
from lightning_d9d.parallel.tokens import TokenShard

_MIXES = "mixes the tokens of its own rank alone"
_POOLS = "makes a vector for each row from the tokens of its own rank alone"
_BY_PLACES = "counts the places of tokens from the first one of its own rank"
_MOST_CHANGE = 2**-5
"""How far the numbers of a token may lie apart, relative to the largest, as it stands in another row of a matrix."""
_MOST_ROUNDING = 2**-16
"""How far sums over all tokens may lie apart, relative to the largest, in float32; in narrower dtypes 8 times eps."""
_SAME = 2**-20
"""How far sums of the same numbers may lie apart on two ranks, relative to the largest."""


class _FoundError(Exception):
    """A module that is not as it must be."""

    def __init__(self, module: nn.Module, what: str) -> None:
        super().__init__()
        self.module, self.what = module, what


class _Seen(NamedTuple):
    """A call of a module, with one number for each token of each tensor."""

    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


class Loss(NamedTuple):
    """How loss and metrics are made of what the last stage gives."""

    make: Callable[[Any, Any], Mapping[str, Sequence[Tensor]]]
    """Takes output and microbatch, and gives numbers, of which each is to be a sum over tokens, by what they are."""
    microbatch: Any


def probe(
    stage: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    mesh: MeshDomains,
    axis: TokenAxis,
    *,
    modes: Mapping[nn.Module, bool],
    loss: Loss | None = None,
) -> None:
    """See that no module of a stage mixes tokens, or counts them, on its rank alone. Collective over the stage's ranks.

    Args:
        stage: With values, spread over the ranks, and `apart`.
        args: What it is going to be called with.
        kwargs: The same by name.
        mesh: Of all ranks.
        axis: How to find the tokens in these.
        modes: Which of its modules train. In training norms over tokens mix, and dropout does not.
        loss: Of the last stage.

    Raises:
        ConfigError: One does, with its name; on all ranks that share sequences.
    """
    made = _outermost(stage, _is_made_for_shards)
    results = _Results(axis, made)
    with _named(stage, mesh):
        with results.kept(_Declared(axis, mesh)):
            stage(*args, **kwargs)
        try:
            for place, is_wrong, what in ((is_middle, axis.is_mixed, _MIXES), (is_any, axis.is_pooled, _POOLS)):
                with _in_modes(modes):
                    _check_spread(
                        stage, made, results, args, kwargs, partial(axis.with_nan, place=place), is_wrong, what
                    )
            same_args, same_kwargs = _of_first_rank((list(args), dict(kwargs)), mesh)
            _check_places(stage, made, results, same_args, same_kwargs, mesh, axis)
            if loss is not None:
                _check_loss(stage, results, same_args, same_kwargs, loss, mesh, axis)
        except Exception as error:
            error.add_note(
                f"{class_name(stage)} ran with NaN in one token, and with other numbers than the batch's, to see that "
                "it mixes no tokens of its own rank alone; a module must not refuse these"
            )
            raise


@contextmanager
def _named(stage: nn.Module, mesh: MeshDomains) -> Generator[None]:
    """Says what was found, with its name."""
    try:
        yield
    except _FoundError as found:
        name = next((name for name, module in stage.named_modules() if module is found.module), "")
        where = f"{name or 'the stage'} ({class_name(found.module)})"
        raise ConfigError(
            f"{where} {found.what}, but each rank has a part of each sequence "
            f"(context_parallel={mesh.sizes[Axis.CP]}, tensor_parallel={mesh.sizes[Axis.TP]}). Take "
            "lightning_d9d.modules.GroupedQueryAttention, spread by lightning_d9d.parallel.shard_context and "
            "shard_tensors, for attention, positions from TokenShard.of(mesh), and its methods whole and sum for what "
            "sees several tokens. If it asks the other ranks itself, give its class takes_sharded_sequences = True"
        ) from None


def _is_made_for_shards(module: nn.Module) -> bool:
    forward = vars(module).get("forward")
    is_sharded = isinstance(forward, partial) and forward.func.__module__ == tensor.__name__
    return is_sharded or _is_ours(module) or _says_so(module)


def _is_ours(module: nn.Module) -> bool:
    attends_to_all = isinstance(module, GroupedQueryAttention) and isinstance(module.attend, ContextAttention)
    return attends_to_all or isinstance(module, SparseMoE)


def _says_so(module: nn.Module) -> bool:
    return bool(getattr(module, "takes_sharded_sequences", False))


def _must_show(module: nn.Module) -> bool:
    """Whether its class says that it asks other ranks, or is one of ours with a forward of a user's own."""
    has_own_forward = type(module).forward not in (GroupedQueryAttention.forward, SparseMoE.forward)
    return _says_so(module) or (_is_ours(module) and has_own_forward)


def _outermost(stage: nn.Module, is_one: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """The modules that are one and within no other."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if is_one(module):
            found.append(module)
        else:
            for child in module.children():
                visit(child)

    visit(stage)
    return list(dict.fromkeys(found))


@contextmanager
def apart(stages: nn.Module) -> Generator[Mapping[nn.Module, bool]]:
    """Forwards that leave nothing behind: no gradients, dropout, compiled code, random numbers or changed buffers.

    Gives for each module whether it trains otherwise.
    """
    modes = {module: module.training for module in stages.modules()}
    buffers = [(buffer, buffer.clone()) for buffer in stages.buffers()]
    devices = [each.device for each in (*stages.parameters(), *stages.buffers()) if each.is_cuda]
    with torch.no_grad(), torch.random.fork_rng(list(dict.fromkeys(devices))), torch.compiler.set_stance("force_eager"):
        for module in modes:
            module.training = False
        try:
            yield modes
        finally:
            for module, mode in modes.items():
                module.training = mode
            for buffer, value in buffers:
                buffer.copy_(value)


@contextmanager
def _in_modes(modes: Mapping[nn.Module, bool]) -> Generator[None]:
    for module, mode in modes.items():
        module.training = mode
    try:
        yield
    finally:
        for module in modes:
            module.training = False


@contextmanager
def _forwards(modules: Sequence[nn.Module], make: Callable[[nn.Module], Callable[..., Any]]) -> Generator[None]:
    """While open, modules run by what `make` makes of them."""
    before = [(module, vars(module).get("forward")) for module in modules]
    replaced = [make(module) for module in modules]
    for module, forward in zip(modules, replaced, strict=True):
        module.forward = forward
    try:
        yield
    finally:
        for module, forward in before:
            del module.forward
            if forward is not None:
                module.forward = forward


class _Declared:
    """Sees whether modules that say of themselves that they ask other ranks do so."""

    def __init__(self, axis: TokenAxis, mesh: MeshDomains) -> None:
        self.axis, self.mesh = axis, mesh

    def check(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run it twice more, with NaN on the first rank. Collective over ranks that share sequences."""
        on_first = self.mesh.coordinates[Axis.CP] == self.mesh.coordinates[Axis.TP] == 0

        def outputs(place: Callable[[Tensor], Tensor]) -> list[Tensor]:
            given = list(args), dict(kwargs)
            on_rank = mapped(lambda x: self.axis.with_nan(x, place), given) if on_first else given
            return tensors_of(forward(*on_rank[0], **on_rank[1]))

        mixes = any(map(self.axis.is_mixed, outputs(is_middle)))
        hears = any(self.axis.has_nan(x, is_any) for x in outputs(is_any))
        of_ranks = _over_sharing(self.mesh, (on_first, mixes, hears))
        if any(mixes for _, mixes, _ in of_ranks) and not any(hears for first, _, hears in of_ranks if not first):
            claim = "takes_sharded_sequences = True" if _says_so(module) else "a forward of its own"
            raise _FoundError(module, f"has {claim} and {_MIXES}")


class _Results:
    """What modules made for parts of sequences gave: random numbers of the same shapes stand for it later."""

    def __init__(self, axis: TokenAxis, made: Sequence[nn.Module]) -> None:
        self.axis, self.made = axis, made
        self._results: dict[nn.Module, list[Any]] = {module: [] for module in made}

    @contextmanager
    def kept(self, declared: _Declared) -> Generator[None]:
        """While open, they run and what they give is noted."""

        def make(module: nn.Module) -> Callable[..., Any]:
            forward = module.forward

            def run(*args: Any, **kwargs: Any) -> Any:
                result = forward(*args, **kwargs)
                self._results[module].append(mapped(_without_numbers, result))
                if _must_show(module):
                    declared.check(module, forward, args, kwargs)
                return result

            return run

        with _forwards(self.made, make):
            yield

    @contextmanager
    def in_place_of_modules(self, change: Callable[[Any], Any]) -> Generator[None]:
        """While open, they give random numbers, the same whenever this is opened, as `change` makes them."""
        generators: dict[torch.device, torch.Generator] = {}

        def random(x: Any) -> Any:
            if not isinstance(x, Tensor) or not x.is_floating_point():
                return change(x)
            if x.device not in generators:
                generators[x.device] = torch.Generator(x.device).manual_seed(SEED)
            return change(torch.randn(x.shape, dtype=x.dtype, device=x.device, generator=generators[x.device]))

        def make(module: nn.Module) -> Callable[..., Any]:
            results: Iterator[Any] = iter(self._results[module])
            return lambda *_, **__: mapped(random, next(results))

        with _forwards(self.made, make):
            yield


def _without_numbers(x: Any) -> Any:
    """Its shape, dtype and device in next to no memory."""
    return x.new_empty(()).expand(x.shape) if isinstance(x, Tensor) and x.is_floating_point() else x


class _Changed(TorchFunctionMode):
    """Changes the numbers that are looked up for tokens, and those that ranks make together."""

    def __init__(self, looked_up: Callable[[Any], Any], together: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        ours, torchs = torch.ops.lightning_d9d, torch.ops._c10d_functional
        self.changes = {
            **dict.fromkeys((torch.embedding, F.embedding), looked_up),
            **dict.fromkeys((ours.gather_dim, ours.scatter_sum, ours.sum_over, torchs.wait_tensor), together),
            TokenShard.summand: together,
        }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        change = self.changes.get(func)
        return result if change is None else change(result)


def _random_like(x: Tensor) -> Tensor:
    return torch.rand_like(x) if x.is_floating_point() else x


def _check_spread(
    stage: nn.Module,
    made: Sequence[nn.Module],
    results: _Results,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    with_nan: Callable[[Any], Any],
    is_wrong: Callable[[Any], bool],
    what: str,
) -> None:
    """Run with NaN, up to the first module that gives a tensor that is wrong, or within which another gets one."""
    parents = {child: module for module in stage.modules() for child in module.children()}

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        if any(map(is_wrong, tensors_of((args, kwargs)))):
            raise _FoundError(parents.get(module, stage), what)

    def behind(module: nn.Module, _: Any, output: Any) -> None:
        if any(map(is_wrong, tensors_of(output))):
            raise _FoundError(module, what)

    others = _others(stage, made)
    handles = [
        *(each.register_forward_pre_hook(before, with_kwargs=True) for each in [*others, *made]),
        *(each.register_forward_hook(behind) for each in others),
    ]
    try:
        with results.in_place_of_modules(with_nan), _Changed(with_nan, torch.nan_to_num):
            stage(*mapped(with_nan, list(args)), **mapped(with_nan, dict(kwargs)))
    finally:
        for handle in handles:
            handle.remove()


def _others(stage: nn.Module, made: Sequence[nn.Module]) -> list[nn.Module]:
    within = {part for module in made for part in module.modules()}
    return [module for module in stage.modules() if module not in within]


def _check_places(
    stage: nn.Module,
    made: Sequence[nn.Module],
    results: _Results,
    args: list[Any],
    kwargs: dict[str, Any],
    mesh: MeshDomains,
    axis: TokenAxis,
) -> None:
    seen: list[list[_Seen]] = []
    for change in (lambda x: x, axis.reversed):
        calls: list[_Seen] = []

        def note(module: nn.Module, args: Any, kwargs: Any, output: Any, calls: list[_Seen] = calls) -> None:
            calls.append(_Seen(module, _summaries((args, kwargs), axis), _summaries(output, axis)))

        handles = [module.register_forward_hook(note, with_kwargs=True) for module in _others(stage, made)]
        _seed_rank(mesh)
        try:
            with results.in_place_of_modules(change), _Changed(lambda x: x, _random_like):
                stage(*mapped(change, args), **mapped(change, kwargs))
        finally:
            for handle in handles:
                handle.remove()
        seen.append(calls)
    goes_by_places = [
        (index, call.outputs)
        for index, (call, again) in enumerate(zip(*seen, strict=True))
        if _are_reversed(call.inputs, again.inputs, axis) and not _are_reversed(call.outputs, again.outputs, axis)
    ]
    of_ranks = _over_sharing(mesh, {index: [x.cpu() for x in outputs] for index, outputs in goes_by_places})
    for index, outputs in of_ranks[0].items():
        if all(index in theirs and _are_close(outputs, theirs[index]) for theirs in of_ranks):
            raise _FoundError(seen[0][index].module, _BY_PLACES)


def _check_loss(
    stage: nn.Module,
    results: _Results,
    args: list[Any],
    kwargs: dict[str, Any],
    loss: Loss,
    mesh: MeshDomains,
    axis: TokenAxis,
) -> None:
    """See that it adds up what each token has with its label, at whichever place."""
    microbatch = _of_first_rank(loss.microbatch, mesh)
    runs, names, rounding = [], list[str](), _MOST_ROUNDING
    for place in (is_none, is_even, is_odd, is_any):
        change = partial(axis.exchanged, place=place)
        _seed_rank(mesh)
        with results.in_place_of_modules(change), _Changed(lambda x: x, _random_like):
            output = stage(*mapped(change, args), **mapped(change, kwargs))
            made = loss.make(output, mapped(change, microbatch))
        names = [name for name, of_name in made.items() for _ in of_name]
        numbers = [number for of_name in made.values() for number in of_name]
        rounding = max(rounding, *(8 * torch.finfo(x.dtype).eps for x in numbers if x.is_floating_point()), 0)
        runs.append(torch.stack([x.detach().double().reshape(()).cpu() for x in numbers]))
    forwards, even, odd, backwards = runs
    most = torch.stack(runs).abs().amax(0)  # where it is not finite, no comparison is true
    mixes = ((even + odd) - (forwards + backwards)).abs() > 2 * rounding * most
    of_ranks = _over_sharing(mesh, (mixes, forwards, (forwards - backwards).abs() > rounding * most))
    mixing = torch.stack([each for each, _, _ in of_ranks]).any(0)
    alike = [changes & ((numbers - forwards).abs() <= _SAME * most) for _, numbers, changes in of_ranks]
    places = torch.stack(alike).all(0)
    for name, mixes_tokens, goes_by_places in zip(names, mixing.tolist(), places.tolist(), strict=True):
        if mixes_tokens:
            raise _loss_error(name, "is not a sum of what each token has with its label", mesh)
        if goes_by_places:
            raise _loss_error(name, "goes by the places of tokens, counted from the first one of its own rank", mesh)


def _loss_error(name: str, what: str, mesh: MeshDomains) -> ConfigError:
    return ConfigError(
        f"{name} {what}, but each rank has a part of each sequence "
        f"(context_parallel={mesh.sizes[Axis.CP]}, tensor_parallel={mesh.sizes[Axis.TP]}). Shift labels in "
        "prepare_batch, where sequences are whole, or in the data; make means over tokens in the stage, with "
        "TokenShard.of(mesh); and return WeightedLoss(sum over tokens, number of those that count), not their mean"
    )


def check_inputs(
    inputs_of: Callable[[Any], Mapping[str, Any]], microbatch: Any, name: str, mesh: MeshDomains, axis: TokenAxis
) -> None:
    """See that what stages are called with does not count tokens on its rank alone. Collective over ranks that share.

    Args:
        inputs_of: Makes keyword arguments of a microbatch.
        microbatch: With this rank's tokens.
        name: Of what makes them.
        mesh: Of all ranks.
        axis: How to find the tokens.

    Raises:
        ConfigError: It does; on all ranks that share sequences.
    """
    same = _of_first_rank(microbatch, mesh)
    seen: list[dict[str, list[Tensor]]] = []
    for change in (lambda x: x, axis.reversed):
        _seed_rank(mesh)
        inputs = inputs_of(mapped(change, same))
        seen.append({key: _summaries(tree, axis) for key, tree in inputs.items()})
    ours, again = seen
    by_places = {key: [x.cpu() for x in ours[key]] for key in ours if not _are_reversed(ours[key], again[key], axis)}
    of_ranks = _over_sharing(mesh, by_places)
    for key, value in of_ranks[0].items():
        if all(key in theirs and _are_close(value, theirs[key]) for theirs in of_ranks):
            raise ConfigError(
                f"{key!r}, which {name} makes, {_BY_PLACES}, but each rank has a part of each sequence "
                f"(context_parallel={mesh.sizes[Axis.CP]}, tensor_parallel={mesh.sizes[Axis.TP]}). Take positions from "
                "TokenShard.of(mesh), or make what goes by the order of tokens in prepare_batch, where sequences are "
                "whole, and name it in sequence_dims"
            )


def _seed_rank(mesh: MeshDomains) -> None:
    torch.manual_seed(SEED + mesh.coordinates[Axis.CP] * mesh.sizes[Axis.TP] + mesh.coordinates[Axis.TP])


def _summaries(tree: Any, axis: TokenAxis) -> list[Tensor]:
    return [summary for x in tensors_of(tree) if (summary := axis.summary(x)) is not None]


def _are_reversed(ours: list[Tensor], again: list[Tensor], axis: TokenAxis) -> bool:
    return _are_close([axis.reversed(x) for x in ours], again)


def _are_close(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(
        x.shape == y.shape and bool((x - y).abs().max() <= _MOST_CHANGE * x.abs().max())
        for x, y in zip(ours, theirs, strict=True)
    )


def _of_first_rank(tree: Any, mesh: MeshDomains) -> Any:
    """Copies with the numbers of the first of the ranks that share sequences. Collective over them."""
    copied = mapped(lambda x: x.detach().clone(), tree)
    for axis in (Axis.CP, Axis.TP):
        if mesh.sizes[axis] > 1:
            group = mesh.group(axis)
            first = torch.distributed.get_process_group_ranks(group)[0]
            broadcast_tensors(tensors_of(copied), group, first)
    return copied


def _over_sharing(mesh: MeshDomains, value: Any) -> list[Any]:
    """The values of all ranks that share sequences. Collective over them."""
    values = [value]
    for axis in (Axis.CP, Axis.TP):
        if mesh.sizes[axis] > 1:
            values = [each for theirs in all_gather_object(values, mesh.group(axis)) for each in theirs]
    return values
