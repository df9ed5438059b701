"""Steps of `expert_messages` with own memory: tokens go to the rank's own experts, and each value is there."""

from __future__ import annotations

import pytest
import torch

from lightning_d9d.metrics.profiled import Kernel
from lightning_d9d.modules.peer_dispatch import PeerDispatch, PeerExchange
from lightning_d9d.ops import peer_exchange
from lightning_d9d.ops.backend import using_kernels
from tests.benchmarks.even_routing import even_choices
from tests.benchmarks.expert_messages import OwnMemory, cases, summary, table, verdicts
from tests.harness.compare import assert_tensors_close
from tests.harness.ranks import RankContext

NUM_EXPERTS, TOP_K, NUM_TOKENS, WIDTH = 8, 3, 24, 16
NUM_LOCAL = NUM_EXPERTS // 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_own_experts_stand_in_for_the_others(rank: RankContext, kernels: str) -> None:
    with pytest.MonkeyPatch.context() as patch, using_kernels(kernels):
        patch.setattr(peer_exchange, "_functions", peer_exchange._functions)
        memory = OwnMemory()
        memory.setup(None, None, "fit")
        take_steps(rank, memory)


def take_steps(rank: RankContext, memory: OwnMemory) -> None:
    """Each expert multiplies by a number of its own, and those of the second rank by ten times as much."""
    dispatch = PeerDispatch(NUM_EXPERTS, rank.group, PeerExchange(rank.group, 2.0))
    generator = torch.Generator().manual_seed(rank.rank)
    choices = even_choices(NUM_TOKENS, NUM_EXPERTS, TOP_K, rank.rank, 2).to(rank.device)
    here = (1.0 + torch.arange(NUM_LOCAL, device=rank.device)) * 10**rank.rank
    for step in range(6):
        memory.on_train_batch_start(None, None, None, step)  # type: ignore[arg-type]
        assert memory.is_own == (step % 2 == 1)
        x, gradient = torch.randn(2, NUM_TOKENS, WIDTH, generator=generator).to(rank.device)
        weights = torch.rand(NUM_TOKENS, TOP_K, generator=generator).to(rank.device)
        ranks = torch.full_like(choices, rank.rank) if memory.is_own else choices // NUM_LOCAL
        factors = (1.0 + choices % NUM_LOCAL) * 10**ranks
        tokens = dispatch.dispatch(x.requires_grad_(), choices, weights.requires_grad_())
        factors_of_rows = here.repeat_interleave(tokens.offsets.diff(prepend=tokens.offsets.new_zeros(1)))
        used = len(factors_of_rows)
        results = tokens.x[:used] * (factors_of_rows * tokens.weights[:used])[:, None]
        combined = dispatch.combine(torch.cat([results, tokens.x[used:].detach()]), tokens)
        combined.backward(gradient)
        expected = {
            "combined": x * (weights * factors).sum(1, keepdim=True),
            "gradient of x": gradient * (weights * factors).sum(1, keepdim=True),
            "gradient of weights": (gradient * x).sum(1, keepdim=True) * factors,
        }
        actual = (combined, x.grad, weights.grad)
        assert_tensors_close(dict(zip(expected, actual, strict=True)), expected)
        rank.barrier()
        assert has_waited(dispatch.exchange) == (not memory.is_own)
        rank.barrier()
    assert dispatch.exchange.failures() == 0
    dispatch.exchange.close()


def has_waited(exchange: PeerExchange) -> bool:
    """Return whether the other rank has set its flag here for this rank's last wait."""
    memory = exchange.memory
    assert memory is not None
    flags = memory.view(memory.rank, 0, torch.int32, 2)
    assert flags[memory.rank] == memory.state[0]
    return bool(flags[1 - memory.rank] == memory.state[0])


def test_steps_come_in_pairs() -> None:
    for steps in (11, 8):
        with pytest.raises(ValueError, match=f"--steps {steps} must be even, and 10 or more"):
            cases("cuda", quick=False, steps=steps)
    assert cases("cuda", quick=False, steps=10)[0].steps == 10


def test_messages_of_the_whole_model_are_judged() -> None:
    (case,) = cases("cuda", quick=False)
    assert (case.judges, case.num_processes, case.expert_dispatch) == (True, 2, "peer")
    seconds = [9.0] * 6 + [1.2 if step % 2 else 1.19 for step in range(7, case.steps - 1)] + [5.0, 5.0]
    each = {"_share": (0.5, 0.4), "_push_sums": (3.0, 2.0)}
    traces = [
        [Kernel(name, "7", 0, 1e3 * ms * late) for name, steps in each.items() for ms in steps] for late in (1.0, 2.0)
    ]
    result = {"case": case.name, "judges": True, **summary(seconds, traces)}
    assert result["added_ms"] == pytest.approx(10 + 0.5)
    assert result["kernels"]["_push_sums"] == pytest.approx((4.5, 3.0))
    assert verdicts(result) == ["met"]
    assert verdicts({**result, "added_ms": 15.1}) == ["missed"]
    assert "links add 10.5 ms" in table(result, "cuda")
    assert "added_ms" not in summary(seconds, [])
