"""`lightning-d9d doctor` checks whether this machine, or the ranks of this job, can train.

Without a launcher it checks this machine and starts two processes, or one for each GPU. Started by torchrun, SLURM or
another launcher it joins the job's ranks instead, and rank 0 prints.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import (
    ClusterEnvironment,
    KubeflowEnvironment,
    LSFEnvironment,
    MPIEnvironment,
    SLURMEnvironment,
    TorchElasticEnvironment,
)
from packaging.requirements import Requirement
from packaging.version import Version

from lightning_d9d import env
from lightning_d9d.errors import RankError
from lightning_d9d.mesh.collectives import all_gather_object, gather_object

GIB = 2**30
ALL_REDUCE_BYTES = 64 * 2**20
COPY_BYTES = 256 * 2**20
NUM_REPEATS = 3
NUM_CLOCK_EXCHANGES = 5
LOCAL_SECONDS = 14.0  # for processes started here; all is to be said within 20 s
JOB_SECONDS = 120.0  # for a job's ranks, which may start at different speeds
MAX_CLOCK_SKEW_SECONDS = 1.0
MIN_DISK_BYTES, LOW_DISK_BYTES = 2**28, 10 * GIB
MIN_SHARED_BYTES, LOW_SHARED_BYTES = 2**26, GIB  # containers have 64 MiB by default

Level = Literal["ok", "note", "warning", "BROKEN"]


@dataclass(frozen=True)
class Finding:
    """A line of the table."""

    level: Level
    """The severity: "note" means that something optional is missing; "BROKEN", that training needs it."""
    name: str
    value: str
    remedy: str = ""


@dataclass(frozen=True)
class RankReport:
    """The findings of one rank."""

    rank: int
    host: str
    findings: list[Finding]
    """Findings about the rank's machine. All findings of rank 0 are printed, and only the problems of other
    ranks."""
    versions: dict[str, str | None]
    clock_offset_seconds: float
    """How far this rank's clock is ahead of rank 0's."""
    clock_error_seconds: float
    """Half of the round trip of the measurement."""


@dataclass(frozen=True)
class GroupReport:
    """The findings of all ranks together."""

    ranks: list[RankReport]
    findings: list[Finding]


# This machine


def examine_versions(versions: dict[str, str | None], has_gpu: bool) -> Iterator[Finding]:
    """Compare versions with those that the package needs. Triton is needed only on GPUs."""
    for name, version in versions.items():
        minimum, tested = env.MINIMUM_VERSIONS.get(name), env.newest_tested(name, version)
        needed = has_gpu or name not in ("triton", "CUDA")
        if version is None:
            remedy = "" if name == "CUDA" or not needed else f"pip install '{name}>={minimum}'"
            yield Finding("BROKEN" if remedy else "ok", name, "none", remedy)
        elif minimum is not None and needed and Version(version) < Version(minimum):
            yield Finding("BROKEN", name, f"{version}, older than {minimum}", f"install {name}>={minimum}")
        elif tested is not None and needed:
            what = f"{version}, newer than {tested}, the newest tested"
            yield Finding("warning", name, what, f"install {name} {tested}")
        else:
            yield Finding("ok", name, version)


def examine_packages(packages: Sequence[env.OptionalPackage]) -> Iterator[Finding]:
    """Return findings about optional packages, with the command to install those that are missing."""
    for package in packages:
        if package.version is None:
            yield Finding("note", package.name, "not installed", f"pip install 'lightning-d9d[{package.extra}]'")
        else:
            yield Finding("ok", package.name, package.version)


def examine_deep_ep() -> Iterator[Finding]:
    """Return a finding for each installed package of DeepEP: the version of torch that it is for. It is not used."""
    for name in ("sgl-deep-ep", "sgl-deep-ep-v25", "deep-ep"):
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        needed = [each for each in map(Requirement, found.requires or []) if each.name == "torch"]
        fits = all(each.specifier.contains(torch.__version__, prereleases=True) for each in needed)
        made_for = ", ".join(f"torch{each.specifier}" for each in needed) or "any torch"
        what = f"{found.version}, for {made_for}" + ("" if fits else f"; here is {torch.__version__}")
        yield Finding("note", name, what, "not used here; ParallelConfig.expert_dispatch sends tokens to experts")


def examine_devices(num_devices: int, seen_by_driver: str | None) -> Iterator[Finding]:
    """Check that torch can use the GPUs that the driver lists (`nvidia-smi -L`)."""
    num_listed = len(seen_by_driver.splitlines()) if seen_by_driver else 0
    if num_devices == 0 and num_listed > 0 and "CUDA_VISIBLE_DEVICES" not in os.environ:
        built_for = f"torch is built for CUDA {torch.version.cuda}" if torch.version.cuda else "torch is a CPU build"
        yield Finding(
            "BROKEN", "GPUs", f"torch sees none of {num_listed}", f"{built_for}; install one that fits the driver"
        )
    else:
        yield Finding("ok", "GPUs", str(num_devices) if num_devices else "none, trains on the CPU")


def examine_space(folder: Path, free_bytes: int, shared_bytes: int | None, num_devices: int) -> Iterator[Finding]:
    """Return the free disk space in the current folder, and the size of shared memory."""
    level: Level = "BROKEN" if free_bytes < MIN_DISK_BYTES else "warning" if free_bytes < LOW_DISK_BYTES else "ok"
    remedy = "" if level == "ok" else "checkpoints go to trainer.default_root_dir; set it to a larger disk"
    yield Finding(level, "free disk", f"{free_bytes / GIB:.1f} GiB in {folder}", remedy)
    if shared_bytes is not None:
        too_small = shared_bytes <= MIN_SHARED_BYTES and num_devices > 1
        level = "BROKEN" if too_small else "warning" if shared_bytes < LOW_SHARED_BYTES else "ok"
        remedy = "" if level == "ok" else "nccl and dataloader workers need it; docker run --shm-size=16g or --ipc=host"
        yield Finding(level, "shared memory", f"{shared_bytes / GIB:.2f} GiB", remedy)


def examine_machine() -> list[Finding]:
    """Return all findings about this machine. CUDA is not initialized."""
    num_devices = env.num_cuda_devices()
    shared = shutil.disk_usage(env.SHARED_MEMORY).total if env.SHARED_MEMORY.exists() else None
    return [
        *examine_versions(env.versions(), num_devices > 0),
        *examine_packages(env.optional_packages()),
        *examine_deep_ep(),
        Finding("ok", "CPU", f"{os.cpu_count()} cores, {platform.machine()}"),
        *examine_devices(num_devices, env.nvidia_smi("-L")),
        *examine_space(Path.cwd(), shutil.disk_usage(Path.cwd()).free, shared, num_devices),
    ]


# Ranks together


def examine_group(
    device: torch.device | None,
    begin: Callable[[str], object] = lambda backend: None,
    gloo_group: dist.ProcessGroup | None = None,
) -> GroupReport:
    """Check all ranks. Collective; rank 0's report covers all of them.

    Args:
        device: This rank's CUDA device, None if it has none.
        begin: Called with the next backend, in case it hangs.
        gloo_group: All ranks, with gloo; None if the default group uses gloo.
    """
    begin("gloo")
    rank = dist.get_rank()
    versions = env.versions()
    findings = [_all_reduce(torch.device("cpu"), gloo_group, "gloo")]
    with_device = all_gather_object(device is not None, gloo_group)
    if any(with_device):
        ranks = [r for r, has_device in enumerate(with_device) if has_device]
        timeout = timedelta(seconds=JOB_SECONDS)
        group = dist.new_group(ranks, backend="nccl", timeout=timeout)
        begin("nccl")
        if device is not None:
            assert isinstance(group, dist.ProcessGroup)
            torch.cuda.set_device(device)
            findings.append(_all_reduce(device, group, "nccl"))
    findings += _links(device)
    findings.append(_copy_bandwidth(device or torch.device("cpu")))
    offset, error = _clock_offset(gloo_group)
    own = RankReport(rank, socket.gethostname(), examine_machine(), versions, offset, error)
    return GroupReport(gather_object(own, gloo_group) or [], findings)


def _all_reduce(device: torch.device, group: dist.ProcessGroup | None, backend: str) -> Finding:
    size = dist.get_world_size(group)
    tensor = torch.empty(ALL_REDUCE_BYTES // 4, device=device)
    seconds = []
    try:
        for _ in range(1 + NUM_REPEATS):  # the first connects
            tensor.fill_(dist.get_rank(group) + 1)
            _synchronize(device)
            start = time.perf_counter()
            dist.all_reduce(tensor, group=group)
            _synchronize(device)
            seconds.append(time.perf_counter() - start)
        wrong = int((tensor != size * (size + 1) / 2).sum())
    except RuntimeError as error:
        return broken_group(backend, str(error).splitlines()[0])
    if wrong:
        return broken_group(backend, f"{wrong} of {tensor.numel()} sums over {size} ranks are wrong")
    best = min(seconds[1:])
    bus = 2 * (size - 1) / size * ALL_REDUCE_BYTES / best / 1e9
    speed = f", {1000 * best:.1f} ms for 64 MiB, {bus:.2f} GB/s on the bus" if size > 1 else ""
    return Finding("ok", f"{backend} all-reduce", f"{size} rank{'s' * (size > 1)}{speed}")


def broken_group(backend: str, problem: str) -> Finding:
    """Return a finding about ranks that cannot join."""
    remedy = {
        "gloo": "let the machine's name resolve to an address that the others reach, or set GLOO_SOCKET_IFNAME",
        "nccl": "run again with NCCL_DEBUG=INFO; set NCCL_SOCKET_IFNAME where the network interface is the wrong one",
    }
    return Finding("BROKEN", f"{backend} all-reduce", problem, remedy[backend])


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _copy_bandwidth(device: torch.device) -> Finding:
    source = torch.ones(COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(1 + NUM_REPEATS):
        _synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
    speed = 2 * COPY_BYTES / min(seconds[1:]) / 1e9
    return Finding("ok", "device copy", f"{speed:.0f} GB/s read and written on {device}")


def _links(device: torch.device | None) -> Iterator[Finding]:
    """Return the devices of this machine, and which of them can access each other's memory."""
    if device is None:
        return
    devices = env.cuda_devices()
    for index, found in enumerate(devices):
        major, minor = found.compute_capability
        memory = f"{found.memory_bytes / GIB:.0f} GiB, compute capability {major}.{minor}"
        yield Finding("ok", f"GPU {index}", f"{found.name}, {memory}")
    pairs = [(a, b) for a in range(len(devices)) for b in range(len(devices)) if a != b]
    if pairs:
        apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
        remedy = "slower; look at `nvidia-smi topo -m` and at the machine's IOMMU settings" if apart else ""
        value = f"none between GPUs {', '.join(apart)}" if apart else "between all GPUs"
        yield Finding("warning" if apart else "ok", "peer access", value, remedy)
    if topology := env.nvidia_smi("topo", "-m"):
        yield Finding("ok", "topology", "\n" + topology)


