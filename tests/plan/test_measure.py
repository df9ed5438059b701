"""Rates of a machine, measured on a CPU with tiny sizes: the same code that a GPU runs."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_forward_pre_hook

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.cli.measuring import write_table
from lightning_d9d.errors import ConfigError
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.modules.adapters import Adapter
from lightning_d9d.plan import MachineTable, Sizes, machine_of, measure, plan
from lightning_d9d.plan.measure import (
    HostBlocks,
    Measured,
    attention_rates,
    grouped_products,
    host_fields,
    host_seconds,
    link_fields,
    products,
    seconds_of,
)
from lightning_d9d.schedule.layers import HOST_SECONDS, HostSeconds
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
    blocks=1,
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
    assert {*HOST_SECONDS}.isdisjoint(table.not_measured)
    assert all(getattr(table, name) is not None for name in HOST_SECONDS)
    assert {"peak_flops", "node_link_bytes", "network_bytes", "host_share"} <= {*table.not_measured}
    assert [each.tokens for each in table.attention_by_tokens] == [32, 128]
    assert table.rates_for(120).attention_forward_flops_per_second == table.attention_by_tokens[1].forward_flops
    strategy = D9DStrategy(mesh=MeshConfig(data_parallel_replicate=2))
    slow = plan(Qwen3MoePretraining(preset="tiny"), strategy, 2, table, rows=4, tokens=128)
    assert (
        slow.step_seconds
        > plan(Qwen3MoePretraining(preset="tiny"), strategy, 2, "h200", rows=4, tokens=128).step_seconds
    )


def test_the_host_launches_blocks_with_each_recomputation() -> None:
    """Two kinds run all of a block again, and one the four linear layers of its attention."""
    run: Counter[str] = Counter()
    hook = register_module_forward_pre_hook(lambda module, inputs: run.update([type(module).__name__]))
    try:
        found = host_seconds(CPU, 1, blocks=2)
    finally:
        hook.remove()
    assert [(of.preset, of.has_adapters) for of in found] == [
        *(("tiny", False), ("tiny", True)),
        *(("tiny-dense", False), ("tiny-dense", True)),
    ]
    for each in found.values():
        assert list(each) == ["none", "attention", "selective", "full"]
        assert all(measured.seconds > 0 for measured in each.values())
    times, layers = 2 + 1, 2
    assert run["SparseMoE"] == run["SwiGLU"] == times * layers * 2 * (1 + 1 + 2 + 2)
    sparse, dense = 4 + 8 + 8 + 8, 7 + 11 + 14 + 14
    adapted_sparse, adapted_dense = 1 + 2 + 2 + 2, 2 + 3 + 4 + 4  # others are one operator for layers of one input
    assert run["Linear"] == times * layers * (sparse + adapted_sparse + dense + adapted_dense)


def test_seconds_of_adapters_by_hand() -> None:
    """A dense block has seven linear layers with adapters, one with experts four, and two weights of experts."""

    def measured(*seconds: float) -> dict[str, Measured]:
        return {kind: Measured("", each) for kind, each in zip(HostSeconds._fields, seconds, strict=True)}

    dense, sparse = [1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]
    adapted_dense, adapted_sparse = [1.7, 2.7, 2.9, 5.4], [5.6, 6.2, 7.2, 9.0]
    found = host_fields({
        HostBlocks("tiny", False): measured(*sparse),
        HostBlocks("tiny", True): measured(*adapted_sparse),
        HostBlocks("tiny-dense", False): measured(*dense),
        HostBlocks("tiny-dense", True): measured(*adapted_dense),
    })  # fmt: skip
    assert found["sparse_host_seconds"] == HostSeconds(*sparse)
    assert found["dense_host_seconds"] == HostSeconds(*dense)
    assert found["linear_adapter_host_seconds"] == pytest.approx([0.1, 0.1, 0.0, 0.2])
    assert found["experts_adapter_host_seconds"] == pytest.approx([0.1, 0.0, 0.1, 0.1])


def test_blocks_with_adapters_train_nothing_else() -> None:
    blocks = HostBlocks("tiny", True).build(CPU, 3)
    adapters = [part for part in blocks.modules() if isinstance(part, Adapter)]
    trained = [parameter for parameter in blocks.parameters() if parameter.requires_grad]
    assert len(trained) == 2 * len(adapters) == 2 * 3 * (4 + 2)


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
    over_nodes, _ = link_fields(TINY, rank.device, rank.group, num_nodes=2)
    assert over_nodes["gpus_per_node"] == 1
    assert {"network_bytes", "latency"} < over_nodes.keys()
    assert "node_link_bytes" not in over_nodes


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
