"""Replicas that mix their weights in place of summing gradients: what a fit does with `replicate_sync`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator, Hashable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import lightning as L
import torch.distributed as dist
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_d9d.errors import ConfigError
from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.mesh.collectives import broadcast_tensors
from lightning_d9d.mesh.sharding import local, sharding_of
from lightning_d9d.metrics.wait_clock import WaitClock
from lightning_d9d.mixing import ReplicaMixing
from lightning_d9d.mixing.mean import ReplicaMean
from lightning_d9d.mixing.mixer import Mixer
from lightning_d9d.mixing.rounds import Rounds
from lightning_d9d.pipeline.types import shared_buffers
from lightning_d9d.strategy.optimizer_step import check_steps_once
from lightning_d9d.strategy.own_values import OwnValues
from lightning_d9d.strategy.ranks import JobRanks
from lightning_d9d.strategy.replica_report import ReplicaReport
from lightning_d9d.strategy.tied import TiedParameters

MIXING = "lightning_d9d_mixing"
"""Under which name a checkpoint has the round of its replicas."""


class MixedReplicas:
    """The replicas of a job, as this rank of one of them knows them.

    Args:
        config: Who mixes with whom, and how.
        ranks: The ranks of the job, with replicas apart.
    """

    def __init__(self, config: ReplicaMixing, ranks: JobRanks) -> None:
        self.config = config
        self.mixer: Mixer | None = None
        """In a fit."""
        self._ranks = ranks
        self._mean: ReplicaMean | None = None
        self._model: nn.Module = nn.Module()
        self._tied: Mapping[nn.Parameter, Any] = {}
        self._optimizers: Sequence[Optimizer] = ()
        self._trained: set[nn.Parameter] = set()
        """What is trained, or was in this fit."""
        self._report: ReplicaReport | None = None
        self._saved: Mapping[str, Any] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedReplicas:
        """Groups and messages are of one run; copies of its Trainer share them."""
        return self

    def check(self, trainer: L.Trainer, module: L.LightningModule, *, steps_in_backward: bool) -> None:
        """Refuse what cannot be beside replicas that mix. Local.

        Args:
            trainer: About to run.
            module: The module that it runs.
            steps_in_backward: Whether parameters are updated inside the backward.

        Raises:
            ConfigError: The number of replicas does not fit the topology, or something else averages or steps.
        """
        name = f"replicate_sync={self.config.topology!r}"
        Rounds(self.config.topology, self._ranks.num_replicas)
        if steps_in_backward:
            raise ConfigError(
                f"{name} with step_in_backward=True: weights are mixed between backward and update, and then all "
                "gradients must be there; leave step_in_backward out"
            )
        if not module.automatic_optimization:
            raise ConfigError(
                f"{name}: {type(module).__name__} steps its optimizers itself (automatic_optimization is False), so "
                "no one step ends a round; leave that to Lightning, or take replicate_sync='all_reduce'"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            averages = getattr(callback, "averages_weights", False)
            if averages or isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ConfigError(
                    f"{name} with the callback {type(callback).__name__}: each replica would average weights of its "
                    "own. Leave the callback out: validation and checkpoints have the mean of all replicas anyway"
                )

    def make_equal(self, model: nn.Module) -> None:
        """Overwrite parameters and buffers by those of the first replica. Collective over all ranks."""
        group = self._all_replicas
        tensors = [*model.parameters(), *shared_buffers(model)]
        broadcast_tensors(map(local, tensors), group, dist.get_process_group_ranks(group)[0])

    def open(self, model: nn.Module, tied: TiedParameters, optimizers: Sequence[Optimizer]) -> None:
        """Set up a fit. Collective over all ranks.

        Args:
            model: The module, with its weights in place.
            tied: The parameters that other pipeline ranks have, too.
            optimizers: Of the module.

        Raises:
            ConfigError: The module has not one optimizer that steps once.
        """
        if len(optimizers) != 1:
            raise ConfigError(
                f"replicate_sync={self.config.topology!r} takes one optimizer, whose step ends a round; the module has "
                f"{len(optimizers)}: put their parameters into groups of one"
            )
        check_steps_once(optimizers[0])
        self._model, self._tied, self._optimizers = model, tied, optimizers
        self._trained = set()
        clock = WaitClock(self._ranks.device)
        rounds, size = Rounds(self.config.topology, self._ranks.num_replicas), int(self.config.bucket_mb * 2**20)
        options: dict[str, Any] = {"adaptive": self.config.adaptive, "observer": clock}
        self.mixer = Mixer(rounds, self._ranks.mesh, bucket_bytes=size, **options)
        self._mean = ReplicaMean(self._all_replicas, size)
        self._report = ReplicaReport(self._ranks, self._all_replicas, clock)

    def begin(self, path: object) -> None:
        """Training begins, from a checkpoint perhaps. Collective over all ranks.

        Each rank takes up its own values of a checkpoint, if all of them have those; else all go on from the mean.

        Args:
            path: Of the checkpoint.
        """
        mixer = self.mixer
        assert mixer is not None
        saved, self._saved = self._saved, None
        if saved is not None:
            mixer.num_launched = int(saved["num_rounds"])
            own = OwnValues(str(path), self._ranks.rank)
            if all(Ranks().all_gather(own.fit(saved, self._ranks.num_replicas, self._ranks.world_size))):
                with Ranks().agreed("own values of replicas cannot be taken up"):
                    own.load(self._tensors())
                self._update()
                mixer.repeat()

    def finish(self, optimizer: Optimizer) -> None:
        """Mix with the edge, before the optimizer steps. Collective over the edge."""
        assert self.mixer is not None
        self.mixer.finish(optimizer)

    def launch(self, trainer: L.Trainer, module: L.LightningModule, norm: Tensor | None) -> None:
        """Begin the next round, behind the step of the optimizer. Collective over the edge, without waiting.

        Args:
            trainer: Says whether this step logs.
            module: Logs.
            norm: The norm of the replica's gradients, where it is known.
        """
        assert self.mixer is not None
        assert self._report is not None
        every = trainer.log_every_n_steps  # type: ignore[attr-defined]
        if every and (trainer.global_step + 1) % every == 0:
            self._report.exchange(module, self.mixer.squared_distance, norm)
        self.mixer.measures = every > 0 and (trainer.global_step + 2) % every == 0
        self._update()
        self.mixer.launch()

    @contextmanager
    def mean_in_checkpoint(self, checkpoint: dict[str, Any], path: str) -> Generator[None]:
        """Open around a save: weights and states of the optimizer are the mean of all replicas. Collective.

        Before, each rank writes its own values beside the checkpoint, from which as many replicas go on exactly.

        Args:
            checkpoint: Gets the round; without states of optimizers nobody trains on from it.
            path: Equal on all ranks.
        """
        mean, mixer = self._mean, self.mixer
        if mean is None or mixer is None:
            yield
            return
        was_in_place = mean.is_in_place
        mean.revert()
        if "optimizer_states" in checkpoint:
            checkpoint[MIXING] = {
                "num_rounds": mixer.num_launched,
                "num_replicas": self._ranks.num_replicas,
                "num_ranks": self._ranks.world_size,
                "global_step": checkpoint["global_step"],
            }
            with Ranks().agreed(f"own values of replicas cannot be saved beside {path!r}"):
                OwnValues(path, self._ranks.rank).save(checkpoint[MIXING], self._tensors())
        self._take_mean(with_states="optimizer_states" in checkpoint)
        try:
            yield
        finally:
            mean.revert()
            if was_in_place:
                self._take_mean()

    def opened(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep what a checkpoint says of rounds, until training begins. Local."""
        self._saved = checkpoint.get(MIXING)

    def global_average(self) -> Tensor | None:
        """Put the mean of all replicas in the place of weights and buffers, until `revert`. Collective over all ranks.

        Training must not go on before `revert`.

        Returns:
            The distance of this replica to the mean, a float64 scalar. None outside of a fit.
        """
        if self._mean is None or self._mean.is_in_place:
            return None
        squared = self._take_mean()
        if squared is None or self._report is None:
            return None
        self._report.centre = self._report.whole(squared).sqrt()
        return self._report.centre

    def revert(self) -> None:
        """Put each replica's own values back. Local; nothing where they are in place."""
        if self._mean is not None:
            self._mean.revert()

    def end(self, *, keeps_mean: bool = True) -> None:
        """Training ends: all replicas get the mean. Collective over all ranks.

        Args:
            keeps_mean: Whether they get it; else they stay as they are.
        """
        if self.mixer is not None:
            self.mixer.drop()
            if self._report is not None:
                self._report.end()
            if keeps_mean and self._mean is not None:
                self._take_mean(with_states=True, keeps=False)

    def close(self) -> None:
        """End a run. Local."""
        if self.mixer is not None:
            self.mixer.close()
        self.mixer = self._mean = self._report = None
        self._optimizers, self._trained, self._model, self._tied = (), set(), nn.Module(), {}

    @property
    def _all_replicas(self) -> dist.ProcessGroup:
        return self._ranks.mesh.mixing_group([range(self._ranks.num_replicas)])

    def _update(self) -> None:
        """Mix what is trained now, or was before: replicas differ in both. Local."""
        assert self.mixer is not None
        parameters = [p for p in self._model.parameters() if p.requires_grad or p in self._trained]
        if len(parameters) != len(self._trained):
            self._trained = {*parameters}
            self.mixer.take(alike(parameters, self._tied))

    def _take_mean(self, *, with_states: bool = False, keeps: bool = True) -> Tensor | None:
        assert self._mean is not None
        parameters = [p for p in self._model.parameters() if p.requires_grad or p in self._trained]
        batches = alike(parameters, self._tied)
        rest = [*shared_buffers(self._model), *(self._states() if with_states else ())]
        floats = [each for each in rest if each.is_floating_point() and each.numel() > 1]
        others = [each for each in rest if not (each.is_floating_point() and each.numel() > 1)]
        return self._mean.take(batches, alike(floats, {}), others, keeps=keeps)

    def _states(self) -> list[Tensor]:
        found: list[Tensor] = []
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    found += [each for each in optimizer.state.get(parameter, {}).values() if isinstance(each, Tensor)]
        return found

    def _tensors(self) -> list[Tensor]:
        """Return all that a replica has of its own, in the same order each time."""
        return [*self._model.parameters(), *self._model.buffers(), *self._states()]


def alike(tensors: Iterable[Tensor], tied: Mapping[nn.Parameter, Any]) -> list[list[Tensor]]:
    """Put tensors together that lie alike: all copies of one of them are then with the same others, in the same order.

    Args:
        tensors: This rank's.
        tied: Those of them that other pipeline ranks have, too, which may have others in between.
    """
    batches: dict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        shared = tied.get(tensor) if isinstance(tensor, nn.Parameter) else None
        batches[sharding_of(tensor) if shared is None else shared.ranks].append(tensor)
    for key, members in batches.items():
        if isinstance(key, tuple) and members and isinstance(members[0], nn.Parameter) and members[0] in tied:
            members.sort(key=lambda each: tied[each].name)  # type: ignore[index]
    return list(batches.values())
