"""Replicas that mix their weights instead of summing gradients: the parts of a fit with `replicate_sync`."""

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
from lightning_d9d.mesh.groups import abandon
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
"""The name under which a checkpoint stores the round of its replicas."""


class MixedReplicas:
    """The replicas of a job, from the viewpoint of a rank in one of them.

    Args:
        config: The topology and the settings of mixing.
        ranks: The ranks of the job, with separate replicas.
    """

    def __init__(self, config: ReplicaMixing, ranks: JobRanks) -> None:
        self.config = config
        self.mixer: Mixer | None = None
        """The mixer during a fit, else None."""
        self._ranks = ranks
        self._mean: ReplicaMean | None = None
        self._model: nn.Module = nn.Module()
        self._tied: Mapping[nn.Parameter, Any] = {}
        self._optimizers: Sequence[Optimizer] = ()
        self._trained: set[nn.Parameter] = set()
        """The parameters that are trained, or were in this fit."""
        self._report: ReplicaReport | None = None
        self._saved: Mapping[str, Any] | None = None
        self._has_ended = False
        """True once all messages of the fit have been received."""

    def __deepcopy__(self, memo: dict[int, Any]) -> MixedReplicas:
        """Return this object: groups and messages belong to one run, and copies of its Trainer share them."""
        return self

    def check(self, trainer: L.Trainer, module: L.LightningModule, *, steps_in_backward: bool) -> None:
        """Refuse settings that cannot be combined with replicas that mix. Local.

        Args:
            trainer: Trainer that is about to run.
            module: The module of the run.
            steps_in_backward: Whether parameters are updated inside the backward.

        Raises:
            ConfigError: The number of replicas does not fit the topology, or another part averages or steps.
        """
        name = f"replicate_sync={self.config.topology!r}"
        Rounds(self.config.topology, self._ranks.num_replicas)
        if steps_in_backward:
            raise ConfigError(
                f"{name} with step_in_backward=True: weights are mixed between backward and update, which needs all "
                "gradients; leave step_in_backward out"
            )
        if not module.automatic_optimization:
            raise ConfigError(
                f"{name}: {type(module).__name__} steps its optimizers itself (automatic_optimization is False), so no "
                "single step ends a round; leave that to Lightning, or set replicate_sync='all_reduce'"
            )
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            averages = getattr(callback, "averages_weights", False)
            if averages or isinstance(callback, StochasticWeightAveraging | WeightAveraging):
                raise ConfigError(
                    f"{name} with the callback {type(callback).__name__}: each replica would average its own weights. "
                    "Leave the callback out: validation and checkpoints have the mean of all replicas anyway"
                )

    def make_equal(self, model: nn.Module) -> None:
        """Overwrite parameters and buffers by those of the first replica. Collective over all ranks."""
        group = self._all_replicas()
        tensors = [*model.parameters(), *shared_buffers(model)]
        broadcast_tensors(map(local, tensors), group, dist.get_process_group_ranks(group)[0])

    def open(self, model: nn.Module, tied: TiedParameters, optimizers: Sequence[Optimizer]) -> None:
        """Set up a fit. Collective over all ranks.

        Args:
            model: The module, with its weights loaded.
            tied: The parameters that other pipeline ranks have, too.
            optimizers: Optimizers of the module.

        Raises:
            ConfigError: The module does not have exactly one optimizer that steps once.
        """
        if len(optimizers) != 1:
            raise ConfigError(
                f"replicate_sync={self.config.topology!r} supports one optimizer, whose step ends a round; the module "
                f"has {len(optimizers)}: put their parameters into groups of one optimizer"
            )
        check_steps_once(optimizers[0])
        self._model, self._tied, self._optimizers = model, tied, optimizers
        self._trained, self._has_ended = set(), False
        clock = WaitClock(self._ranks.device)
        rounds, size = Rounds(self.config.topology, self._ranks.num_replicas), int(self.config.bucket_mb * 2**20)
        options: dict[str, Any] = {
            "adaptive": self.config.adaptive,
            "peer_copies": self.config.peer_copies,
            "observer": clock,
        }
        self.mixer = Mixer(rounds, self._ranks.mesh, bucket_bytes=size, **options)
        everyone = self._all_replicas()
        self._mean = ReplicaMean(everyone, size)
        self._report = ReplicaReport(self._ranks, everyone, clock)

    def begin(self, path: object) -> None:
        """Begin training, perhaps from a checkpoint. Collective over all ranks.

        Each rank restores its own values of a checkpoint, if all of them have those; otherwise all continue from the
        mean.

        Args:
            path: Path of the checkpoint.
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
        """Begin the next round, after the step of the optimizer. Collective over the edge, without waiting.

        Args:
            trainer: Trainer that knows whether this step logs.
            module: Module that logs.
            norm: The norm of the replica's gradients, if it is known.
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
        """Replace weights and states of the optimizer by the mean of all replicas during a save. Collective.

        Before that, each rank writes its own values beside the checkpoint, from which as many replicas resume exactly.

        Args:
            checkpoint: Checkpoint that gets the round; without states of optimizers, training cannot resume from it.
            path: Path; equal on all ranks.
        """
        mean, mixer = self._mean, self.mixer
        if mean is None or mixer is None:
            yield
            return
        was_in_place = mean.is_in_place
        mean.revert()
        mixer.settle()
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
        """Keep a checkpoint's information about rounds until training begins. Local."""
        self._saved = checkpoint.get(MIXING)

    def global_average(self) -> Tensor | None:
        """Put the mean of all replicas in place of weights and buffers, until `revert`. Collective over all ranks.

        Training must not continue before `revert`.

        Returns:
            The distance of this replica from the mean, a float64 scalar. None outside of a fit.
        """
        if self._mean is None or self._mean.is_in_place:
            return None
        squared = self._take_mean()
        if squared is None or self._report is None:
            return None
        self._report.centre = self._report.whole(squared).sqrt()
        return self._report.centre

    def revert(self) -> None:
        """Restore each replica's own values. Local; does nothing if they are in place."""
        if self._mean is not None:
            self._mean.revert()

    def end(self) -> None:
        """End training: all replicas get the mean. Collective over all ranks."""
        if self.mixer is not None:
            self.mixer.drop()
            if self._report is not None:
                self._report.end()
            if self._mean is not None:
                self._take_mean(with_states=True, keeps=False)
            self._has_ended = True

    def close(self) -> None:
        """End a run. Local. After an error, messages may be under way, so the next run gets other groups."""
        if self.mixer is not None:
            self.mixer.close()
            if not self._has_ended:
                for group in (*self.mixer.groups, *(() if self._mean is None else (self._mean.group,))):
                    abandon(group)
        self.mixer = self._mean = self._report = None
        self._optimizers, self._trained, self._model, self._tied = (), set(), nn.Module(), {}

    def _all_replicas(self) -> dist.ProcessGroup:
        """Return the ranks at this rank's place in all replicas. Collective over all ranks."""
        return self._ranks.mesh.mixing_group([range(self._ranks.num_replicas)])

    def _update(self) -> None:
        """Mix parameters that are trained now, or were trained before: replicas differ in both. Local."""
        assert self.mixer is not None
        parameters = [p for p in self._model.parameters() if p.requires_grad or p in self._trained]
        if len(parameters) != len(self._trained):
            self._trained = {*parameters}
            self.mixer.take(alike(parameters, self._tied))

    def _take_mean(self, *, with_states: bool = False, keeps: bool = True) -> Tensor | None:
        assert self._mean is not None
        assert self.mixer is not None
        self.mixer.settle()
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
        """Return all tensors of a replica, in the same order each time."""
        return [*self._model.parameters(), *self._model.buffers(), *self._states()]


def alike(tensors: Iterable[Tensor], tied: Mapping[nn.Parameter, Any]) -> list[list[Tensor]]:
    """Group tensors with the same sharding: all copies of a tensor are then with the same others, in the same order.

    Args:
        tensors: This rank's.
        tied: The tensors that other pipeline ranks have, too, which may have others in between.
    """
    batches: dict[Hashable, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        shared = tied.get(tensor) if isinstance(tensor, nn.Parameter) else None
        batches[sharding_of(tensor) if shared is None else shared.ranks].append(tensor)
    for key, members in batches.items():
        if isinstance(key, tuple) and members and isinstance(members[0], nn.Parameter) and members[0] in tied:
            members.sort(key=lambda each: tied[each].name)  # type: ignore[index]
    return list(batches.values())
