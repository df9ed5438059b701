"""What adapters cost beside the base: no message between ranks that is as wide as the model, no weight product.

Passes over activations, too, are those of thin products alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from lightning_d9d.modules import GroupedQueryAttention, SparseMoE, SwiGLU
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.parallel import ParallelConfig, recompute_activations
from lightning_d9d.peft import FullTune, LoRA, PeftMethod, inject
from tests.harness.ranks import RankContext
from tests.meshes.cases import MATRICES
from tests.meshes.equality import CONFIG, on_mesh

ACTIVATIONS = ("gather_dim", "scatter_sum", "all_reduce", "all_to_all")
"""Operators of the package that send hidden states."""
PRODUCTS = ("mm", "addmm", "bmm", "adapted_linears_backward", "grouped_gemm_weight_gradient", "linear_cross_entropy")


class Results(TorchDispatchMode):
    """Counts what operators return, by name and shape."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.seen: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if name in self.names:
            self.seen.update((name, tuple(each.shape)) for each in tree_leaves(result))
        return result


class Watching(L.Callback):
    """Watches a batch: its forward, its backward and the optimizer's step."""

    def __init__(self) -> None:
        self.results = Results(*ACTIVATIONS)

    def on_train_batch_start(self, *args: Any) -> None:
        self.results.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self.results.__exit__(None, None, None)


@pytest.mark.ranks(2)
def test_tensor_parallel_adapters_send_nothing_of_hidden_width(rank: RankContext) -> None:
    sent = []
    for peft in (FullTune(), MATRICES):
        watching = Watching()
        strategy = D9DStrategy(mesh=MeshConfig(tensor_parallel=2))
        on_mesh(rank, strategy, steps=1, peft=peft, callbacks=[watching])
        sent.append(watching.results.seen)
    assert sent[0]
    assert not sent[1] - sent[0]


@pytest.mark.parametrize("method", [FullTune(), LoRA(rank=3, rank_of_experts=3)], ids=["full", "adapters"])
def test_frozen_weights_have_no_product(method: PeftMethod) -> None:
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(CONFIG)
    inject(model, method)
    ids = torch.arange(42).view(2, 21)
    with Results(*PRODUCTS) as results:
        model(ids, ids, reduction="sum").loss.backward()
    shapes = {shape for _, shape in results.seen}
    matrices = [each for each in model.parameters() if each.dim() > 1 and each is not model.model.embed_tokens.weight]
    made = [parameter.requires_grad for parameter in matrices if tuple(parameter.shape) in shapes]
    assert made == [True] * sum(parameter.requires_grad for parameter in matrices)


WIDTH, NUM_TOKENS = 48, 64
"""The model's width and number of tokens. Adapters of rank 2 have no tensor half as large as the tokens' rows."""
PRODUCT_EVENTS = ("aten::mm", "aten::addmm", "aten::addmm_")
VIEWS = ("aten::view", "aten::as_strided", "aten::_unsafe_view", "aten::alias", "aten::detach")


def attention() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    table = torch.ones(1, NUM_TOKENS, 1, 8)
    module = GroupedQueryAttention(WIDTH, 4, 2, 16, norm_eps=1e-6, initializer_range=0.1)
    return module, lambda module, x: module(x, (table, table))


def mlp() -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    return SwiGLU(WIDTH, 72, initializer_range=0.1), lambda module, x: module(x)


def passes(run: Callable[[], object]) -> tuple[dict[str, int], Counter[str]]:
    """Count products, and what else reads activations as wide as the model, by operator."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()

    def is_in_product(event: Any) -> bool:
        parent = event.cpu_parent
        return parent is not None and (parent.name in PRODUCT_EVENTS or is_in_product(parent))

    products: Counter[str] = Counter()
    others: Counter[str] = Counter()
    for event in profiler.events():
        if event.name in PRODUCT_EVENTS:
            products[event.name] += 1
        elif event.name.startswith("aten::") and event.name not in VIEWS and not is_in_product(event):
            is_wide = any(torch.Size(shape).numel() >= NUM_TOKENS * WIDTH // 2 for shape in event.input_shapes)
            if is_wide and not any(child.name.startswith("aten::") for child in event.cpu_children):
                others[event.name] += 1
    return dict(products), others


@pytest.mark.parametrize(
    ("make", "num_inputs", "num_layers"), [(attention, 2, 4), (mlp, 2, 3)], ids=["attention", "mlp"]
)
def test_passes_over_activations_are_those_of_thin_products(make: Any, num_inputs: int, num_layers: int) -> None:
    counts = []
    for method in (None, LoRA(rank=2, targets=["[a-z]*_proj"])):
        torch.manual_seed(0)
        module, run = make()
        module.requires_grad_(False)
        if method is not None:
            inject(module, method)
        x = torch.randn(1, NUM_TOKENS, WIDTH, requires_grad=True)
        results: list[Tensor] = []
        forward = passes(lambda: results.append(run(module, x)))  # noqa: B023
        gradient = torch.ones_like(results[0])
        counts.append((forward, passes(lambda: results[0].backward(gradient))))  # noqa: B023
    (frozen_forward, frozen_backward), (forward, backward) = counts
    assert frozen_forward[0] == frozen_backward[0] == {"aten::mm": num_layers}
    assert forward[0] == {"aten::mm": num_inputs, "aten::addmm": num_layers, "aten::addmm_": num_layers}
    assert backward[0] == {"aten::mm": 2 * num_inputs, "aten::addmm": 2 * num_layers, "aten::addmm_": num_layers}
    assert not forward[1] - frozen_forward[1]
    assert not backward[1] - frozen_backward[1]


@pytest.mark.parametrize("method", [None, LoRA(rank=2)], ids=["frozen", "adapters"])
def test_a_recomputation_ends_before_the_last_product_of_experts(method: PeftMethod | None) -> None:
    module = SparseMoE(16, 8, 4, 2, normalize=True, initializer_range=0.3).requires_grad_(False)
    if method is not None:
        inject(module, method)
    recompute_activations(nn.Sequential(module), ParallelConfig(recompute="full"), [module])
    x = torch.randn(6, 16, requires_grad=True)
    product = mock.Mock(wraps=torch.nn.functional.grouped_mm)
    with using_kernels("triton"), mock.patch("torch.nn.functional.grouped_mm", product):
        y = module(x)
        assert product.call_count == 2
        y.sum().backward()
    assert product.call_count == 2 + 1 + 2
