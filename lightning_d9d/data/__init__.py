"""What batches are read from. `resume.py`: loaders that go on in the middle of an epoch."""

from lightning_d9d.data.resume import can_resume_by_sampler, make_resumable

__all__ = ["can_resume_by_sampler", "make_resumable"]
