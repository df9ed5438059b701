"""What batches are read from. `resume.py`: loaders that go on in the middle of an epoch; `workers.py`: their seeds."""

from lightning_d9d.data.resume import can_resume_by_sampler, is_place_of_sampler, make_resumable
from lightning_d9d.data.workers import seed_workers

__all__ = ["can_resume_by_sampler", "is_place_of_sampler", "make_resumable", "seed_workers"]
