"""What batches are read from.

`resume.py`: going on in the middle of an epoch; `workers.py`: random numbers.
"""

from lightning_d9d.data.resume import (
    DataRank,
    can_replay,
    can_resume_by_sampler,
    is_place_of_sampler,
    is_replayed,
    make_replayed,
    make_resumable,
    resumes_at,
    without_resuming,
)
from lightning_d9d.data.workers import seed_order, seed_workers

__all__ = [
    "DataRank",
    "can_replay",
    "can_resume_by_sampler",
    "is_place_of_sampler",
    "is_replayed",
    "make_replayed",
    "make_resumable",
    "resumes_at",
    "seed_order",
    "seed_workers",
    "without_resuming",
]
