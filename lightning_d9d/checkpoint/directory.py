"""A checkpoint is a directory: tensors by global name, readable on any mesh, and plain values.

    path/values.pt           the values, and which folder has the tensors
    path/data-<token>/       torch Distributed Checkpoint: `.metadata` and at most one file a rank

The content of `path` is always complete: files are written beside it, and `values.pt` takes its place last, in one
step.
"""

from __future__ import annotations

import io
import os
import re
import stat
import weakref
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_d9d.checkpoint.metadata import METADATA_NAME, StoredTensor, digest, read_metadata, stored_tensors
from lightning_d9d.checkpoint.torch_files import check_archive, read_saved
from lightning_d9d.errors import ConfigError, StateError
from lightning_d9d.mesh.agreement import Ranks, first_of
from lightning_d9d.state.directory import make_directory, publish, sync
from lightning_d9d.state.owner import Owner, hold, owned, remove, unless_held
from lightning_d9d.state.regular import open_regular

if TYPE_CHECKING:  # functions import it, as metadata.py says
    from lightning_d9d.checkpoint.tensors import Checksums, PiecesToSave, TensorReader

VALUES_NAME = "values.pt"
_FORMAT = "lightning_d9d checkpoint 2"
_DATA_NAME = re.compile(r"data-([0-9a-f]{16})")
OF_ADAPTER = re.compile(r"lora\.[ab]$")
"""The end of the names of adapters' tensors."""


def is_directory(path: str | Path) -> bool:
    """Return True if the path has a checkpoint of `save_directory`, even a damaged one."""
    return Path(path, VALUES_NAME).is_file()


