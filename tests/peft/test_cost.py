"""What adapters cost beside the base: no message between ranks that is as wide as the model, and no weight product."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM
from lightning_d9d.peft import FullTune, LoRA, PeftMethod, inject
from tests.harness.ranks import RankContext
from tests.meshes.cases import MATRICES
from tests.meshes.equality import CONFIG, on_mesh

ACTIVATIONS = ("gather_dim", "scatter_sum", "all_reduce", "all_to_all")
"""Operators of the package that send hidden states."""
PRODUCTS = ("mm", "addmm", "bmm", "grouped_gemm_weight_gradient", "linear_cross_entropy")


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
