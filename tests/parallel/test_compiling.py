"""Compiled blocks: the same losses and gradients, whole, recomputed, in split backwards, in copies and under FSDP2.

On the CPU a backend that traces and splits graphs as the default one does, but leaves it at torch's operators.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from lightning_d9d import ConfigError, MeshConfig, ParallelConfig
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.modules import SparseMoE, SwiGLU
from lightning_d9d.ops import WeightGradients, defer, grouped_gemm, using_grouped_gemm
from lightning_d9d.ops.backend import runs_triton, using_kernels
from lightning_d9d.ops.grouped_gemm import grouped_gemm_reference
from lightning_d9d.parallel import compile_blocks, compiling, recompute_activations
from lightning_d9d.parallel.config import ExpertDispatch
from lightning_d9d.schedule import LayerCosts, Machine, ModelCosts
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.parallel.test_recompute import LAYERS, make_own, make_qwen3, train

COMPILED = ParallelConfig(compile=True)
grouped_gemm_module = sys.modules["lightning_d9d.ops.grouped_gemm"]  # the package has the function by that name


@contextmanager
def compiler(backend: str = "aot_eager", *, whole: bool = True) -> Generator[None]:
    """Return a compiler that refuses blocks which it cannot compile whole, unless parts are allowed."""
    torch._dynamo.reset()
    counters.clear()
    with mock.patch.object(compiling.torch, "compile", partial(torch.compile, backend=backend, fullgraph=whole)):
        compiling._compiled.cache_clear()
        yield
    compiling._compiled.cache_clear()
    torch._dynamo.reset()


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    del actual["drawn after"], expected["drawn after"]
    assert_tensors_close(actual, expected)


@pytest.mark.parametrize("recompute", ["none", "full", "every_2", "3_of_4", "offload"])
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_losses_and_gradients_are_those_of_the_model(recompute: str, split: bool) -> None:
    (model, inputs), (compiled, same_inputs) = make_qwen3(), make_qwen3()
    parallelize_qwen3_moe(compiled, None, ParallelConfig(compile=True, recompute=recompute))
    with compiler():
        assert_same(train(compiled, same_inputs, split), train(model, inputs, split))
        assert counters["stats"]["unique_graphs"] >= 1
    assert compiled.state_dict().keys() == model.state_dict().keys()


@pytest.mark.gpu
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_on_a_gpu(split: bool) -> None:
    (model, inputs), (compiled, _) = make_qwen3(torch.float32), make_qwen3(torch.float32)
    parallelize_qwen3_moe(compiled, None, COMPILED)
    on_gpu = {n: v.cuda() if isinstance(v, Tensor) else v for n, v in inputs.items()}
    with compiler("inductor"):
        assert_same(train(compiled.cuda(), dict(on_gpu), split), train(model.cuda(), on_gpu, split))


class Layers(nn.Sequential):
    """A dense model."""

    def __init__(self) -> None:
        super().__init__(*(SwiGLU(8, 12, initializer_range=0.3) for _ in range(LAYERS)))


def test_layers_share_a_compilation_and_shapes_are_compiled_twice() -> None:
    model = Layers()
    compile_blocks(model, COMPILED, list(model))
    with compiler():
        for length in (6, 5, 4, 3):
            model(torch.randn(2, length, 8, requires_grad=True)).sum().backward()
        assert counters["stats"]["unique_graphs"] == 2  # of one shape, then of any


class Numbered(nn.Module):
    """A block with code of its own, because the compiler takes the number as a constant."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.weight = nn.Parameter(torch.randn(8, 8, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight / self.number).tanh()


class Summed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("limit", [10, 2])
def test_many_different_blocks(recompute: str, limit: int) -> None:
    """Past the compiler's limit a block runs uncompiled, in its recomputation, too."""
    torch.manual_seed(0)
    blocks = [Numbered(number) for number in range(2, 12)]
    model, inputs = Summed(*blocks), {"x": torch.randn(3, 8, dtype=torch.float64)}
    expected = train(model, inputs)
    model.zero_grad()
    parallel = ParallelConfig(compile=True, recompute=recompute)
    compile_blocks(model, parallel, blocks)
    recompute_activations(model, parallel, blocks)
    with compiler(whole=limit == len(blocks)), torch._dynamo.config.patch(recompile_limit=limit):
        assert_same(train(model, inputs), expected)
        assert counters["stats"]["unique_graphs"] == limit


def _scaled(layer: nn.Linear, x: Tensor, *, factor: float) -> Tensor:
    return factor * nn.Linear.forward(layer, x)


def _negative(layer: nn.Linear, x: Tensor, *, factor: float) -> Tensor:
    return -_scaled(layer, x, factor=factor)


def test_a_layer_whose_forward_is_replaced_is_compiled_again() -> None:
    layer, x = nn.Linear(8, 8), torch.randn(3, 8)
    model = nn.Sequential(nn.Sequential(layer))
    compile_blocks(model, COMPILED, list(model))
    plain = layer(x)
    other = nn.Linear(8, 8)
    with compiler():
        for forward, expected in (
            (partial(_scaled, layer, factor=2.0), 2 * plain),
            (partial(_scaled, layer, factor=3.0), 3 * plain),
            (partial(_negative, layer, factor=3.0), -3 * plain),
            (partial(_negative, other, factor=3.0), -3 * other(x)),
        ):
            layer.forward = forward  # type: ignore[method-assign]
            assert_tensors_close({"y": model(x)}, {"y": expected})
        del layer.forward
        assert_tensors_close({"y": model(x)}, {"y": plain})


