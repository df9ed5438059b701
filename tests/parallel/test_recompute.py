"""Recomputation changes memory and work, and no number."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_d9d import BlockSequence, ConfigError, MeshConfig, ParallelConfig, StageInfo
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.modules import BalanceConfig, ExpertBalance, SparseMoE
from lightning_d9d.ops import WeightGradients, defer
from lightning_d9d.ops.linear import split_linears
from lightning_d9d.parallel import parallelize, recompute, recompute_activations
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.parallel.kept import bytes_kept, loss_of

KINDS = ["full", "selective", "attention", "every_2"]
LAYERS, HIDDEN, EXPERTS = 3, 16, 4
CONFIG = Qwen3MoeConfig(
    vocab_size=32,
    hidden_size=HIDDEN,
    moe_intermediate_size=8,
    num_hidden_layers=LAYERS,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    num_experts=EXPERTS,
    num_experts_per_tok=2,
    initializer_range=0.3,
)
BALANCE = BalanceConfig(bias_rate=0.01, sequence_loss=0.1, z_loss=0.1)


class Block(nn.Module):
    """Dropout of several kinds, a product's result that is modified in place, and a tensor by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attention = nn.MultiheadAttention(HIDDEN, 2, dropout=0.2, batch_first=True)
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.dropout(self.attention(y, y, y, need_weights=False)[0])
        y = self.up(x).relu_()
        return x + F.dropout(self.down(y), 0.4, self.training) * scale


class Own(nn.Module):
    """A model of somebody's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, scale=x.mean(-1, keepdim=True))
        return x.square().sum()


def make_own() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Own().double()
    return model, {"x": torch.randn(2, 5, HIDDEN, dtype=torch.float64, requires_grad=True)}


def make_qwen3(
    dtype: torch.dtype = torch.float64, seed: int = 1, balance: BalanceConfig | None = BALANCE, **changes: Any
) -> tuple[Qwen3MoeForCausalLM, dict[str, Any]]:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(replace(CONFIG, **changes), balance=balance).to(dtype)
    ids = torch.randint(CONFIG.vocab_size, (2, 7), generator=torch.Generator().manual_seed(seed))
    return model, {"input_ids": ids[:, :-1], "labels": ids[:, 1:], "reduction": "sum"}


MODELS: dict[str, Callable[[], tuple[nn.Module, dict[str, Any]]]] = {
    "own": make_own,
    "qwen3_moe": make_qwen3,
    "qwen3_moe in float32": partial(make_qwen3, torch.float32),  # whose grouped products have a kernel
}


def of_kind(kind: str) -> ParallelConfig:
    return ParallelConfig(recompute=kind)


def train(model: nn.Module, inputs: dict[str, Any], split: bool = False) -> dict[str, Any]:
    """The loss and all gradients of one forward and backward."""
    torch.manual_seed(5)
    gradients = WeightGradients()
    if split:
        with defer(gradients):
            loss = loss_of(model(**inputs))
        gradients.backward(loss)
        gradients.accumulate()
    else:
        loss = loss_of(model(**inputs))
        loss.backward()
    drawn = {"drawn after": torch.rand(1)}
    of_inputs = {name: x.grad for name, x in inputs.items() if isinstance(x, Tensor) and x.grad is not None}
    return drawn | of_inputs | {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


def assert_same(actual: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, value in actual.items():
        assert_bitwise_equal(name, value, expected[name])


class Counting(TorchDispatchMode):
    """How often each operator runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))

    def __getitem__(self, name: str) -> int:
        return sum(count for op, count in self.calls.items() if name in op)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
def test_gradients_are_those_without_recomputation(name: str, kind: str, split: bool) -> None:
    results = []
    for each in ("none", kind):
        model, inputs = MODELS[name]()
        names = list(model.state_dict())
        recompute_activations(model, of_kind(each))
        assert list(model.state_dict()) == names
        split_linears(model)
        results.append(train(model, inputs, split))
    assert_same(results[1], results[0])


