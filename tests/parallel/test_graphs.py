"""Blocks as CUDA graphs: on a GPU the numbers of the blocks as they are, over steps, shapes and moving weights.

Without one nothing is captured, and what is asked for is checked all the same.
"""

from __future__ import annotations

import copy
import gc
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, ParallelConfig
from lightning_d9d.datamodules import ByteTextDataModule
from lightning_d9d.mesh import MeshDomains
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.modules import BalanceConfig, SwiGLU
from lightning_d9d.ops import using_grouped_gemm
from lightning_d9d.ops.backend import using_kernels
from lightning_d9d.parallel import capture_blocks, graphs
from tests.harness.compare import assert_bitwise_equal, assert_tensors_close
from tests.harness.ranks import RankContext
from tests.models.test_qwen3_moe_kernels import Losses
from tests.parallel.test_recompute import LAYERS, loss_of, make_own, make_qwen3
from tests.strategy.plain import trainer

CAPTURED = ParallelConfig(cuda_graphs=True)
ON_ANY_DEVICE = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=ON_ANY_DEVICE)
def gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A device on which blocks are captured: a GPU, or the CPU that passes for one, where graphs replay nothing."""
    if request.param == "cpu":
        monkeypatch.setattr(Tensor, "is_cuda", True)
        for name in ("CUDAGraph", "Stream", "current_stream"):
            monkeypatch.setattr(torch.cuda, name, MagicMock())
        for name in ("graph", "stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *args, **kwargs: nullcontext())
    return request.param


def layers(device: str) -> tuple[nn.Sequential, nn.Sequential]:
    """A dense model, and the same with captured layers."""
    torch.manual_seed(0)
    plain = nn.Sequential(*(SwiGLU(8, 12, initializer_range=0.3) for _ in range(LAYERS))).to(device)
    captured = copy.deepcopy(plain)
    capture_blocks(captured, CAPTURED, None, list(captured))
    return plain, captured


def num_captured(model: nn.Module) -> list[int]:
    """Forms, by block."""
    return [len(graphs._captured.get(block, (None, {}))[1]) for block in model]  # type: ignore[attr-defined]


def assert_same_step(plain: nn.Module, captured: nn.Module, x: Tensor) -> None:
    results = []
    for model in (plain, captured):
        own = x.clone().requires_grad_()
        model.zero_grad()
        result = model(own)
        result.square().sum().backward()
        results.append(dict(model.named_parameters()) | {"result": result.detach(), "x": own.grad})
        results[-1] |= {f"gradient of {n}": p.grad for n, p in model.named_parameters()}
    assert_tensors_close(results[1], results[0])


@pytest.mark.parametrize("device", ON_ANY_DEVICE)
def test_steps_of_qwen3_moe(device: str) -> None:
    assert_same_steps(device)


@pytest.mark.gpu
@pytest.mark.flash_attn_4
@pytest.mark.quack
def test_packages_are_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 4 and quack-kernels, which make their kernels when they are first called."""
    products, flash = (sys.modules[f"lightning_d9d.ops.{name}"] for name in ("grouped_gemm", "flash_attention"))
    monkeypatch.setattr(products, "_LEAST_QUACK_OPERATIONS", 1)
    monkeypatch.setattr(flash, "_LEAST_KEYS", 1)
    used = [(products, "_quack_gemm"), (flash, "block"), (flash, "block_backward")]
    calls = [MagicMock(wraps=getattr(module, name)) for module, name in used]
    for (module, name), call in zip(used, calls, strict=True):
        monkeypatch.setattr(module, name, call)
    assert_same_steps("cuda", head_dim=64)
    assert all(call.called for call in calls)


