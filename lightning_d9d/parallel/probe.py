"""Finds modules that mix only the tokens of their own rank, although ranks share sequences.

Attention, a convolution or a mean may not support shared sequences. It then sees only the tokens of its own rank, and
counts places from the first of these. Nothing fails, but the loss is that of another model. So before the first batch,
stages run once more on one of its microbatches, in these ways:

1. Unchanged, to record the outputs of modules that support shards of sequences.
2. With NaN in the numbers of one token. Modules that support shards return random numbers as results, with NaN for that
   token. If another token becomes NaN, the innermost module whose output shows it mixes tokens. NaN survives masks that
   multiply, and weights that are zero.
3. With NaN in the numbers of all tokens. A module may return a matrix of one vector for each row. NaN in it shows that
   the vectors are computed from the tokens of its own rank: their mean, or the last of them. Losses, numbers or one
   number for each row, may be summed.
4. With the same numbers on all ranks, in both orders of tokens. A module whose output is not reversed with its input
   depends on the places of tokens. If its output is the same on all ranks, each rank counts places from 0.
   `microbatch_inputs` is checked in the same way.
5. The last stage, `microbatch_loss` and `microbatch_metrics` run three times. First every second token is replaced by
   that of the reversed order, then the other tokens are, then all. A sum over pairs of a token and its label changes by
   as much in the third run as in the first two together. A loss that shifts labels does not, and neither does a mean
   over tokens. A number that is the same in all runs, such as the share of rows in which every token is right, shows
   nothing.

Ranks compute some results together: with `gather_dim` and the like, `TokenShard` and torch's functional collectives.
Other results they will sum later (`TokenShard.summand`). The checks replace NaN in these results by numbers, or all
their numbers by random ones that differ between ranks. So nothing that is computed from them is reported.

Modules that communicate in other ways have an attribute `takes_sharded_sequences = True`. Two runs with NaN on the
first rank check this. Such a module passes if NaN in the middle token reaches no other token of the first rank. It also
passes if NaN in all tokens reaches a token of another rank. The same holds for subclasses of this package's modules
that have their own forward.
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
"""The largest difference of a token's numbers, relative to the largest, in different rows of a matrix."""
_MOST_ROUNDING = 2**-16
"""The largest difference of sums over all tokens, relative to the largest, in float32; 8 eps in narrower dtypes."""
_SAME = 2**-20
"""The largest difference of sums of the same numbers on two ranks, relative to the largest."""


class _FoundError(Exception):
    """A module failed a check."""

    def __init__(self, module: nn.Module, what: str) -> None:
        super().__init__()
        self.module, self.what = module, what


class _Seen(NamedTuple):
    """A call of a module, with one number for each token of each tensor."""

    module: nn.Module
    inputs: list[Tensor]
    outputs: list[Tensor]


class Loss(NamedTuple):
    """How loss and metrics are computed from the output of the last stage."""

    make: Callable[[Any, Any], Mapping[str, Sequence[Tensor]]]
    """Takes output and microbatch, and returns numbers by name; each must be a sum over tokens."""
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
    """Check that no module of a stage mixes or counts tokens on its rank alone. Collective over the stage's ranks.

    Args:
        stage: A stage with values, spread over the ranks, inside `apart`.
        args: The positional arguments of its next call.
        kwargs: The keyword arguments.
        mesh: The mesh of all ranks.
        axis: Finds the tokens in these.
        modes: The modules that are in training mode. In training, norms over tokens mix; dropout does not.
        loss: Loss and metrics, for the last stage.

    Raises:
        ConfigError: A module, which the error names, mixes or counts tokens; raised on all ranks that share sequences.
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
    """Turn a failed check into a `ConfigError` that names the module."""
    try:
        yield
    except _FoundError as found:
        name = next((name for name, module in stage.named_modules() if module is found.module), "")
        where = f"{name or 'the stage'} ({class_name(found.module)})"
        raise ConfigError(
            f"{where} {found.what}, but each rank has a part of each sequence (context_parallel={mesh.sizes[Axis.CP]}, "
            f"tensor_parallel={mesh.sizes[Axis.TP]}). For attention use lightning_d9d.modules.GroupedQueryAttention, "
            "spread by lightning_d9d.parallel.shard_context and shard_tensors. Take positions from "
            "TokenShard.of(mesh), and use its methods whole and sum if a module needs several tokens. If the module "
            "communicates with other ranks itself, give its class takes_sharded_sequences = True"
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
    """Return whether a class declares that it communicates, or is one of ours with a user's own forward."""
    has_own_forward = type(module).forward not in (GroupedQueryAttention.forward, SparseMoE.forward)
    return _says_so(module) or (_is_ours(module) and has_own_forward)


