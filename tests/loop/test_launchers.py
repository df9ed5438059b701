"""Ranks as clusters start them: the launcher's environment is set by hand on real processes, which then train."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins.environments import KubeflowEnvironment
from torch.utils.data import DistributedSampler

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.cli import main
from lightning_d9d.errors import ConfigError
from lightning_d9d.loop.launch import choose_network_interface, has_ipv4_address
from tests.harness import warm
from tests.harness.compare import assert_close_named
from tests.loop.launcher_job import LAUNCHER_VARIABLES, NUM_STEPS, Model, forked_rank
from tests.strategy.plain import Plain, loader, trainer

ROOT = Path(__file__).parents[2]
JOB_SECONDS = 120.0


def expected_weights() -> torch.Tensor:
    """Return the weights after the same steps of one process that reads both ranks' rows."""
    model = Model()
    optimizer = model.configure_optimizers()
    dataset = model.train_dataloader().dataset
    orders = [DistributedSampler(dataset, num_replicas=2, rank=rank) for rank in range(2)]  # as Lightning puts in
    for step, rows in enumerate(zip(*orders, strict=True)):
        optimizer.zero_grad()
        model.training_step([tensor[list(rows)] for tensor in dataset.tensors], step).backward()
        optimizer.step()
    return torch.cat([model.layer.weight.detach().flatten(), model.layer.bias.detach()])


def read(directory: Path, cases: Sequence[str]) -> list[dict[str, Any]]:
    """What both ranks said of each case, all of rank 0 first. Checks that they trained, together."""
    said = [json.loads((directory / f"{rank}.json").read_text()) for rank in range(2)]
    records = [said[rank][case] for rank in range(2) for case in cases]
    expected = expected_weights()
    for record in records:
        assert record["weights"] == records[0]["weights"]
        assert len(record["losses"]) == NUM_STEPS
        assert_close_named("weights", torch.tensor(record["weights"], dtype=torch.float64), expected)
    assert said[0][cases[0]]["losses"] != said[1][cases[0]]["losses"]
    return records


def start_ranks(
    directory: Path, environments: Sequence[dict[str, str]], cases: list[str], hostnames: Sequence[str] = ("a", "b")
) -> list[int | None]:
    """Two ranks, each with its environment and host name, forked from a process that has imported everything.

    Returns:
        Their exit codes.
    """
    ranks = [
        warm.context().Process(target=forked_rank, args=(str(directory), number, environment, hostname, cases))
        for number, (environment, hostname) in enumerate(zip(environments, hostnames, strict=True))
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(JOB_SECONDS)
        rank.kill()
        rank.join()
    print(*((directory / f"{number}.txt").read_text() for number in range(2)), sep="\n" + 80 * "=" + "\n")
    return [rank.exitcode for rank in ranks]


def run_ranks(
    directory: Path, environments: Sequence[dict[str, str]], cases: list[str], hostnames: Sequence[str] = ("a", "b")
) -> list[dict[str, Any]]:
    """`start_ranks`; what the ranks said."""
    assert start_ranks(directory, environments, cases, hostnames) == [0, 0]
    return read(directory, cases)


def free_port(ports: range) -> int:
    """The ports that launchers make from a job's number cannot be left to the system."""
    for port in ports[os.getpid() % 1000 :]:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise AssertionError(f"no free port in {ports}")


def slurm(rank: int, port: int, *, num_nodes: int, **variables: str) -> dict[str, str]:
    """What srun sets for one of two tasks."""
    node, local_rank = (rank, 0) if num_nodes == 2 else (0, rank)
    nodes = "127.0.0.[1-2]" if num_nodes == 2 else "127.0.0.1"
    return {
        "SLURM_JOB_ID": str(1_230_000 + port - 15000),
        "SLURM_JOB_NAME": "train",
        "SLURM_JOB_NODELIST": nodes,
        "SLURM_NODELIST": nodes,
        "SLURM_NNODES": str(num_nodes),
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": str(2 // num_nodes),
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": str(rank),
        "SLURM_NODEID": str(node),
        "SLURM_LOCALID": str(local_rank),
        **variables,
    }


def check(records: list[dict[str, Any]], environment: str, address: str, port: int, places: list[list[int]]) -> None:
    for record in records:
        assert (record["environment"], record["address"], record["port"]) == (environment, address, port)
    for rank, place in enumerate(places):
        num_cases = len(records) // 2
        assert [r["place"] for r in records[num_cases * rank : num_cases * (rank + 1)]] == [place] * num_cases


ON_TWO_NODES = [[0, 0, 0, 2], [1, 1, 0, 2]]  # global, node and local rank, world size
ON_ONE_NODE = [[0, 0, 0, 2], [1, 0, 1, 2]]


@pytest.mark.jobs
def test_slurm_two_nodes_without_an_address(tmp_path):
    """This is `srun` in an sbatch script: the address is the first of the node list, the port follows from the job's
    number."""
    port = free_port(range(15000, 25000))
    environments = [slurm(rank, port, num_nodes=2) for rank in range(2)]
    records = run_ranks(tmp_path, environments, ["two_nodes", "two_nodes_cli"])
    check(records, "SLURMEnvironment", "127.0.0.1", port, ON_TWO_NODES)


@pytest.mark.jobs
def test_slurm_bare_srun_on_one_node(tmp_path):
    """A job without a script has the command's name."""
    port = free_port(range(15000, 25000))
    environments = [slurm(rank, port, num_nodes=1, SLURM_JOB_NAME="python") for rank in range(2)]
    records = run_ranks(tmp_path, environments, ["two_devices", "two_devices_cli"])
    check(records, "SLURMEnvironment", "127.0.0.1", port, ON_ONE_NODE)


@pytest.mark.jobs
def test_the_store_of_one_node_listens_on_its_address_alone(tmp_path):
    port = free_port(range(25000, 32000))
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "NODE_RANK": "0"}
    environments = [{**shared, "LOCAL_RANK": str(rank)} for rank in range(2)]
    records = run_ranks(tmp_path, environments, ["two_devices"])
    check(records, "LightningEnvironment", "localhost", port, ON_ONE_NODE)
    assert records[0]["answers"] == {"127.0.0.1": True, "127.0.0.2": False}  # the store is in rank 0's process


