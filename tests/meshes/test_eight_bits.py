"""States in eight bits: any mesh has the bits of one process, also after a resume on another mesh.

Gradients are drawn by name and step, so that sums over ranks, which round, have no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_d9d import D9DStrategy, MeshConfig
from lightning_d9d.checkpoint import load_optimizer_state, open_directory
from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.sharding import local, local_ranges
from lightning_d9d.models.qwen3_moe import Qwen3MoeForCausalLM, Qwen3MoePretraining
from lightning_d9d.optim import StochasticAdamW, parameter_groups
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.meshes.equality import CONFIG, WEIGHT_DECAY, Watched, whole
from tests.strategy.plain import trainer

MODEL = replace(
    CONFIG,
    hidden_size=40,
    head_dim=32,
    num_hidden_layers=2,
    mlp_only_layers=(1,),
    intermediate_size=64,
)
"""A model with rows of whole blocks, a ragged row, short rows (of experts), and rows that tensor ranks share."""
STEPS, SAVED_AFTER = 10, 4
MESHES: dict[str, MeshConfig] = {
    "tp2": MeshConfig(tensor_parallel=2),
    "pp2": MeshConfig(pipeline_parallel=2),
    "shard2": MeshConfig(data_parallel_shard=2),
    "rep2-ep2": MeshConfig(data_parallel_replicate=2, expert_parallel=2),
    "shard4": MeshConfig(data_parallel_shard=4),
    "rep2-shard2": MeshConfig(data_parallel_replicate=2, data_parallel_shard=2),
    "rep4-ep4": MeshConfig(data_parallel_replicate=4, expert_parallel=4),
    "shard2-tp2": MeshConfig(data_parallel_shard=2, tensor_parallel=2),
    "pp2-shard2-ep2": MeshConfig(pipeline_parallel=2, data_parallel_shard=2, expert_parallel=2),
}
ROUTES = [
    ("tp2",),
    ("pp2",),
    ("shard2", "rep2-ep2"),
    ("shard4", "rep4-ep4"),
    ("rep2-shard2", "shard4", "shard2-tp2"),
    ("rep4-ep4", "pp2-shard2-ep2", "rep2-shard2"),
    ("shard2-tp2", "pp2-shard2-ep2"),
]
FAST = ROUTES[0], ROUTES[2]


def optimizer_of(module: nn.Module) -> StochasticAdamW:
    return StochasticAdamW(parameter_groups(module, WEIGHT_DECAY), lr=0.01, state_dtype=torch.uint8, seed=5)


def drawn(name: str, shape: Iterable[int], step: int) -> Tensor:
    """A gradient of a whole parameter; experts and words get none in some steps."""
    key = sum(map(ord, name)) * 100 + step
    generator = torch.Generator().manual_seed(key)
    gradient = torch.randn(tuple(shape), generator=generator)
    is_used = torch.rand(len(gradient), generator=generator) < 0.7
    return (gradient * is_used.view(-1, *[1] * (gradient.dim() - 1)) * 0.1).bfloat16()


class Drawn(Watched):
    """Takes drawn gradients, and keeps whole states."""

    save_to: str | None = None
    states: dict[str, Tensor]

    def configure_optimizers(self) -> Any:
        return optimizer_of(self)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self._named():
            gradient = drawn(name, parameter.shape, self.global_step)
            held = gradient[tuple(slice(each.start, each.stop) for each in local_ranges(parameter))]
            local(parameter.grad).copy_(held)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if self.save_to is not None and self.global_step % SAVED_AFTER == 0:
            self.trainer.save_checkpoint(self.save_to)
            self.trainer.should_stop = True

    def on_train_end(self) -> None:
        optimizer = self.optimizers(use_pl_optimizer=False)
        assert isinstance(optimizer, StochasticAdamW)
        self.states = {
            f"{name} {key}": whole(value) for name, p in self._named() for key, value in optimizer.state[p].items()
        }


def fitted(
    rank: RankContext, mesh: MeshConfig, load_from: str | None = None, save_to: str | None = None, config: Any = MODEL
) -> dict[str, Tensor]:
    """The weights and states that this rank holds after the last step."""
    L.seed_everything(1, verbose=False)
    module = Drawn(config, STEPS, dtype_of_weights=torch.bfloat16)
    module.save_to = save_to
    options = {"precision": "bf16-true", "max_epochs": 1, "use_distributed_sampler": False}
    trainer(D9DStrategy(mesh=mesh), rank.world_size, rank.device.type, **options).fit(module, ckpt_path=load_from)
    return {name: whole(parameter.detach()) for name, parameter in module._named()} | module.states


def on_one_process(load_from: str | None = None) -> dict[str, Tensor]:
    """Plain torch, perhaps from a checkpoint of a mesh."""
    L.seed_everything(1, verbose=False)
    module = Qwen3MoePretraining(MODEL)
    torch.set_default_dtype(torch.bfloat16)
    try:
        module.configure_model()
    finally:
        torch.set_default_dtype(torch.float32)
    model = module.model
    assert isinstance(model, Qwen3MoeForCausalLM)
    optimizer = optimizer_of(model)
    named = dict(model.named_parameters())
    first = 0
    if load_from is not None:
        checkpoint, first = open_directory(load_from, alone=True), SAVED_AFTER
        prefix = next(name for name in checkpoint.tensors if name.endswith("embed_tokens.weight"))
        prefix = prefix.removeprefix("model.").removesuffix("model.embed_tokens.weight")
        checkpoint.load({f"model.{prefix}{name}": p.detach() for name, p in named.items()}, strict=False)
        load_optimizer_state(optimizer, {p: f"{prefix}{name}" for name, p in named.items()}, "optimizer_0", checkpoint)
    for step in range(first, STEPS):
        for name, parameter in named.items():
            parameter.grad = drawn(name, parameter.shape, step).to(parameter.dtype)
        optimizer.step()
    states = {f"{name} {key}": value for name, p in named.items() for key, value in optimizer.state[p].items()}
    return {name: parameter.detach() for name, parameter in named.items()} | states


def routes() -> list[Any]:
    return [
        pytest.param(
            route,
            id="->".join(route),
            marks=[pytest.mark.ranks(MESHES[route[0]].world_size), *([] if route in FAST else [pytest.mark.meshes])],
        )
        for route in ROUTES
    ]


@pytest.mark.parametrize("route", routes())
def test_meshes_have_the_bits_of_one_process(rank: RankContext, route: tuple[str, ...]) -> None:
    """Weights, codes and scales, though each mesh but the last one hands over to the next one."""
    expected = rank.from_first_rank(on_one_process)
    assert any(value.dtype == torch.uint8 for value in expected.values())
    saved = [None, *(str(rank.tmp_dir / str(number)) for number in range(len(route) - 1)), None]
    for mesh, load_from, save_to in zip(route, saved[:-1], saved[1:], strict=True):
        found = fitted(rank, MESHES[mesh], load_from, save_to)
    for name, value in found.items():
        assert_bitwise_equal(name, value, expected[name])
    held = rank.all_gather_object(set(found))
    assert set().union(*held) == expected.keys()
    if len(route) > 1:
        alone = rank.from_first_rank(on_one_process, saved[1])
        for name, value in alone.items():
            assert_bitwise_equal(f"{name} alone", value, expected[name])


@pytest.mark.ranks(2)
def test_a_row_that_is_sharded_within_a_block_is_refused(rank: RankContext) -> None:
    with pytest.raises(ConfigError, match=r"is sharded within a block of 32 places. Rank 0 holds 0 to 11 of dim 1"):
        fitted(rank, MESHES["tp2"], config=replace(MODEL, intermediate_size=24))