def _clock_offset(group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Return the seconds by which this rank's clock is ahead of rank 0's, and the possible error. Collective."""
    best = (0.0, float("inf")) if dist.get_rank() else (0.0, 0.0)
    clock = torch.zeros(1, dtype=torch.float64)
    for peer in range(1, dist.get_world_size()):
        for _ in range(NUM_CLOCK_EXCHANGES):
            if dist.get_rank() == 0:
                dist.recv(clock, peer, group=group)
                dist.send(torch.tensor([time.time()], dtype=torch.float64), peer, group=group)
            elif dist.get_rank() == peer:
                start = time.time()
                dist.send(clock, 0, group=group)
                dist.recv(clock, 0, group=group)
                end = time.time()
                best = min(best, ((start + end) / 2 - clock.item(), (end - start) / 2), key=lambda pair: pair[1])
    return best


def compare_ranks(ranks: Sequence[RankReport]) -> Iterator[Finding]:
    """Yield differences between ranks that must be equal, and problems of ranks other than 0."""
    first = ranks[0]
    for report in ranks[1:]:
        place = f"rank {report.rank} on {report.host}"
        for name, version in report.versions.items():
            if version != first.versions[name]:
                yield Finding(
                    "BROKEN",
                    f"{name} on all ranks",
                    f"{version} on {place}, {first.versions[name]} on rank 0 on {first.host}",
                    "install the same versions on all machines",
                )
        if report.host != first.host:
            for found in report.findings:
                if found.level in ("warning", "BROKEN"):
                    yield Finding(found.level, found.name, f"{place}: {found.value}", found.remedy)
    worst = max(ranks, key=lambda report: abs(report.clock_offset_seconds))
    skew = abs(worst.clock_offset_seconds)
    is_off = skew - worst.clock_error_seconds > MAX_CLOCK_SKEW_SECONDS
    value = (
        f"at most {1000 * skew:.2f} ms (± {1000 * worst.clock_error_seconds:.2f}), rank {worst.rank} on {worst.host}"
    )
    remedy = "times in logs cannot be compared; set the clocks by NTP" if is_off else ""
    yield Finding("warning" if is_off else "ok", "clock skew", value, remedy)


def _report_findings(report: GroupReport) -> list[Finding]:
    return [*report.ranks[0].findings, *report.findings, *compare_ranks(report.ranks)]


# Processes of our own


def examine_here(limit_seconds: float = LOCAL_SECONDS) -> list[Finding]:
    """Start processes on this machine, two or one for each GPU, which join on the loopback interface."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    size = max(2, env.num_cuda_devices())
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_run_rank, args=(rank, size, f"{folder}/store", sender), daemon=True)
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        sender.close()
        report = _wait_for_report(receiver, time.monotonic() + limit_seconds)
        for process in processes:
            process.join(1 if isinstance(report, GroupReport) else 0)
            process.kill()
            process.join()
    return _report_findings(report) if isinstance(report, GroupReport) else [*examine_machine(), report]