def assert_same_steps(device: str, **changes: Any) -> None:
    """Two microbatches each, whose gradients add up; routers with all their losses, and counts of tokens."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    (plain, _), (captured, _) = make_qwen3(dtype, **changes), make_qwen3(dtype, **changes)
    parallelize_qwen3_moe(captured, None, CAPTURED)
    results: list[dict[str, Any]] = []
    for model in (plain.to(device), captured.to(device)):
        optimizer, found = torch.optim.SGD(model.parameters(), lr=0.01), {}
        for step in range(3):
            for microbatch in range(2):
                inputs = make_qwen3(seed=1 + 2 * step + microbatch)[1]
                on_device = {n: v.to(device) if isinstance(v, Tensor) else v for n, v in inputs.items()}
                loss = loss_of(model(**on_device))
                loss.backward()
                found[f"loss {step} {microbatch}"] = loss.detach()
            found |= {f"gradient {step} {name}": p.grad.clone() for name, p in model.named_parameters()}
            optimizer.step()
            optimizer.zero_grad()
        results.append(found | {name: t.detach() for name, t in model.state_dict(keep_vars=True).items()})
    assert_tensors_close(results[1], results[0])
    assert num_captured(list(captured.model.layers.values())) == [int(device == "cuda")] * LAYERS  # type: ignore[arg-type]


class Collecting(nn.Module):
    """A layer in whose last forward graphs become garbage, which Python then collects, if its collector is on."""

    def __init__(self, garbage: list[Any]) -> None:
        super().__init__()
        self.layer, self.garbage, self.may_collect = nn.Linear(8, 8), garbage, []

    def forward(self, x: Tensor) -> Tensor:
        self.may_collect.append(gc.isenabled())
        if len(self.may_collect) > graphs._NUM_WARM_UPS:
            self.garbage = []
        if gc.isenabled():
            gc.collect()
        return self.layer(x)


def test_no_graph_is_freed_while_another_is_captured(gpu: str) -> None:
    """An earlier fit leaves its graphs in reference cycles, and Python's collector runs at any time."""
    _, earlier = layers(gpu)
    x = torch.randn(2, 5, 8, device=gpu, requires_grad=True)
    earlier(x).sum().backward()
    garbage = [graphs._captured[layer] for layer in earlier]
    garbage.append(garbage)
    block = Collecting(garbage).to(gpu)
    del earlier, garbage
    capture_blocks(block, CAPTURED, None, [block])
    block(x).sum().backward()
    assert block.may_collect == [*[True] * graphs._NUM_WARM_UPS, False]
    assert gc.isenabled()


@pytest.mark.gpu
def test_each_form_is_captured_once_up_to_a_number() -> None:
    plain, captured = layers("cuda")
    for length in [*range(1, graphs.MAX_FORMS + 2)] * 2:
        assert_same_step(plain, captured, torch.randn(2, length, 8, device="cuda"))
    assert num_captured(captured) == [graphs.MAX_FORMS] * LAYERS


@pytest.mark.gpu
def test_weights_that_move_and_thaw_are_noticed() -> None:
    plain, captured = layers("cuda")
    x = torch.randn(2, 5, 8, device="cuda")
    assert_same_step(plain, captured, x)
    for model in (plain, captured):
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.5
    assert_same_step(plain, captured, x)
    for is_trained in (False, True):
        for model in (plain, captured):
            model[1].requires_grad_(is_trained)
            model.zero_grad()
        assert_same_step(plain, captured, x)
    assert num_captured(captured) == [1] * LAYERS


@pytest.mark.gpu
def test_a_second_forward_before_the_backward_is_refused() -> None:
    _, captured = layers("cuda")
    first, _ = (captured(torch.randn(2, 5, 8, device="cuda")) for _ in range(2))
    with pytest.raises(RuntimeError, match="ran again before the backward of this call"):
        first.sum().backward()


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_one_backward_and_one_derivative(gpu: str) -> None:
    """A backward overwrites what the forward has left for it, and is not recorded itself."""
    _, captured = layers(gpu)
    x = torch.randn(2, 5, 8, device=gpu, requires_grad=True)
    result = captured(x)
    result.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="this backward ran before"):
        result.sum().backward()
    with pytest.raises(RuntimeError, match=r"cannot be differentiated twice \(create_graph=True\)"):
        torch.autograd.grad(captured(x).sum(), x, create_graph=True)
    captured(x).sum().backward()


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_what_python_decides_is_captured_apart(gpu: str) -> None:
    """A part that is not trained for a while, and tokens that do not count."""
    _, captured = layers(gpu)
    block = captured[0]
    block.balance = nn.Module()
    block.balance.counts_tokens = True
    x = torch.randn(2, 5, 8, device=gpu)
    for part, name in ((block.balance, "counts_tokens"), (block.up_proj, "training")):
        for value in (False, True):
            setattr(part, name, value)
            captured(x).sum().backward()
    assert num_captured(captured) == [3, *[1] * (LAYERS - 1)]


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_hooks_on_parameters_are_refused(gpu: str) -> None:
    """Such hooks would run in the graph and after it."""
    _, captured = layers(gpu)
    handle = captured[1].up_proj.weight.register_hook(lambda gradient: 2 * gradient)
    x = torch.randn(2, 5, 8, device=gpu)
    with pytest.raises(ConfigError, match=r"up_proj.weight of a SwiGLU has a hook \(Tensor.register_hook\)"):
        captured(x)
    handle.remove()
    captured(x)


@pytest.mark.gpu
def test_results_and_gradients_stay_after_the_next_step() -> None:
    _, captured = layers("cuda")
    kept = []
    for _ in range(2):
        x = torch.randn(2, 5, 8, device="cuda", requires_grad=True)
        result = captured(x)
        result.sum().backward()
        kept.append((x.grad, result, result.detach().clone(), x.grad.clone()))
    for gradient, result, same_result, same_gradient in kept:
        assert_bitwise_equal("result", result.detach(), same_result)
        assert_bitwise_equal("gradient", gradient, same_gradient)