@pytest.mark.parametrize(("kind", "times"), [("full", LAYERS), ("selective", 0), ("attention", LAYERS), ("every_2", 2)])
def test_what_runs_again(kind: str, times: int) -> None:
    again = {}
    for each in ("none", kind):
        model, inputs = make_qwen3(torch.float32)
        recompute_activations(model, of_kind(each))
        loss = loss_of(model(**inputs))
        with Counting() as counting:
            loss.backward()
        again[each] = counting
    ops = ("mm", "_scaled_dot_product", "topk", "rsqrt")
    more = {op: again[kind][op] - again["none"][op] for op in ops}
    # In a block: the projections of attention, the router's and two of the experts; only what precedes the last is
    # known to be needed, which is why the output projection of attention alone is not made again.
    products = {"full": 7, "selective": 0, "attention": 3, "every_2": 7}[kind]
    assert more["mm"] == times * products
    assert more["_scaled_dot_product"] == times
    assert more["topk"] == (0 if kind == "attention" else times)
    assert more["rsqrt"] > 0  # the norms


def test_what_is_kept() -> None:
    num_bytes = {}
    for kind in ("none", *KINDS):
        model, inputs = make_qwen3(torch.float32)
        recompute_activations(model, of_kind(kind))
        num_bytes[kind] = bytes_kept(model, inputs)

    assert num_bytes["full"] < num_bytes["every_2"] < num_bytes["none"]
    assert num_bytes["full"] < num_bytes["selective"] < num_bytes["attention"] < num_bytes["none"]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 24), nn.Linear(24, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.down(self.up(x).relu())).sum()


def test_selective_keeps_once_what_is_needed() -> None:
    """It does not keep results of the last products, except a number in place of those of the experts."""
    model, x = MLP(), torch.randn(6, HIDDEN)
    recompute_activations(model, of_kind("selective"), [model])
    assert bytes_kept(model, {"x": x}) == 6 * 24 * 4

    intermediate, top_k = 8, 2
    moe = SparseMoE(HIDDEN, intermediate, EXPERTS, top_k, normalize=True, initializer_range=0.3)
    whole = nn.Sequential(moe, nn.Flatten(0), Sum())
    recompute_activations(whole, of_kind("selective"), [moe])
    logits, chosen, gate_and_up, places = EXPERTS * 4, top_k * (4 + 8), top_k * 2 * intermediate * 4, top_k * 4
    number = 4
    with Counting() as counting:
        assert bytes_kept(whole, {"input": x}) == len(x) * (logits + chosen + gate_and_up + places) + number
    assert counting["grouped_gemm"] == 2 + 3  # nothing twice


