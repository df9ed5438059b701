"""The package's logger, whose messages name their rank."""

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
    """Set the rank's name in all further messages, such as `pp0-dp3`; "" for none."""
    _filter.rank_name = name
