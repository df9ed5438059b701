"""Split backwards of stages whose parameters are sharded."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lightning_d9d.ops import WeightGradients, defer, split_linears
from tests.harness.compare import assert_close_named, assert_tensors_close


def make_stage(device):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).to(device, torch.float64)


def make_input(device, seed=0):
    return torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(device)


def take_gradients(stage):
    gradients = {name: p.grad for name, p in stage.named_parameters()}
    stage.zero_grad()
    return gradients


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_sequence_parallel", [False, True], ids=["tensor", "tensor and sequence"])
def test_tensor_parallel(rank, is_sequence_parallel):
    stage, mesh = make_stage(rank.device), init_device_mesh(rank.device.type, (2,))
    outer = {"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}
    first, last = outer if is_sequence_parallel else ({}, {})
    # Between the two layers the activation is a DTensor, and so is what the notes hold.
    parallelize_module(
        stage, mesh, {"0": ColwiseParallel(use_local_output=False, **first), "2": RowwiseParallel(**last)}
    )
    x = make_input(rank.device).requires_grad_()
    x_local = x.chunk(2, dim=1)[rank.rank] if is_sequence_parallel else x
    stage(x_local).square().sum().backward()
    expected, expected_dx = take_gradients(stage), x.grad
    x.grad = None
    split_linears(stage)
    gradients = WeightGradients()
    with defer(gradients):
        loss = stage(x_local).square().sum()
    gradients.backward(loss)
    assert all(p.grad is None for p in stage.parameters())
    gradients.accumulate()
    assert_close_named("dx", x.grad, expected_dx)
    for name, gradient in take_gradients(stage).items():
        assert isinstance(gradient, DTensor)
        assert gradient.placements == expected[name].placements
        assert_close_named(name, gradient, expected[name])


@pytest.mark.ranks(2)
def test_unsharded_parameters_of_fsdp(rank):
    """Gradients of microbatches add up in the unsharded parameters until they are to be reduced."""
    stage, mesh = make_stage(rank.device), init_device_mesh(rank.device.type, (2,))
    reference = copy.deepcopy(stage)
    inputs = [make_input(rank.device, seed).requires_grad_() for seed in range(3)]
    for x in inputs:
        (2 * reference(x).square().sum()).backward()  # both ranks have the same input
    fully_shard(stage[0], mesh=mesh)
    fully_shard(stage, mesh=mesh)
    units = [unit for unit in stage.modules() if isinstance(unit, FSDPModule)]
    for unit in units:
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    split_linears(stage)
    stage.set_reshard_after_forward(False)
    stage.set_is_last_backward(False)
    stage.set_reshard_after_backward(False)
    stage.set_requires_gradient_sync(False)
    under_way = [WeightGradients() for _ in inputs]
    losses = []
    for gradients, x in zip(under_way, inputs, strict=True):
        with defer(gradients):
            losses.append(stage(x).square().sum())
    for gradients, loss in zip(under_way, losses, strict=True):
        gradients.backward(loss)
    for gradients in under_way:
        gradients.accumulate()
    stage.set_is_last_backward(True)
    stage.set_reshard_after_backward(True)
    stage.set_requires_gradient_sync(True)
    (0 * stage(inputs[0]).sum()).backward()  # its hooks reduce what is there
    assert_tensors_close(take_gradients(stage), take_gradients(reference))
