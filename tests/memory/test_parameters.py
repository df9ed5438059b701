"""Weights, gradients and states by arithmetic against real tensors, exactly."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, NAdam, Optimizer, RAdam

from lightning_d9d import MeshConfig, MeshDomains, ParallelConfig
from lightning_d9d.memory import gathered_bytes, gradient_bytes, state_bytes, weight_bytes
from lightning_d9d.mesh.sharding import local
from lightning_d9d.models.qwen3_moe import Qwen3MoeConfig, Qwen3MoeForCausalLM
from lightning_d9d.models.qwen3_moe.plan import parallelize_qwen3_moe
from lightning_d9d.optim import MuonAdamW, StochasticAdamW
from tests.harness.ranks import RankContext

CONFIG = Qwen3MoeConfig(
    vocab_size=96,
    hidden_size=64,
    moe_intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    head_dim=32,
    num_experts=4,
    num_experts_per_tok=2,
)


def model(dtype: torch.dtype = torch.float32) -> Qwen3MoeForCausalLM:
    return Qwen3MoeForCausalLM(CONFIG).to(dtype)


def matrices_and_rest(parameters: Iterable[nn.Parameter]) -> list[dict]:
    parameters = list(parameters)
    wide = [each for each in parameters if each.ndim >= 2]
    return [{"params": wide[1:]}, {"params": [wide[0]], "matrices": False}]


OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "adamw": lambda module: AdamW(module.parameters()),
    "amsgrad": lambda module: Adam(module.parameters(), amsgrad=True),
    "radam": lambda module: RAdam(module.parameters()),
    "nadam": lambda module: NAdam(module.parameters()),
    "sgd": lambda module: SGD(module.parameters()),
    "momentum": lambda module: SGD(module.parameters(), momentum=0.9),
    "muon": lambda module: MuonAdamW(matrices_and_rest(module.parameters())),
    "stochastic, float32": lambda module: StochasticAdamW(module.parameters()),
    "stochastic, bfloat16": lambda module: StochasticAdamW(module.parameters(), state_dtype=torch.bfloat16),
    "stochastic, eight bits": lambda module: StochasticAdamW(module.parameters(), state_dtype=torch.uint8),
}


def stepped(optimizer: Optimizer) -> int:
    """Bytes of the states that are really there after a step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    values = (value for state in optimizer.state.values() for value in state.values())
    return sum(local(value).nbytes for value in values if isinstance(value, Tensor))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *((name, torch.float32) for name in OPTIMIZERS),
        *((name, torch.bfloat16) for name in OPTIMIZERS),
    ],
    ids=str,
)
def test_states_of_each_optimizer(name: str, dtype: torch.dtype) -> None:
    module = model(dtype)
    module.lm_head.requires_grad_(False)
    optimizer = OPTIMIZERS[name](module)
    assert state_bytes(optimizer) == stepped(optimizer)


def test_states_in_eight_bits_of_another_optimizer() -> None:
    module = model(torch.bfloat16)
    expected = stepped(StochasticAdamW(module.parameters(), state_dtype=torch.uint8))
    assert state_bytes(AdamW(module.parameters()), eight_bits=True) == expected


def test_an_optimizer_that_is_not_known() -> None:
    own = type("Own", (AdamW,), {})(model().parameters())
    assert state_bytes(own) is None


def test_weights_and_gradients() -> None:
    module = model(torch.bfloat16)
    module.model.embed_tokens.requires_grad_(False)
    module.register_buffer("mean", torch.zeros(7))
    module.register_parameter("again", module.lm_head.weight)
    tensors = [*module.parameters(), *module.buffers(), module.lm_head.weight]
    assert weight_bytes(tensors) == sum(each.nbytes for each in (*module.parameters(), *module.buffers()))
    ids = torch.randint(96, (2, 9))
    module(ids[:, :-1], labels=ids[:, 1:], reduction="sum").loss.backward()
    made = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    assert gradient_bytes(module.parameters()) == sum(each.nbytes for each in made)
    assert gradient_bytes(module.parameters(), lambda _: torch.float32) == 4 * sum(each.numel() for each in made)


MESHES = {
    "sharded": {"data_parallel_shard": 2},
    "experts": {"data_parallel_replicate": 2, "expert_parallel": 2},
    "tensors": {"tensor_parallel": 2},
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MESHES)
def test_what_a_rank_of_a_mesh_has(rank: RankContext, name: str) -> None:
    domains = MeshDomains.build(MeshConfig(**MESHES[name]), rank.device.type)
    with torch.device("meta"):
        module = Qwen3MoeForCausalLM(CONFIG).to(torch.bfloat16)
    parallelize_qwen3_moe(module, domains, ParallelConfig())
    on_meta = weight_bytes(module.parameters())
    module.to_empty(device=rank.device)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert on_meta == weight_bytes(module.parameters()) == sum(local(p).nbytes for p in module.parameters())
    for make in (OPTIMIZERS["adamw"], OPTIMIZERS["stochastic, eight bits"]):
        optimizer = make(module)
        assert state_bytes(optimizer) == stepped(optimizer)
    assert gradient_bytes(module.parameters()) == on_meta
    whole = sum(parameter.numel() for parameter in module.parameters())
    if name == "sharded":
        assert gathered_bytes(module.parameters(), torch.float32) == 4 * whole
        gathered = set(module.parameters())
        assert gradient_bytes(module.parameters(), gathered=gathered) == 2 * whole
    else:
        assert gathered_bytes(module.parameters(), None) == on_meta < 2 * whole
    domains.close()
