"""What jsonargparse refuses, in a user's words: place, what is wrong, the nearest name, and what is legal.

Its message is a tree of lines: keys and classes that lead to the mistake, below each all alternatives of a type. The
alternative that says most is the mistake; of a message that has none of them the lines that are no alternatives stay.
"""

from __future__ import annotations

import ast
import pydoc
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jsonargparse import ArgumentParser
from omegaconf.errors import OmegaConfBaseException

from lightning_d9d.cli import SUBCOMMANDS
from lightning_d9d.cli.files import Written
from lightning_d9d.errors import did_you_mean

_OPTION = re.compile(r"(?:Option|does not accept option) '([^']+)'|unrecognized arguments: (.+)")
_CLASS = re.compile(r"Expected a dot import path string: (.+)|No module named '(.+)'")
_TYPE = re.compile(r"Expected an? (.+)\. Got value: (.*)|Given value: (.*)")
_KEY = re.compile(r'Parser key "([^"]+)"|Group \'([^\']+)\'')
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_SUBTYPES = re.compile(r"Subtypes: \[(.*)\]$")
_CALL = re.compile(r"([\w.]+)\((.*)\)$")
_NOISE = ("Does not validate", "- Does not validate", "Subtypes:", "Errors:", "- Expected a", "Given value")
_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "text", "NoneType": "null"}

_MAX_LEGAL = 300
"""Characters of a list of legal names; a longer one is left to `--help`."""


@dataclass(frozen=True)
class _Line:
    """A line of a message, with what the lines above it say of its place."""

    text: str
    path: tuple[str, ...]
    owner: str | None
    """Import path of the class whose arguments they are; None: those of the command line."""
    owner_path: tuple[str, ...]
    """Where that class is."""
    subtypes: str
    """The alternatives of the type that is expected there."""


def explain(message: str, arguments: Sequence[str], parser: ArgumentParser) -> str:
    """Translates a message of jsonargparse's.

    Args:
        message: The message.
        arguments: What was parsed.
        parser: The parser of the subcommand.

    Returns:
        One to three lines.
    """
    lines = list(_read(message))
    written = Written(arguments)
    for pattern, describe in ((_OPTION, _unknown_option), (_CLASS, _unknown_class), (_TYPE, _wrong_value)):
        for line in lines:
            if found := pattern.search(line.text):
                return describe(next(filter(None, found.groups()), ""), line, written, parser)
    return "\n".join(essence(message).splitlines()[:3])


