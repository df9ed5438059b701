"""Random legal programs: any placement, any order of work in which nothing comes before what it uses."""

from __future__ import annotations

from hypothesis import strategies as st

from lightning_d9d.schedule import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Overlapped,
    Program,
    add_messages,
)

Compute = Forward | Backward | BackwardInput | BackwardWeight


@st.composite
def programs(draw: st.DrawFn, pairs: bool = True, num_ranks: int | None = None) -> Program:
    """A program of compute actions, of at most 4 ranks (or of `num_ranks`), 5 stages and 4 microbatches.

    Work is laid out in one order over all ranks, in which every action may come next whose inputs are there, and each
    rank gets its part of it. Two that come next to one another on one rank may become a pair.
    """
    num_ranks = num_ranks or draw(st.integers(1, 4))
    more_stages = draw(st.integers(0, 5 - num_ranks))
    placement = tuple(
        draw(st.permutations([*range(num_ranks), *(draw(st.integers(0, num_ranks - 1)) for _ in range(more_stages))]))
    )
    num_microbatches = draw(st.integers(1, 4))
    last = len(placement) - 1
    backward = draw(st.booleans()) or draw(st.booleans())
    ready: list[Compute] = [Forward(0, m) for m in range(num_microbatches)]
    ranks: list[list[Action]] = [[] for _ in range(num_ranks)]
    before: tuple[int, Compute] | None = None
    while ready:
        action = ready.pop(draw(st.integers(0, len(ready) - 1)))
        stage, m = action.stage, action.microbatch
        rank = placement[stage]
        if (
            pairs
            and before is not None
            and before[0] == rank
            and _independent(before[1], action)
            and draw(st.booleans())
        ):
            ranks[rank][-1] = Overlapped(before[1], action)
            before = None
        else:
            ranks[rank].append(action)
            before = rank, action
        if isinstance(action, Forward) and stage < last:
            ready.append(Forward(stage + 1, m))
        elif not isinstance(action, BackwardWeight) and backward:
            after = stage if isinstance(action, Forward) else stage - 1
            if isinstance(action, BackwardInput):
                ready.append(BackwardWeight(stage, m))
            if after >= 0:
                ready.append(draw(st.sampled_from([Backward, BackwardInput]))(after, m))
    return Program(tuple(map(tuple, ranks)), placement, num_microbatches)


def _independent(first: Compute, second: Compute) -> bool:
    return first.microbatch != second.microbatch


@st.composite
def broken(draw: st.DrawFn, num_ranks: int | None = None) -> Program:
    """A legal program with one change: left out, doubled, moved, sent to another rank, or another kind of action."""
    program = draw(programs(pairs=draw(st.booleans()), num_ranks=num_ranks))
    if draw(st.booleans()):
        program = add_messages(program)
    ranks = [list(actions) for actions in program.ranks]
    rank = draw(st.integers(0, len(ranks) - 1))
    place = draw(st.integers(0, len(ranks[rank]) - 1))
    action = ranks[rank][place]
    match draw(st.sampled_from(["leave out", "double", "move", "other rank", "swap"])):
        case "leave out":
            del ranks[rank][place]
        case "double":
            ranks[rank].insert(draw(st.integers(0, len(ranks[rank]))), action)
        case "move":
            ranks[rank].insert(draw(st.integers(0, len(ranks[rank]) - 1)), ranks[rank].pop(place))
        case "other rank":
            ranks[draw(st.integers(0, len(ranks) - 1))].append(ranks[rank].pop(place))
        case _:
            other = draw(st.integers(0, len(ranks[rank]) - 1))
            ranks[rank][place], ranks[rank][other] = ranks[rank][other], ranks[rank][place]
    return Program(tuple(map(tuple, ranks)), program.placement, program.num_microbatches)