def _wait_for_report(receiver: Connection, deadline: float) -> GroupReport | Finding:
    """Return rank 0's report, or a rank's finding. Rank 0 first sends the name of each backend before it is tried."""
    backend = "gloo"
    while receiver.poll(max(0.0, deadline - time.monotonic())):
        try:
            received = receiver.recv()
        except EOFError:
            return broken_group(backend, "the processes that were to meet on this machine ended without a message")
        if not isinstance(received, str):
            return received
        backend = received
    return broken_group(backend, "the processes that were to meet on this machine did not in time")


def _run_rank(rank: int, size: int, store: str, sender: Connection) -> None:
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(store, size),
            rank=rank,
            world_size=size,
            timeout=timedelta(seconds=LOCAL_SECONDS),
        )
        begin = sender.send if rank == 0 else lambda backend: None
        report = examine_group(torch.device("cuda", rank) if rank < env.num_cuda_devices() else None, begin)
        if rank == 0:
            sender.send(report)
        dist.destroy_process_group()
    except RuntimeError as error:
        sender.send(broken_group("gloo", str(error).splitlines()[0]))


# The ranks of a job


def find_launcher() -> ClusterEnvironment | None:
    """Return the launcher that started this process as one of several, if there is one."""
    kinds = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)
    found = next((kind() for kind in kinds if kind.detect()), None)
    if found is None and {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        found = KubeflowEnvironment()
    return found if found is not None and found.world_size() > 1 else None


def examine_job(launcher: ClusterEnvironment, limit_seconds: float = JOB_SECONDS) -> list[Finding]:
    """Join all ranks of the job and check them. Collective; every rank returns the findings of all ranks.

    Raises:
        RankError: The ranks could not join, or lost each other.
    """
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = launcher.main_address, str(launcher.main_port)
    rank, size = launcher.global_rank(), launcher.world_size()
    try:
        dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timedelta(seconds=limit_seconds))
        has_device = launcher.local_rank() < env.num_cuda_devices()
        report = examine_group(torch.device("cuda", launcher.local_rank()) if has_device else None)
        shared = [_report_findings(report) if rank == 0 else []]
        dist.broadcast_object_list(shared)
        dist.destroy_process_group()
    except RuntimeError as error:
        raise RankError(
            f"rank {rank} of {size} on {socket.gethostname()}, which joins at "
            f"{launcher.main_address}:{launcher.main_port}: {str(error).splitlines()[0]}"
        ) from error
    return shared[0]


def table(findings: Sequence[Finding]) -> str:
    """Return one line for each finding, with its remedy below, and a last line with the verdict."""
    width = max(len(finding.name) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:8}{finding.name:{width}}  {finding.value}".rstrip())
        if finding.remedy:
            lines.append(f"{'':8}{'':{width}}  -> {finding.remedy}")
    num_broken = sum(finding.level == "BROKEN" for finding in findings)
    lines.append(f"{num_broken} broken" if num_broken else "healthy")
    return "\n".join(lines)


def main(_: object = None) -> int:
    """Print the table. Collective on the ranks of a job: rank 0 prints, and so does each rank that could not join.

    Returns:
        The exit code: 1 if something that training needs is broken, the same on every rank of a job, otherwise 0.
    """
    launcher = find_launcher()
    prints = launcher is None or launcher.global_rank() == 0
    try:
        findings = examine_here() if launcher is None else examine_job(launcher)
    except RankError as error:
        findings, prints = [*examine_machine(), broken_group("gloo", str(error))], True
    if prints:
        sys.stdout.write(table(findings) + "\n")
    return int(any(finding.level == "BROKEN" for finding in findings))
