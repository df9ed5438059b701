"""`lightning-d9d doctor`: the real command on this machine, ranks of a job, and what it makes of broken machines."""

from __future__ import annotations

import re
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment

from lightning_d9d import doctor, env
from lightning_d9d.errors import RankError
from tests.harness import warm
from tests.harness.ranks import RankContext
from tests.loop.test_launchers import free_port, slurm, start_ranks

ROOT = Path(__file__).parents[1]
GIB = 2**30
HEALTHY_NAMES = ["python", "torch", "lightning", "free disk", "gloo all-reduce", "device copy", "clock skew"]


def levels(findings: Any) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def check_healthy(output: str) -> None:
    lines = output.splitlines()
    assert lines[-1] == "healthy", output
    for name in HEALTHY_NAMES:
        assert sum(bool(re.match(rf"(ok|warning) +{name}  ", line)) for line in lines) == 1, output
    speed = re.search(r"gloo all-reduce  2 ranks, [\d.]+ ms for 64 MiB, ([\d.]+) GB/s on the bus", output)
    assert speed is not None, output
    assert 0.01 < float(speed[1]) < 1000


@pytest.mark.jobs
def test_command_on_this_machine(tmp_path):
    start = time.monotonic()
    result = warm.run_command("doctor", folder=tmp_path, variables={}, seconds=240)
    print(f"{time.monotonic() - start:.1f} s\n{result.stdout}")
    assert result.returncode == 0, result.stderr
    check_healthy(result.stdout)


@pytest.mark.jobs
def test_ranks_of_a_job(tmp_path):
    """Both ranks end with the same code, and rank 0 alone prints."""
    port = free_port(range(15000, 25000))
    environments = [slurm(rank, port, num_nodes=2) for rank in range(2)]
    assert start_ranks(tmp_path, environments, []) == [0, 0]
    check_healthy((tmp_path / "0.txt").read_text())
    assert "healthy" not in (tmp_path / "1.txt").read_text()


@pytest.mark.ranks(2)
def test_group_of_ranks(rank: RankContext):
    gloo = dist.new_group(backend="gloo")
    report = doctor.examine_group(rank.device if rank.device.type == "cuda" else None, gloo_group=gloo)
    dist.destroy_process_group(gloo)
    assert [each.rank for each in report.ranks] == ([0, 1] if rank.rank == 0 else [])
    assert set(levels(report.findings).values()) == {"ok"}
    for each in report.ranks:  # one machine, one clock
        assert abs(each.clock_offset_seconds) <= each.clock_error_seconds + 1e-4


@pytest.mark.ranks(2)
def test_sum_that_is_wrong(rank: RankContext):
    with pytest.MonkeyPatch.context() as patch:  # the fixture would be undone in pytest's process, not on the ranks
        patch.setattr(dist, "all_reduce", lambda tensor, group: None)
        finding = doctor._all_reduce(rank.device, None, "gloo")
    assert (finding.level, finding.value) == ("BROKEN", f"{2**24} of {2**24} sums over 2 ranks are wrong")


