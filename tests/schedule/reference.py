"""A second simulator for small programs, which looks at the whole machine at every whole moment.

It shares nothing with the package but actions and programs: it knows when an action may run, and lets a clock tick. It
needs whole durations. A program that is wrong in any way stops it, or leaves work undone or done twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from lightning_d9d.schedule import Overlapped, Program, parse


class Stuck(Exception):  # noqa: N818  # not an error of the test
    """The program cannot run to its end, or does the wrong work."""


@dataclass
class Machine:
    """What exists at some moment, by the short names of actions."""

    program: Program
    duration: dict[str, int]
    """Kind -> whole time; kinds "F", "B", "I", "W"."""
    transfer: int = 0
    latency: int = 0
    rendezvous: bool = False
    time: int = 0
    there: dict[str, int] = field(default_factory=dict)
    """What is computed or has arrived -> since when."""
    spans: list[tuple[int, str, int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        num_ranks = len(self.program.ranks)
        self.left = [list(map(str, actions)) for actions in self.program.ranks]
        self.free_at = [0] * num_ranks
        self.line_free_at: dict[object, int] = {}
        self.lines: dict[tuple[int, int], list[str]] = {}
        """(sender, receiver) -> sends that wait."""
        self.queues: list[list[str]] = [[] for _ in range(num_ranks)]
        self.received: dict[tuple[int, int], list[str]] = {}
        self.ran: list[str] = []

    def run(self) -> int:
        """The time of the last end. Raises `Stuck`."""
        with_messages = self.program.has_messages
        while True:
            while any([self.rank_goes(rank, with_messages) for rank in range(len(self.left))]) or self.lines_go():
                pass
            later = [time for time in self.times() if time > self.time]
            if not later:
                break
            self.time = min(later)
        if any(self.left) or any(self.lines.values()) or any(self.queues):
            raise Stuck("waits for ever")
        self.all_work_is_done()
        return max((end for *_, end in self.spans), default=0)

    def times(self) -> list[int]:
        return [*self.there.values(), *self.free_at, *self.line_free_at.values()]

    def split(self, name: str) -> tuple[int, str, int]:
        action = parse(name)
        return action.stage, action.code, action.microbatch  # type: ignore[union-attr]

    def is_there(self, *names: str) -> bool:
        return any(self.there.get(name, self.time + 1) <= self.time for name in names)

    def can_run(self, rank: int, name: str, with_messages: bool) -> bool:
        stage, kind, m = self.split(name)
        placement = self.program.placement
        if placement[stage] != rank:
            raise Stuck(f"{name} on a rank without the stage")
        if kind == "W":
            return self.is_there(f"{stage}I{m}")
        if kind != "F" and not self.is_there(f"{stage}F{m}"):
            return False
        other = stage - 1 if kind == "F" else stage + 1
        if not 0 <= other < len(placement):
            return True
        if with_messages and placement[other] != rank:
            receive = f"{stage}RECV_{'F' if kind == 'F' else 'B'}{m}"
            return receive in self.ran and self.is_there(receive)
        return self.is_there(*([f"{other}F{m}"] if kind == "F" else [f"{other}B{m}", f"{other}I{m}"]))

    def rank_goes(self, rank: int, with_messages: bool) -> bool:
        if not self.left[rank] or self.free_at[rank] > self.time:
            return False
        name = self.left[rank][0]
        if "SEND" in name or "RECV" in name:
            stage, kind, m = self.split(name)
            made = [f"{stage}F{m}"] if kind == "SEND_F" else [f"{stage}B{m}", f"{stage}I{m}"]
            if "SEND" in name and not self.is_there(*made):
                return False
            self.post(rank, name)
        else:
            action = parse(name)
            parts = [str(action.first), str(action.second)] if isinstance(action, Overlapped) else [name]
            if not all(self.can_run(rank, part, with_messages) for part in parts):
                return False
            end = self.time + sum(self.duration[self.split(part)[1]] for part in parts)
            self.free_at[rank] = end
            self.spans.append((rank, name, self.time, end))
            self.ran += parts
            for part in parts:
                self.there[part] = end
        self.left[rank].pop(0)
        return True

    def ends(self, name: str) -> tuple[int, int, str, str]:
        """Sender, receiver, send and receive of a message."""
        stage, kind, m = self.split(name)
        step = 1 if kind.endswith("F") else -1
        source = stage if kind.startswith("SEND") else stage - step
        placement = self.program.placement
        if not (0 <= source < len(placement) and 0 <= source + step < len(placement)):
            raise Stuck(f"{name} has no other end")
        direction = kind[-1]
        sender, receiver = placement[source], placement[source + step]
        return sender, receiver, f"{source}SEND_{direction}{m}", f"{source + step}RECV_{direction}{m}"

    def post(self, rank: int, name: str) -> None:
        sender, receiver, send, _ = self.ends(name)
        if sender == receiver or rank != (sender if "SEND" in name else receiver):
            raise Stuck(f"{name} does not cross ranks here")
        self.ran.append(name)
        if "RECV" in name:
            self.received.setdefault((sender, receiver), []).append(send)
        if self.rendezvous:
            self.queues[rank].append(name)
        elif "SEND" in name:
            self.lines.setdefault((sender, receiver), []).append(name)

    def lines_go(self) -> bool:
        """Start one message; whether there was any."""
        if self.rendezvous:
            names = [queue[0] for queue in self.queues if queue and "SEND" in queue[0]]
        else:
            names = [line[0] for line in self.lines.values() if line]
        for name in names:
            sender, receiver, send, receive = self.ends(name)
            users: list[object] = [sender, receiver] if self.rendezvous else [(sender, receiver)]
            if any(self.line_free_at.get(user, 0) > self.time for user in users):
                continue
            if self.rendezvous:
                if self.queues[receiver][:1] != [receive]:
                    continue
                self.queues[sender].pop(0)
                self.queues[receiver].pop(0)
            else:
                self.lines[sender, receiver].pop(0)
            for user in users:
                self.line_free_at[user] = self.time + self.transfer
            self.there[receive] = self.time + self.transfer + self.latency
            self.spans += [
                (rank, n, self.time, self.there[receive]) for rank, n in ((sender, send), (receiver, receive))
            ]
            return True
        return False

    def all_work_is_done(self) -> None:
        """Everything once, and messages received in the order in which they were sent."""
        if len(set(self.ran)) < len(self.ran):
            raise Stuck("something is done twice")
        ran = set(self.ran)
        backward = any(self.split(name)[1] in "BIW" for name in ran)
        expected = set()
        for stage in range(self.program.num_stages):
            for m in range(self.program.num_microbatches):
                expected.add(f"{stage}F{m}")
                if backward:
                    expected |= {f"{stage}I{m}", f"{stage}W{m}"} if f"{stage}I{m}" in ran else {f"{stage}B{m}"}
        if {name for name in ran if "_" not in name} != expected:
            raise Stuck("work is left out")
        sent: dict[tuple[int, int], list[str]] = {}
        for name in self.ran:
            if "SEND" in name:
                sender, receiver, *_ = self.ends(name)
                sent.setdefault((sender, receiver), []).append(name)
        if sent != self.received:
            raise Stuck("messages are received as what they are not")
