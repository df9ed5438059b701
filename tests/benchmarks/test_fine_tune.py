"""What `fine_tune` measures."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch

from tests.benchmarks.fine_tune import IMPLEMENTATIONS, Adapters, Ours, OursWhole, Theirs, cases, run_case, table
from tests.benchmarks.train_step import QUICK
from tests.harness import warm

OURS = f"ours, {Adapters(2)}, recompute full"
PEERS = [f"transformers and peft, {Adapters(2)}, {each}, recompute full" for each in IMPLEMENTATIONS]


class Ends:
    """Ends its process."""

    def __init__(self, device: torch.device) -> None:
        os._exit(3)


class Fails:
    """Has no memory."""

    def __init__(self, device: torch.device) -> None:
        raise torch.OutOfMemoryError("out of memory\nmore words")


def test_contenders_do_the_same_work(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their losses behind the first steps are compared; a peer that fails is left out."""
    monkeypatch.setattr("tests.benchmarks.fine_tune.multiprocessing.get_context", lambda method: warm.context())
    (compared,) = cases("cpu", quick=True, experts=["grouped_mm", "eager"])
    result = run_case(replace(compared, contenders={**compared.contenders, PEERS[1]: Ends}), "cpu")
    printed = capsys.readouterr().out
    assert result["peer"] in PEERS
    assert [*result["contenders"]] == [OURS, PEERS[0], PEERS[2]]
    assert f"| {result['peer']} | 1 (peer)" in table({"benchmark": "fine_tune", **result}, "cpu")
    assert result["failed"] == {PEERS[1]: "failed with exit code 3"}
    assert all(f"  {name}: " in printed for name in (OURS, *PEERS))
    trained = {name: values["trained_parameters"] for name, values in result["contenders"].items()}
    config = QUICK.config
    second_of_gate_and_up = config.num_hidden_layers * config.num_experts * 2 * config.hidden_size
    assert trained[PEERS[0]] == trained[PEERS[2]] == trained[OURS] - second_of_gate_and_up


def test_the_best_kind_of_recomputation_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kinds that fail are left out with their error. A second command measures what the folder lacks."""
    monkeypatch.setattr("tests.benchmarks.fine_tune.multiprocessing.get_context", lambda method: warm.context())
    (compared,) = cases("cpu", quick=True, experts=["eager"], recompute="none,3_of_4,full,unsloth", folder=tmp_path)
    kinds = [name.removeprefix(f"ours, {Adapters(2)}, recompute ") for name in compared.contenders]
    peers = [name for name in compared.contenders if name.startswith("transformers")]
    assert kinds[:3] == ["none", "3_of_4", "full"]
    assert [name.rpartition(" ")[2] for name in peers] == ["none", "full"]
    lacking = replace(compared, contenders={**compared.contenders, peers[0]: Fails})
    result = run_case(lacking, "cpu")
    assert result["failed"] == {peers[0]: "OutOfMemoryError: out of memory"}
    assert result["peer"] == peers[1]
    (ours,) = [name for name in result["contenders"] if name.startswith("ours")]
    seconds = {path.name: json.loads(path.read_text())["seconds_per_step"] for path in tmp_path.glob("*ours*")}
    assert len(seconds) == 3
    assert median(seconds[f"{compared.name}, {ours}.json"]) == min(map(median, seconds.values()))
    again = run_case(replace(lacking, contenders=dict.fromkeys(lacking.contenders, Ends)), "cpu")
    assert again["contenders"] == result["contenders"]
    assert again["failed"] == {peers[0]: "failed with exit code 3"}


def test_contenders_are_selected_and_ordered_by_the_begins_of_their_names() -> None:
    chosen = ["transformers", f"ours, {Adapters(2)}"]
    (_, compared, *_) = cases("cuda", quick=False, layers=48, experts=["grouped_mm"], contenders=chosen)
    assert [*compared.contenders] == [PEERS[0], OURS]
    assert compared.block_steps == 1


def test_a_contender_has_its_time() -> None:
    (compared,) = cases("cpu", quick=True, experts=[], seconds=1)
    with pytest.raises(RuntimeError, match=r"nothing to compare, as there failed .*not done in 1 s"):
        run_case(compared, "cpu")


def test_ours_with_experts_is_judged_by_every_peer() -> None:
    of_gpu = cases("cuda", quick=False, layers=4, experts=["eager"])
    of_experts = [f"ours, {Adapters(rank)}" for rank in (2, 2, 16)]
    assert [[*case.limits] for case in of_gpu] == [*([each] for each in of_experts), ["ours, states in eight bits"]]
    assert {case.conditions["layers"] for case in of_gpu} == {4}


@pytest.mark.parametrize("contender", [Ours, partial(Theirs, implementation="eager")], ids=["ours", "theirs"])
def test_adapters_of_another_size_are_refused(
    contender: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Adapters, "num_parameters", lambda *_, **__: 9)
    with pytest.raises(RuntimeError, match=r"trains \d+ parameters, not 9"):
        contender(QUICK, Adapters(2), device=torch.device("cpu"))


def test_all_parameters_with_states_in_eight_bits() -> None:
    """Nobody trains with a rate of 0, so the loss of ours is that of its weights."""
    contender = OursWhole(QUICK, torch.device("cpu"))
    contender.run(2)
    states = contender.optimizer.state.values()
    assert any(value.dtype == torch.uint8 for state in states for value in state.values())
    before = contender.loss()
    other = OursWhole(QUICK, torch.device("cpu"))
    other.run(2)
    assert other.loss() == before
