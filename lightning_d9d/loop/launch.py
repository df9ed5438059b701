"""Before ranks join: checks that the launcher started the expected ranks, and chooses the network."""

from __future__ import annotations

import ctypes
import inspect
import ipaddress
import os
import signal
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from lightning.fabric.utilities.rank_zero import rank_zero_info
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher
from lightning.pytorch.utilities.model_helpers import is_overridden

from lightning_d9d.errors import ConfigError, RankError
from lightning_d9d.paths import check_named

_LAUNCHED_BY = "LIGHTNING_D9D_LAUNCHED_BY"
"""Variable of a launched rank, with the process ID of its launcher."""
_launcher = os.environ.pop(_LAUNCHED_BY, None)  # not for processes that this one starts
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
_INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")

# Variables with the number of processes of a launcher, and why Lightning may not have recognized it.
_UNNOTICED = {
    "SLURM_STEP_NUM_TASKS": "Lightning takes jobs named bash or interactive for a shell; name the job otherwise "
    "(srun --job-name train)",
    "OMPI_COMM_WORLD_SIZE": "Lightning knows MPI's ranks by mpi4py alone; install it",
    "PMI_SIZE": "Lightning knows MPI's ranks by mpi4py alone; install it",
    "WORLD_SIZE": "for Kubeflow's PyTorchJob give the Trainer plugins=KubeflowEnvironment() from "
    "lightning.pytorch.plugins.environments, and for a launcher of your own set LOCAL_RANK and NODE_RANK",
}


class Launcher(_SubprocessScriptLauncher):
    """Lightning's launcher of a machine's other ranks, which puts its process number into their environment."""

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Any = None, **kwargs: Any) -> Any:
        """Start the other ranks, and run a function of the Trainer. On one node mistakes are found first.

        Raises:
            ConfigError: Degrees do not fit the number of ranks, or the model names a path that does not exist; no
                process has been started.
        """
        if self.num_nodes == 1 and not self.cluster_environment.creates_processes_externally:
            trainer.strategy.mesh_config.resolve(self.num_processes)
            check_model(function, *args, **kwargs)
        return super().launch(function, *args, trainer=trainer, **kwargs)

    def _call_children_scripts(self) -> None:
        os.environ[_LAUNCHED_BY] = str(os.getpid())
        try:
            super()._call_children_scripts()
        finally:
            del os.environ[_LAUNCHED_BY]


