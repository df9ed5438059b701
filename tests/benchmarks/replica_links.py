"""Steps a second of replicas over slow links, beside all-reduce, and what the bytes predict.

Each rank is a node: a network namespace of Linux, whose link to a switch has a rate both ways (`tc ... tbf`). Its
computation is a pause, as on a device of its own, so that the machine's processor is free for messages. All ways and
rates run in the same processes, one after another. It needs root, `ip` and `tc`, and no GPU.

Prediction: an all-reduce over n replicas sends `2 (n - 1) / n` of the gradients, and begins when an eighth of the
backward is done. A mix sends as much of the weights as its edge has it, and has a whole step to arrive. What a step
takes beside, without a limit on links, is added to both.
"""

from __future__ import annotations

import logging
import os
import statistics
import subprocess
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L

from lightning_d9d import D9DStrategy, GradSyncConfig
from lightning_d9d.mixing import ReplicaMixing
from lightning_d9d.mixing.rounds import Rounds
from tests.benchmarks.replica_ranks import Paused, Place, Times, run_ranks, trainer_of

PEER = "all_reduce"
WAYS = (PEER, "one_peer_exp", "alternating_exp_ring")
NUM_LAYERS = 8
FIRST_STEPS = 3
CHANGING = "changing"
"""The value in place of a rate for a link of the last node that has two rates in turn."""


@dataclass(frozen=True, kw_only=True)
class LinksCase:
    """A model, how long it computes, and the rates."""

    name: str = "4 replicas"
    num_processes: int = 4
    num_parameters: int = 1_000_000
    forward_seconds: float = 0.1
    backward_seconds: float = 0.2
    rates: tuple[int, ...] = (400, 200, 100, 50)
    """Mbit/s of each link."""
    changing: tuple[int, int] = (200, 50)
    """The two rates of the last node's link, in turn; the other links have the first."""
    changing_seconds: float = 2.0
    steps: int = 12
    """The number of timed steps; four times as many with a changing link."""


def cases(device_type: str, quick: bool) -> list[LinksCase]:
    """Four replicas; with `quick` two, at one rate."""
    if quick:
        return [LinksCase(name="2 replicas", num_processes=2, rates=(400,), steps=2, num_parameters=80_000)]
    return [LinksCase()]


# The network


def _tc(namespace: str, interface: str, *arguments: str) -> None:
    subprocess.run(["tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", *arguments], check=True)


def _switch(number: int) -> tuple[str, str]:
    """The other end of a node's cable."""
    return f"d9d-bench-{os.getpid()}-switch", f"to-{number}"


def set_rate(place: Place, far_end: tuple[str, str], mbit: int | None) -> None:
    """Limit a node's link both ways; None: no limit."""
    limit = ["pfifo"] if mbit is None else ["tbf", "rate", f"{mbit}mbit", "burst", "256kb", "limit", "16mb"]
    _tc(place.namespace, place.interface, *limit)
    _tc(*far_end, *limit)


@contextmanager
def nodes(number: int) -> Iterator[list[tuple[Place, tuple[str, str]]]]:
    """Open while there are nodes at a switch."""

    def ip(*arguments: str) -> None:
        subprocess.run(["ip", *arguments], check=True, capture_output=True)

    switch = _switch(0)[0]
    made: list[str] = []
    try:
        ip("netns", "add", switch)
        made.append(switch)
        ip("-n", switch, "link", "add", "switch", "type", "bridge")
        ip("-n", switch, "link", "set", "switch", "up")
        found = []
        for index in range(number):
            place = Place(f"d9d-bench-{os.getpid()}-{index}", "cable", f"10.214.9.{index + 1}")
            port = _switch(index)[1]
            ip("netns", "add", place.namespace)
            made.append(place.namespace)
            ip("-n", place.namespace, "link", "add", "cable", "type", "veth", "peer", "name", port, "netns", switch)
            ip("-n", switch, "link", "set", port, "master", "switch", "up")
            ip("-n", place.namespace, "address", "add", f"{place.address}/24", "dev", "cable")
            for interface in ("lo", "cable"):
                ip("-n", place.namespace, "link", "set", interface, "up")
            found.append((place, (switch, port)))
        yield found
    finally:
        for namespace in made:
            subprocess.run(["ip", "netns", "delete", namespace], check=False)


