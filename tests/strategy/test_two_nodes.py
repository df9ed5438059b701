"""Two nodes on one machine, each a network namespace of Linux: equal losses, and a network that fails."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from tests.harness import warm
from tests.loop.launcher_job import SHUTDOWN_SECONDS, STEP_SECONDS
from tests.loop.test_launchers import free_port, read, run_ranks

pytestmark = pytest.mark.jobs

PREFIX = "lightning-d9d-test-"
JOB_SECONDS = 200.0
EXTRA_SECONDS = 80.0  # a busy machine may take long to notice, print and exit; a hang takes 300 s
_NEW_NETWORK = 0x40000000
"""The flag of `setns(2)` for a new network namespace."""


@dataclass
class Node:
    """A network namespace with one end of a cable."""

    namespace: str
    interface: str
    address: str

    def ip(self, *arguments: str) -> None:
        subprocess.run(["ip", "-n", self.namespace, *arguments], check=True, capture_output=True)

    def end_processes(self) -> None:
        """End all processes, also ranks that torchrun started in sessions of their own."""
        listed = subprocess.run(["ip", "netns", "pids", self.namespace], capture_output=True, text=True, check=False)
        for process in map(int, listed.stdout.split()):
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    def start(self, module: str, arguments: list[str], folder: Path, stdout: Path, stderr: Path) -> BaseProcess:
        variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": warm.python_path(), "PYTHONUNBUFFERED": "1"}
        environment = {**os.environ, **variables, "GLOO_SOCKET_IFNAME": self.interface}
        command = (module, arguments, folder, environment, Path(os.devnull), stdout, stderr)
        job = warm.context().Process(target=run_in_namespace, args=(self.namespace, *command))
        job.start()
        return job


def run_in_namespace(namespace: str, *command: Any) -> None:
    """`warm.run_module` on a node, in a session of its own."""
    os.setsid()
    system = ctypes.CDLL(None, use_errno=True)
    with open(Path("/run/netns", namespace)) as file:
        if system.setns(file.fileno(), _NEW_NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    warm.run_module(*command, forks=True)


def remove_namespaces_of_ended_tests() -> None:
    """A test that was killed could not clean up."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    for name in re.findall(rf"^{PREFIX}\d+-\d", listed, re.M):
        if not Path("/proc", name.removeprefix(PREFIX).split("-")[0]).exists():
            subprocess.run(["ip", "netns", "delete", name], check=False)


@pytest.fixture
def nodes() -> Iterator[list[Node]]:
    remove_namespaces_of_ended_tests()
    unique = f"{PREFIX}{os.getpid()}"
    nodes = [Node(f"{unique}-{number}", f"node{number}", f"10.213.7.{number + 1}") for number in range(2)]
    try:
        for node in nodes:
            subprocess.run(["ip", "netns", "add", node.namespace], check=True)
        peer = ["peer", "name", nodes[1].interface, "netns", nodes[1].namespace]
        nodes[0].ip("link", "add", nodes[0].interface, "type", "veth", *peer)
        for node in nodes:
            node.ip("address", "add", f"{node.address}/24", "dev", node.interface)
            for interface in ("lo", node.interface):
                node.ip("link", "set", interface, "up")
        yield nodes
    finally:
        for node in nodes:  # the cable goes with them
            subprocess.run(["ip", "netns", "delete", node.namespace], check=False)


@dataclass
class Ended:
    """A job whose network was cut."""

    exit_codes: list[int | None] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Seconds from the cut to the end of each process."""
    outputs: list[str] = field(default_factory=list)


def run_and_cut(nodes: list[Node], directory: Path, *cases: str) -> Ended:
    """torchrun on each node, one rank a node; when rank 0 says that it is ready, its cable is pulled."""
    outputs = [directory / f"node{number}.txt" for number in range(2)]
    said = directory / "said"
    os.mkfifo(said)
    jobs = []
    for number, node in enumerate(nodes):
        arguments = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1"]
        arguments += [f"--master-addr={nodes[0].address}", "--master-port=29500"]
        arguments += ["-m", "tests.loop.launcher_job", str(directory), *cases]
        stdout = said if number == 0 else Path(os.devnull)
        jobs.append(node.start("torch.distributed.run", arguments, directory, stdout, outputs[number]))
    limits = [threading.Timer(JOB_SECONDS, node.end_processes) for node in nodes]
    ended = Ended()
    try:
        for limit in limits:
            limit.start()
        with said.open() as lines:
            if any("ready" in line for line in lines):
                nodes[0].ip("link", "set", nodes[0].interface, "down")
            cut = time.monotonic()
            for job in jobs:
                job.join()
                ended.exit_codes.append(job.exitcode)
                ended.seconds.append(time.monotonic() - cut)
    finally:
        for limit, node in zip(limits, nodes, strict=True):
            limit.cancel()
            limit.join()
            node.end_processes()
        ended.outputs = [output.read_text() for output in outputs]
        print(ended.seconds, *ended.outputs, sep="\n" + 80 * "=" + "\n")
    return ended


@pytest.mark.network_namespaces
def test_two_nodes_train_as_one_and_end_when_their_network_fails(nodes, tmp_path):
    ended = run_and_cut(nodes, tmp_path, "two_nodes", "cut")
    apart = read(tmp_path, ["two_nodes"])
    assert [record["place"] for record in apart] == [[0, 0, 0, 2], [1, 1, 0, 2]]
    (tmp_path / "one_node").mkdir()
    port = free_port(range(25000, 32000))
    shared = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environments = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"} for rank in range(2)]
    together = run_ranks(tmp_path / "one_node", environments, ["two_devices"])
    for one, other in zip(apart, together, strict=True):
        assert one["losses"] == other["losses"]
        assert one["weights"] == other["weights"]

    assert 0 not in ended.exit_codes
    assert max(ended.seconds) < STEP_SECONDS + SHUTDOWN_SECONDS + EXTRA_SECONDS
    assert "no answer from rank 1: a process ended" in ended.outputs[0]
    assert "rank 0 failed: it does not answer; its process or the network is down" in ended.outputs[1]
