"""Words for mistakes on the command line: which values are legal in place of the given one."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_d9d.errors import ConfigError, did_you_mean

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "NoneType": "null",
    **dict.fromkeys(("Sequence", "list", "tuple"), "a list"),
    **dict.fromkeys(("Mapping", "dict"), "a mapping"),
}
"""Python's types as users call them, by their Python names."""


class MistakeError(ConfigError):
    """A mistake in the arguments or in a configuration file, with its place."""


def either(words: Sequence[str]) -> str:
    """Join alternatives: "a, b or c"."""
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def must_be(subject: str, value: str, choices: Sequence[str], kinds: Sequence[str] = ()) -> str:
    """Return a message with the legal values of a setting.

    Args:
        subject: The setting, with its place.
        value: The given value.
        choices: Legal words.
        kinds: Other legal values: Python names of types, or a description.
    """
    legal = [*map(repr, choices), *(KINDS.get(kind, kind) for kind in kinds)]
    return f"{subject} must be {either(legal)}, not {value!r}{did_you_mean(value, choices)}"