def save_directory(
    path: str | Path,
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
    *,
    named_values: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save a checkpoint under `path`, and replace its content: another checkpoint, a file or a link. Collective.

    The checkpoint appears there complete or not at all, even if the process is killed; until then the former content
    stays. The next save to this path removes leftovers of a killed one. If several jobs save to one path at the same
    time, the checkpoint of the last one stays, whole.

    Args:
        path: Path on a file system that all ranks see; the first rank's path is used. Missing parents are made.
        tensors: Tensors by global name. Plain tensors are replicated: all ranks that have the name have the same
            values. A DTensor may lie on any mesh. Ranks may hold different names.
        values: Numbers, strings, lists, dicts, plain tensors. The first rank's values are saved.
        named_values: Further values, by name. Values of all ranks are saved; for equal names, the lowest rank's.
        group: The ranks that save; by default all.

    Raises:
        StateError: A rank could not write, or the ranks do not see the same files. Every rank raises it. The former
            content of `path` is still there.
        ConfigError: The path is a URL.
    """
    from lightning_d9d.checkpoint.tensors import PiecesToSave

    prepare_save(path, lambda: PiecesToSave(tensors), values, named_values=named_values, group=group)()


def prepare_save(
    path: str | Path,
    pieces: Callable[[], PiecesToSave],
    values: Mapping[str, Any],
    *,
    named_values: Mapping[str, Any] | None = None,
    group: dist.ProcessGroup | None = None,
    later_group: dist.ProcessGroup | None = None,
    copy: bool = False,
) -> Callable[[], None]:
    """Do the first part of `save_directory`, and return a function for the rest, for any thread. Both are collective.

    Args:
        path: As for `save_directory`.
        pieces: Function that is called once, here: it returns the tensors, or copies of them.
        values: As for `save_directory`.
        named_values: Likewise.
        group: As for `save_directory`.
        later_group: Group of the same ranks for the rest; by default `group`.
        copy: If True, copy the values now, so that they may change before the rest is done.

    Raises:
        StateError: The arguments cannot be saved. Every rank raises it.
        ConfigError: The path is a URL.
    """
    target, ranks = _on_file_system(path), Ranks(group)
    failure = f"checkpoint {str(target)!r} cannot be saved"
    prepared: list[tuple[PiecesToSave, Mapping[str, Any], Mapping[str, Any]]] = []

    def prepare() -> None:
        named = _packed(named_values or {})
        own = _packed(values) if ranks.is_first else b""
        if copy:
            prepared.append((pieces(), _unpacked(own) if own else {}, _unpacked(named)))
        else:
            prepared.append((pieces(), values, named_values or {}))

    ranks.together(failure, prepare)
    return lambda: _save(target, *prepared[0], Ranks(later_group or group), failure)


def _save(
    path: Path,
    pieces: PiecesToSave,
    values: Mapping[str, Any],
    named_values: Mapping[str, Any],
    ranks: Ranks,
    failure: str,
) -> None:
    from lightning_d9d.checkpoint.tensors import write_tensors

    all_named = ranks.merge(named_values)
    owners: list[Owner] = []  # of the first rank
    with ExitStack() as stack:

        def prepare() -> Path | None:
            if not ranks.is_first:
                return None
            if both := sorted(all_named.keys() & values.keys()):
                raise StateError(f"{first_of(both)} in both values and named values; rename one")
            owners.append(stack.enter_context(_prepared(path)))
            return owners[0].hidden("partial") / f"data-{owners[0].token}"

        prepared = ranks.together(failure, prepare)[0]
        assert prepared is not None
        data = prepared
        checksums: list[Checksums] = []

        def finish() -> None:
            if ranks.is_first:
                _publish(owners[0], data, {**values, **all_named}, checksums[0])
                stack.close()

        def give_up() -> None:
            stack.close()
            if not ranks.is_first:  # a rank may have a file system of its own
                remove(data.parent)

        try:
            ranks.together(failure, lambda: checksums.append(write_tensors(data, pieces, ranks)))
            ranks.together(failure, finish)
        except StateError:
            with suppress(StateError):
                ranks.together(failure, give_up)
            raise


def open_directory(path: str | Path, *, group: dist.ProcessGroup | None = None, alone: bool = False) -> Checkpoint:
    """Read a checkpoint's values, and check that its tensors are there. Collective, unless `alone`.

    It does not run code of the files. Another job may save to the path at any time: opened tensors stay until the
    checkpoint is released.

    Args:
        path: Path that was given to `save_directory`.
        group: The ranks that load, which may differ from those that saved; by default all.
        alone: If True, open it for this process only, without the others.

    Raises:
        StateError: The checkpoint or one of its files is missing, damaged, truncated or foreign. Every rank
            raises it.
        ConfigError: The path is a URL.
    """
    from lightning_d9d.checkpoint.tensors import TensorReader

    path, ranks = _on_file_system(path), Ranks(group, alone=alone)
    opened: list[Checkpoint] = []

    def read() -> str:
        with ExitStack() as held:
            content = _read_and_hold(path, held)
            data = path / content["data"]
            metadata = read_metadata(data, content["metadata"], ranks.share)
            reader = TensorReader(data, metadata, content["checksums"])
            weakref.finalize(reader, held.pop_all().close)
        opened.append(Checkpoint(path, content["values"], reader, ranks))
        return content["data"]

    failure = f"checkpoint {str(path)!r} cannot be read"
    before: set[str] = set()
    while len(found := set(ranks.together(failure, read))) > 1:  # another job may just have saved there
        if found <= before:
            raise StateError(f"{failure}: ranks see different checkpoints; put it on a file system that all ranks see")
        before = found
    return opened[-1]


def remove_directory(path: str | Path) -> None:
    """Remove a checkpoint, or a link to one, never leaving a part of it under its name. Not collective."""
    path = _on_file_system(path)
    if path.is_symlink():
        path.unlink()
        return
    with suppress(FileNotFoundError), owned(path) as owner:
        os.rename(path, owner.hidden("removed"))


class Differences(NamedTuple):
    """Differences between the requested tensors and the tensors of a checkpoint."""

    missing: list[str]
    """Names that the checkpoint lacks: these tensors are unchanged."""
    unexpected: list[str]
    """Names in the checkpoint that were not requested."""


def compare(
    tensors: Mapping[str, Tensor],
    stored: Mapping[str, StoredTensor],
    ranks: Ranks,
    failure: str,
    *,
    strict: bool,
    prefix: str,
) -> Differences:
    """Compare requested tensors with stored ones. Collective.

    Args:
        tensors: As for `Checkpoint.load`.
        stored: All stored tensors; the same on all ranks.
        ranks: The ranks that load.
        failure: Beginning of the error message.
        strict: As for `Checkpoint.load`.
        prefix: As for `Checkpoint.load`.

    Raises:
        StateError: A tensor does not fit, or is on the meta device. Every rank raises the same error.
    """
    wanted = ranks.merge({(name, tuple(t.shape), str(t.dtype), t.is_meta): t.dtype for name, t in tensors.items()})
    names = {name for name, *_ in wanted}
    differences = Differences(
        sorted(names - stored.keys()), [name for name in stored if name.startswith(prefix) and name not in names]
    )
    misfits = {
        name: problem
        for (name, shape, _, is_meta), dtype in wanted.items()
        if name in stored and (problem := _misfit(name, stored[name], shape, dtype, is_meta))
    }
    others: dict[str, str] = {}
    if strict:
        others |= {name: f"{name} is not in the checkpoint" for name in differences.missing}
        others |= {name: f"{name} is in the checkpoint, but was not requested" for name in differences.unexpected}
    if misfits or others:
        raise StateError(
            f"{failure}, the checkpoint {what_differs(misfits, others)}: "
            f"{first_of([*misfits.values(), *others.values()])}. Build the model with the config and peft it was saved "
            "with, or give another checkpoint"
        )
    return differences


def what_differs(misfits: Iterable[str], others: Iterable[str]) -> str:
    """Return what is wrong with a checkpoint, by the names of tensors. Without names, it is of another model.

    Args:
        misfits: Tensors that have another shape in the model.
        others: Tensors that only one of the two has.
    """
    misfits, others = list(misfits), list(others)
    names = misfits + others
    if not names or not all(map(OF_ADAPTER.search, names)):
        return "is of another model"
    return "has LoRA adapters of other weights" if others else "has LoRA adapters of another rank"


def _misfit(name: str, stored: StoredTensor, shape: tuple[int, ...], dtype: torch.dtype, is_meta: bool) -> str | None:
    if tuple(stored.shape) != shape:
        return f"{name} has shape {list(stored.shape)} in the checkpoint, {list(shape)} in the model"
    if stored.dtype != dtype and not (stored.dtype.is_floating_point and dtype.is_floating_point):
        return f"{name} is {stored.dtype} in the checkpoint, {dtype} in the model"
    return f"{name} is on the meta device; allocate it first" if is_meta else None


class Checkpoint:
    """A checkpoint that `open_directory` opened; all of its files have been found."""

    def __init__(self, path: Path, values: dict[str, Any], reader: TensorReader, ranks: Ranks) -> None:
        self.path = path
        self.values = values
        """Values and named values."""
        self.tensors: dict[str, StoredTensor] = stored_tensors(reader.metadata)
        """Shape and dtype of each saved tensor, by name."""
        self._reader = reader
        self.ranks = ranks

    def load(
        self, tensors: Mapping[str, Tensor], *, strict: bool = True, prefix: str = "", later: str | None = None
    ) -> Differences:
        """Overwrite tensors in place with the saved ones. Collective, over the ranks that opened it.

        Args:
            tensors: Tensors by the names of the save; plain ones, or DTensors on any mesh. Ranks may hold different
                names. Floating dtypes are cast; others must equal the saved ones.
            strict: If True, all tensors must have been saved, and some rank must request each saved one with `prefix`.
            prefix: Prefix of the names that must all be requested.
            later: Prefix of names that will be loaded later: these tensors must be undamaged, too. Each of their pieces
                is checked once, by some rank.

        Returns:
            The names that only one of the two has, if not strict; the same on every rank.

        Raises:
            StateError: Names, shapes or dtypes do not fit, or a file is damaged. Every rank raises it, and all tensors
                are unchanged.
        """
        failure = f"checkpoint {str(self.path)!r} cannot be loaded"
        differences = compare(tensors, self.tensors, self.ranks, failure, strict=strict, prefix=prefix)
        self.ranks.together(failure, lambda: self._reader.check(tensors))
        if later is not None:
            rest = [name for name in self.tensors if name.startswith(later)]
            self.ranks.together(failure, lambda: self._reader.check_share(rest, self.ranks.share))
            self._reader.trust(rest)
        self.ranks.together(failure, lambda: self._reader.fill(tensors))
        return differences

    def read(self, prefix: str = "") -> dict[str, Tensor]:
        """Read whole tensors into the CPU's memory: all whose names begin with `prefix`. Not collective.

        Raises:
            StateError: A file is damaged.
        """
        wanted = {name: spec for name, spec in self.tensors.items() if name.startswith(prefix)}
        tensors = {name: torch.empty(spec.shape, dtype=spec.dtype) for name, spec in wanted.items()}
        failure = f"checkpoint {str(self.path)!r} cannot be read"
        Ranks(alone=True).together(failure, lambda: self._reader.check(tensors))
        Ranks(alone=True).together(failure, lambda: self._reader.fill(tensors))
        return tensors


# Values


def _packed(values: Mapping[str, Any]) -> bytes:
    """Return the values as the content of a file."""
    try:
        return _pack_and_check(dict(values))
    except Exception as error:
        for name, value in values.items():
            try:
                _pack_and_check({name: value})
            except Exception as reason:
                named = re.search(r"GLOBAL (\S+)", str(reason))
                kind = named[1] if named else type(value).__name__
                raise StateError(
                    f"value {name!r} holds {kind}, which could not be loaded again; save only numbers, strings, "
                    "lists, dicts and plain tensors"
                ) from error
        raise


def _pack_and_check(values: dict[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(values, buffer)
    _unpacked(buffer.getvalue())
    return buffer.getvalue()


def _unpacked(content: bytes) -> dict[str, Any]:
    file = io.BytesIO(content)
    read_saved(file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def _read_values(path: Path) -> dict[str, Any]:
    file = path / VALUES_NAME
    if not path.exists():
        raise StateError("the path does not exist; give another one")
    if not os.path.lexists(file):
        raise StateError(
            f"{str(file)!r} is missing: the checkpoint is incomplete or not one of this package; give another"
        )
    with open_regular(file) as stream:
        packed = stream.read()
    try:
        check_archive(io.BytesIO(packed))
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            damaged = archive.testzip()  # torch does not compare checksums
        content = None if damaged else _unpacked(packed)
    except Exception as error:
        reason = f" (it {error})" if isinstance(error, StateError) else ""
        raise StateError(f"{str(file)!r} is damaged, truncated or foreign{reason}; give another checkpoint") from error
    if damaged:
        raise StateError(f"{str(file)!r} is damaged; give another checkpoint")
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise StateError(f"{str(file)!r} is not of this version of the package; give another checkpoint")
    if not (isinstance(content.get("data"), str) and _DATA_NAME.fullmatch(content["data"])):
        raise StateError(f"{str(file)!r} does not name a folder of tensors; give another checkpoint")
    if not (isinstance(content.get("values"), dict) and _are_checksums(content.get("checksums"))):
        raise StateError(f"{str(file)!r} lacks values or checksums; give another checkpoint")
    return content


def _read_and_hold(path: Path, held: ExitStack) -> dict[str, Any]:
    """Read the values; until `held` is closed, no save of another job removes their tensors.

    If another job has just replaced them, the new values are returned.
    """
    before = None
    while True:
        content = _read_values(path)
        metadata = hold(path / content["data"] / METADATA_NAME)
        if metadata is not None:
            held.enter_context(metadata)
            return content
        if content["data"] == before:  # a file is missing or damaged
            return content
        before = content["data"]


def _are_checksums(sums: Any) -> bool:
    return isinstance(sums, dict) and all(isinstance(of_file, dict) for of_file in sums.values())


# The directory


def refuse_others(path: Path) -> None:
    """Refuse to replace files that are not of a save, even if other jobs save to the path meanwhile. Not collective.

    Raises:
        StateError: The path is a directory with other files, or a device.
    """
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    if not (stat.S_ISLNK(status.st_mode) or stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        raise StateError("it is a device or another special file; give another path")
    with suppress(FileNotFoundError, NotADirectoryError):
        names = os.listdir(path) if stat.S_ISDIR(status.st_mode) else []
        if names and VALUES_NAME not in names and os.path.samestat(status, os.lstat(path)):
            raise StateError("it is a directory with other files; remove it or give another path")


def _on_file_system(path: str | Path) -> Path:
    if "://" in str(path):
        raise ConfigError(f"{path} is a URL; a checkpoint of several files needs a path on a file system")
    return Path(path).absolute()


def _is_own_directory(path: Path) -> bool:
    return is_directory(path) and not path.is_symlink()


@contextmanager
def _prepared(path: Path) -> Iterator[Owner]:
    """Yield an owner with a directory for the tensors, beside `path`. Leftovers are removed before and after."""
    make_directory(path.parent)
    owner: Owner | None = None
    try:
        with owned(path) as owner:
            _tidy(owner)
            refuse_others(path)
            root = owner.hidden("partial")
            root.mkdir()  # without parents=True, which would follow an existing link
            (root / f"data-{owner.token}").mkdir()
            yield owner
    finally:
        if owner is not None:
            _tidy(owner)


def _publish(owner: Owner, data: Path, values: dict[str, Any], checksums: Checksums) -> None:
    """Publish the checkpoint under the owner's path in one step, after all files are on the disk."""
    root, path = data.parent, owner.path
    if not (data / METADATA_NAME).exists():
        raise StateError(f"{str(data / METADATA_NAME)!r} has vanished; save again")
    metadata = digest(data)
    read_metadata(data, metadata)
    sync(data)
    about = {"format": _FORMAT, "data": data.name, "metadata": metadata, "checksums": checksums}
    content = _packed({**about, "values": values})
    with open(root / VALUES_NAME, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    while True:
        is_there = _is_own_directory(path)
        try:
            if not is_there:
                publish(owner)
                return
            os.rename(data, path / data.name)
            break
        except OSError:
            if _is_own_directory(path) == is_there:  # if not, another save or removal was faster
                raise
    sync(path)
    try:
        os.replace(root / VALUES_NAME, path / VALUES_NAME)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise StateError("another job has just removed or replaced it; give each job its own folder") from error
    sync(path)


def _tidy(owner: Owner) -> None:
    """Remove data in the owner's checkpoint that its values do not name, unless they are being saved or read."""
    if not _is_own_directory(owner.path):
        return
    with suppress(StateError, OSError):  # the checkpoint is damaged, so the owner of the data is unknown
        found = [
            entry
            for entry in owner.path.iterdir()
            if (name := _DATA_NAME.fullmatch(entry.name)) and not owner.is_kept(name[1])
        ]
        used = _read_values(owner.path)["data"]  # read last: data without an owner before this will never be named
        for entry in found:
            if entry.name != used:
                with suppress(OSError), unless_held(entry / METADATA_NAME) as is_free:
                    if is_free:
                        remove(entry)
