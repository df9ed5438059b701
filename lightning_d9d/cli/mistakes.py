"""Translates errors of jsonargparse into the user's words: place, problem, nearest name and legal values.

A message of jsonargparse is a tree of lines: keys and classes that lead to the mistake, with all alternatives of a type
below each. The alternative with the most specific message is the mistake. A message without alternatives keeps its
other lines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pkgutil import resolve_name
from typing import Any

from jsonargparse import ArgumentParser
from omegaconf.errors import OmegaConfBaseException

from lightning_d9d.cli import SUBCOMMANDS
from lightning_d9d.cli.files import Written
from lightning_d9d.cli.wording import either, must_be
from lightning_d9d.errors import did_you_mean, nearest_choice

_OPTION = re.compile(r"(?:Option|does not accept option) '([^']+)'|unrecognized arguments: (.+)")
_CLASS = re.compile(r"Expected a dot import path string: (.+)")
_IMPORT = re.compile(r"(No module named '.+'|module '.+' has no attribute '.+'|cannot import name .+)")
_TYPE = re.compile(r"Expected an? (.+)\. Got value: (.*)|Given value: (.*)")
_NO_VALUE = re.compile(r"argument (?:\S+/)?(--\S+): expected .*argument")
_REQUIRED = re.compile(r"arguments are required: (?:\w+\.)?(\w+)")
_KEY = re.compile(r'Parser key "([^"]+)"|Group \'([^\']+)\'')
_OWNER = re.compile(r"Problem with given class_path '([^']+)'")
_SUBTYPES = re.compile(r"Subtypes: \[(.*)\]$")
_CALL = re.compile(r"([\w.]+)\((.*)\)$")
_ARGUMENT = re.compile(r"NestedArg\(key='(?:init_args\.)?(.+?)', val='?(.*?)'?\)$")
_MADE_LATER = "expects a function or a callable class"
_MADE = re.compile(r"(?:Got|Given) value: Namespace\(class_path='([^']+)'")
"""A class whose objects are made later, such as an optimizer."""
_SAME_NAME = re.compile(r"Multiple subclasses with name (\w+)\..*: (.+)\.$")
_KIND = re.compile(r"<class '(?:\w+\.)*(\w+)'>|\b(Sequence|list|tuple|Mapping|dict)\[")
_NOISE = ("Does not validate", "- Does not validate", "Subtypes:", "Errors:", "- Expected a", "Given value")

_GIVEN_LATER: set[str | int] = {"params", "optimizer"}
"""First arguments of optimizers and schedules, which a configuration never has."""

_MAX_NAMES = 12
"""Maximum number of names in a list of classes."""

_MAX_LEGAL = 300
"""Maximum length of a list of options; for a longer one the message refers to `--help`."""


@dataclass(frozen=True)
class _Line:
    """A line of a message, with its place according to the lines above it."""

    text: str
    path: tuple[str, ...]
    owners: tuple[tuple[tuple[str, ...], str], ...]
    """The classes around it, from the outermost: the place and the import path of each."""
    subtypes: str
    """The alternatives of the type that is expected there."""

    @property
    def owner(self) -> str | None:
        """Import path of the class that has these arguments; None means the command line itself."""
        return self.owners[-1][1] if self.owners else None

    @property
    def owner_path(self) -> tuple[str, ...]:
        """The place of that class."""
        return self.owners[-1][0] if self.owners else ()


def explain(message: str, arguments: Sequence[str], parser: ArgumentParser) -> str:
    """Translate a message of jsonargparse.

    Args:
        message: The message.
        arguments: The arguments that were parsed.
        parser: The parser of the subcommand.

    Returns:
        One to three lines.
    """
    lines = _with_made(list(_read(message)))
    written = Written(arguments)
    nested = {
        line.path: found[1] for line in lines if (found := _ARGUMENT.search(line.text)) and found[0] not in arguments
    }
    for pattern, describe in _KINDS:
        for line in lines:
            if found := pattern.search(line.text):
                if pattern in (_CLASS, _TYPE) and nested.get(line.path, "class_path") != "class_path":
                    return _no_class(".".join(line.path), nested[line.path])
                return describe(next(filter(None, found.groups()), ""), line, written, parser)
    return "\n".join(essence(message).splitlines()[:3])


def essence(message: str) -> str:
    """Return the message without the alternatives that jsonargparse lists around it."""
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if not line.lstrip().startswith(_NOISE)]
    return "\n".join(filter(None, lines)) or message


def _read(message: str) -> Iterator[_Line]:
    """Yield the lines; the less indented lines above a line give its place."""
    above: list[tuple[int, _Line]] = []
    for text in filter(str.strip, message.splitlines()):
        depth = len(text) - len(text.lstrip(" -"))
        while above and above[-1][0] > depth:
            above.pop()
        line = above[-1][1] if above else _Line("", (), (), "")
        if key := _KEY.search(text):
            names = tuple((key[1] or key[2]).split("."))
            is_full = not line.owners and names[: len(line.path)] == line.path  # as in the value of `--trainer`
            line = replace(line, path=names if is_full else (*line.path, *names))
        if owner := _OWNER.search(text):
            line = replace(line, owners=(*line.owners, (line.path, owner[1])))
        if subtypes := _SUBTYPES.search(text):
            line = replace(line, subtypes=subtypes[1])
        above.append((depth, line))
        yield replace(line, text=text.strip())


def _with_made(lines: list[_Line]) -> list[_Line]:
    """Return the lines; those about arguments of a class whose objects are made later have it as their owner.

    Some lines name the class themselves, others in a later line about the same place.
    """
    made = {line.path: found[1] for line in reversed(lines) if (found := _MADE.search(line.text))}
    return [
        replace(line, owners=(*line.owners, (line.path, made[line.path])))
        if _MADE_LATER in line.text and line.path in made
        else line
        for line in lines
    ]


def _at(written: Written, path: Sequence[str], value: str | None = None) -> str:
    """Return the place of a setting, or of what contains it, followed by a colon."""
    candidates = [(path, value), *((path[:length], None) for length in range(len(path), 0, -1))]
    place = next(filter(None, (written.find(names, wanted) for names, wanted in candidates)), None)
    return f"{place}: " if place else ""


def locate(written: Written, path: Sequence[str], value: str | None = None) -> str:
    """Return a setting with its place: `run.yaml, line 3: trainer.max_steps` or `--trainer.max_steps`.

    Args:
        written: The arguments and files that the user wrote.
        path: The names that lead to the setting.
        value: The text that is wrong there.
    """
    key = ".".join(path)
    place = _at(written, path, value)
    return f"--{key}" if place == f"--{key}: " else f"{place}{key}"


def _unknown_option(text: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    option, equals, _ = text.split()[0].partition("=")
    known = _names_of(line.owner, parser)
    if "unrecognized" in line.text and not option.startswith("--"):
        if option.startswith("-") or equals or option in known:
            return f"{option!r} is no option; the names of options begin with two dashes: --{option.lstrip('-')}"
        return f"{option!r} follows no option; a configuration file is given with --config {option}"
    names = [*line.path, *(name for name in option.lstrip("-").split(".") if name != "init_args")]
    length, children = len(line.owner_path), _children(known, [])
    while names[length] in children and length + 1 < len(names):
        length += 1
        children = _children(known, names[len(line.owner_path) : length])
    within = ".".join(names[:length]) or _program(parser)
    if line.owner and length == len(line.owner_path):
        within = line.owner.rpartition(".")[2]
    named = (line.owner or "", (line.owner or "").rpartition(".")[2])
    if not known and not any(written.find(line.owner_path, each) for each in named):  # the base, as none is named
        key = ".".join(line.owner_path)
        return f"{_at(written, names)}{key} has settings but no class; give class_path: CLASS in a file before this one"
    legal = f"{within} takes {', '.join(children) or 'no options'}"
    if len(legal) > _MAX_LEGAL:
        legal = f"`{_program(parser)} {_help_of(line)}` lists what {within} takes"
    place = _at(written, names[: length + 1])
    inner: list[str] = []
    if length == 0:  # the files have the settings of the classes that they choose
        inner = [name for name in known if name.endswith(f".{names[0]}")]
        inner = inner or [name for name in written.full_names(names[0]) if name != names[0]]
    nearest = did_you_mean(inner[0], inner) if inner else did_you_mean(names[length], children)
    return f"{place}{within} has no option {names[length]!r}{nearest}\n{legal}"


def _help_of(line: _Line) -> str:
    """Return the options that print the arguments of the innermost class; each class on the way to it is named."""
    asked = [f"--{'.'.join(path)}.help {_short(owner)}" for path, owner in line.owners]
    return " ".join(asked) or "--help"


def _short(owner: str) -> str:
    """Return the short name of a class: those of this package and of Lightning need no module."""
    return owner.rpartition(".")[2] if owner.startswith(("lightning_d9d.", "lightning.")) else owner


def _program(parser: ArgumentParser) -> str:
    return parser.prog.replace(" [options]", "")


def _children(known: Iterable[str], names: Sequence[str]) -> list[str]:
    """Return the names that may follow a prefix."""
    prefix = "".join(f"{name}." for name in names)
    return list(dict.fromkeys(each.removeprefix(prefix).split(".")[0] for each in known if each.startswith(prefix)))


def _names_of(owner: str | None, parser: ArgumentParser) -> list[str]:
    """Return the options of a class or of the whole command line, nested ones with dots."""
    if owner is not None:
        kind, parser = resolve_name(owner), ArgumentParser(exit_on_error=False)
        first = next(iter(inspect.signature(kind).parameters), "")
        parser.add_class_arguments(kind, fail_untyped=False, skip=_GIVEN_LATER & {first})
    return list(parser.get_defaults(skip_validation=True).keys())


def _unknown_class(name: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    return describe_class(name, locate(written, line.path, name), ".".join(line.path), _classes(line.subtypes))


def describe_class(name: str, subject: str, key: str, bases: Iterable[type], words: Sequence[str] = ()) -> str:
    """Return what is wrong with the name of a class.

    Args:
        name: The name.
        subject: The setting with its place.
        key: The setting's full name.
        bases: The class that it must extend.
        words: Other legal values, besides classes, which are not listed then.
    """
    if call := _CALL.match(name):
        return (
            f"{subject} takes the name of a class without its arguments, not {name!r}\n"
            f"in a file write class_path: {call[1]}, with the arguments below init_args:; on the command line "
            f"--{key}.class_path {call[1]} --{key}.ARGUMENT VALUE"
        )
    bases = [*bases]
    kinds = {kind for base in bases for kind in _subclasses(base)} or {*bases}
    known = [kind.__name__ for kind in sorted(kinds, key=_closeness)]
    if name in known:
        return f"{subject} takes a class as --{key}.class_path {name}, or as class_path: {name} in a file"
    longer = [each for each in known if each.casefold().startswith(name.casefold())]  # as wandb of WandbLogger
    nearest = nearest_choice(name, [*words, *known]) or next(iter(longer), None)
    choices = sorted(words or known, key=lambda each: each != nearest)
    legal = [*_beginning(choices), "the full name of a class such as my_package.MyClass"]
    meant = did_you_mean(nearest, [nearest]) if nearest else ""
    return f"{subject} knows no {name!r}{meant}\nit may be {either(legal)}"


def _closeness(kind: type) -> tuple[bool, bool, str]:
    """Order classes: those that this package or Lightning extends, and those of other packages, come last."""
    is_extended = any(each.__module__.startswith(("lightning_d9d.", "lightning.")) for each in kind.__subclasses__())
    return is_extended, not kind.__module__.startswith("lightning_d9d."), kind.__name__


def _beginning(names: Sequence[str]) -> list[str]:
    left_out = len(names) - _MAX_NAMES
    return [*names[:_MAX_NAMES], *([f"{left_out} more"] if left_out > 0 else [])]


def _not_importable(reason: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    name = line.owner or ""
    return (
        f"{locate(written, line.path, name)}: {name} cannot be imported: {reason}\n"
        "its package must be installed, or the folder that has it in PYTHONPATH"
    )


def _same_name(name: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    found = _SAME_NAME.search(line.text)
    assert found is not None
    subject = locate(written, line.path, name)
    return f"{subject}: several classes have the name {name}; give the full one: {either(found[2].split(', '))}"


def _classes(subtypes: str) -> Iterator[type]:
    for name in re.findall(r"(?:\w+\.)+\w+", subtypes):
        with suppress(ImportError, AttributeError):
            kind = resolve_name(name)
            if isinstance(kind, type) and kind.__module__ != "collections.abc":  # of which half of all classes are
                yield kind


def _subclasses(base: type) -> Iterator[type]:
    for kind in base.__subclasses__():
        if not kind.__name__.startswith("_"):
            yield kind
        yield from _subclasses(kind)


def _no_class(key: str, argument: str) -> str:
    return f"--{key}.{argument}: {key} is no class that has arguments; put --{key}.class_path CLASS before"


def _wrong_value(_: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    found = _TYPE.search(line.text)
    assert found is not None
    expected, value = (found[1], found[2]) if found[1] else (line.subtypes, found[3])
    literals = ", ".join(re.findall(r"Literal\[(.*?)\]", expected))
    choices = list(dict.fromkeys(re.findall(r"[^\s',]+", literals)))
    kinds = [each[1] or each[2] for each in _KIND.finditer(expected)]
    if not choices and not kinds:
        kinds = [re.sub(r"(\w+\.)+", "", expected)]
    return must_be(locate(written, line.path, value), value, choices, kinds)


def _required(name: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    if line.owner is None:
        return f"{_program(parser)} needs {name}; give --{name} VALUE, or {name}: in a file and --config FILE"
    short = line.owner.rpartition(".")[2]
    place = next(filter(None, (written.find(line.path, each) for each in (line.owner, short))), "")
    if place and not place.startswith("--"):
        return f"{place}: {short} needs {name}; set {name}: VALUE below its init_args:"
    option = ".".join((*line.path, name))
    return f"{short} needs {name}; give --{option} VALUE behind it, or set {name}: VALUE below its init_args: in a file"


def _no_value(option: str, line: _Line, written: Written, parser: ArgumentParser) -> str:
    return f"{option} needs a value"


_KINDS = (
    (_OPTION, _unknown_option),
    (_CLASS, _unknown_class),
    (_SAME_NAME, _same_name),
    (_IMPORT, _not_importable),
    (_REQUIRED, _required),
    (_NO_VALUE, _no_value),
    (_TYPE, _wrong_value),
)
"""Possible mistakes, the most specific first."""


def explain_interpolation(error: OmegaConfBaseException, arguments: Sequence[str], values: Mapping[str, Any]) -> str:
    """Return where a `${...}` is and what is wrong with it, with the names that the user wrote.

    Args:
        error: OmegaConf's.
        arguments: The arguments that were parsed.
        values: The configuration.
    """
    names = re.sub(r"\[(\d+)\]", r".\1", str(error.full_key or "")).split(".")
    place = _at(Written(arguments), [name for name in names[names[0] in SUBCOMMANDS :] if name != "init_args"])
    reason = re.sub(r" \(resolved to .*?\)", "", (error.msg or "").splitlines()[0])
    reason = re.sub(r"^\w+ raised while resolving interpolation: ", "", reason).strip('"')
    reason = re.sub(r"'\.+", "'", reason)  # dots that lead from the place to the top of the file
    key = re.search(r"Interpolation key '(.+)' not found", reason)
    nearest = did_you_mean(key[1], _full_names(values)) if key else ""
    return f"{place}{reason}{nearest}\nin files, not in arguments, ${{...}} is the full name of another value"


def _full_names(values: Mapping[str, Any]) -> Iterator[str]:
    for name, value in values.items():
        yield name
        if isinstance(value, Mapping):
            yield from (f"{name}.{inner}" for inner in _full_names(value))
