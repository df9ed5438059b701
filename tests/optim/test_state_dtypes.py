"""States in eight bits over long times, between dtypes, and on sharded rows."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import AdamW

from lightning_d9d import ConfigError, StateError
from lightning_d9d.checkpoint import load_optimizer_state, open_directory, optimizer_state, save_directory
from lightning_d9d.mesh import MeshConfig, MeshDomains
from lightning_d9d.ops.eight_bits import AVERAGE, LEAST_SQUARE, SQUARE, decoded
from lightning_d9d.optim import StochasticAdamW
from tests.benchmarks.optimizer_loss import MOST, PEER, SMALL, LossCase, run_case
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext

WIDE, NARROW, CODES = torch.float32, torch.bfloat16, torch.uint8
IN_EIGHT_BITS = partial(StochasticAdamW, state_dtype=CODES)


def squares(optimizer: StochasticAdamW, parameter: Tensor) -> Tensor:
    state = optimizer.state[parameter]
    return decoded(state["exp_avg_sq"], state["exp_avg_sq_scale"], SQUARE)


def averages(optimizer: StochasticAdamW, parameter: Tensor) -> Tensor:
    state = optimizer.state[parameter]
    return decoded(state["exp_avg"], state["exp_avg_scale"], AVERAGE)


def steps(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, count: int, first: int = 0) -> None:
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)], ids=str)
def test_a_row_without_gradients_and_then_with_some(betas: tuple[float, float]) -> None:
    """Rows of rare words are such rows. Their weights move as those of AdamW, before the pause, in it and after it."""
    values = torch.randn(8, 96, generator=torch.Generator().manual_seed(0))
    scales = torch.logspace(-4, 0, 96)  # places of a block that differ much
    ours, theirs = nn.Parameter(values.clone()), nn.Parameter(values.clone())
    made = [make([p], lr=1e-3, betas=betas) for make, p in ((IN_EIGHT_BITS, ours), (AdamW, theirs))]
    largest = [0.0, 0.0]
    for step in range(540):
        gradient = torch.randn(8, 96, generator=torch.Generator().manual_seed(step)) * scales
        if 20 <= step < 520:
            gradient[4:] = 0
        for index, (optimizer, parameter) in enumerate(zip(made, (ours, theirs), strict=True)):
            before = parameter.detach().clone()
            parameter.grad = gradient
            optimizer.step()
            largest[index] = max(largest[index], (parameter.detach() - before).abs().max().item())
        assert isinstance(made[0], StochasticAdamW)
        assert squares(made[0], ours).min() >= LEAST_SQUARE
    assert largest[0] < 2 * largest[1]
    apart = (ours - theirs).detach()
    for rows in (slice(4), slice(4, 8)):
        moved = (theirs.detach() - values)[rows]
        assert apart[rows].norm() < 0.25 * moved.norm()


def test_averages_have_no_bias() -> None:
    """Means over many places stay those of float32, though a step changes a square by a thousandth of itself."""
    ours, theirs = (nn.Parameter(torch.zeros(64, 512)) for _ in range(2))
    optimizer, exact = IN_EIGHT_BITS([ours], lr=0.0), StochasticAdamW([theirs], lr=0.0)
    for step in range(300):
        gradient = torch.randn(64, 512, generator=torch.Generator().manual_seed(step)) * (1 if step < 100 else 3)
        for parameter, each in ((ours, optimizer), (theirs, exact)):
            parameter.grad = gradient
            each.step()
    expected = exact.state[theirs]
    assert abs((squares(optimizer, ours) / expected["exp_avg_sq"]).mean().item() - 1) < 0.01
    assert (squares(optimizer, ours) / expected["exp_avg_sq"]).std() < 0.25
    error = averages(optimizer, ours) - expected["exp_avg"]
    assert abs(error.mean().item()) < 5 * error.std().item() / error.numel() ** 0.5
    assert error.norm() < 0.1 * expected["exp_avg"].norm()


def test_losses_on_text() -> None:
    """A small model and little text; `optimizer_loss` has larger ones."""
    case = LossCase(
        name="small", config=SMALL, steps=80, rows=4, length=48, rates=(5e-3,), repeats=1, kinds=(PEER, "8-bit states")
    )
    losses = run_case(case, "cpu")["losses"]
    assert losses[PEER][0] < 4
    assert losses["8-bit states"][0] < MOST * losses[PEER][0]


@pytest.mark.parametrize(("saved", "wanted"), [*itertools.permutations([WIDE, NARROW, CODES], 2)], ids=str)
@pytest.mark.parametrize("shape", [(6, 40), (5,)], ids=str)
def test_states_of_another_dtype(saved: torch.dtype, wanted: torch.dtype, shape: tuple[int, ...]) -> None:
    """Converted where the dtype holds all: vectors have float32 states beside eight bits."""
    first, second = (nn.Parameter(torch.ones(shape, dtype=NARROW)) for _ in range(2))
    optimizer = StochasticAdamW([first], lr=0.01, state_dtype=saved, seed=7)
    steps(optimizer, first, 3)
    again = StochasticAdamW([second], state_dtype=wanted)
    widths = {WIDE: 3, NARROW: 2, CODES: 1 if len(shape) > 1 else 3}
    if widths[saved] > widths[wanted]:
        with pytest.raises(StateError, match=r"exp_avg of a parameter .* would lose digits .* StochasticAdamW\(state_"):
            again.load_state_dict(optimizer.state_dict())
        return
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["state_dtype"] == wanted
    assert again.param_groups[0]["seed"] == 7
    state = again.state[second]
    assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    has_codes = saved == CODES and len(shape) > 1
    for name, of in (("exp_avg", averages), ("exp_avg_sq", squares)):
        expected = of(optimizer, first) if has_codes else optimizer.state[first][name].float()
        assert state[name].dtype == (WIDE if wanted == CODES else wanted)
        assert_bitwise_equal(name, state[name].float(), expected)
    steps(again, second, 1, first=3)
    assert bool(second.isfinite().all())


def test_names_of_dtypes() -> None:
    parameter = nn.Parameter(torch.zeros(4, 4))
    assert StochasticAdamW([parameter], state_dtype="uint8").param_groups[0]["state_dtype"] == CODES
    with pytest.raises(ConfigError, match=r"=int8 must be torch\.float32, torch\.bfloat16 or torch\.uint8"):
        StochasticAdamW([parameter], state_dtype="int8")  # type: ignore[arg-type]


def test_bytes_of_a_parameter() -> None:
    parameter = nn.Parameter(torch.zeros(64, 256, dtype=NARROW))
    optimizer = IN_EIGHT_BITS([parameter])
    steps(optimizer, parameter, 1)
    held = parameter.nbytes + sum(value.nbytes for key, value in optimizer.state[parameter].items() if key != "step")
    assert held / parameter.numel() == 4 + 2 / 32


@pytest.mark.ranks(2)
@pytest.mark.parametrize("shape", [(4, 40), (4, 96), (2, 4, 48)], ids=str)
def test_rows_sharded_within_blocks_are_refused(rank: RankContext, shape: tuple[int, ...]) -> None:
    """All ranks refuse them alike. A group with other states accepts them."""
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    mesh, dim = domains.for_axes("dp_cp_shard"), len(shape) - 1
    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    weight = nn.Parameter(distribute_tensor(torch.ones(shape, device=rank.device), mesh, placements))
    match = rf"w of shape .* within a block of 32 places. Rank 0 holds 0 to {shape[-1] // 2 - 1} of dim {dim}"
    with pytest.raises(ConfigError, match=match):
        IN_EIGHT_BITS([("w", weight)])
    optimizer = IN_EIGHT_BITS([{"params": [weight], "state_dtype": "bfloat16"}])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    domains.close()


@pytest.mark.ranks(2)
def test_wider_states_from_a_directory_on_rows_sharded_anywhere(rank: RankContext) -> None:
    """Codes of one process become float32 on ranks whose parts begin within blocks."""
    domains = MeshDomains.build(MeshConfig(data_parallel_shard=2), rank.device.type)
    mesh = domains.for_axes("dp_cp_shard")
    whole = nn.Parameter(torch.ones(6, 70, device=rank.device, dtype=NARROW))
    optimizer = IN_EIGHT_BITS([whole], lr=0.01)
    steps(optimizer, whole, 3)
    saved, values = optimizer_state(optimizer, {whole: "weight"}, "optimizer")
    save_directory(rank.tmp_dir / "checkpoint", saved, {}, named_values=values)
    for placement in (Shard(1), Shard(0)):
        part = nn.Parameter(distribute_tensor(torch.ones_like(whole), mesh, [placement]))
        again = StochasticAdamW([part])
        checkpoint = open_directory(rank.tmp_dir / "checkpoint")
        load_optimizer_state(again, {part: "weight"}, "optimizer", checkpoint)
        expected: dict[str, Any] = {"exp_avg": averages(optimizer, whole), "exp_avg_sq": squares(optimizer, whole)}
        for name, value in expected.items():
            assert_bitwise_equal(name, again.state[part][name], value)
    domains.close()
