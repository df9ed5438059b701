"""Values given to a stage while it is built on the meta device: they are recorded, and computed on the CPU later.

[Note: recorded values] Tensors on the meta device have no values, so `nn.init.normal_(weight)` does nothing there.
While a `Recording` is open, each call that would have set or changed values is recorded. Afterwards the calls that a
parameter depends on run again on the CPU, on whole tensors, and a rank takes its slice.

*Random numbers* follow from the seed and a name: that of the parameter to which a call writes, else that of the
parameter being computed. So they are the same on every mesh, like all initial weights.

*Defaults* are not recorded values: a submodule's own `reset_parameters()` writes them to its own tensors when it is
built. Those tensors are reset later. Copies of them are reset, too, each by its own name.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.seeds import derived

_aten = torch.ops.aten
_EMPTY = (_aten.empty, _aten.empty_like, _aten.empty_strided, _aten.new_empty, _aten.new_empty_strided)
_COPIES = (_aten.clone, _aten._to_copy)
_OVERWRITING = {
    *(_aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_, _aten.copy_, _aten.bernoulli_, _aten.exponential_),
    *(_aten.log_normal_, _aten.random_),
}
"""Functions that overwrite all earlier values if they write to all of a tensor."""
_RESETS = ("reset_parameters", "_reset_parameters")
_BETWEEN = ("torch.utils._device", "torch._compile", "torch._dynamo.eval_frame")
"""Modules that may be on the stack between a function and this mode: another active `torch.device`."""
_NARROW = (torch.float16, torch.bfloat16)
_IS_META = torch.Tensor.is_meta.__get__  # type: ignore[attr-defined]


class Piece(NamedTuple):
    """The place of a meta tensor in its storage."""

    storage: int
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    storage_bytes: int

    @property
    def is_whole(self) -> bool:
        """True if the piece is all of the storage."""
        return self.shape.numel() * self.dtype.itemsize == self.storage_bytes


class _Call(NamedTuple):
    function: Callable[..., Any]
    args: tuple[Any, ...]
    """Arguments, with a `Piece` for each meta tensor."""
    kwargs: Mapping[str, Any]
    read: list[Piece]
    """All tensors among its arguments, including those that it writes to."""
    written: list[Piece]
    results: list[Piece | None]
    """New tensors among its results; None for others."""
    is_random: bool
    is_default: bool
    """True if a submodule's own reset makes the call."""
    obstacle: str | None
    """The reason why it cannot run again, if any."""

    @property
    def name(self) -> str:
        """The name of the function."""
        return str(getattr(self.function, "__name__", self.function)).split(".")[0]

    @property
    def changed(self) -> list[Piece]:
        """The pieces whose values it changes."""
        return [*self.written, *(piece for piece in self.results if piece is not None)]

    def run(self, memory: dict[int, Tensor]) -> None:
        """Make the call on the CPU, on tensors in the memory of their storages."""
        if self.obstacle is not None:
            raise RuntimeError(self.obstacle)
        casts: list[tuple[Tensor, Tensor]] = []

        def argument(leaf: Any) -> Any:
            if isinstance(leaf, Piece):
                tensor = _tensor_at(leaf, memory)
                if self.is_random and tensor.is_floating_point() and tensor.dtype != torch.float32:
                    casts.append((tensor, tensor.float()))  # random numbers of any dtype are drawn in float32
                    return casts[-1][1]
                return tensor
            if isinstance(leaf, torch.dtype):
                return torch.float32 if leaf in _NARROW or (self.is_random and leaf.is_floating_point) else leaf
            return torch.device("cpu") if isinstance(leaf, torch.device) else leaf

        args, kwargs = tree_map(argument, (self.args, dict(self.kwargs)), is_leaf=_is_piece)
        results = tree_flatten(self.function(*args, **kwargs))[0]
        for tensor, cast in casts:
            tensor.copy_(cast)
        for piece, result in zip(self.results, results, strict=False):
            if piece is not None:
                _tensor_at(piece, memory).copy_(result)


class RecordedValue:
    """The value given to a parameter or buffer while it was built.

    Args:
        recording: A closed recording.
        name: Name of the tensor in the whole model.
        piece: Place of the tensor in its storage.
        names: Names of all tensors of the stage, by storage.
    """

    def __init__(self, recording: Recording, name: str, piece: Piece, names: Mapping[int, str]) -> None:
        self.shape = piece.shape
        self.is_default = recording.is_default(piece.storage)
        """True if only the reset of a submodule gave it."""
        self._recording, self._name, self._piece, self._names = recording, name, piece, names

    def make(self, seed: int) -> Tensor:
        """Compute the whole value on the CPU, in at least float32. It changes torch's random state.

        Args:
            seed: Seed of the job.

        Raises:
            ConfigError: A call cannot run again.
        """
        memory: dict[int, Tensor] = {}
        num_passing = 0
        for index, call in self._recording.needed(self._piece.storage):
            if call.is_random:
                owner = next((piece.storage for piece in call.changed if piece.storage in self._names), None)
                if owner is None:
                    torch.default_generator.manual_seed(derived(seed, self._name, "passing", num_passing))
                    num_passing += 1
                else:  # its draws do not depend on the tensor being made
                    count = self._recording.num_random(owner, before=index)
                    torch.default_generator.manual_seed(derived(seed, self._names[owner], "written", count))
            try:
                call.run(memory)
            except (RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"configure_stage gives {self._name!r} a value by {call.name}, which cannot be recorded: {error}. "
                    "Set it in reset_parameters() of the submodule that owns it, or in on_stages_built()"
                ) from error
        return _tensor_at(self._piece, memory)


