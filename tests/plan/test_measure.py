"""Rates of a machine, measured on a CPU with tiny sizes: the same code that a GPU runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.cli.measuring import write_table
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.plan import MachineTable, Sizes, machine_of, measure, plan
from lightning_d9d.plan.measure import attention_rates, grouped_products, host_seconds, products, seconds_of
from tests.harness.ranks import RankContext

TINY = Sizes(
    tokens=64,
    hidden=32,
    heads=2,
    kv_heads=1,
    head_dim=16,
    vocabulary=96,
    experts=4,
    experts_per_token=2,
    expert_hidden=16,
    rows=(32, 128),
    copy_bytes=2**16,
    message_bytes=2**16,
    dtype=torch.float32,
    repeats=2,
)
CPU = torch.device("cpu")


def test_operations_are_counted_by_hand() -> None:
    flops = [each.flops for each in products(TINY, CPU)]
    assert flops == 3 * [2 * 64 * 32 * 32] + 3 * [2 * 64 * 32 * 16] + 3 * [2 * 64 * 32 * 32] + 3 * [2 * 16 * 32 * 96]
    copies = 64 * 2
    grouped = [2 * copies * 32 * 32, 4 * copies * 32 * 32, 2 * copies * 16 * 32, 4 * copies * 16 * 32]
    assert [each.flops for each in grouped_products(TINY, CPU)] == grouped
    (short, forward, backward), (long, *_) = attention_rates(TINY, CPU)
    assert (short, long) == (32, 128)
    assert forward.flops == 2 * 2 * 32**2 * 2 * 16  # two rows; half of the scores, and half of their sums
    assert backward.flops == 2.5 * forward.flops


def test_a_table_is_written_read_and_planned_with(tmp_path: Path) -> None:
    write_table(str(tmp_path / "own.json"), lambda local: CPU, TINY)
    table = machine_of(str(tmp_path / "own.json"))
    assert table.device == "cpu"
    assert {"linear_flops", "attention_forward_flops", "grouped_flops", "copy_bytes"}.isdisjoint(table.not_measured)
    assert {"sparse_host_seconds", "dense_host_seconds"}.isdisjoint(table.not_measured)
    assert {"peak_flops", "node_link_bytes", "network_bytes", "host_share"} <= {*table.not_measured}
    assert [each.tokens for each in table.attention_by_tokens] == [32, 128]
    assert table.rates_for(120).attention_forward_flops_per_second == table.attention_by_tokens[1].forward_flops
    strategy = D9DStrategy(mesh=MeshConfig(data_parallel_replicate=2))
    slow = plan(Qwen3MoePretraining(preset="tiny"), strategy, 2, table, rows=4, tokens=128)
    assert (
        slow.step_seconds
        > plan(Qwen3MoePretraining(preset="tiny"), strategy, 2, "h200", rows=4, tokens=128).step_seconds
    )


@pytest.mark.parametrize(
    ("preset", "mlp", "linears"), [("tiny", "SparseMoE", 4 + 8 + 8 + 8), ("tiny-dense", "SwiGLU", 7 + 11 + 14 + 14)]
)
def test_the_host_launches_blocks_with_each_recomputation(
    preset: Literal["tiny", "tiny-dense"], mlp: str, linears: int
) -> None:
    """Two kinds run all of a block again, and one the four layers of its attention."""
    run: Counter[str] = Counter()
    hook = register_module_forward_pre_hook(lambda module, inputs: run.update([type(module).__name__]))
    try:
        found = host_seconds(CPU, preset, 1)
    finally:
        hook.remove()
    assert list(found) == ["none", "attention", "selective", "full"]
    assert all(each.seconds > 0 for each in found.values())
    times, layers = 2 + 1, 4
    assert run[mlp] == times * layers * (1 + 1 + 2 + 2)
    assert run["Linear"] == times * layers * linears


def test_time_is_that_of_the_action() -> None:
    values = iter(range(100))
    assert 0 <= seconds_of(lambda: next(values), CPU, 5) < 1
    assert next(values) == 2 + 5


@pytest.mark.ranks(2)
def test_links_of_ranks(rank: RankContext) -> None:
    found: MachineTable
    found, rows = measure(rank.device, TINY, group=dist.group.WORLD)
    assert {"node_link_bytes", "latency"}.isdisjoint(found.not_measured)
    assert "network_bytes" in found.not_measured
    assert found.gpus_per_node == 2
    gathered = next(each for each in rows if each.name == "all_gather")
    assert gathered.num_bytes == 2**16 / 2  # half of all is this rank's own
    over_nodes, _ = measure(rank.device, TINY, group=dist.group.WORLD, num_nodes=2)
    assert "network_bytes" not in over_nodes.not_measured


def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_d9d.cli.commands import doctor_parser
    from lightning_d9d.cli.measuring import run

    with pytest.raises(ConfigError, match=r"--measure own.yaml must end in .json"):
        run(doctor_parser().parse_args(["--measure", "own.yaml"]))
    monkeypatch.setattr("lightning_d9d.cli.measuring.num_cuda_devices", lambda: 0)
    with pytest.raises(ConfigError, match=r"doctor --measure needs a GPU, and torch sees none"):
        run(doctor_parser().parse_args(["--measure", "own.json"]))


@pytest.mark.gpu
def test_a_gpu(tmp_path: Path) -> None:
    """Rates are below the data sheet's and above a tenth of it."""
    found, _ = measure(torch.device("cuda", 0), Sizes(rows=(4096, 16384)))
    for rate in (found.linear_flops, found.grouped_flops, found.attention_forward_flops):
        assert 0.1 * found.peak_flops < rate < found.peak_flops
    assert found.launch_seconds < 1e-4
