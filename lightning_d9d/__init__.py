"""`lightning_d9d` is a PyTorch Lightning strategy for Qwen3-MoE and other models on any mix of parallelism.

`Trainer(strategy=D9DStrategy(...))` (or `strategy="d9d"`, registered by this import) trains plain LightningModules as
data-parallel replicas and `D9DModule`s microbatch by microbatch. Start reading at `strategy/train_step.py`.

This import takes milliseconds, because torch and Lightning are imported when the first name is used. So
`lightning_d9d.schedule` and the first checks of the command line need neither.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_d9d.registration import register_with_lightning

if TYPE_CHECKING:
    from lightning_d9d._public import *  # noqa: F403

__version__ = "0.1.0.dev0"

register_with_lightning()


def __getattr__(name: str) -> Any:
    if find_spec(f"lightning_d9d.{name}"):
        return import_module(f"lightning_d9d.{name}")
    public = import_module("lightning_d9d._public")
    if name in ("__all__", *public.__all__):
        return getattr(public, name)
    raise AttributeError(f"module 'lightning_d9d' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *import_module("lightning_d9d._public").__all__})