@pytest.mark.gpu
def test_what_waits_for_the_device_is_refused() -> None:
    """Products of experts in float32 bring their offsets to the host."""
    model, inputs = make_qwen3(torch.float32)
    parallelize_qwen3_moe(model, None, CAPTURED)
    with pytest.raises(ConfigError, match=r"a Qwen3MoeLayer cannot be captured\. Set it to False"):
        model.cuda()(**{n: v.cuda() if isinstance(v, Tensor) else v for n, v in inputs.items()})
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_nothing_is_captured_without_training() -> None:
    plain, captured = layers("cuda")
    x = torch.randn(2, 5, 8, device="cuda")
    with torch.no_grad():
        assert_bitwise_equal("without gradient", captured(x), plain(x))
    assert_bitwise_equal("evaluated", captured.eval()(x).detach(), plain.eval()(x).detach())
    assert num_captured(captured) == [0] * LAYERS


@pytest.mark.parametrize("device", ON_ANY_DEVICE)
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_by_a_trainer(precision: str, device: str, tmp_path: Path) -> None:
    """The run has validations in between, accumulated batches, and a second fit of the same module."""
    curves = []
    for parallel in (ParallelConfig(), CAPTURED):
        L.seed_everything(0, verbose=False)
        module = Qwen3MoePretraining(preset="tiny", learning_rate=1e-3)
        losses = Losses()
        for _ in range(2):
            run = trainer(
                D9DStrategy(parallel=parallel),
                device=device,
                precision=precision,
                max_steps=4,
                accumulate_grad_batches=2,
                val_check_interval=2,
                limit_val_batches=1,
                gradient_clip_val=1.0,
                default_root_dir=tmp_path,
                callbacks=[losses],
            )
            run.fit(module, ByteTextDataModule(sequence_length=32, batch_size=2))
        assert not any(part in graphs._captured for part in module.modules())
        curves.append({"losses": torch.stack(losses.of_steps)})
    assert len(curves[0]["losses"]) == 16
    assert_tensors_close(curves[1], curves[0])


def test_calls_are_taken_back() -> None:
    model, _ = make_own()
    for parallel in (CAPTURED, CAPTURED, ParallelConfig()):
        capture_blocks(model, parallel, None)
        of_blocks = sum("forward" in vars(layer) for layer in model.layers)  # type: ignore[union-attr]
        assert of_blocks == LAYERS * parallel.cuda_graphs


def test_a_forward_of_the_owner_s_is_refused() -> None:
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    model[0][0].forward = nn.Identity().forward  # type: ignore[index,union-attr]
    with pytest.raises(ConfigError, match="cuda_graphs=True: the instance of Linear has its own forward"):
        capture_blocks(model, CAPTURED, None)


@pytest.mark.parametrize(("name", "value"), [("compile", True), ("recompute", "full")])
def test_other_ways_to_run_blocks_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"cuda_graphs=True cannot be combined with {name}={value!r}"):
        ParallelConfig(cuda_graphs=True, **{name: value})


@pytest.mark.ranks(2)
def test_replicas_but_no_parts_of_a_model(rank: RankContext) -> None:
    for degree, is_whole in (("data_parallel_replicate", True), ("data_parallel_shard", False)):
        domains = MeshDomains.build(MeshConfig(**{degree: 2}), rank.device.type)
        model, _ = make_qwen3(torch.float32)
        if is_whole:
            parallelize_qwen3_moe(model, domains, CAPTURED)
        else:
            with pytest.raises(ConfigError, match=r"data_parallel_replicate=1 must be the number of ranks, 2"):
                parallelize_qwen3_moe(model, domains, CAPTURED)
        domains.close()
    domains = MeshDomains.build(MeshConfig(data_parallel_replicate=2, expert_parallel=2), rank.device.type)
    with pytest.raises(ConfigError, match=r"needs the whole model on each rank: expert_parallel=2 must be 1"):
        capture_blocks(make_qwen3(torch.float32)[0], CAPTURED, domains)
    domains.close()


@pytest.mark.ranks(2)
def test_losses_of_routers_over_ranks_are_refused(rank: RankContext) -> None:
    """A rank that captures a block runs it more often than another, and they would no longer sum together."""
    model, _ = make_qwen3(torch.float32, balance=BalanceConfig(global_batch_loss=0.1))
    with pytest.raises(ConfigError, match=r"a loss over several ranks \(BalanceConfig.global_batch_loss\)"):
        capture_blocks(model, CAPTURED, None)


@pytest.mark.filterwarnings("ignore:User provided device_type of 'cuda'")
def test_settings_of_the_process_are_captured_apart(gpu: str) -> None:
    """Kernels and the backend of grouped products, when they change between steps."""
    _, captured = layers(gpu)
    x = torch.randn(2, 5, 8, device=gpu)
    for setting in (nullcontext(), using_kernels("torch"), using_grouped_gemm("eager"), nullcontext()):
        with setting:
            captured(x).sum().backward()
    assert num_captured(captured) == [3] * LAYERS