def check_model(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Refuse a model with a path that does not exist, unless its own `prepare_data` may make it. Local.

    Args:
        function: The function of the Trainer that will run the model.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        ConfigError: The path does not exist.
    """
    given = inspect.signature(function).bind(*args, **kwargs).arguments
    model = given.get("model")
    if model is not None and not is_overridden("prepare_data", model):
        check_named(model, resumes=given.get("ckpt_path") is not None)


@contextmanager
def ending_with_launcher() -> Iterator[None]:
    """Make a launched rank end with its launcher, while ranks join and no watchdog runs yet. Local.

    Otherwise a rank would wait for `TimeoutConfig.init_seconds`. Linux only.

    Raises:
        RankError: The launcher has already ended.
    """
    if _launcher is None or sys.platform != "linux":
        yield
        return
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # torch waits where Python's own handlers do not run
    try:
        if os.getppid() != int(_launcher):
            raise RankError(f"the process that launched this rank, {_launcher}, ended before the ranks joined")
        yield
    finally:
        prctl(_PR_SET_PDEATHSIG, 0)


def check_launcher_is_noticed(environment: ClusterEnvironment) -> None:
    """Refuse to train alone, or to launch ranks, in one of several processes that a launcher started.

    Raises:
        ConfigError: Lightning does not detect the launcher; the message says how to make it do so.
    """
    if environment.creates_processes_externally or "NODE_RANK" in os.environ:
        return
    for variable, remedy in _UNNOTICED.items():
        number = os.environ.get(variable, "1")
        if number != "1" and (variable != "WORLD_SIZE" or "RANK" in os.environ):
            raise ConfigError(
                f"{variable}={number} says that this is one of {number} processes, but Lightning has not detected "
                f"this: {remedy}"
            )


def check_number_of_ranks(environment: ClusterEnvironment, num_devices: int, num_nodes: int) -> None:
    """Refuse a number of ranks, in all or on this node, that differs from the Trainer's.

    Raises:
        ConfigError: Raised with both numbers.
    """
    launcher = type(environment).__name__.removesuffix("Environment")
    try:
        started = environment.world_size()
    except KeyError:  # a SLURM job that was submitted without a number of tasks
        started = 1
    expected = f"devices={num_devices} and num_nodes={num_nodes} of the Trainer"
    remedy = (
        "make devices the number of ranks on each node (srun --ntasks-per-node, torchrun --nproc-per-node) and "
        "num_nodes the number of nodes"
    )
    if started != num_devices * num_nodes:
        raise ConfigError(
            f"{launcher} started {started} ranks, but {expected} make {num_devices * num_nodes}; {remedy}"
        )
    if started > 1 and (local_rank := environment.local_rank()) >= num_devices:
        raise ConfigError(
            f"{launcher} started rank {environment.global_rank()} as number {local_rank + 1} on its node, but "
            f"{expected} allow {num_devices} there; {remedy}"
        )
    try:
        environment.validate_settings(num_devices=num_devices, num_nodes=num_nodes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def has_ipv4_address(interface: str) -> bool:
    """Return whether a network interface of this machine has an IPv4 address. Linux only."""
    import fcntl

    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as request:
        try:
            fcntl.ioctl(request, get_address, struct.pack("256s", interface.encode()))
        except OSError:
            return False
    return True


def choose_network_interface(
    num_nodes: int,
    folder: Path = Path("/sys/class/net"),
    has_address: Callable[[str], bool] = has_ipv4_address,
) -> str | None:
    """Make gloo and nccl use InfiniBand if several nodes have it and the user has not chosen an interface.

    Sets `GLOO_SOCKET_IFNAME` and `NCCL_SOCKET_IFNAME` to the first interface called `ib...` that is up and has an IPv4
    address (without one it carries RDMA alone). Without such an interface, gloo and nccl choose as always.

    Args:
        num_nodes: Number of nodes of the run; with one node nothing is set.
        folder: Linux's folder of network interfaces.
        has_address: Returns whether an interface has an address.

    Returns:
        The name of the interface, if it was set here.
    """
    if num_nodes == 1 or sys.platform != "linux" or any(name in os.environ for name in _INTERFACE_VARIABLES):
        return None
    for path in sorted(folder.glob("ib*")):
        if (path / "operstate").read_text().strip() == "up" and has_address(path.name):
            for variable in _INTERFACE_VARIABLES:
                os.environ[variable] = path.name
            rank_zero_info(f"Nodes talk over {path.name}; {' and '.join(_INTERFACE_VARIABLES)} choose otherwise.")
            return path.name
    return None


def local_store(environment: ClusterEnvironment, num_nodes: int, timeout: timedelta) -> dist.TCPStore | None:
    """Return a store for ranks that join at an address of this machine, which listens only on that address. Collective.

    torch itself listens on all addresses, and anyone who reaches the port controls the job.

    Args:
        environment: Cluster environment of the run, with its number of ranks.
        num_nodes: Number of nodes of the run.
        timeout: How long ranks wait for each other.

    Returns:
        The store; None if torch must start it: for several nodes, or for an address that other machines reach. None
        also under torchrun, which has already started one.
    """
    address, port = environment.main_address, environment.main_port
    if num_nodes > 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not _is_loopback(address):
        return None
    is_first = environment.global_rank() == 0
    return dist.TCPStore(
        address,
        port,
        environment.world_size(),
        is_first,
        timeout,
        multi_tenant=True,
        master_listen_fd=_listen(address, port) if is_first else None,
    )


def _is_loopback(address: str) -> bool:
    try:
        found = {each[4][0] for each in socket.getaddrinfo(address, None, type=socket.SOCK_STREAM)}
    except OSError:
        return False
    return all(ipaddress.ip_address(each).is_loopback for each in found)


def _listen(address: str, port: int) -> int | None:
    """Return a socket for the store to use; None if the port is in use, perhaps by an earlier store of this process."""
    for family, *_, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        try:
            return socket.create_server(place, family=family).detach()
        except OSError:
            continue
    return None
