"""Planned memory of a step beside torch's own memory tracker, which runs the step with tensors that have no data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.parallel import ParallelConfig, recompute_activations
from tests.memory.test_peak import DENSE, SPARSE, planned
from tests.memory.traced import as_on_gpu

ROWS, TOKENS = 2, 4096
PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "what-a-rank-holds-and-sends.md"


def tracked(config: Qwen3MoeConfig, recompute: str) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tracker's bytes behind the first backward, and at the peak of the second step, by kind."""
    dtype = torch.get_default_dtype()
    with FakeTensorMode(), as_on_gpu():
        try:
            torch.set_default_dtype(torch.bfloat16)
            model = Qwen3MoeForCausalLM(config)
        finally:
            torch.set_default_dtype(dtype)
        recompute_activations(model, ParallelConfig(recompute=recompute))
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tracker: Any = MemTracker()
        tracker.track_external(model, optimizer, ids)
        with tracker:
            model(ids, labels=ids, reduction="sum").loss.backward()
            ended = of_kinds(tracker.get_tracker_snapshot("current"))
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
            model(ids, labels=ids, reduction="sum").loss.backward()
            optimizer.step()
        return ended, of_kinds(tracker.get_tracker_snapshot("peak"))


def of_kinds(snapshot: dict[torch.device, dict[Any, int]]) -> dict[str, int]:
    (found,) = snapshot.values()
    return {str(getattr(kind, "name", kind)): value for kind, value in found.items()}


@pytest.mark.parametrize(
    ("name", "config", "recompute"),
    [
        ("sparse", SPARSE, "none"),
        ("dense", DENSE, "full"),
        pytest.param("dense", DENSE, "selective", marks=pytest.mark.meshes),
    ],
)
def test_torch_counts_the_same(
    name: str, config: Qwen3MoeConfig, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workspaces are left out, and logits, as the loss is one operator."""
    monkeypatch.setattr("lightning_d9d.memory.layers.tokens_at_once", lambda *sizes: 0)
    model = planned(config, ROWS, TOKENS, recompute)
    found = model.peak(0)
    weights, gradients, states = model.at_end(0)
    ended, most = tracked(config, recompute)
    assert (ended["PARAM"], ended["GRAD"], most["OPT"]) == (weights, gradients, states)
    total = found.total - found.constant
    assert total == pytest.approx(most["Total"], rel=0.001)
    cells = " | ".join(f"{value / 1e9:.3f}" for value in (weights, gradients, states, total))
    row = re.search(rf'\| {name}, `"{recompute}"` \| {re.escape(cells)} \| ([0-9.]+) \|', PAGE.read_text())
    assert row is not None
    assert float(row[1]) == pytest.approx(most["Total"] / 1e9, abs=0.002)  # versions of torch count differently
