"""Errors keep their text, and hold nothing that steers a terminal."""

import pickle

import pytest

from lightning_d9d.errors import ConfigError, RankError, ScheduleError, StateError, StateNotFoundError


@pytest.mark.parametrize("kind", [ConfigError, ScheduleError, StateError, StateNotFoundError, RankError])
def test_messages_are_printable(kind):
    error = kind("naïve\n\tfile \x1b[2J\r\x00\x9b1m\u202e\ud800 日本")
    assert str(error) == "naïve\n\tfile \\x1b[2J\\r\\x00\\x9b1m\\u202e\\ud800 日本"
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is kind
    assert str(again) == str(error)


def test_an_error_takes_what_it_took():
    assert str(StateError()) == ""
    assert StateError("a", 1).args == ("a", 1)
