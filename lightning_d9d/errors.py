"""Errors that a user can act on. Each message names the field, the value, the rank where it matters, and the remedy."""

from __future__ import annotations


class ConfigError(ValueError):
    """A setting, a hook or the input data cannot be used as given; raised before anything is computed with it."""


class ScheduleError(ConfigError):
    """A pipeline schedule cannot run the stages or microbatches it was given."""


class StateError(RuntimeError):
    """Saved weights or a checkpoint do not fit what they are loaded into, or a file is missing, foreign or damaged."""


class StateNotFoundError(StateError, FileNotFoundError):
    """A checkpoint is not where it was looked for. Lightning raises a `FileNotFoundError` there."""


class RankError(RuntimeError):
    """Another rank failed or stopped answering; the message names it."""
