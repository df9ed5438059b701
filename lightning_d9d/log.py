"""The package's logger, whose messages say which rank they come from."""

from __future__ import annotations

import logging

logger = logging.getLogger("lightning_d9d")


class _RankName(logging.Filter):
    """Puts the rank's name before each message; empty in one process."""

    rank_name = ""

    def filter(self, record: logging.LogRecord) -> bool:
        if self.rank_name:
            record.msg = f"[{self.rank_name}] {record.msg}"
        return True


_filter = _RankName()
logger.addFilter(_filter)


def name_rank(name: str) -> None:
    """Call this process by its place in the mesh, such as `pp0-dp3`, in all further messages; "" for no name."""
    _filter.rank_name = name