class Sum(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum()


def test_results_that_are_modified_are_made_again() -> None:
    again = {}
    for kind in ("none", "selective"):
        model, inputs = make_own()
        recompute_activations(model, of_kind(kind))
        loss = model(**inputs)
        with Counting() as again[kind]:
            loss.backward()
    assert again["selective"]["addmm"] - again["none"]["addmm"] == LAYERS


class Twofold(nn.Module):
    """An output is what a product gave, for others to modify; the last tensor that is saved is what one gave, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.first(x)
        return y, F.silu(self.second(y.tanh()))


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_outputs_that_are_modified_later(kind: str, early_stop: bool) -> None:
    results = []
    for each in ("none", kind):
        torch.manual_seed(0)
        model = Twofold()
        recompute_activations(model, of_kind(each), [model])
        with set_checkpoint_early_stop(early_stop):
            first, second = model(torch.randn(3, HIDDEN, dtype=torch.float64))
        first += 1
        (first + second).sum().backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert_same(results[1], results[0])


def test_a_second_backward() -> None:
    results = []
    for kind in ("none", "selective"):
        model, inputs = make_qwen3()
        recompute_activations(model, of_kind(kind))
        loss = model(**inputs, output_hidden_states=True).hidden_states[-1].square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
        results.append({name: parameter.grad for name, parameter in model.named_parameters() if "head" not in name})
    assert_same(results[1], results[0])


@pytest.mark.parametrize("kind", KINDS)
def test_weight_gradients_wait_for_the_weight_backward(kind: str) -> None:
    """Those of recomputed blocks wait, too. The recomputation itself is over before."""
    halves = {}
    for each in ("none", kind):
        model, inputs = make_qwen3(torch.float32)
        recompute_activations(model, of_kind(each))
        split_linears(model)
        gradients = WeightGradients()
        with defer(gradients):
            loss = loss_of(model(**inputs))
        with Counting() as first:
            gradients.backward(loss)
        late = [name for name, parameter in model.named_parameters() if "layers" in name and parameter.grad is None]
        with Counting() as second:
            gradients.accumulate()
        halves[each] = first, second, late
    for first, second, late in halves.values():
        assert len(late) == LAYERS * 7  # four of attention, the router, two of the experts
        assert second["mm"] == len(late) + 1  # and the head
        assert first["_backward"] > 0
        assert second["_scaled_dot_product"] == 0
    attention_again = halves[kind][0]["_scaled_dot_product"] - halves["none"][0]["_scaled_dot_product"]
    assert attention_again == {"full": LAYERS, "selective": 0, "attention": LAYERS, "every_2": 2}[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_changes_without_grad_mode(kind: str) -> None:
    model, inputs = make_qwen3()
    recompute_activations(model, of_kind(kind))
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            output, calls = calls_of(recompute, "checkpoint", lambda: model(**inputs))
        assert calls == 0
    trained, calls = calls_of(recompute, "checkpoint", lambda: model(**inputs))
    assert calls == {"every_2": 2}.get(kind, LAYERS)
    assert_bitwise_equal("loss", output.loss.clone(), trained.loss.detach())


@pytest.mark.parametrize("kind", ["none", *KINDS])
def test_tokens_are_counted_once(kind: str) -> None:
    model, inputs = make_qwen3()
    recompute_activations(model, of_kind(kind))
    for _ in range(2):
        loss_of(model(**inputs)).backward()
    counts = [part.tokens_per_expert.sum().item() for part in model.modules() if isinstance(part, ExpertBalance)]
    assert counts == [2 * CONFIG.num_experts_per_tok * inputs["input_ids"].numel()] * LAYERS


def recomputed(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if "forward" in vars(part)]


def test_which_modules() -> None:
    model = Own()
    for kind, names in {
        "full": ["layers.0", "layers.1", "layers.2"],
        "every_2": ["layers.0", "layers.2"],
        "every_1": ["layers.0", "layers.1", "layers.2"],
        "every_3": ["layers.0"],
        "2_of_3": ["layers.0", "layers.1"],
        "2_of_2": ["layers.0", "layers.1", "layers.2"],
        "attention": ["layers.0.attention", "layers.1.attention", "layers.2.attention"],
        "none": [],
    }.items():
        for _ in range(2):
            recompute_activations(model, of_kind(kind))  # in the place of the one before
            assert recomputed(model) == names, kind
    recompute_activations(model, of_kind("attention"), attention=(nn.LayerNorm,))
    assert recomputed(model) == ["layers.0.norm", "layers.1.norm", "layers.2.norm"]
    recompute_activations(model, ParallelConfig(recompute="full", shard_blocks=("Own",)))
    assert recomputed(model) == [""]
    recompute_activations(model, of_kind("full"), [model.layers[1]])
    assert recomputed(model) == ["layers.1"]
    sequence = BlockSequence([Own(), nn.Tanh(), nn.Tanh()], StageInfo(0, 1))
    recompute_activations(sequence, of_kind("every_2"))
    assert recomputed(sequence) == ["0", "2"]


@pytest.mark.parametrize("make", [Own, partial(Qwen3MoeForCausalLM, CONFIG)], ids=["own", "qwen3_moe"])
def test_the_plans_recompute(make: Callable[[], nn.Module]) -> None:
    model = make()
    plan: Any = parallelize_qwen3_moe if isinstance(model, Qwen3MoeForCausalLM) else parallelize
    plan(model, None, of_kind("every_2"))
    prefix = "model." if isinstance(model, Qwen3MoeForCausalLM) else ""
    assert recomputed(model) == [f"{prefix}layers.0", f"{prefix}layers.2"]


def copy_by_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy_by_pickle])
def test_copies_recompute_their_own(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, inputs = make_qwen3()
    recompute_activations(model, of_kind("selective"))
    expected = train(model, inputs)
    model.zero_grad()
    other = copied(model)
    del model
    assert recomputed(other)
    assert_same(train(other, inputs), expected)


def test_a_forward_of_the_owner_s_is_kept() -> None:
    model, inputs = make_own()
    layer: Any = model.get_submodule("layers.0")
    twice = layer.forward = lambda x, scale: Block.forward(layer, x, scale=2 * scale)
    expected = train(model, inputs)
    model.zero_grad()
    inputs["x"].grad = None
    recompute_activations(model, of_kind("full"))
    assert layer.forward is not twice
    assert_same(train(model, inputs), expected)
    recompute_activations(model, of_kind("none"))
    assert layer.forward is twice


def test_nothing_to_recompute() -> None:
    with pytest.raises(
        ConfigError, match=r"recompute='full' has no effect here: Block has no blocks, .*shard_blocks=\[\"Block\"\]"
    ):
        recompute_activations(Block(), of_kind("full"))
    model, _ = make_qwen3()
    with pytest.raises(
        ConfigError, match=r"Qwen3MoeForCausalLM has no Conv1d or Bilinear\. .*attention=\(MyAttention,\)"
    ):
        recompute_activations(model, of_kind("attention"), attention=(nn.Conv1d, nn.Bilinear))
    without_blocks = nn.ModuleDict({"embedding": nn.Embedding(3, 4), "layers": nn.ModuleList()})
    for kind in KINDS:
        recompute_activations(without_blocks, of_kind(kind))  # as of a pipeline's first stage
    assert not recomputed(without_blocks)


class OfDefaultDtype(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight * torch.arange(4.0)).tanh()


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_the_default_dtype_of_the_forward_is_repeated(kind: str) -> None:
    """A precision of half the bits sets it around the forward."""
    results = []
    for each in ("none", kind):
        torch.manual_seed(0)
        model = OfDefaultDtype().bfloat16()
        recompute_activations(model, of_kind(each), [model])
        torch.set_default_dtype(torch.bfloat16)
        try:
            y = model(torch.randn(3, 4, requires_grad=True))
        finally:
            torch.set_default_dtype(torch.float32)
        y.sum().backward()
        results.append({"y": y.detach(), "weight": model.weight.grad})
        assert torch.get_default_dtype() == torch.float32
    assert_same(results[1], results[0])


class Fickle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.is_changed = False

    def forward(self, x: Tensor) -> Tensor:
        y = x @ self.weight
        y = torch.addmm(y, y, y) if self.is_changed else y @ y
        return y.tanh()


def test_another_way_in_the_recomputation_raises() -> None:
    model = Fickle()
    recompute_activations(model, of_kind("selective"), [model])
    y = model(torch.randn(4, 4))
    model.is_changed = True
    with pytest.raises(
        RuntimeError, match=r"called aten\.addmm\.default, but its forward had called aten\.mm\.default"
    ):
        y.sum().backward()


def calls_of(owner: Any, name: str, run: Callable[[], Any]) -> tuple[Any, int]:
    """What `run` returns, and how often it called `owner.name`."""
    calls = []
    function = getattr(owner, name)

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return function(*arguments, **options)

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(owner, name, counted)
        return run(), len(calls)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
def test_experts_on_two_ranks(rank: RankContext, kind: str, split: bool) -> None:
    mesh = MeshDomains.build(MeshConfig(data_parallel_replicate=2, expert_parallel=2), rank.device.type)
    results, exchanges = {}, {}
    for each in ("none", kind):
        model, inputs = make_qwen3(seed=rank.rank)
        inputs = {name: x.to(rank.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        model.to(rank.device)
        parallelize_qwen3_moe(model, mesh, of_kind(each))
        results[each], exchanges[each] = calls_of(dist, "all_to_all_single", partial(train, model, inputs, split))
    assert_same(results[kind], results["none"])
    # Of the counts, the rows and their weights; nothing brings results back again.
    again = {"full": 3 * LAYERS, "selective": 0, "attention": 0, "every_2": 3 * 2}[kind]
    assert exchanges[kind] - exchanges["none"] == again
    mesh.close()


class OfDTensors(nn.Module):
    """What is saved last is a product's result, inside of another tensor than the product gave."""

    def __init__(self, mesh: DeviceMesh, is_product_of_dtensors: bool) -> None:
        super().__init__()
        self.mesh, self.is_product_of_dtensors = mesh, is_product_of_dtensors
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Tensor) -> Tensor:
        x, weight = (
            DTensor.from_local(each, self.mesh, [Replicate()]) if self.is_product_of_dtensors else each
            for each in (x, self.weight.to(x.device))
        )
        y = x @ weight
        if isinstance(y, DTensor):
            return F.silu(y.to_local())
        y = F.silu(DTensor.from_local(y, self.mesh, [Replicate()]))
        assert isinstance(y, DTensor)
        return y.to_local()


