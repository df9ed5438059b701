"""Weights of a checkpoint, or a part of them, as the beginning of another run on another mesh."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from lightning_d9d import CheckpointConfig, D9DStrategy, MeshConfig, StateError
from lightning_d9d.callbacks import InitialWeights
from lightning_d9d.checkpoint import Differences
from lightning_d9d.strategy.weights import report
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext
from tests.strategy.plain import trainer
from tests.strategy.sharded import Sharded, WholeWeights


class Headed(Sharded):
    """A model with a head that was not saved, and without a buffer that was."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 5).double()
        del self.num_steps
        self.num_steps = 0  # type: ignore[assignment]


class Seen(WholeWeights):
    """Records the weights before the first step."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = module.whole()

    def on_train_end(self, trainer: Any, module: Any) -> None:
        pass


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", ["sharded", "consolidated"])
def test_whole_and_in_part_onto_a_mesh(rank: RankContext, mode: str) -> None:
    def train(module: Sharded, mesh: MeshConfig, *callbacks: Callback, max_steps: int) -> dict[str, Tensor]:
        whole = WholeWeights()
        strategy = D9DStrategy(mesh=mesh, checkpoint=CheckpointConfig(mode=mode))  # type: ignore[arg-type]
        run = trainer(strategy, 2, str(rank.device), callbacks=[*callbacks, whole], max_steps=max_steps)
        run.fit(module)
        run.save_checkpoint(rank.tmp_dir / f"{max_steps}.ckpt")
        return whole.weights

    weights = train(Sharded(optimizer="adamw"), MeshConfig(data_parallel_replicate=2), max_steps=1)
    path = rank.tmp_dir / "1.ckpt"

    def fit(module: Sharded, **options: Any) -> tuple[InitialWeights, dict[str, Tensor]]:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
        initial, seen = InitialWeights(path, **options), Seen()
        train(module, MeshConfig(data_parallel_shard=2), initial, seen, max_steps=2)
        return initial, seen.weights

    initial, whole = fit(Sharded())
    assert initial.differences == ([], [])
    for name, weight in weights.items():
        assert_bitwise_equal(name, whole[name], weight)
    _, part = fit(Sharded(), prefix="net.3.")
    assert not part["net.0.weight"].any()
    assert_bitwise_equal("net.3.weight", part["net.3.weight"], weights["net.3.weight"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        initial, headed = fit(Headed(), strict=False)
    texts = [text for each in caught if "not all was loaded: " in (text := str(each.message))]
    assert len(texts) == (2 if rank.rank == 0 else 0)
    assert all("2 are not in it" in text or "1 are not in the model: " in text for text in texts)
    assert (sorted(initial.differences.missing), initial.differences.unexpected) == (
        ["head.bias", "head.weight"],
        ["num_steps"],
    )
    assert_bitwise_equal("net.0.weight", headed["net.0.weight"], weights["net.0.weight"])
    with pytest.raises(StateError, match=r"prefix='nets\.': no name in the module begins .* the names are \S+; "):
        fit(Sharded(), prefix="nets.", strict=False)
    with pytest.raises(StateError, match=r"of another model: (model\.)?head\.\w+ is not in the"):
        fit(Headed())


def test_names_of_a_checkpoint_do_not_steer_a_terminal() -> None:
    with pytest.warns(UserWarning, match=r"not all was loaded: 1 are not in the model: \\x1b\[2J$"):
        report(Differences([], ["\x1b[2J"]), "step.ckpt")
