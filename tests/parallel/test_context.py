"""Attention over sequences that are spread over ranks: results and gradients of one process that has them whole."""

import copy
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from lightning_d9d import ConfigError
from lightning_d9d.modules import GroupedQueryAttention, rope_tables
from lightning_d9d.ops import flash_attention
from lightning_d9d.ops.attention import attention_reference
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.parallel import context
from lightning_d9d.parallel.context import KINDS, SequenceShard, shard_context
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.harness.tolerances import Kind

by_kind = pytest.mark.parametrize("kind", KINDS)
SEQ = 24

# Of two rows each: borders within chunks, at their ends, and documents that lie on several ranks.
DOCUMENTS = {
    "one document": None,
    "two borders": [[0] * 5 + [1] * 11 + [2] * 8, [7] * 12 + [3] * 12],
    "short and long": [[0, 1, 1, 2] + [3] * 20, [5] * 23 + [6]],
    "back again": [[0] * 7 + [1] * 9 + [0] * 8, [*range(24)]],
}


class Case(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    documents: Tensor | None


def make(
    documents: str = "one document",
    heads: int = 8,
    kv_heads: int = 4,
    seq: int = SEQ,
    head_dim: int = 6,
    dtype: torch.dtype = torch.float64,
) -> Case:
    """Whole sequences, seen as in a model, where a token's heads lie side by side in memory."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, seq, num, head_dim) for num in (heads, kv_heads, kv_heads, heads)]
    q, k, v, grad_out = (torch.randn(shape, generator=generator).to(dtype).transpose(1, 2) for shape in shapes)
    ids = DOCUMENTS[documents]
    return Case(q, k, v, grad_out, None if ids is None else torch.tensor(ids, dtype=torch.int32))


def whole(case: Case) -> dict[str, Tensor]:
    q, k, v = (t.detach().clone().requires_grad_() for t in case[:3])
    out = attention_reference(q, k, v, case.documents)
    out.backward(case.grad_out)
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def local(case: Case, rank: RankContext) -> Case:
    """Return this rank's part, with the layout in memory that the model would give it."""
    shard = SequenceShard(rank.rank, rank.world_size)
    parts = (shard.take(t.transpose(1, 2), 1).to(rank.device).transpose(1, 2) for t in case[:4])
    return Case(*parts, None if case.documents is None else shard.take(case.documents, 1).to(rank.device))


def run(kind: str, case: Case, rank: RankContext) -> dict[str, Tensor]:
    """Result and gradients of this rank's part."""
    part = local(case, rank)
    q, k, v = (t.requires_grad_() for t in part[:3])
    out = KINDS[kind](rank.group)(q, k, v, part.documents)
    out.backward(part.grad_out)
    return {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}


def assert_equals_whole(kind: str, case: Case, rank: RankContext) -> None:
    shard = SequenceShard(rank.rank, rank.world_size)
    expected = {name: shard.take(t, 2) for name, t in whole(case).items()}
    assert_tensors_close(run(kind, case, rank), expected)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_make_up_the_whole(size: int) -> None:
    sequences = torch.randn(2, 12, 3)
    parts = [SequenceShard(rank, size).take(sequences, 1) for rank in range(size)]
    assert all(part.shape[1] == 12 // size for part in parts)
    for rank, part in enumerate(parts):
        shard = SequenceShard(rank, size)
        assert_bitwise_equal("part", part, sequences[:, shard.positions(12 // size, torch.device("cpu"))])
        assert_bitwise_equal("joined", shard.join(torch.cat(parts, 1), 1), sequences)


def test_each_rank_holds_an_early_and_a_late_chunk() -> None:
    chunks = [SequenceShard(rank, 3).positions(4, torch.device("cpu")).tolist() for rank in range(3)]
    assert chunks == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]


@pytest.mark.parametrize(("length", "remedy"), [(30, "24 or 32, or"), (3, "to 8, or")])
def test_a_sequence_that_cannot_be_cut(length: int, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"{length} tokens .* 4 ranks .* multiple of 8\. .* {remedy}"):
        SequenceShard(0, 4).take(torch.zeros(1, length), 1)
    assert SequenceShard(0, 1).take(torch.zeros(1, length), 1).shape == (1, length)


@pytest.mark.ranks(2)
@by_kind
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_on_two_ranks(rank: RankContext, documents: str, kind: str) -> None:
    assert_equals_whole(kind, make(documents, heads=4, kv_heads=2), rank)


@pytest.mark.ranks(4)
@by_kind
@pytest.mark.parametrize("documents", DOCUMENTS)
def test_on_four_ranks(rank: RankContext, documents: str, kind: str) -> None:
    assert_equals_whole(kind, make(documents), rank)


@pytest.mark.ranks(2)
@by_kind
def test_on_kernels_of_our_own(rank: RankContext, kind: str) -> None:
    """Which run in Triton's interpreter where there is no GPU."""
    with using_kernels("triton"):
        assert_equals_whole(kind, make("two borders", heads=4, kv_heads=2, dtype=torch.float32), rank)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["gather", "ring"])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (5, 1)])
def test_any_number_of_heads(rank: RankContext, heads: int, kv_heads: int, kind: str) -> None:
    assert_equals_whole(kind, make("two borders", heads, kv_heads), rank)


@pytest.mark.ranks(2)
@by_kind
def test_subgroups_of_one_rank(rank: RankContext, kind: str) -> None:
    """One rank attends to what it has, of any length."""
    group, _ = dist.new_subgroups(1)
    assert group is not None
    case = make(seq=7)
    q, k, v = (t.to(rank.device).requires_grad_() for t in case[:3])
    out = KINDS[kind](group)(q, k, v)
    out.backward(case.grad_out.to(rank.device))
    assert_tensors_close({"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}, whole(case))
    dist.destroy_process_group(group)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_ranks_compute_equally_much_and_nothing_in_vain(rank: RankContext, kind: str) -> None:
    """Pairs of queries and keys of whole blocks, and half of those of the block on the diagonal."""
    pairs = {"forward": 0.0, "backward": 0.0}

    def count(name: str, compute):
        def counted(*arguments):
            *tensors, masks = arguments
            num_keys = tensors[-2 if name == "forward" else 2].shape[2]
            pairs[name] += tensors[0].shape[2] * num_keys * (0.5 if masks.causal else 1)
            return compute(*arguments)

        return counted

    with (
        patch.object(context, "attention_block", count("forward", context.attention_block)),
        patch.object(context, "attention_block_backward", count("backward", context.attention_block_backward)),
    ):
        run(kind, make(), rank)
    of_all = SEQ * SEQ / 2
    assert pairs == {"forward": of_all / 4, "backward": of_all / 4}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_only_local_tensors_are_kept(rank: RankContext, kind: str) -> None:
    part = local(make(), rank)
    q, k, v = (t.requires_grad_() for t in part[:3])
    kept: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        KINDS[kind](rank.group)(q, k, v)
    assert sum(t.numel() for t in kept) == 2 * q.numel() + k.numel() + v.numel() + q.numel() // q.shape[-1]


class Stage(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            GroupedQueryAttention(16, 4, 2, 6, norm_eps=1e-6, initializer_range=0.5, **options) for _ in range(2)
        )
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.normal_(generator=torch.Generator().manual_seed(number))

    def forward(self, x: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        rope = rope_tables(positions.unsqueeze(0), 6, 100.0, x.dtype)
        for layer in self.layers:
            x = x + checkpoint(layer, x, rope, documents, use_reentrant=False)
        return x


@pytest.mark.ranks(2)
@by_kind
def test_a_stage_and_its_copies(rank: RankContext, kind: str) -> None:
    """All attention of a module, recomputed, with rotary positions: sums over ranks are the whole's gradients."""
    assert_stage_equals_whole(rank, kind)


@pytest.mark.ranks(2)
def test_a_window_and_sinks(rank: RankContext) -> None:
    assert_stage_equals_whole(rank, "heads", window=9, sinks=True, interleaved=True)


@pytest.mark.parametrize("kind", ["gather", "ring"])
@pytest.mark.parametrize("options", [{"window": 9}, {"sinks": True}], ids=str)
def test_a_window_or_sinks_that_a_kind_does_not_take(kind: str, options: dict[str, Any]) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        message = rf"Attention supports neither window={options.get('window')} nor sinks; .*context='heads'"
        with pytest.raises(ConfigError, match=message):
            shard_context(Stage(**options), dist.group.WORLD, kind)
        q, k, v = make()[:3]
        given = {"sinks": torch.zeros(8)} if "sinks" in options else options
        with pytest.raises(ConfigError, match=message):
            KINDS[kind](dist.group.WORLD)(q, k, v, **given)
    finally:
        dist.destroy_process_group()


def assert_stage_equals_whole(rank: RankContext, kind: str, **options: Any) -> None:
    ids, x = torch.tensor(DOCUMENTS["two borders"]), torch.randn(2, SEQ, 16, generator=torch.Generator().manual_seed(9))
    one = Stage(**options).double()
    expected = one(x.double(), torch.arange(SEQ), ids)
    expected.square().sum().backward()

    shard = SequenceShard(rank.rank, 2)
    stage = Stage(**options).double().to(rank.device)
    shard_context(stage, rank.group, kind)
    stage = copy.deepcopy(stage)
    positions = shard.positions(SEQ // 2, rank.device)
    out = stage(shard.take(x.double(), 1).to(rank.device), positions, shard.take(ids, 1).to(rank.device))
    out.square().sum().backward()
    assert_close_named("out", out, shard.take(expected, 1), kind=Kind.OUTPUT)
    for parameter in stage.parameters():
        dist.all_reduce(parameter.grad)
    assert_tensors_close(
        {name: p.grad for name, p in stage.named_parameters()}, {name: p.grad for name, p in one.named_parameters()}
    )


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_compiled_as_one_operator(rank: RankContext, kind: str) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    attend, part = KINDS[kind](rank.group), local(make("two borders"), rank)
    q, k, v = (t.requires_grad_() for t in part[:3])
    expected = attend(q, k, v, part.documents)
    actual = torch.compile(attend.__call__, backend=backend, fullgraph=True)(q, k, v, part.documents)
    assert_bitwise_equal("out", actual, expected)
    (graph,) = graphs
    targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
    assert getattr(torch.ops.lightning_d9d, f"{kind}_attention") in targets


@pytest.mark.parametrize("kind", ["gather", "ring"])
def test_registration_passes_torchs_checks(kind: str) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        for dtype, documents in ((torch.float64, "one document"), (torch.float32, "two borders")):
            case = make(documents, dtype=dtype)
            inputs = (*(t.requires_grad_() for t in case[:3]), case.documents, dist.group.WORLD.group_name)
            operator = getattr(torch.ops.lightning_d9d, f"{kind}_attention").default
            assert set(torch.library.opcheck(operator, inputs).values()) == {"SUCCESS"}
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "legal"), [(12, 6, "1 or 2 or 3 or 6"), (8, 2, "1 or 2"), (6, 3, "1 or 3")]
)
def test_heads_that_ranks_cannot_share(rank: RankContext, heads: int, kv_heads: int, legal: str) -> None:
    message = f"over 4 ranks: {heads} query heads and {kv_heads} key/value heads .* {legal} ranks can; .* 'ring'"
    with pytest.raises(ConfigError, match=message):
        run("heads", make(heads=heads, kv_heads=kv_heads), rank)


@pytest.mark.ranks(2)
@by_kind
def test_a_part_that_is_not_two_chunks(rank: RankContext, kind: str) -> None:
    q, k, v = (torch.zeros(1, 2, 5, 4, device=rank.device) for _ in range(3))
    with pytest.raises(ConfigError, match=f"rank {rank.rank} of 2 .* 5 tokens .* SequenceShard"):
        KINDS[kind](rank.group)(q, k, v)


@pytest.mark.ranks(2)
def test_an_unknown_kind(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match="context='rings' must be one of 'gather', 'ring', 'heads'"):
        shard_context(Stage(), rank.group, "rings")


@pytest.mark.gpu
@pytest.mark.ranks(2)
@by_kind
@pytest.mark.parametrize("kv_heads", [2, 4])
@pytest.mark.parametrize("backend", ["CUDNN_ATTENTION", "FLASH_ATTENTION"])
def test_kernels(rank: RankContext, backend: str, kv_heads: int, kind: str) -> None:
    case = make(heads=4, kv_heads=kv_heads, seq=1024, head_dim=64, dtype=torch.bfloat16)
    shard = SequenceShard(rank.rank, 2)
    expected = {name: shard.take(t, 2) for name, t in whole(Case(*(t.float() for t in case[:4]), None)).items()}
    with sdpa_kernel(getattr(SDPBackend, backend)):
        actual = run(kind, case, rank)
    assert_close_named("out", actual.pop("out"), expected.pop("out"), kind=Kind.OUTPUT)
    assert_tensors_close(actual, expected)


@pytest.mark.gpu
@pytest.mark.flash_attn_4
@pytest.mark.ranks(2)
@by_kind
def test_version_4_of_flash_attention(rank: RankContext, kind: str) -> None:
    """It runs in all blocks that are long enough, forward and backward."""
    case = make(heads=4, kv_heads=2, seq=1024, head_dim=64, dtype=torch.bfloat16)
    shard = SequenceShard(rank.rank, 2)
    expected = {name: shard.take(t, 2) for name, t in whole(Case(*(t.float() for t in case[:4]), None)).items()}
    with (
        patch.object(flash_attention, "_LEAST_KEYS", 1),
        patch.object(flash_attention, "block", wraps=flash_attention.block) as forward,
        patch.object(flash_attention, "block_backward", wraps=flash_attention.block_backward) as backward,
    ):
        actual = run(kind, case, rank)
    assert forward.call_count == backward.call_count == (1 if kind == "heads" else 2)
    assert_close_named("out", actual.pop("out"), expected.pop("out"), kind=Kind.OUTPUT)
    assert_tensors_close(actual, expected)