class Recording:
    """A recording of the calls that set values of meta tensors while it is open. See [Note: recorded values]."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._history: dict[int, list[tuple[int, bool]]] = {}
        """The calls that write to each storage, and whether they overwrite everything."""
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that addresses are not reused
        self._modes = ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_Functions(self))
        self._modes.enter_context(_Operators(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._modes.close()

    def values_of(self, named: Iterable[tuple[str, Tensor]]) -> dict[str, RecordedValue]:
        """Return the values given to tensors, by name; tensors without a known value are left out.

        Args:
            named: All tensors of a stage, with their names in the whole model.
        """
        pieces = [(name, _piece_of(tensor)) for name, tensor in named if _is_plain_meta(tensor)]
        names: dict[int, str] = {}
        for name, piece in pieces:
            names.setdefault(piece.storage, name)
        for storage, name in list(names.items()):  # the tensor before `.to(dtype)` has the same name
            while (source := self._converted_from(storage)) is not None and source not in names:
                names[source] = name
                storage = source
        return {name: RecordedValue(self, name, piece, names) for name, piece in pieces if self._writers(piece.storage)}

    def needed(self, storage: int) -> list[tuple[int, _Call]]:
        """Return the calls on which the values of a storage depend, with their numbers, in order."""
        needed: set[int] = set()
        states: list[tuple[int, int | None]] = [(storage, None)]
        while states:
            for index in self._writers(*states.pop()):
                if index not in needed:
                    needed.add(index)
                    states.extend((piece.storage, index) for piece in self._calls[index].read)
        return [(index, self._calls[index]) for index in sorted(needed)]

    def num_random(self, storage: int, before: int) -> int:
        """Count how often random numbers are written to a storage before a call."""
        return sum(self._calls[index].is_random for index, _ in self._history[storage] if index < before)

    def is_default(self, storage: int, before: int | None = None) -> bool:
        """Return True if the values of a storage before a call come only from a submodule's own reset."""
        for index in self._writers(storage, before):
            call = self._calls[index]
            if getattr(call.function, "overloadpacket", None) in _COPIES and call.read:
                if not self.is_default(call.read[0].storage, index):
                    return False
            elif not call.is_default:
                return False
        return True

    def note(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        written: Sequence[Tensor],
        results: Sequence[Any] = (),
        *,
        is_random: bool,
        overwrites: bool,
    ) -> None:
        """Record a call.

        Args:
            function: Function to call again.
            args: The arguments of the call.
            kwargs: Arguments of the call.
            written: Tensors that it writes to.
            results: Tensors that it returns, and other leaves.
            is_random: True if it draws random numbers.
            overwrites: True if it overwrites all values of the tensors that it writes to.
        """
        read = [_piece_of(leaf) for leaf in tree_flatten((args, kwargs))[0] if _is_plain_meta(leaf)]
        known = {piece.storage for piece in read}
        made = [
            piece if piece is not None and piece.storage not in known else None
            for piece in (_piece_of(leaf) if _is_plain_meta(leaf) else None for leaf in results)
        ]
        changed = [_piece_of(tensor) for tensor in written]
        if not changed and not any(made):
            return
        self._storages.extend(t.untyped_storage() for t in (*written, *results) if _is_plain_meta(t))
        draws_by_itself = any(isinstance(leaf, torch.Generator) for leaf in tree_flatten((args, kwargs))[0])
        unknown = next((piece for piece in read if piece not in changed and piece.storage not in self._history), None)
        obstacle = (
            "it reads a tensor of unknown values; build that tensor on the CPU (device='cpu')" if unknown else None
        )
        if draws_by_itself:
            obstacle = "it draws from a torch.Generator, whose numbers depend on the order of calls"
        call = _Call(
            function,
            tree_map(_kept, args),
            tree_map(_kept, dict(kwargs)),
            read,
            changed,
            made,
            is_random,
            _is_default(written),
            obstacle,
        )
        index = len(self._calls)
        self._calls.append(call)
        for piece in changed:
            reads_it = sum(other.storage == piece.storage for other in read) > 1
            whole = overwrites and piece.is_whole and not reads_it
            self._history.setdefault(piece.storage, []).append((index, whole))
        for piece in made:
            if piece is not None:
                self._history[piece.storage] = [(index, True)]

    def note_empty(self, tensor: Tensor) -> None:
        """Record a tensor without values."""
        self._storages.append(tensor.untyped_storage())
        self._history[_piece_of(tensor).storage] = []

    def _converted_from(self, storage: int) -> int | None:
        history = self._history.get(storage) or [(0, False)]
        call = self._calls[history[0][0]] if history[0][1] else None
        is_cast = call is not None and getattr(call.function, "overloadpacket", None) == _aten._to_copy
        return call.read[0].storage if call is not None and is_cast and call.read else None

    def _writers(self, storage: int, before: int | None = None) -> list[int]:
        """Return the calls that wrote the values which a storage has before a call."""
        earlier = [(i, is_whole) for i, is_whole in self._history.get(storage, []) if before is None or i < before]
        first = max((place for place, (_, is_whole) in enumerate(earlier) if is_whole), default=0)
        return [index for index, _ in earlier[first:]]