def test_split_backwards_have_no_weight_phase() -> None:
    """Only the parameters outside of blocks wait for the weight backward."""
    model, inputs = make_qwen3(torch.float32)
    compile_blocks(model, COMPILED, list(model.model.layers.values()))
    later = WeightGradients()
    with compiler():
        with defer(later):
            output = model(**inputs)
        later.backward(output.loss + output.router_loss)
    waiting = {name for name, p in model.named_parameters() if p.grad is None}
    assert waiting == {"lm_head.weight"}
    later.accumulate()
    assert all(p.grad is not None for p in model.parameters())


class Settings(nn.Module):
    """A block that does what the settings of the process say, some of it in traced code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = grouped_gemm(x, self.weight, torch.tensor([3, 5], dtype=torch.int32))
        return -x if runs_triton(x) else x


def test_settings_of_the_process_take_effect_after_blocks_were_compiled() -> None:
    model, x = nn.Sequential(Settings()), torch.ones(5, 8)
    compile_blocks(model, COMPILED, list(model))
    loop = mock.patch.object(grouped_gemm_module, "grouped_gemm_reference", wraps=grouped_gemm_reference)
    signs, loops = [], []
    with compiler(), loop as counted:
        for setting in (using_kernels("auto"), using_kernels("triton"), using_grouped_gemm("eager"), nullcontext()):
            counted.reset_mock()
            with setting:
                signs.append(float(model(x).detach().sign().mean()))
            loops.append(counted.call_count)
    assert signs == [1, -1, 1, 1]
    assert loops == [0, 0, 1, 0]


def test_copies_compute_with_their_own_weights() -> None:
    model, inputs = make_qwen3()
    compile_blocks(model, COMPILED, list(model.model.layers.values()))
    with compiler():
        first = model(**inputs).loss
        other = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        assert_bitwise_equal("loss", other(**inputs).loss, first)


def test_calls_are_taken_back() -> None:
    model, inputs = make_own()
    for parallel in (ParallelConfig(compile=True, recompute="full"), COMPILED, ParallelConfig()):
        compile_blocks(model, parallel)
        assert sum("forward" in vars(layer) for layer in model.layers) == LAYERS * parallel.compile  # type: ignore[arg-type]
    with compiler():
        model(**inputs)
        assert not counters["stats"]


def test_a_forward_of_the_owner_s_is_refused() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    model[0][0].forward = nn.Identity().forward  # type: ignore[index,union-attr]
    with pytest.raises(ConfigError, match="the instance of Linear has its own forward"):
        compile_blocks(model, COMPILED)


@pytest.mark.parametrize("recompute", ["selective", "attention"])
def test_recomputation_inside_of_blocks_is_refused(recompute: str) -> None:
    with pytest.raises(ConfigError, match=f"compile=True with recompute='{recompute}'"):
        ParallelConfig(compile=True, recompute=recompute)


@pytest.mark.ranks(2)
def test_fully_sharded(rank: RankContext) -> None:
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    (model, inputs), (compiled, _) = make_qwen3(seed=1 + rank.rank), make_qwen3()
    with pytest.raises(ConfigError, match="recompute='full': routers have losses over several ranks"):
        compile_blocks(model, ParallelConfig(compile=True, recompute="full"))
    for each, parallel in ((model, ParallelConfig()), (compiled, COMPILED)):
        parallelize_qwen3_moe(each.to(rank.device), domains, parallel)
    inputs = {n: v.to(rank.device) if isinstance(v, Tensor) else v for n, v in inputs.items()}
    with compiler():
        actual = train(compiled, inputs)
        assert counters["stats"]["unique_graphs"] >= 1
    assert_same(actual, train(model, inputs))
    domains.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("dispatch", "recompute", "split"),
    [
        ("all_to_all", "none", False),
        ("all_to_all", "full", False),
        ("all_to_all", "none", True),
        ("peer", "none", False),
        ("peer", "full", True),
    ],
)
def test_numbers_of_tokens_that_travel_are_not_compiled(
    rank: RankContext, dispatch: ExpertDispatch, recompute: str, split: bool
) -> None:
    """Each batch sends other numbers of tokens. All layers and batches share the two parts around the experts."""
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2, expert_parallel=2), rank.device.type)
    (model, _), (compiled, _) = make_qwen3(balance=None), make_qwen3(balance=None)
    parallel = ParallelConfig(expert_dispatch=dispatch, expert_capacity=4.0)
    parallelize_qwen3_moe(model.to(rank.device), domains, parallel)
    parallelize_qwen3_moe(compiled.to(rank.device), domains, replace(parallel, compile=True, recompute=recompute))
    with compiler(whole=False):
        for step in range(4):
            _, inputs = make_qwen3(seed=2 * step + rank.rank)
            inputs = {n: v.to(rank.device) if isinstance(v, Tensor) else v for n, v in inputs.items()}
            assert_same(train(compiled, dict(inputs), split), train(model, inputs, split))
            assert counters["stats"]["unique_graphs"] == 2
            for parameter in (*model.parameters(), *compiled.parameters()):
                parameter.grad = None
    compile_blocks(compiled, ParallelConfig())
    assert not any("forward" in vars(part) for part in compiled.modules() if isinstance(part, SparseMoE))
    domains.close()


def test_the_simulator_is_told() -> None:
    layer = LayerCosts(forward_flops=1e9, backward_input_flops=1e9, backward_weight_flops=1e9, weight_bytes=1e9)
    costs = ModelCosts(before=layer, layers=(layer, layer), after=layer).compiled()
    assert costs.before == costs.after == layer  # which stay as they are
    machine = Machine()
    whole, compiled = (machine.seconds(each, 4) for each in (layer, costs.layers[0]))
    assert compiled.backward_weight == 0
    assert compiled.backward == compiled.backward_input == pytest.approx(whole.backward)