@pytest.mark.jobs
def test_slurm_puts_a_job_back_into_the_queue(tmp_path, monkeypatch):
    """One rank gets the signal in the middle of its collectives; all save at the end of the same window, and end."""
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\necho $1 $2 > {tmp_path}/queue\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    port = free_port(range(15000, 25000))
    variables = {"SLURM_TEST_ROOT": str(tmp_path), "PATH": os.environ["PATH"]}
    environments = [slurm(rank, port, num_nodes=1, **variables) for rank in range(2)]
    assert start_ranks(tmp_path, environments, ["requeued"]) == [128 + signal.SIGUSR1] * 2
    assert (tmp_path / "queue").read_text() == f"requeue {environments[0]['SLURM_JOB_ID']}\n"
    [path] = tmp_path.glob("hpc_ckpt_*.ckpt")
    checkpoint = torch.load(path, weights_only=True)
    saved = 4 * checkpoint["global_step"]
    assert 2 * 4 < saved < 2000
    assert checkpoint["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]["processed"] == saved
    environments = [slurm(rank, port + 1, num_nodes=1, **variables) for rank in range(2)]
    assert start_ranks(tmp_path, environments, ["resumes"]) == [0, 0]
    records = [json.loads((tmp_path / f"{rank}.json").read_text())["resumes"] for rank in range(2)]
    assert [len(record["losses"]) for record in records] == [2000 - saved] * 2


@pytest.mark.jobs
def test_slurm_with_address_and_port_of_the_script(tmp_path):
    port = free_port(range(25000, 32000))
    given = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "SLURM_NODELIST": "nowhere[1-2]"}
    environments = [slurm(rank, 15000, num_nodes=2, **given) for rank in range(2)]
    check(run_ranks(tmp_path, environments, ["two_nodes"]), "SLURMEnvironment", "localhost", port, ON_TWO_NODES)