def _sent_bytes(interface: str) -> int:
    """What this process's node has sent."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith(f"{interface}:")]
    return int(line.partition(":")[2].split()[8])


# The ranks


class _Sent(L.Callback):
    """Counts what the node sends in the timed steps."""

    def __init__(self, interface: str) -> None:
        self.interface = interface
        self.counts: list[int] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.counts.append(_sent_bytes(self.interface))


@contextmanager
def _changing(case: LinksCase, link: tuple[Place, tuple[str, str]]) -> Iterator[None]:
    """Open while a link has one rate and the other in turn."""
    ended = threading.Event()

    def change() -> None:
        index = 0
        while not ended.wait(case.changing_seconds):
            index = 1 - index
            set_rate(*link, case.changing[index])

    thread = threading.Thread(target=change, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def timed(case: LinksCase, links: list[tuple[Place, tuple[str, str]]], rank: int) -> dict[str, dict[str, Any]]:
    """Be a rank: train each way at each rate, and return seconds and bytes a step."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    link = links[rank]
    found: dict[str, dict[str, Any]] = {}
    bucket_mb = 4 * case.num_parameters / NUM_LAYERS / 2**20
    for rate in (None, *case.rates, CHANGING):
        changes = rate == CHANGING
        set_rate(*link, case.changing[0] if changes else rate)  # type: ignore[arg-type]
        steps = case.steps * 4 if changes else case.steps
        for name in WAYS:
            times, sent = Times(), _Sent(link[0].interface)
            sync = name if name == PEER else ReplicaMixing(topology=name, bucket_mb=bucket_mb)
            strategy = D9DStrategy(replicate_sync=sync, grad_sync=GradSyncConfig(bucket_mb=bucket_mb))
            options: dict[str, Any] = {"max_steps": FIRST_STEPS + steps, "log_every_n_steps": 0}
            run = trainer_of(strategy, case.num_processes, apart=True, callbacks=[times, sent], **options)
            seconds = case.forward_seconds, case.backward_seconds
            module = Paused(case.num_parameters, *seconds, NUM_LAYERS)
            if changes and rank == case.num_processes - 1:
                with _changing(case, link):
                    run.fit(module)
                set_rate(*link, case.changing[0])
            else:
                run.fit(module)
            found.setdefault(str(rate), {})[name] = {
                "seconds": (times.ends[-1] - times.ends[FIRST_STEPS - 1]) / steps,
                "bytes": (sent.counts[-1] - sent.counts[FIRST_STEPS - 1]) / steps,
            }
            if rank == 0:
                print(rate, name, found[str(rate)][name], flush=True)
    return found


def run_case(case: LinksCase, device_type: str) -> dict[str, Any]:
    """Measure, and return it with the predictions, ready for JSON."""
    with nodes(case.num_processes) as links:
        of_ranks = run_ranks(partial(timed, case, links), case.num_processes, places=[place for place, _ in links])
    rates: dict[str, dict[str, dict[str, float]]] = {}
    for rate in of_ranks[0]:
        for name in WAYS:
            of_way = [found[rate][name] for found in of_ranks]
            rates.setdefault(rate, {})[name] = {
                "seconds": max(each["seconds"] for each in of_way),
                "bytes": statistics.fmean(each["bytes"] for each in of_way),
            }
    free = rates["None"]
    computing = case.forward_seconds + case.backward_seconds
    for rate, of_ways in rates.items():
        for name, values in of_ways.items():
            beside = free[name]["seconds"] - computing
            if rate == CHANGING:
                pair = [predicted_seconds(case, name, each, beside) for each in case.changing]
                values["predicted"] = 1 / statistics.fmean(1 / each for each in pair)
            elif rate != "None":
                values["predicted"] = predicted_seconds(case, name, int(rate), beside)
            values["account"] = message_bytes(case, name)
    return {"case": case.name, "rates": rates, "changing": case.changing, "changing_seconds": case.changing_seconds}


def message_bytes(case: LinksCase, name: str) -> float:
    """What a replica sends a step, by account."""
    if name == PEER:
        share = 2 * (case.num_processes - 1) / case.num_processes
    else:
        share = Rounds(name, case.num_processes).message_share(0)
    return 4 * case.num_parameters * share


def predicted_seconds(case: LinksCase, name: str, mbit: int, beside: float) -> float:
    """A step at a rate, with `beside` for all but computation and messages."""
    bytes_a_second = mbit * 1e6 / 8
    if name == PEER:
        begins = case.backward_seconds / NUM_LAYERS
        message = begins + message_bytes(case, name) / bytes_a_second
        return case.forward_seconds + max(case.backward_seconds, message) + beside
    rounds = Rounds(name, case.num_processes)
    computing = case.forward_seconds + case.backward_seconds
    sizes = [len(rounds.edge(0, number).replicas) for number in range(len(rounds))]
    steps = [max(computing, 8 * case.num_parameters * (size - 1) / size / bytes_a_second) for size in sizes]
    return statistics.fmean(steps) + beside


def verdicts(result: Mapping[str, Any]) -> list[str]:
    """Return a verdict for each rate: whether mixing is faster than all-reduce."""
    limited = [of_ways for rate, of_ways in result["rates"].items() if rate != "None"]
    return ["met" if of_ways["one_peer_exp"]["seconds"] < of_ways[PEER]["seconds"] else "missed" for of_ways in limited]


def table(result: Mapping[str, Any], device_type: str) -> str:
    """What a person reads, in Markdown."""
    columns = [
        "links, Mbit/s",
        "way",
        "steps/s",
        "predicted",
        "of all-reduce",
        "predicted",
        "MB sent a step",
        "account",
    ]
    lines = [f"\nreplica_links, {result['case']}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for rate, of_ways in result["rates"].items():
        first, second = result["changing"]
        shown = {"None": "no limit", CHANGING: f"{first}, one {first} or {second}"}.get(rate, rate)
        peer = of_ways[PEER]
        for name, values in of_ways.items():
            predicted = values.get("predicted")
            cells = [shown, name, f"{1 / values['seconds']:.2f}", f"{1 / predicted:.2f}" if predicted else ""]
            if name == PEER:
                cells += ["1", "1" if predicted else ""]
            else:
                cells.append(f"{peer['seconds'] / values['seconds']:.2f}")
                cells.append(f"{peer['predicted'] / predicted:.2f}" if predicted else "")
            cells += [f"{values['bytes'] / 1e6:.2f}", f"{values['account'] / 1e6:.2f}"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(result: Mapping[str, Any], directory: Path, device_type: str) -> None:
    """The table as a file."""
    (directory / f"replica_links-{result['case'].replace(' ', '-')}.md").write_text(table(result, device_type) + "\n")