@pytest.mark.ranks(1)
@pytest.mark.parametrize("is_product_of_dtensors", [False, True])
def test_dtensors(rank: RankContext, is_product_of_dtensors: bool) -> None:
    results = []
    for kind in ("none", "selective"):
        model = OfDTensors(init_device_mesh(rank.device.type, (1,)), is_product_of_dtensors)
        recompute_activations(model, of_kind(kind), [model])
        model(torch.ones(3, HIDDEN, device=rank.device)).sum().backward()
        results.append({"weight": model.weight.grad})
    assert_same(results[1], results[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_fully_sharded_blocks_are_gathered_once_in_the_backward(rank: RankContext, kind: str) -> None:
    """Experts are gathered once, too: they are a unit inside of the recomputed block."""
    mesh = init_device_mesh(rank.device.type, (2,))
    results, gathered = {}, {}
    for each in ("none", kind):
        model, inputs = make_qwen3(seed=rank.rank, balance=None)
        inputs = {name: x.to(rank.device) if isinstance(x, Tensor) else x for name, x in inputs.items()}
        model.to(rank.device)
        recompute_activations(model, of_kind(each))
        for layer in model.model.layers.values():
            fully_shard(layer.get_submodule("mlp.experts"), mesh=mesh)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        train(model, inputs)
        model.zero_grad()
        results[each], gathered[each] = calls_of(DefaultAllGather, "__call__", partial(train, model, inputs))
    assert_same(results[kind], results["none"])
    assert gathered["none"] == gathered[kind] == 2 * 2 * LAYERS + 1


@pytest.mark.gpu
@pytest.mark.ranks(1)
@pytest.mark.parametrize("kind", ["full", "selective"])
def test_attention_with_dropout_on_a_gpu(rank: RankContext, kind: str) -> None:
    results = []
    for each in ("none", kind):
        model, inputs = make_own()
        model = model.to(rank.device, torch.bfloat16)
        x = inputs["x"].detach().to(rank.device, torch.bfloat16).requires_grad_()
        recompute_activations(model, of_kind(each))
        results.append(train(model, {"x": x}))
    assert_tensors_close(results[1], results[0])  # its backward adds in no fixed order


@pytest.mark.gpu
@pytest.mark.ranks(1)
def test_memory_on_a_gpu(rank: RankContext) -> None:
    num_bytes = {}
    for kind in ("none", *KINDS):
        model, inputs = make_qwen3(torch.bfloat16)
        model.to(rank.device)
        ids = torch.randint(CONFIG.vocab_size, (8, 512), device=rank.device)
        recompute_activations(model, of_kind(kind))
        inputs |= {"input_ids": ids, "labels": ids}
        train(model, inputs)
        before = torch.cuda.memory_allocated(rank.device)
        loss = loss_of(model(**inputs))
        num_bytes[kind] = torch.cuda.memory_allocated(rank.device) - before
        loss.backward()
    assert num_bytes["full"] < num_bytes["selective"] < num_bytes["none"]
    assert num_bytes["full"] < num_bytes["every_2"] < num_bytes["none"]
