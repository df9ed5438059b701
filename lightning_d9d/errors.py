"""Errors that a user can act on. Each message names the field, the value, the rank where it matters, and the remedy."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Unicode categories of characters that control a terminal or the order of text, or that cannot be written."""


def printable(text: str) -> str:
    r"""Return text of a file or another rank without control characters; newlines and tabs stay.

    Args:
        text: Anything.

    Returns:
        The text, with an escape such as `\x1b` in place of each control character.
    """
    if text.isprintable():
        return text
    return "".join(_escaped(each) if unicodedata.category(each) in _CONTROLS else each for each in text)


def _escaped(character: str) -> str:
    return character if character in "\n\t" else character.encode("unicode_escape").decode()


def printable_arguments(args: Iterable[object]) -> tuple[object, ...]:
    """Return an exception's arguments, with texts made `printable`."""
    return tuple(printable(each) if isinstance(each, str) else each for each in args)


def reason(error: BaseException) -> str:
    """Return why a file cannot be read or written, without its name, which the message already has."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _PrintableError(Exception):
    """Base of errors whose messages quote names of files, which must not control a terminal."""

    def __init__(self, *args: object) -> None:
        super().__init__(*printable_arguments(args))


class ConfigError(_PrintableError, ValueError):
    """A setting, a hook or the input data cannot be used; raised before anything is computed with it."""


class ScheduleError(ConfigError):
    """A pipeline schedule cannot run the given stages or microbatches."""


class StateError(_PrintableError, RuntimeError):
    """Saved weights or a checkpoint do not fit the model, or a file is missing, foreign or damaged."""


class StateNotFoundError(StateError, FileNotFoundError):
    """A checkpoint does not exist at the given place. Lightning raises a `FileNotFoundError` in this case."""


class RankError(_PrintableError, RuntimeError):
    """Another rank failed or stopped answering; the message names it."""


_FIRST = "before that, "


def note_first(error: BaseException, first: str) -> None:
    """Add an earlier failure of another rank to an error, as its most likely cause."""
    error.add_note(printable(f"{_FIRST}{first}"))


def first_of_others(error: BaseException) -> str | None:
    """Return the failure of another rank that preceded this one's error, if there was one."""
    if isinstance(error, RankError):
        return str(error)
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(_FIRST)]
    return notes[0].removeprefix(_FIRST) if notes else None


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name.

    Args:
        name: The unknown name.
        choices: The legal names.

    Returns:
        "; did you mean 'learning_rate'?" if one choice differs only in case and a few letters, else "".
    """
    nearest = nearest_choice(name, choices)
    return "" if nearest is None else f"; did you mean {nearest!r}?"


def nearest_choice(name: object, choices: Iterable[str]) -> str | None:
    """Return the choice that differs from an unknown name only in case and a few letters, or None. Local."""
    folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.66)  # two of three letters
    return folded[close[0]] if close else None
