"""Inputs of blocks that wait in the host's memory: the same numbers, copies in order, and less memory on a GPU."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_d9d import ParallelConfig
from lightning_d9d.ops.linear import split_linears
from lightning_d9d.parallel import host_inputs, recompute_activations
from tests.harness.ranks import RankContext
from tests.parallel.kept import loss_of
from tests.parallel.test_recompute import LAYERS, MODELS, assert_same, make_qwen3, train


def of_kind(kind: str) -> ParallelConfig:
    return ParallelConfig(recompute=kind)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("split", [False, True], ids=["full backward", "split backward"])
def test_gradients_are_those_without_recomputation(name: str, split: bool) -> None:
    results = []
    for kind in ("none", "offload"):
        model, inputs = MODELS[name]()
        recompute_activations(model, of_kind(kind))
        split_linears(model)
        results.append(train(model, inputs, split))
    assert_same(results[1], results[0])


class Copies:
    """Notes copies to the host and back, by the place of the block."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.seen: list[str] = []
        self._places: dict[Any, int] = {}
        original = host_inputs._Waiting._copy

        def copy(waiting: Any, source: Tensor, target: Tensor) -> Any:
            goes_out = waiting not in self._places
            place = self._places.setdefault(waiting, len(self._places))
            self.seen.append(f"{'out' if goes_out else 'back'} {place}")
            return original(waiting, source, target)

        patch.setattr(host_inputs._Waiting, "_copy", copy)


def test_each_input_comes_back_before_its_block_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    model, inputs = make_qwen3(torch.float32)
    recompute_activations(model, of_kind("offload"))
    loss = loss_of(model(**inputs))
    assert copies.seen == ["out 0", "out 1", "out 2"]
    seen_by_block = []
    for layer in model.model.layers.values():
        layer.self_attn.register_forward_pre_hook(lambda *_: seen_by_block.append(len(copies.seen)))
    loss.backward()
    assert copies.seen[LAYERS:] == ["back 2", "back 1", "back 0"]
    assert seen_by_block == [5, 6, 6]  # block 1 is on its way while block 2 is computed again


def test_tables_that_blocks_share_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = Copies(monkeypatch)
    model, inputs = make_qwen3(torch.float32)
    model.model.embed_tokens.requires_grad_(False)
    recompute_activations(model, of_kind("offload"))
    loss_of(model(**inputs)).backward()
    assert copies.seen == ["out 0", "out 1", "back 1", "back 0"]  # of the first block nothing requires a gradient


def test_two_backwards_of_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make_qwen3(torch.float64)
    recompute_activations(model, of_kind("offload"))
    loss = loss_of(model(**inputs))
    parameters = [model.model.layers["0"].self_attn.q_proj.weight]
    (first,) = torch.autograd.grad(loss, parameters, retain_graph=True)
    (second,) = torch.autograd.grad(loss, parameters)
    assert torch.equal(first, second)


@pytest.mark.ranks(2)
def test_fully_sharded_blocks(rank: RankContext) -> None:
    results = []
    for kind in ("none", "offload"):
        model, inputs = make_qwen3(torch.float32)
        model.to(rank.device)
        recompute_activations(model, of_kind(kind))
        for layer in model.model.layers.values():
            fully_shard(layer)
        fully_shard(model)
        loss = loss_of(model(**{k: v.to(rank.device) if isinstance(v, Tensor) else v for k, v in inputs.items()}))
        loss.backward()
        gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}  # type: ignore[union-attr]
        results.append({"loss": loss.detach(), **gradients})
    assert_same(results[1], results[0])


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        blocks = (nn.Sequential(nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 1024)) for _ in range(16))
        self.layers = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


@pytest.mark.gpu
def test_equal_bits_and_less_memory_on_a_gpu() -> None:
    """16 inputs of 64 MiB: with "full" all are there at the end of the forward, with "offload" a few."""
    results, peaks = [], []
    for kind in ("full", "offload"):
        torch.manual_seed(0)
        model = Deep().cuda()
        recompute_activations(model, of_kind(kind))
        x = torch.randn(16384, 1024, device="cuda", requires_grad=True)
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):  # memory is used again by later steps
            model.zero_grad()
            loss = model(x)
            loss.backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
        results.append({"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}})
        del model, x, loss
    assert_same(results[1], results[0])
    assert peaks[0] - peaks[1] > 8 * 2**26


@pytest.mark.gpu
def test_memory_is_used_again_although_the_host_is_ahead() -> None:
    """16 inputs of 64 MiB: what is reserved has no room for inputs that are freed before the device has copied them."""
    model = Deep().cuda()
    recompute_activations(model, of_kind("offload"))
    x = torch.randn(16384, 1024, device="cuda", requires_grad=True)
    model(x).backward()
    model.zero_grad()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    torch.cuda._sleep(10**9)  # the device begins when the host has launched all
    model(x).backward()
    apart = torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated()
    assert apart < 6 * 2**26


@pytest.mark.gpu
@pytest.mark.parametrize("is_taken", [True, False], ids=["taken", "dropped"])
def test_no_copy_reads_or_writes_memory_that_is_used_again(is_taken: bool) -> None:
    """The stream of copies is late, and freed memory gets other values at once."""
    gc.collect()
    torch.cuda.empty_cache()
    x = torch.randn(2**24, device="cuda", requires_grad=True)
    wanted = 2 * (2 * x.detach()).cos()
    _delay_copies(x.device)
    inputs, outputs = [x * 2, x * 3, x * 4], []
    for each in inputs:
        with host_inputs.inputs_on_host([each]):
            outputs.append(each.sin())
    places = {each.data_ptr() for each in inputs}
    inputs.clear()
    del each
    others = [torch.full_like(wanted, 7) for _ in range(3)]
    assert {other.data_ptr() for other in others} == places
    torch.autograd.grad(outputs.pop().sum(), x)  # the second input is on its way back
    _delay_copies(x.device)
    torch.autograd.grad(outputs.pop().sum(), x)  # the first one will be
    if is_taken:
        assert torch.equal(torch.autograd.grad(outputs.pop().sum(), x)[0], wanted)
    outputs.clear()
    others += [torch.full_like(wanted, 7) for _ in range(8)]
    torch.cuda.synchronize()
    assert all(bool((other == 7).all()) for other in others)


def _delay_copies(device: torch.device) -> None:
    torch.cuda.synchronize()
    with torch.cuda.stream(host_inputs._stream_of_copies(device)):
        torch.cuda._sleep(10**8)


@pytest.mark.gpu
def test_the_host_waits_for_no_copy() -> None:
    model = Deep().cuda()
    recompute_activations(model, of_kind("offload"))
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    model(x).backward()  # streams and pinned memory are there
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        model(x).backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
