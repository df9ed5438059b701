"""Reads the files of `--config`: whether they can be read, and where in them or in the arguments a setting is."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import yaml

from lightning_d9d.cli.wording import MistakeError
from lightning_d9d.paths import missing

CHECKPOINT_WORDS = ("last", "hpc", "auto")
"""Words that are accepted as `ckpt_path`, besides paths and the names of Lightning's registry."""

_STRATEGY: str = "trainer.strategy"

_NUM_RANKS = re.compile(r"\b\d+ (?:data )?ranks?\b")
_OF_RANKS = [(name, None) for name in ("world_size", "devices", "num_nodes")]
"""Options that make the number of ranks which a message names."""

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option, without `--`, and its value; it reads `--name value` and `--name=value`."""
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        if argument == "-c" or argument.startswith("--"):
            name, equals, value = argument.removeprefix("--").partition("=")
            yield ("config" if name == "-c" else name), (value if equals else following)


def config_files(arguments: Sequence[str]) -> list[str]:
    """Return the files of `--config` and `-c`, without URLs and configurations written in the argument itself."""
    values = [value for name, value in options(arguments) if name == "config"]
    return [value for value in values if value not in ("", "-") and "://" not in value and not _is_inline(value)]


def with_class_of_d9d(arguments: Sequence[str]) -> list[str]:
    """Return the arguments, with the class of `strategy: d9d` before the first option that sets something in it.

    Raises:
        MistakeError: A file of `--config` cannot be read.
    """
    strategy = ""
    for index, argument in enumerate(arguments):
        if argument != "-c" and not argument.startswith("--"):
            continue
        name, value = next(options(arguments[index : index + 2]))
        if name == "config" and config_files([f"--config={value}"]):
            for node, _ in _below(_compose(value), _STRATEGY.split(".")):
                strategy = node.value
        elif name == _STRATEGY:
            strategy = value
        elif name in (f"{_STRATEGY}.class_path", f"{_STRATEGY}.help"):
            break
        elif name.startswith(f"{_STRATEGY}.") and strategy == "d9d":
            return [*arguments[:index], f"--{_STRATEGY}.class_path=lightning_d9d.D9DStrategy", *arguments[index:]]
    return [*arguments]


def _is_inline(value: str) -> bool:
    try:
        return not Path(value).exists() and isinstance(yaml.load(value, _LOADER), dict)
    except (OSError, yaml.YAMLError):
        return False


def check_files(arguments: Sequence[str]) -> None:
    """Read the files of `--config`, and check that of `--ckpt_path`, without torch, Lightning or jsonargparse.

    Raises:
        MistakeError: A file is missing or unreadable, has an error in its syntax, or holds something other than a
            mapping.
    """
    for path in config_files(arguments):
        node = _compose(path)
        if node is not None and not isinstance(node, yaml.MappingNode):
            raise MistakeError(f"{path} has no settings; it must be a mapping such as `trainer: {{max_steps: 100}}`")
    for name, value in options(arguments):
        if name == "ckpt_path" and value not in ("", "null"):
            check_checkpoint(value, "--ckpt_path")


def check_checkpoint(path: str, subject: str) -> None:
    """Check that a checkpoint exists. Lightning's own words, URLs and `${...}` are not checked here.

    Raises:
        MistakeError: The checkpoint does not exist; the message begins with the subject.
    """
    if path in CHECKPOINT_WORDS or path.startswith("registry") or "://" in path or "${" in path:
        return
    if path == "best" and not Path(path).exists():
        raise MistakeError(
            f"{subject} best: only the process that trained knows which checkpoint was best\ngive its path; "
            "ModelCheckpoint's filename can have the monitored value"
        )
    if not Path(path).exists():
        raise MistakeError(
            f"{subject}: {missing(path)}\ngive the path of a checkpoint, or one of {', '.join(CHECKPOINT_WORDS)}"
        )


def _compose(path: str) -> yaml.Node | None:
    try:
        return yaml.compose(Path(path).read_text(encoding="utf-8"), _LOADER)
    except OSError as error:
        raise MistakeError(missing(path) if error.errno == errno.ENOENT else f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise MistakeError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        context = f" {error.context}, which begins on line {error.context_mark.line + 1}" if error.context_mark else ""
        raise MistakeError(f"{path}{line}: not YAML: {error.problem}{context}") from error
    except yaml.YAMLError as error:
        raise MistakeError(f"{path}: not YAML: {str(error).splitlines()[0]}") from error


class Written:
    """Finds where a setting was written: in the arguments, or in a file of `--config`.

    Args:
        arguments: The arguments.

    Raises:
        MistakeError: A file of `--config` cannot be read.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        self._sources = [_source(name, value) for name, value in options(arguments)]

    def find(self, path: Sequence[str], value: str | None = None) -> str | None:
        """Return the place of a setting: the option, or the file and the line.

        Args:
            path: The names that lead to it, without `init_args`; indices of lists may be left out.
            value: A text that the setting, or something inside of it, must have.

        Returns:
            The place with the highest precedence if there are several; None if nobody wrote it.
        """
        for source in reversed(self._sources):
            length = len(source.names)
            if source.names != [*path[:length]]:
                continue
            for node, line in _below(source.root, [*path[length:]]):
                if value is None:
                    return source.place(line)
                for each in (node, *(value for _, value in _settings(node))):
                    if each.value == value:
                        return source.place(each.start_mark.line + 1)
        return None

    def find_named(self, message: str) -> str | None:
        """Find the first setting that a message names with its value, or else as a list or a name in backticks.

        One in the arguments comes before all in files, which it may have made impossible. If the message names a number
        of ranks, this holds for the arguments that gave it, too; the place in the file then follows.
        """
        pairs: list[tuple[str, str | None]] = re.findall(r"\b(\w+)='?([^\s';,()]+)", message)
        pairs += [(name, value) for value, name in re.findall(r"invalid value (\S+) for (\w+)", message)]
        pairs += [(tick or of_list, None) for tick, of_list in re.findall(r"`(\w+)`|\b(\w+)=\[", message)]
        if place := self._first(pairs, is_file=False):
            return place
        in_file = self._first(pairs, is_file=True)
        if in_file and _NUM_RANKS.search(message) and (place := self._first(_OF_RANKS, is_file=False)):
            return f"{place}, beside {in_file}"
        return in_file

    def full_names(self, name: str) -> list[str]:
        """Return the settings in files that have this as their last name, with the names that lead to each."""
        return [
            ".".join(names)
            for source in self._sources
            for names in _full_names(source.root)
            if source.is_file and names[-1] == name
        ]

    def _first(self, pairs: Sequence[tuple[str, str | None]], *, is_file: bool) -> str | None:
        """Find the first of some settings, with their values, in the files or in the other arguments."""
        sources = [each for each in reversed(self._sources) if each.is_file == is_file]
        found = (each.find_anywhere(*pair) for pair in pairs for each in sources)
        return next(filter(None, found), None)