def essence(message: str) -> str:
    """The message without the alternatives that jsonargparse lists around it."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if not line.lstrip().startswith(_NOISE)]
    return "\n".join(filter(None, lines)) or message


def _read(message: str) -> Iterator[_Line]:
    """The lines; what is indented less deeply, and above, says where a line belongs."""
    above: list[tuple[int, _Line]] = []
    for text in message.splitlines():
        depth = len(text) - len(text.lstrip(" -"))
        while above and above[-1][0] > depth:
            above.pop()
        line = above[-1][1] if above else _Line("", (), None, (), "")
        if key := _KEY.search(text):
            line = replace(line, path=(*line.path, *(key[1] or key[2]).split(".")))
        if owner := _OWNER.search(text):
            line = replace(line, owner=owner[1], owner_path=line.path)
        if subtypes := _SUBTYPES.search(text):
            line = replace(line, subtypes=subtypes[1])
        above.append((depth, line))
        yield replace(line, text=text.strip())


def _at(written: Written, path: Sequence[str], value: str | None = None) -> str:
    """The place of a setting, or of what it is in, with a colon behind it."""
    candidates = [(path, value), *((path[:length], None) for length in range(len(path), 0, -1))]
    place = next(filter(None, (written.find(names, wanted) for names, wanted in candidates)), None)
    return f"{place}: " if place else ""


def _unknown_option(text: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    option, program = text.split()[0].partition("=")[0], parser.prog.replace(" [options]", "")
    if "unrecognized" in line.text and not option.startswith("-"):
        return f"{option!r} follows no option; a configuration file is given with --config {option}"
    names = [*line.path, *(name for name in option.lstrip("-").split(".") if name != "init_args")]
    known = _names_of(line.owner, parser)
    length, children = len(line.owner_path), _children(known, [])
    while names[length] in children and length + 1 < len(names):
        length += 1
        children = _children(known, names[len(line.owner_path) : length])
    within = ".".join(names[:length]) or program
    legal = f"{within} takes {', '.join(children)}"
    if len(legal) > _MAX_LEGAL:
        legal = f"`{program} --help` lists what {within} takes"
    place = _at(written, names[: length + 1])
    return f"{place}{within} has no option {names[length]!r}{did_you_mean(names[length], children)}\n{legal}"


def _children(known: Iterable[str], names: Sequence[str]) -> list[str]:
    """The names that can follow, of those in full."""
    prefix = "".join(f"{name}." for name in names)
    return list(dict.fromkeys(each.removeprefix(prefix).split(".")[0] for each in known if each.startswith(prefix)))


def _names_of(owner: str | None, parser: ArgumentParser) -> list[str]:
    """The options of a class, or of the whole command line, nested ones with dots."""
    if owner is not None:
        parser = ArgumentParser(exit_on_error=False)
        parser.add_class_arguments(pydoc.locate(owner), fail_untyped=False)
    return list(parser.get_defaults(skip_validation=True).keys())


def _unknown_class(name: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    place, key = _at(written, line.path, name), ".".join(line.path)
    if call := _CALL.match(name):
        return (
            f"{place}{key} is the name of a class, without its arguments: {name!r}\n"
            f"write class_path: {call[1]} in a file, with the arguments below init_args:, "
            f"or --{key} {call[1]} --{key}.ARGUMENT VALUE"
        )
    known = sorted({kind.__name__ for base in _classes(line.subtypes) for kind in _subclasses(base)})
    legal = ", ".join(known)
    legal = f"choose one of {legal}, or write" if known and len(legal) <= _MAX_LEGAL else "write"
    return (
        f"{place}{key}: no class is called {name!r}{did_you_mean(name, known)}\n"
        f"{legal} the full name of a class that can be imported, such as my_package.MyClass"
    )


def _classes(subtypes: str) -> list[type]:
    located = [pydoc.locate(name) for name in re.findall(r"(?:\w+\.)+\w+", subtypes)]
    return [each for each in located if isinstance(each, type)]


def _subclasses(base: type) -> Iterator[type]:
    for kind in (base, *base.__subclasses__()):
        if not kind.__name__.startswith("_"):
            yield kind
        if kind is not base:
            yield from _subclasses(kind)


def _wrong_value(_: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    found = _TYPE.search(line.text)
    assert found is not None
    expected = found[1] or line.subtypes
    value = found[2] if found[1] else found[3]
    choices = [
        str(each) for group in re.findall(r"Literal\[(.*?)\]", expected) for each in ast.literal_eval(f"[{group}]")
    ]
    kinds = re.findall(r"<class '(?:\w+\.)*(\w+)'>", expected)
    legal = [*map(repr, choices), *(_WORDS.get(kind, kind) for kind in kinds)] or [re.sub(r"(\w+\.)+", "", expected)]
    place, key = _at(written, line.path, value), ".".join(line.path)
    return f"{place}{key} must be {_or(legal)}, not {value!r}{did_you_mean(value, choices)}"


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def explain_interpolation(error: OmegaConfBaseException, arguments: Sequence[str], known: Iterable[str]) -> str:
    """Says where a `${...}` is and what is wrong with it, with the names that the user wrote.

    Args:
        error: OmegaConf's.
        arguments: What was parsed.
        known: The full names of all values of the configuration.
    """
    names = re.sub(r"\[(\d+)\]", r".\1", str(error.full_key or "")).split(".")
    place = _at(Written(arguments), [name for name in names[names[0] in SUBCOMMANDS :] if name != "init_args"])
    reason = re.sub(r" \(resolved to .*?\)", "", (error.msg or "").splitlines()[0])
    reason = re.sub(r"'\.+", "'", reason)  # dots that lead from the place to the top of the file
    key = re.search(r"Interpolation key '(.+)' not found", reason)
    nearest = did_you_mean(key[1], known) if key else ""
    return f"{place}{reason}{nearest}\nin files, not in arguments, ${{...}} is the full name of another value"
