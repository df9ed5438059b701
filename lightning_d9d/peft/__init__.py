"""Selects the trained parts of a model: adapters of low rank (`LoRA`), some parameters (`FullTune`), or both (`Stack`).

`inject` adds the adapters of a method to a module and freezes the rest, before the module is sharded or compiled.
`merge` adds adapters to weights, and `unmerge` removes them again.
"""

from lightning_d9d.peft.files import load_adapter, save_adapter
from lightning_d9d.peft.inject import inject, is_adapted, merge, trainable_parameters, unmerge
from lightning_d9d.peft.methods import FullTune, LoRA, PeftMethod, Stack

__all__ = [
    "FullTune",
    "LoRA",
    "PeftMethod",
    "Stack",
    "inject",
    "is_adapted",
    "load_adapter",
    "merge",
    "save_adapter",
    "trainable_parameters",
    "unmerge",
]
