"""Two kills; `python -m tests.chaos --kills 200` has more."""

from pathlib import Path

import pytest

from tests.chaos.kill import run


@pytest.mark.jobs
def test_a_job_that_is_killed_again_and_again(tmp_path: Path) -> None:
    report = run(tmp_path / "chaos", num_kills=2, seed=3)
    assert report.kills == 2
    assert report.loaded > 3
