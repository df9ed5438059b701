"""One rank process of the pool: it joins the process group once, then runs one test body after another."""

import dataclasses
import faulthandler
import gc
import importlib
import importlib.util
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor._redistribute import _gen_transform_infos
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from tests.harness.messages import STACK_SIGNAL, Assignment, Finish, Finished, Passed, Raised, Ready, Setup, Skipped
from tests.harness.ranks import RankContext
from tests.harness.recorder import Recorder
from tests.harness.state import restored_state

_FATAL = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""The signals of faults in native code, at which faulthandler prints the stack."""


def main(connection: Connection) -> None:
    """Be a rank until the pool kills this process.

    Args:
        connection: To the pool, which first says who this is.
    """
    torch.set_num_threads(1)
    setup = connection.recv()
    assert isinstance(setup, Setup)
    faulthandler.enable()
    faulthandler.register(STACK_SIGNAL, file=open(setup.stack_path, "w"), all_threads=True)  # noqa: SIM115
    _keep_handlers(STACK_SIGNAL, *_FATAL)
    worker = _Worker(connection, setup)
    gc.freeze()  # torch's own objects need no look at every collection
    connection.send(Ready(main_thread=threading.get_ident()))
    while True:
        worker.run(connection.recv())


def _keep_handlers(*kept: int) -> None:
    """Let nobody change what signals do: Lightning restores handlers after a fit, and knows none of faulthandler."""
    change = signal.signal

    def change_others(signalnum: int, handler: Any) -> Any:
        return signal.getsignal(signalnum) if signalnum in kept else change(signalnum, handler)

    signal.signal = change_others


class _Worker:
    """What lives as long as the process."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        self._connection = connection
        self._setup = setup
        self._context = _join_group(setup)
        self._ended_groups = _ended_groups()
        self._recorder = Recorder()
        self._importer = _AssertionRewriter()

    def run(self, assignment: Assignment) -> None:
        """One test. Unless every rank's body returns, the pool does not say Finish but kills the ranks."""
        with restored_state() as leftovers:
            if assignment.record:
                self._recorder.start(self._setup.record_path)
            try:
                body = self._importer.load(assignment)
                os.chdir(assignment.directory)  # a trainer without a directory of its own writes here
                context = dataclasses.replace(self._context, tmp_dir=assignment.directory)
                body(rank=context, **pickle.loads(assignment.arguments))
            except pytest.skip.Exception as skip:
                self._connection.send(Skipped(reason=str(skip.msg)))
            except BaseException as error:  # SystemExit as well: a rank always answers
                self._connection.send(_raised(error))
            else:
                self._connection.send(Passed())
            finish = self._connection.recv()
            assert isinstance(finish, Finish)
            self._recorder.stop()
            reusable = dist.is_initialized()
            try:
                groups = _close_groups() if reusable else ["no default process group"]
                if self._ended_groups:  # DTensor takes equal meshes for one, and would go on with groups that are gone
                    _clear_sharding_prop_cache()
                    _gen_transform_infos.cache_clear()
                    self._ended_groups.clear()
            except Exception as error:  # the body left a collective that is no longer matched
                self._connection.send(_raised(error))
                return
        self._connection.send(Finished(leftovers=leftovers + groups, reusable=reusable))


def _join_group(setup: Setup) -> RankContext:
    device, backend = torch.device("cpu"), "gloo"
    if setup.device_type == "cuda":
        device, backend = torch.device("cuda", setup.rank), "nccl"
        torch.cuda.set_device(device)
    else:
        _share_device()
    dist.init_process_group(
        backend,
        store=dist.TCPStore("127.0.0.1", setup.store_port, is_master=False, timeout=setup.group_timeout),
        rank=setup.rank,
        world_size=setup.world_size,
        timeout=setup.group_timeout,
        device_id=device if backend == "nccl" else None,
    )
    return RankContext(
        rank=setup.rank, world_size=setup.world_size, device=device, backend=backend, tmp_dir=setup.directory
    )


def _share_device() -> None:
    """Let all groups of gloo wait for messages in one thread: each device has one, which wakes up every 10 ms."""
    gloo: Any = dist.distributed_c10d.ProcessGroupGloo
    device = gloo.create_default_device()

    class OnOneDevice(type(gloo)):
        """What torch knows as the class of such groups. The groups are its own."""

        def __call__(cls, store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
            options = gloo._Options()
            options._devices, options._threads, options._timeout = [device], 2, timeout
            return gloo(store, rank, size, options)

        def __instancecheck__(cls, group: object) -> bool:
            return isinstance(group, gloo)

    dist.distributed_c10d.ProcessGroupGloo = OnOneDevice(gloo.__name__, (gloo,), {})


def _ended_groups() -> list[dist.ProcessGroup | None]:
    """Return a list to which each group is added that this process destroys."""
    ended: list[dist.ProcessGroup | None] = []
    destroy = dist.destroy_process_group

    def destroy_and_note(group: dist.ProcessGroup | None = None) -> None:
        ended.append(group)
        destroy(group)

    dist.destroy_process_group = destroy_and_note
    return ended


def _close_groups() -> list[str]:
    """Meet the other ranks once more on the default group, then destroy every group but those that go with it."""
    dist.barrier()
    pools = sys.modules.get("lightning_d9d.mesh.groups")
    pool = pools.GroupPool.living() if pools else None
    kept = [dist.group.WORLD, *(pooled.group for pooled in (pool.groups if pool else ()))]
    others = [group for group in dist.distributed_c10d._world.pg_map if group not in kept]
    if others and pool:
        pool.close()  # torch names groups by their number: with fewer, a new one would get the name of one that is kept
    for group in others:
        dist.destroy_process_group(group)
    return ["process groups"] if others else []


def _raised(error: BaseException) -> Raised:
    own_frame = error.__traceback__
    frames = own_frame.tb_next if own_frame else None
    return Raised(
        at_seconds=time.monotonic(),
        type_name=type(error).__name__,
        text=str(error),
        traceback="".join(traceback.format_exception(type(error), error, frames or own_frame)),
    )


class _AssertionRewriter:
    """Imports test modules as pytest does, so that a failed `assert` shows its values."""

    def __init__(self) -> None:
        os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        self.config = pytest.Config.fromdictargs({}, ["--noconftest"])
        del os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"]

    def load(self, assignment: Assignment) -> Callable[..., Any]:
        name, path = assignment.module_name, assignment.path
        if name not in sys.modules:
            for finder in sys.meta_path:  # the rewriter is the first of them
                if spec := finder.find_spec(name, [str(path.parent)]):
                    break
            else:
                raise ImportError(f"cannot import {path} as {name}")
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
        target: Any = sys.modules[name]
        for part in assignment.qualified_name.split("."):
            target = getattr(target, part)
            target = target() if isinstance(target, type) else target
        return target
