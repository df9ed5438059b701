"""Histograms on meshes against those of whole tensors, by numpy."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig
from lightning_d9d.callbacks import Histograms
from lightning_d9d.callbacks.router_counts import named_routers
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.modules import TopKRouter
from lightning_d9d.parallel import ParallelConfig
from lightning_d9d.strategy.optimizers import first_names
from lightning_d9d.sync.histograms import BORDERS, bin_counts
from tests.callbacks.test_run_metrics import CONFIG, LENGTH, MESHES, others
from tests.harness.ranks import RankContext
from tests.strategy.plain import Plain, loader, trainer

Bins = list[tuple[float, int]]
"""The upper border of each bin that has something, and how much."""


class Recorder(TensorBoardLogger):
    """Keeps histograms, without the package."""

    def __init__(self) -> None:
        Logger.__init__(self)
        self.found: dict[tuple[str, int], Bins] = {}

    experiment: Any = property(lambda self: self)
    save_dir: Any = property(lambda self: None)
    version = name = log_dir = root_dir = save_dir

    def log_metrics(self, *args: Any, **kwargs: Any) -> None:
        pass

    log_hyperparams = save = finalize = after_save_checkpoint = log_graph = log_metrics  # type: ignore[assignment]

    def add_histogram_raw(
        self, name: str, bucket_limits: list[float], bucket_counts: list[int], global_step: int, **values: Any
    ) -> None:
        assert len(bucket_limits) == len(bucket_counts)
        assert values["num"] == sum(bucket_counts)
        assert values["min"] < bucket_limits[0] <= bucket_limits[-1] == values["max"]
        pairs = zip(bucket_limits, bucket_counts, strict=True)
        self.found[name, global_step] = [(limit, count) for limit, count in pairs if count]


def bins_of(values: np.ndarray[Any, Any]) -> Bins:
    counts, limits = np.histogram(values, [-np.inf, *BORDERS, np.inf])
    limits[-1] = 2 * BORDERS[-1]
    return [(float(limit), int(count)) for limit, count in zip(limits[1:], counts, strict=True) if count]


class Whole(L.Callback):
    """Takes the same of whole tensors."""

    def __init__(self) -> None:
        self.expected: dict[tuple[str, int], Bins] = {}
        self.probabilities: dict[str, list[Tensor]] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for name, router in named_routers(pl_module).items():
            router.register_forward_hook(partial(self._see, name))

    def _see(self, name: str, router: TopKRouter, inputs: tuple[Tensor], _: Any) -> None:
        if not torch.is_grad_enabled():  # the check of a first batch, which is no part of the step
            return
        with torch.no_grad():
            logits = inputs[0] @ router.weight.T
            exponents = (logits - logits.amax(-1, keepdim=True)).exp()
            self.probabilities.setdefault(name, []).append(exponents / exponents.sum(-1, keepdim=True))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        own = {}
        for parameter, name in first_names(pl_module.state_dict(keep_vars=True)).items():
            for kind, value in (("weights", parameter.detach()), ("gradients", parameter.grad)):
                assert value is not None
                whole = value.full_tensor() if isinstance(value, DTensor) else value
                own[f"{kind}/{name}", trainer.global_step] = bins_of(whole.numpy())
        seen, self.probabilities = self.probabilities, {}
        everywhere: dict[str, list[np.ndarray[Any, Any]]] = {}
        for theirs, seen_there in Ranks().all_gather((own, seen)):
            self.expected |= theirs
            for name, parts in seen_there.items():
                everywhere.setdefault(name, []).extend(part.flatten().numpy() for part in parts)
        for name, parts in everywhere.items():
            self.expected[f"router_probabilities/{name}", trainer.global_step] = bins_of(np.concatenate(parts))


def token_rows() -> list[dict[str, Tensor]]:
    ids = torch.randint(32, (12, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]


def check(degrees: dict[str, int] | None = None, world_size: int = 1, rank: int = 0) -> None:
    whole, recorder = Whole(), Recorder()
    strategy = D9DStrategy(mesh=MeshConfig(**(degrees or {})), microbatch_size=1)
    run = trainer(
        strategy,
        world_size,
        callbacks=[Histograms(every_n_steps=2, router_probabilities="*"), whole],
        logger=recorder,
        max_epochs=1,
        max_steps=3,
        precision="64-true",
    )
    data = DataLoader(token_rows(), batch_size=4 // run.num_devices)  # type: ignore[arg-type]
    run.fit(Qwen3MoePretraining(CONFIG, warmup_steps=2), data)
    if rank == 0:
        expected = {key: bins for key, bins in whole.expected.items() if key[1] != 1}
        num_named = {kind: len({name for name, _ in expected if name.startswith(kind)}) for kind in ("w", "g", "r")}
        assert num_named["w"] == num_named["g"] > num_named["r"] == CONFIG.num_hidden_layers
        of_routers = {key: sum(count for _, count in bins) for key, bins in expected.items() if "router" in key[0]}
        assert {key[1] for key in of_routers} == {0, 2}
        num_rows = 4 // run.num_devices * strategy.ranks.dp_size
        assert {*of_routers.values()} == {num_rows * LENGTH * CONFIG.num_experts}  # each token once, wherever it was
        assert recorder.found == expected
    else:
        assert recorder.found == {}


def test_one_process() -> None:
    check()


def test_recomputed_forwards_do_not_count_again() -> None:
    found = []
    for recompute in ("none", "full"):
        recorder = Recorder()
        histograms = Histograms(weights=None, gradients=None, router_probabilities="*.layers.1.*")
        strategy = D9DStrategy(parallel=ParallelConfig(recompute=recompute))  # type: ignore[arg-type]
        run = trainer(strategy, callbacks=[histograms], logger=recorder, max_steps=1, precision="64-true")
        module = Qwen3MoePretraining(CONFIG, warmup_steps=2)
        run.fit(module, DataLoader(token_rows(), batch_size=4))  # type: ignore[arg-type]
        found.append(recorder.found)
        assert not any(
            router._forward_hooks or hasattr(router, "counts_tokens") for router in named_routers(module).values()
        )
    assert list(found[0]) == [("router_probabilities/model.layers.1.mlp.gate", 0)]
    assert found[0] == found[1]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mesh", ["shard2 ep2", *others("pp2", "tp2")])
def test_two_ranks(rank: RankContext, mesh: str) -> None:
    check(MESHES[mesh], 2, rank.rank)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", ["pp2 rep2 ep2", *others("cp2 tp2")])
def test_four_ranks(rank: RankContext, mesh: str) -> None:
    check(MESHES[mesh], 4, rank.rank)


def test_bins() -> None:
    numbers = [0.0, -0.0, 1e-13, 1.0, -1.0, 1e30, -1e30, float("nan"), float("inf"), *BORDERS]
    values = torch.tensor(numbers, dtype=torch.float64)
    counts = bin_counts(values)
    finite = values[values.isfinite()].numpy()
    assert counts.tolist() == np.histogram(finite, [-np.inf, *BORDERS, np.inf])[0].tolist()
    assert counts[len(BORDERS) // 2] == 4  # with the lower border


def test_what_cannot_be_logged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"every_n_steps=0\) must be at least 1"):
        Histograms(every_n_steps=0)
    with pytest.raises(ConfigError, match=r"weights=None, gradients=None\) logs nothing"):
        Histograms(weights=None, gradients=None)
    with pytest.raises(ConfigError, match="needs a TensorBoardLogger or a WandbLogger"):
        trainer(D9DStrategy(), callbacks=[Histograms()]).fit(Plain(), loader(4))
    with pytest.raises(ConfigError, match="needs D9DStrategy, but the Trainer has SingleDeviceStrategy"):
        trainer("auto", callbacks=[Histograms()], logger=Recorder()).fit(Plain(), loader(4))
    with pytest.raises(ConfigError, match=r"gradients='x'\): no parameter has such a name; .* 'net.0.weight'"):
        trainer(D9DStrategy(), callbacks=[Histograms(gradients="x")], logger=Recorder()).fit(Plain(), loader(4))
    of_routers = Histograms(router_probabilities="x")
    with pytest.raises(ConfigError, match=r"router_probabilities='x'\): no router has such a name; there is none"):
        trainer(D9DStrategy(), callbacks=[of_routers], logger=Recorder()).fit(Plain(), loader(4))
    compiled = D9DStrategy(parallel=ParallelConfig(compile=True))
    with pytest.raises(ConfigError, match=r"router_probabilities='x'\) beside ParallelConfig.compile=True"):
        trainer(compiled, callbacks=[of_routers], logger=Recorder()).fit(Qwen3MoePretraining(CONFIG), loader(4))


@pytest.mark.loggers
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    module = Plain()
    logger = TensorBoardLogger(tmp_path, name="", version="run")
    before = module.net[0].weight.detach().clone()
    trainer(D9DStrategy(), callbacks=[Histograms(gradients=None)], logger=logger, max_epochs=1).fit(module, loader(8))
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    (event,) = events.Histograms("weights/net.0.weight")
    assert event.step == 0
    assert filled(event) == bins_of(before.double().numpy())


def filled(event: Any) -> Bins:
    found = zip(event.histogram_value.bucket_limit, event.histogram_value.bucket, strict=True)
    return [(limit, count) for limit, count in found if count]


@pytest.mark.loggers
def test_probabilities_of_routers_in_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    whole, logger = Whole(), TensorBoardLogger(tmp_path, name="", version="run")
    histograms = Histograms(weights=None, gradients=None, router_probabilities="*")
    run = trainer(D9DStrategy(), callbacks=[histograms, whole], logger=logger, max_steps=1, precision="64-true")
    run.fit(Qwen3MoePretraining(CONFIG, warmup_steps=2), DataLoader(token_rows(), batch_size=4))  # type: ignore[arg-type]
    events = EventAccumulator(str(tmp_path / "run")).Reload()
    expected = {name: bins for (name, _), bins in whole.expected.items() if "router" in name}
    assert len(expected) == CONFIG.num_hidden_layers
    assert {name: filled(*events.Histograms(name)) for name in expected} == expected