@dataclass(frozen=True)
class _Source:
    """An option with its value, or a file of `--config`."""

    name: str
    names: list[str]
    """The names that lead to the value."""
    root: yaml.Node | None
    is_file: bool = False

    def place(self, line: int) -> str:
        """Return the place of a line of the value: that of an option is the option."""
        return f"{self.name}, line {line}" if self.is_file else self.name

    def find_anywhere(self, name: str, value: str | None) -> str | None:
        """Find a setting by its last name, and by its value unless that is None."""
        whole = [(self.names[-1], self.root, 1)] if self.names else []
        inner = ((key.value, node, key.start_mark.line + 1) for key, node in _settings(self.root))
        for key, node, line in (*whole, *inner):
            is_it = value is None or (isinstance(node, yaml.ScalarNode) and _are_equal(node.value, value))
            if key == name and is_it:
                return self.place(line)
        return None


def _source(name: str, value: str) -> _Source:
    if name != "config":
        return _Source(f"--{name}", _names(name), _value(value))
    if files := config_files([f"--config={value}"]):
        return _Source(files[0], [], _compose(files[0]), is_file=True)
    return _Source("--config", [], _value(value))


def _value(text: str) -> yaml.Node | None:
    """Read the value of an option, which may be a mapping or a list; any other text is a scalar."""
    with suppress(yaml.YAMLError):
        if node := yaml.compose(text, _LOADER):
            return node
    return yaml.compose(json.dumps(text), _LOADER)


def _are_equal(written: str, value: str | None) -> bool:
    """Return whether a value is what was written; None matches anything, and 1.0 matches 1."""
    if value is None or written == value:
        return True
    try:
        return float(written) == float(value)
    except ValueError:
        return False


def _names(option: str) -> list[str]:
    return [name for name in option.rstrip("+").split(".") if name not in ("class_path", "init_args")]


def _below(node: yaml.Node | None, path: list[str], line: int = 1) -> Iterator[tuple[yaml.Node, int]]:
    """Yield each node that the names lead to, with the line of its key."""
    if node is None:
        return
    if not path:
        yield node, line
    elif isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            if key.value == path[0]:
                yield from _below(value, path[1:], key.start_mark.line + 1)
            elif key.value == "init_args":
                yield from _below(value, path, line)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            rest = path[1:] if path[0] == str(index) else path
            if rest is not path or not path[0].isdigit():
                yield from _below(item, rest, item.start_mark.line + 1)


def _settings(node: yaml.Node | None) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    """Yield all keys and values in a node, however deep."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            yield key, value
            yield from _settings(value)
    elif isinstance(node, yaml.SequenceNode):
        for item in node.value:
            yield from _settings(item)


def _full_names(node: yaml.Node | None) -> Iterator[list[str]]:
    """Yield the names that lead to each setting in mappings, without `init_args`."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            own = [] if key.value == "init_args" else [key.value]
            if own:
                yield own
            yield from ([*own, *names] for names in _full_names(value))