@pytest.mark.jobs
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_lsf(tmp_path, num_nodes):
    """The rank file names the machine that launched first, then one a rank."""
    port = free_port(range(10000, 11000))
    hosts = ["127.0.0.1", f"127.0.0.{num_nodes}"]
    (tmp_path / "rankfile").write_text("\n".join(["login", *hosts]) + "\n")
    environments = [
        {
            "LSB_JOBID": str(77_000 + port - 10000),
            "LSB_DJOB_RANKFILE": str(tmp_path / "rankfile"),
            "JSM_NAMESPACE_SIZE": "2",
            "JSM_NAMESPACE_RANK": str(rank),
            "JSM_NAMESPACE_LOCAL_RANK": str(rank if num_nodes == 1 else 0),
        }
        for rank in range(2)
    ]
    cases = ["two_devices", "two_devices_cli"] if num_nodes == 1 else ["two_nodes"]
    records = run_ranks(tmp_path, environments, cases, hosts)
    check(records, "LSFEnvironment", "127.0.0.1", port, ON_ONE_NODE if num_nodes == 1 else ON_TWO_NODES)


def pytorch_job(rank: int, port: int) -> dict[str, str]:
    """What the operator sets in each pod."""
    return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": str(rank)}


@pytest.mark.jobs
def test_kubeflow(tmp_path):
    port = free_port(range(25000, 32000))
    environments = [pytorch_job(rank, port) for rank in range(2)]
    records = run_ranks(tmp_path, environments, ["kubeflow", "kubeflow_cli"])
    check(records, "KubeflowEnvironment", "127.0.0.1", port, ON_TWO_NODES)


