"""Errors that a user can act on. Each message names the field, the value, the rank where it matters, and the remedy."""

from __future__ import annotations

import difflib
import unicodedata
from collections.abc import Iterable

_CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}
"""Categories of Unicode that steer a terminal or the order of text, or that cannot be written."""


def printable(text: str) -> str:
    r"""Text of a file or another rank without what steers a terminal; newlines and tabs stay.

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
    """Return why a file cannot be read or written, for a message that names it: the system's text would repeat it."""
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


class _PrintableError(Exception):
    """The messages quote names of files, which a terminal must not obey."""

    def __init__(self, *args: object) -> None:
        super().__init__(*printable_arguments(args))


class ConfigError(_PrintableError, ValueError):
    """A setting, a hook or the input data cannot be used as given; raised before anything is computed with it."""


class ScheduleError(ConfigError):
    """A pipeline schedule cannot run the stages or microbatches it was given."""


class StateError(_PrintableError, RuntimeError):
    """Saved weights or a checkpoint do not fit what they are loaded into, or a file is missing, foreign or damaged."""


class StateNotFoundError(StateError, FileNotFoundError):
    """A checkpoint is not where it was looked for. Lightning raises a `FileNotFoundError` there."""


class RankError(_PrintableError, RuntimeError):
    """Another rank failed or stopped answering; the message names it."""


_FIRST = "before that, "


def note_first(error: BaseException, first: str) -> None:
    """Add to an error what another rank said before it, and most likely is its cause."""
    error.add_note(printable(f"{_FIRST}{first}"))


def first_of_others(error: BaseException) -> str | None:
    """Return the failure of another rank that came before this one's error, if there was one."""
    if isinstance(error, RankError):
        return str(error)
    notes = [note for note in getattr(error, "__notes__", []) if note.startswith(_FIRST)]
    return notes[0].removeprefix(_FIRST) if notes else None


def did_you_mean(name: object, choices: Iterable[str]) -> str:
    """Return the end of a message about an unknown name.

    Args:
        name: What was given.
        choices: What is legal.

    Returns:
        "; did you mean 'learning_rate'?" where one choice is spelt alike but for case and a few letters, else "".
    """
    nearest = nearest_choice(name, choices)
    return "" if nearest is None else f"; did you mean {nearest!r}?"


def nearest_choice(name: object, choices: Iterable[str]) -> str | None:
    """Return the choice that is spelt like an unknown name but for case and a few letters, or None. Local."""
    folded = {choice.casefold(): choice for choice in choices}
    close = difflib.get_close_matches(str(name).casefold(), folded, n=1, cutoff=0.7)
    return folded[close[0]] if close else None
