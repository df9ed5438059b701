"""`AimLogger` logs runs to a repository of Aim."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.logger import _convert_params, _flatten_dict
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment

from lightning_d9d.errors import ConfigError

_SUBSETS = ("train", "val", "test")


class AimLogger(Logger):
    """Logs to [Aim](https://aimstack.io), which needs no server: `aim up` shows the repository.

    A value `val_loss` becomes the metric `loss` in the context `{"subset": "val"}`, so that Aim draws it beside that of
    training. Only rank 0 writes. Needs the package `aim` (extra `aim`).

    Args:
        save_dir: The directory that contains the repository `.aim`; also the address of a server (`aim://...`).
        experiment: The name under which Aim groups runs.
        run_hash: Hash of a run to continue; by default a new run.
        system_seconds: How often Aim's own thread records the use of the host; None: never.

    Raises:
        ConfigError: `aim` is not installed.
    """

    def __init__(
        self,
        save_dir: str | Path = ".",
        experiment: str | None = None,
        run_hash: str | None = None,
        system_seconds: float | None = None,
    ) -> None:
        super().__init__()
        try:
            from aim import Run  # type: ignore[import-not-found]
        except ImportError as error:
            raise ConfigError(
                "AimLogger needs aim, which is not installed: pip install 'lightning-d9d[aim]', or choose another "
                "logger"
            ) from error
        self._open = Run
        self._save_dir = str(save_dir)
        self._name = experiment
        self._hash = run_hash
        self._system_seconds = system_seconds
        self._run: Any = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Any:
        """Aim's `Run`, opened on first use; on rank 0."""
        if self._run is None:
            self._run = self._open(
                run_hash=self._hash,
                repo=self._save_dir,
                experiment=self._name,
                system_tracking_interval=self._system_seconds,
                capture_terminal_logs=False,
                log_system_params=False,
            )
            self._hash = self._run.hash
        return self._run

    @property
    def name(self) -> str | None:
        """The experiment."""
        return self._name

    @property
    def version(self) -> str | None:
        """The hash of the run; None before it is opened, and on other ranks."""
        return self._hash

    @property
    def save_dir(self) -> str:
        """The directory of the repository."""
        return self._save_dir

    def continue_run(self, run_hash: str) -> None:
        """Continue an earlier run. This must be called before the run is opened. Local."""
        self._hash = run_hash

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write values of a step."""
        for name, value in metrics.items():
            subset = next((each for each in _SUBSETS if name.startswith(f"{each}_")), None)
            short = name if subset is None else name.removeprefix(f"{subset}_")
            self.experiment.track(value, name=short, step=step, context={"subset": subset} if subset else {})

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Write hyperparameters, flattened; those of an earlier call stay."""
        for name, value in _flatten_dict(_convert_params(params)).items():
            plain = value if isinstance(value, bool | int | float | str) else str(value)
            self.experiment["hparams", name] = plain

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Close the run; a later call opens it again."""
        if self._run is not None:
            self._run.close()
            self._run = None