def _outermost(stage: nn.Module, is_one: Callable[[nn.Module], bool]) -> list[nn.Module]:
    """Return the modules that fulfil the condition, without those inside another such module."""
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
    """Run forwards that leave no trace: no gradients, dropout, compiled code, random numbers or changed buffers.

    It yields for each module whether it normally trains.
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
    """Replace the forwards of modules by the results of `make` inside the block."""
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
    """Checks whether modules that claim to communicate do so."""

    def __init__(self, axis: TokenAxis, mesh: MeshDomains) -> None:
        self.axis, self.mesh = axis, mesh

    def check(self, module: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Run a module twice more, with NaN on the first rank.

        Collective over ranks that share sequences.
        """
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
    """Keeps the shapes of results of modules that support shards; random numbers replace the results later."""

    def __init__(self, axis: TokenAxis, made: Sequence[nn.Module]) -> None:
        self.axis, self.made = axis, made
        self._results: dict[nn.Module, list[Any]] = {module: [] for module in made}

    @contextmanager
    def kept(self, declared: _Declared) -> Generator[None]:
        """Run the modules and record their results inside the block."""

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
        """Make the modules return random numbers, the same each time, changed by `change`, inside the block."""
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
    """Return a tensor of the same shape, dtype and device that takes almost no memory."""
    return x.new_empty(()).expand(x.shape) if isinstance(x, Tensor) and x.is_floating_point() else x


class _Changed(TorchFunctionMode):
    """Changes the values that are looked up for tokens, and those that ranks compute together."""

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
    """Run with NaN, up to the first module that returns a wrong tensor, or passes one to a module inside."""
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
    """Check that the loss sums over pairs of a token and its label, independent of their places."""
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
            raise _loss_error(name, "is not a sum over pairs of a token and its label", mesh)
        if goes_by_places:
            raise _loss_error(name, "depends on the places of tokens, counted from the first one of its own rank", mesh)


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
    """Check that inputs of stages do not count tokens on one rank alone. Collective over ranks that share sequences.

    Args:
        inputs_of: Makes keyword arguments from a microbatch.
        microbatch: A microbatch with this rank's tokens.
        name: The name of `inputs_of`, for the error.
        mesh: The mesh of all ranks.
        axis: Object that finds the tokens.

    Raises:
        ConfigError: An input counts tokens on one rank alone; raised on all ranks that share sequences.
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
                "TokenShard.of(mesh). Or compute values that depend on the order of tokens in prepare_batch, where "
                "sequences are whole, and name them in sequence_dims"
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
    """Return copies with the numbers of the first of the ranks that share sequences.

    Collective over them.
    """
    copied = mapped(lambda x: x.detach().clone(), tree)
    for axis in (Axis.CP, Axis.TP):
        if mesh.sizes[axis] > 1:
            group = mesh.group(axis)
            first = torch.distributed.get_process_group_ranks(group)[0]
            broadcast_tensors(tensors_of(copied), group, first)
    return copied


def _over_sharing(mesh: MeshDomains, value: Any) -> list[Any]:
    """Return the values of all ranks that share sequences. Collective over them."""
    values = [value]
    for axis in (Axis.CP, Axis.TP):
        if mesh.sizes[axis] > 1:
            values = [each for theirs in all_gather_object(values, mesh.group(axis)) for each in theirs]
    return values
