"""What `test_launched_rank_whose_launcher_is_killed` runs on two ranks: the launcher is killed before they meet."""

import os
import signal
import sys
import time
from pathlib import Path

from lightning_d9d import D9DStrategy
from tests.strategy.plain import Plain, loader, trainer

FOLDER = Path(sys.argv[1])
MEETS = FOLDER / "rank 1"


class Killed(D9DStrategy):
    """Rank 0, which launched rank 1, is killed when that is about to meet it."""

    def setup_environment(self) -> None:
        """Set up the environment as the module describes."""
        if self.local_rank == 0:
            while not MEETS.exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)
        written = FOLDER / "partial"
        written.write_text(str(os.getpid()))
        written.rename(MEETS)
        super().setup_environment()


if __name__ == "__main__":
    trainer(strategy=Killed(), devices=2, max_steps=1).fit(Plain(), loader(8))
