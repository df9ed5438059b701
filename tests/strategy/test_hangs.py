"""Reports of jobs that hang: who keeps the others waiting, and where all ranks are."""

from __future__ import annotations

import re
import signal
import tempfile
from pathlib import Path

import pytest

from lightning_d9d import ConfigError, D9DStrategy, TimeoutConfig
from lightning_d9d.loop.shutdown import check_report_signal, hang_watch
from tests.harness import warm
from tests.loop.test_launchers import free_port
from tests.strategy import hangs
from tests.strategy.fault_table import JOB_SECONDS, PAGE, Job
from tests.strategy.hangs import HANGS, page_rows
from tests.strategy.plain import trainer

IN_CI = ("endless Python loop", "C call that holds the interpreter", "another order")


@pytest.mark.jobs
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in IN_CI else pytest.mark.meshes) for name in HANGS]
)
def test_a_job_that_hangs_says_where_it_is(name: str, tmp_path: Path) -> None:
    HANGS[name].run(tmp_path)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.jobs
@pytest.mark.parametrize("name", ["SIGSTOP", "endless Python loop", "a rank leaves a collective out"])
def test_a_job_on_nccl_that_hangs_says_where_it_is(name: str, tmp_path: Path) -> None:
    HANGS[name].run(tmp_path, "cuda")


@pytest.mark.jobs
def test_a_signal_asks_for_a_report_and_the_job_goes_on(tmp_path: Path) -> None:
    ended = Job(1, hangs.ask_for_report, 0, "", ()).run(tmp_path, "forward")
    assert ended.exit_codes == [0, 0]
    (report,) = tmp_path.glob("hang-*.txt")
    said = report.read_text()
    assert "Written because SIGUSR2 came to rank 1" in said
    assert re.search(r"rank 1 \(.*\) did not come to .*hangs.py:\d+ in ask_for_report", said)
    assert "stacks and collectives of all ranks are in" in ended.outputs[1]


@pytest.mark.jobs
def test_a_rank_that_does_not_make_its_groups_is_named_within_seconds(tmp_path: Path) -> None:
    """Collectives have a limit of ten minutes meanwhile."""
    port = free_port(range(25000, 32000))
    ranks = [
        warm.context().Process(target=hangs.run_without_groups, args=(tmp_path, number, port)) for number in range(2)
    ]
    try:
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join(JOB_SECONDS)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.exitcode for rank in ranks] == [1, 1]
    for number in range(2):
        assert (
            "did not make their process groups within TimeoutConfig.groups_seconds=1 s"
            in (tmp_path / f"{number}.txt").read_text()
        )
    (report,) = tmp_path.glob("hang-*.txt")
    assert re.search(r"rank 1 \(.*\) did not come to .*hangs.py:\d+ in wait_for_data", report.read_text())


@pytest.mark.parametrize("name", ["SIGTERM", "usr2", 12])
def test_a_signal_that_means_something_else_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"report_signal=.* must be None or one of SIGUSR1"):
        TimeoutConfig(report_signal=name)


def test_the_signal_of_a_requeue_is_refused() -> None:
    check_report_signal("SIGUSR2", signal.SIGUSR1)
    with pytest.raises(ConfigError, match="report_signal='SIGUSR1' also requeues the job in SLURM"):
        check_report_signal("SIGUSR1", signal.SIGUSR1)


@pytest.mark.parametrize("place", ["a file", "https://nowhere/reports"])
def test_reports_that_cannot_be_beside_the_run(place: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "a file").touch()
    directory = place if "://" in place else str(tmp_path / place / "reports")
    watch = hang_watch(trainer(D9DStrategy()), TimeoutConfig(report_directory=directory))
    assert str(watch.directory) == tempfile.gettempdir()
    assert f"reports of hangs cannot be written to {directory}, but to" in caplog.text


def test_the_page_shows_the_table_of_hangs() -> None:
    shown = [re.sub(r" \| \d+\.\d \| (?=\d+ \|$)", " | ? | ", row) for row in PAGE.read_text().splitlines()]
    rows = page_rows(lambda name: "?")
    assert [row for row in shown if row in rows] == rows