def test_rank_whose_others_do_not_come(monkeypatch):
    port = free_port(range(15000, 25000))
    for name, value in {**slurm(0, port, num_nodes=2), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    launcher = doctor.find_launcher()
    assert isinstance(launcher, SLURMEnvironment)
    with pytest.raises(RankError, match=rf"rank 0 of 2 on .*, which joins at 127.0.0.1:{port}: .*"):
        doctor.examine_job(launcher, limit_seconds=1)


def test_processes_that_do_not_meet():
    """The processes that the command started are ended."""
    findings = doctor.examine_here(limit_seconds=0)
    assert levels(findings)["gloo all-reduce"] == "BROKEN"
    assert "did not in time" in doctor.table(findings)
    assert doctor.table(findings).endswith("\n1 broken")


def test_exit_code_and_remedy(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "find_launcher", lambda: None)
    monkeypatch.setattr(doctor, "examine_here", lambda: [doctor.broken_group("nccl", "unhandled system error")])
    assert doctor.main() == 1
    assert capsys.readouterr().out.splitlines() == [
        "BROKEN  nccl all-reduce  unhandled system error",
        "                         -> run again with NCCL_DEBUG=INFO; set NCCL_SOCKET_IFNAME where the network interface"
        " is the wrong one",
        "1 broken",
    ]


def test_versions():
    found = {"python": "3.12.1", "torch": "2.10.0+cu128", "CUDA": "12.8", "lightning": None, "triton": None}
    by_name = {finding.name: finding for finding in doctor.examine_versions(found, has_gpu=True)}
    assert [by_name[name].level for name in found] == ["ok", "BROKEN", "ok", "BROKEN", "BROKEN"]
    assert by_name["torch"].value == "2.10.0+cu128, older than 2.11"
    assert by_name["lightning"].remedy == "pip install 'lightning>=2.6.4'"
    found |= {"torch": "2.13.0+cpu", "lightning": "2.6.6", "CUDA": None}
    assert set(levels(doctor.examine_versions(found, has_gpu=False)).values()) == {"ok"}
    found |= {"torch": "2.99.1+cu140", "lightning": "2.6.99", "triton": "3.99.0"}
    by_name = {finding.name: finding for finding in doctor.examine_versions(found, has_gpu=False)}
    assert [by_name[name].level for name in found] == ["ok", "warning", "ok", "warning", "ok"]
    newest = env.TESTED_VERSIONS["torch"]
    assert by_name["torch"].value == f"2.99.1+cu140, newer than {newest}, the newest tested"


def test_minimum_versions_and_extras_are_the_projects():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    minima = dict(re.match(r"([\w-]+)[^>]*>=([\d.]+)", each).groups() for each in project["dependencies"])  # type: ignore[union-attr]
    minima["python"] = project["requires-python"].removeprefix(">=")
    assert {name: minima[name] for name in env.MINIMUM_VERSIONS} == env.MINIMUM_VERSIONS
    newest = {name: tuple(map(int, version.split("."))) for name, version in env.TESTED_VERSIONS.items()}
    bounds = dict(re.match(r"([\w-]+)[^<]*<([\d.]+)", each).groups() for each in project["dependencies"] if "<" in each)  # type: ignore[union-attr]
    for name in ("torch", "triton", "lightning"):  # the next minor version is excluded
        assert bounds[name] == f"{newest[name][0]}.{newest[name][1] + 1}"
    for package in env.optional_packages():
        distributions = " ".join(project["optional-dependencies"][package.extra])
        assert package.name.replace("_", "-") in distributions


def test_packages():
    packages = [env.OptionalPackage("plotly", None, "viz"), env.OptionalPackage("matplotlib", "3.9", "viz")]
    missing, present = doctor.examine_packages(packages)
    assert (missing.level, missing.remedy) == ("note", "pip install 'lightning-d9d[viz]'")
    assert (present.level, present.value) == ("ok", "3.9")


def test_gpus_that_torch_cannot_use(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    listed = "GPU 0: A (UUID: 1)\nGPU 1: A (UUID: 2)"
    (broken,) = doctor.examine_devices(0, listed)
    assert (broken.level, broken.value) == ("BROKEN", "torch sees none of 2")
    assert "install one that fits the driver" in broken.remedy
    assert levels(doctor.examine_devices(2, listed)) == levels(doctor.examine_devices(0, None)) == {"GPUs": "ok"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert levels(doctor.examine_devices(0, listed)) == {"GPUs": "ok"}


@pytest.mark.parametrize(
    ("free", "shared", "num_devices", "expected"),
    [
        (500 * GIB, 64 * GIB, 8, ["ok", "ok"]),
        (GIB, 2**26, 0, ["warning", "warning"]),
        (2**20, 2**26, 2, ["BROKEN", "BROKEN"]),
        (500 * GIB, None, 1, ["ok"]),
    ],
)
def test_space(free, shared, num_devices, expected):
    findings = list(doctor.examine_space(Path("/data"), free, shared, num_devices))
    assert [finding.level for finding in findings] == expected
    assert all(bool(finding.remedy) == (finding.level != "ok") for finding in findings)


def report(rank: int, host: str, torch: str = "2.13.0", offset: float = 0.0, error: float = 0.001) -> doctor.RankReport:
    findings = [doctor.Finding("BROKEN" if host == "bad" else "ok", "free disk", "0.1 GiB", "a remedy")]
    return doctor.RankReport(rank, host, findings, {"torch": torch}, offset, error)


def test_ranks_that_differ():
    findings = list(doctor.compare_ranks([report(0, "a"), report(1, "a"), report(2, "b", torch="2.11.0")]))
    assert levels(findings) == {"torch on all ranks": "BROKEN", "clock skew": "ok"}
    assert findings[0].value == "2.11.0 on rank 2 on b, 2.13.0 on rank 0 on a"
    findings = list(doctor.compare_ranks([report(0, "a"), report(1, "bad")]))
    assert findings[0].value == "rank 1 on bad: 0.1 GiB"
    assert levels(findings) == {"free disk": "BROKEN", "clock skew": "ok"}


def test_clocks():
    (skew,) = doctor.compare_ranks([report(0, "a"), report(1, "b", offset=-3.0)])
    assert (skew.level, skew.value) == ("warning", "at most 3000.00 ms (± 1.00), rank 1 on b")
    (skew,) = doctor.compare_ranks([report(0, "a"), report(1, "b", offset=-3.0, error=2.5)])  # too far away to tell
    assert skew.level == "ok"


@pytest.mark.parametrize(("made_for", "value"), [("==2.0.1", "for torch==2.0.1; here is"), (">=2", "for torch>=2")])
def test_an_installed_deep_ep(made_for: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is named with the torch that it is for, so that nobody expects it to be used."""
    assert [*doctor.examine_deep_ep()] == []
    folder = tmp_path / "sgl_deep_ep-0.1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.4\nName: sgl-deep-ep\nVersion: 0.1\nRequires-Dist: torch{made_for}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    (finding,) = doctor.examine_deep_ep()
    assert (finding.level, finding.name) == ("note", "sgl-deep-ep")
    assert finding.value.startswith(f"0.1, {value}")
    assert ("here is" in finding.value) == (made_for == "==2.0.1")
