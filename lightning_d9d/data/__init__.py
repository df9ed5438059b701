"""What batches are read from. `resume.py`: going on in the middle of an epoch; `workers.py`: random numbers."""

from lightning_d9d.data.resume import can_resume_by_sampler, is_place_of_sampler, make_resumable
from lightning_d9d.data.workers import seed_order, seed_workers

__all__ = ["can_resume_by_sampler", "is_place_of_sampler", "make_resumable", "seed_order", "seed_workers"]