class _Operators(TorchDispatchMode):
    """A mode that records calls of torch's operators."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        results = tree_flatten(result)[0]
        if func.overloadpacket in _EMPTY:
            if _is_plain_meta(result):
                self.recording.note_empty(result)
            return result
        arguments = func._schema.arguments
        written = [
            leaf
            for place, argument in enumerate(arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_flatten(args[place] if place < len(args) else kwargs.get(argument.name))[0]
            if _is_plain_meta(leaf)
        ]
        if written or any(map(_is_plain_meta, results)):
            self.recording.note(
                *(func, args, kwargs, written, results),
                is_random=torch.Tag.nondeterministic_seeded in func.tags,
                overwrites=func.overloadpacket in _OVERWRITING or any(argument.is_out for argument in arguments),
            )
        return result


class _Functions(TorchFunctionMode):
    """A mode for calls that do not reach operators: Python values, and `nn.init` functions that skip meta tensors."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self.recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func == _IS_META and result:
            self._note_skipped()
        elif func in (torch.tensor, torch.as_tensor) and _is_plain_meta(result) and not isinstance(args[0], Tensor):
            value = func(*args, **{**kwargs, "device": "cpu"})
            self.recording.note(_aten.clone.default, (value,), {}, [], [result], is_random=False, overwrites=True)
        return result

    def _note_skipped(self) -> None:
        """Record the call of a function that skips tensors on the meta device."""
        caller: Any = sys._getframe(2)
        while caller.f_globals.get("__name__") in _BETWEEN:
            caller = caller.f_back
        if caller.f_globals.get("__name__") != nn.init.__name__:
            return
        code = caller.f_code
        given = {name: caller.f_locals[name] for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]}
        function = getattr(nn.init, code.co_name, None)
        if function is not None and _is_plain_meta(given.get("tensor")):
            self.recording.note(function, (), given, [given["tensor"]], is_random=True, overwrites=True)


def _is_plain_meta(leaf: Any) -> bool:
    is_plain = type(leaf) is Tensor or (issubclass(type(leaf), nn.Parameter) and not is_lazy(leaf))
    return is_plain and leaf.device.type == "meta"


def _address(tensor: Tensor) -> int:
    """Return the address of the tensor's storage, also for one without memory."""
    return tensor.untyped_storage()._cdata


def _piece_of(tensor: Tensor) -> Piece:
    return Piece(
        _address(tensor),
        tensor.shape,
        tensor.stride(),
        int(tensor.storage_offset()),
        tensor.dtype,
        tensor.untyped_storage().nbytes(),
    )


def _kept(leaf: Any) -> Any:
    """Save an argument for a later call: the place of a meta tensor, or a copy of another tensor, which may change."""
    if _is_plain_meta(leaf):
        return _piece_of(leaf)
    return leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def _is_default(written: Sequence[Tensor]) -> bool:
    """Return True if a submodule's own reset is running, on its own tensor or one without an owner."""
    storages = {_address(tensor) for tensor in written}
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _RESETS and isinstance(module := frame.f_locals.get("self"), nn.Module):
            own = (*module._parameters.values(), *module._buffers.values())
            if storages <= {_address(tensor) for tensor in own if tensor is not None}:
                return True
        frame = frame.f_back
    return False


def _is_piece(leaf: Any) -> bool:
    return isinstance(leaf, Piece)


def _tensor_at(piece: Piece, memory: dict[int, Tensor]) -> Tensor:
    dtype = torch.float32 if piece.dtype in _NARROW else piece.dtype
    flat = memory.get(piece.storage)
    if flat is None:
        fill = float("nan") if dtype.is_floating_point else 0
        flat = torch.full([piece.storage_bytes // piece.dtype.itemsize], fill, dtype=dtype, device="cpu")
        memory[piece.storage] = flat
    if flat.dtype != dtype:
        raise RuntimeError(f"its memory is used as {flat.dtype} and as {dtype}")
    return flat.as_strided(piece.shape, piece.stride, piece.offset)
