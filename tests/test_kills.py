"""Some kills of processes that save; `python -m tests.kills --kills 200` has more."""

from pathlib import Path

from tests.kills import run


def test_saves_that_are_killed_again_and_again(tmp_path: Path) -> None:
    report = run(tmp_path / "kills", num_kills=12, seed=1)
    assert report.kills >= 12
    assert report.of_two > 0
    assert report.with_leftovers > 0
