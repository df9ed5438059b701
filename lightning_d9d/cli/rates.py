"""`lightning-d9d learning-rate` draws the learning rate of a `fit`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lightning_d9d.cli.training import D9DCLI
from lightning_d9d.errors import ConfigError, reason
from lightning_d9d.optim import plot_learning_rates
from lightning_d9d.paths import make_folder_of
from lightning_d9d.strategy.module import D9DModule


class _Drawing(D9DCLI):
    """Builds model and data as `fit` does, without a Trainer, and draws."""

    picture: Path

    def instantiate_trainer(self, **kwargs: Any) -> Any:
        """Build no Trainer, because it would look for the devices of the run."""

    def _run_subcommand(self, subcommand: str) -> None:
        num_steps = self.config[subcommand]["trainer"]["max_steps"]
        if num_steps < 1:
            raise ConfigError(
                f"max_steps={num_steps} of the Trainer does not give the number of steps to draw; set "
                "--trainer.max_steps"
            )
        if not isinstance(self.model, D9DModule):
            raise ConfigError(
                f"{type(self.model).__name__} is a plain LightningModule, whose schedule is known only in a run. Draw "
                "it in Python (lightning_d9d.optim.plot_learning_rates), or make it a D9DModule"
            )
        rates = self.model.learning_rates(num_steps)
        try:
            plot_learning_rates({"learning rate": rates}, self.picture)
        except OSError as error:
            raise ConfigError(f"{self.picture} cannot be written: {reason(error)}; give another file") from error
        sys.stdout.write(f"{self.picture}: {num_steps} steps, from {rates[0]:g} over {max(rates):g} to {rates[-1]:g}\n")


def run(_: object = None) -> None:
    """Run the subcommand of `sys.argv`: its arguments are the picture and options of `fit`.

    Raises:
        ConfigError: The schedule is impossible or known only in a run, or the picture cannot be written.
    """
    words = sys.argv[2:]
    if words[0] in ("-h", "--help"):
        sys.stdout.write("usage: lightning-d9d learning-rate PICTURE [options of fit]\n\n")
        words.insert(0, "")
    else:
        make_folder_of(words[0])
    _Drawing.picture = Path(words[0])
    sys.argv[1:] = ["fit", *words[1:]]
    _Drawing(parser_kwargs={"prog": "lightning-d9d"})