@pytest.mark.jobs
@pytest.mark.mpi
def test_mpi(tmp_path):
    mpiexec = shutil.which("mpiexec")
    assert mpiexec is not None
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)}
    job = [sys.executable, "-m", "tests.loop.launcher_job", str(tmp_path), "two_devices", "two_devices_cli"]
    result = subprocess.run(
        [mpiexec, "-n", "2", *job],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": warm.python_path(), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=2 * JOB_SECONDS,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    records = read(tmp_path, ["two_devices", "two_devices_cli"])
    assert {record["environment"] for record in records} == {"MPIEnvironment"}
    assert [record["place"] for record in records] == [place for place in ON_ONE_NODE for _ in range(2)]


@pytest.fixture
def set_launcher(monkeypatch):
    """Sets a launcher's environment, and no other's."""

    def set_environment(variables: dict[str, str]) -> None:
        for name in os.environ:
            if name.startswith(LAUNCHER_VARIABLES):
                monkeypatch.delenv(name)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_environment


def torchrun(rank: int, local_rank: int) -> dict[str, str]:
    return {
        "TORCHELASTIC_RUN_ID": "1",
        "WORLD_SIZE": "4",
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": "0",
    }


MISMATCHES = {
    "slurm": (
        slurm(0, 15000, num_nodes=1),
        {"devices": 4},
        "SLURM started 2 ranks, but devices=4 and num_nodes=1 of the Trainer make 4; make devices the number",
    ),
    "slurm one too few": (slurm(0, 15000, num_nodes=1), {"devices": 1}, "SLURM started 2 ranks, but devices=1"),
    "slurm other shape": (
        slurm(0, 15000, num_nodes=2),
        {"devices": 2},
        "`--ntasks-per-node=1` does not match. HINT: Set `devices=1`",
    ),
    "torchrun": (torchrun(0, 0), {"devices": 2}, "TorchElastic started 4 ranks, but devices=2 and num_nodes=1"),
    "torchrun other shape": (
        torchrun(3, 3),
        {"devices": 2, "num_nodes": 2},
        "TorchElastic started rank 3 as number 4 on its node, but devices=2 and num_nodes=2 of the Trainer allow 2",
    ),
    "kubeflow": (
        pytorch_job(1, 25000),
        {"devices": 2, "num_nodes": 2, "plugins": [KubeflowEnvironment()]},
        "Kubeflow started 2 ranks, but devices=2 and num_nodes=2 of the Trainer make 4",
    ),
    "kubeflow unnoticed": (
        pytorch_job(1, 25000),
        {"num_nodes": 2},
        r"WORLD_SIZE=2 says that this is one of 2 processes.*give the Trainer plugins=KubeflowEnvironment\(\)",
    ),
    "kubeflow unnoticed, one node": (pytorch_job(1, 25000), {}, "WORLD_SIZE=2"),
    "slurm unnoticed": (
        slurm(0, 15000, num_nodes=2, SLURM_JOB_NAME="bash"),
        {},
        "SLURM_STEP_NUM_TASKS=2 .* name the job otherwise",
    ),
    "mpi unnoticed": ({"PMI_SIZE": "2", "PMI_RANK": "1"}, {"devices": 2}, "PMI_SIZE=2 .* install it"),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_other_number_of_ranks_than_the_trainers(set_launcher, name):
    variables, options, message = MISMATCHES[name]
    set_launcher(variables)
    with pytest.raises(ConfigError, match=message):
        trainer("d9d", **options).fit(Plain(), loader(8))


def test_other_number_of_ranks_on_the_command_line(set_launcher, monkeypatch, capsys, tmp_path):
    set_launcher(slurm(0, 15000, num_nodes=1))
    monkeypatch.chdir(tmp_path)
    config = str(ROOT / "examples" / "qwen3_moe" / "tiny.yaml")
    options = ["--trainer.accelerator", "cpu", "--trainer.devices", "3"]
    monkeypatch.setattr(sys, "argv", ["lightning-d9d", "fit", "--config", config, *options])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "error: --trainer.devices: SLURM started 2 ranks, but devices=3 and num_nodes=1" in capsys.readouterr().err


def test_degrees_that_do_not_fit_are_found_before_processes_start():
    run = trainer(D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), devices=3)
    with pytest.raises(ConfigError, match="pipeline_parallel=2 does not divide 3 ranks"):
        run.fit(Plain(), loader(8))
    assert run.strategy.launcher.procs == []


def test_own_launcher_of_several_nodes_is_noticed(set_launcher):
    """Who sets NODE_RANK says which node this is; Lightning starts this node's ranks."""
    set_launcher(slurm(1, 15000, num_nodes=2, SLURM_JOB_NAME="bash", NODE_RANK="1"))
    assert L.Trainer(accelerator="cpu", strategy="d9d", devices=2, num_nodes=2, logger=False).node_rank == 1


@pytest.fixture
def interfaces(tmp_path, monkeypatch):
    """A folder of network interfaces; the chosen one's variables are unset, now and after the test."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(variable, "")
        monkeypatch.delenv(variable)
    for name, state in {"lo": "unknown", "eth0": "up", "ib0": "down", "ib1": "up", "ib2": "up", "ib3": "up"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "operstate").write_text(f"{state}\n")
    return tmp_path


def test_first_infiniband_interface_that_is_up_with_an_address(interfaces):
    assert choose_network_interface(2, interfaces, {"ib0", "ib2", "ib3"}.__contains__) == "ib2"
    assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "ib2"


@pytest.mark.parametrize("variable", ["GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"])
def test_chosen_interface_stays(interfaces, monkeypatch, variable):
    monkeypatch.setenv(variable, "eth0")
    assert choose_network_interface(2, interfaces, lambda name: True) is None
    assert [os.environ.get(name) for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")].count("eth0") == 1


def test_nothing_is_guessed(interfaces):
    assert choose_network_interface(1, interfaces, lambda name: True) is None
    assert choose_network_interface(2, interfaces, lambda name: name in ("lo", "eth0", "ib0")) is None
    assert choose_network_interface(2, interfaces / "absent") is None
    assert "GLOO_SOCKET_IFNAME" not in os.environ


def test_addresses_of_real_interfaces():
    assert has_ipv4_address("lo")
    assert not has_ipv4_address("ib99")


@pytest.mark.jobs
def test_launched_rank_whose_launcher_is_killed(tmp_path: Path) -> None:
    """The launcher is killed before ranks meet. The rank ends, too, and does not wait for
    `TimeoutConfig.init_seconds`."""
    job = {"folder": tmp_path, "variables": {"PYTHONPATH": warm.python_path()}, "module": "tests.loop.orphan_job"}
    launcher = warm.run_command(str(tmp_path), **job, seconds=JOB_SECONDS, forks=True)
    assert launcher.returncode == -signal.SIGKILL, launcher.stderr
    with suppress(ProcessLookupError):
        rank = os.pidfd_open(int((tmp_path / "rank 1").read_text()))
        try:
            assert select.select([rank], [], [], JOB_SECONDS / 2)[0], "rank 1 goes on"
        finally:
            signal.pidfd_send_signal(rank, signal.SIGKILL)
            os.close(rank)
