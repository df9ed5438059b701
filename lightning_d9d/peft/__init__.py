"""Choose what of a model is trained: adapters of low rank (`LoRA`), some parameters (`FullTune`), or both (`Stack`).

`inject` gives a module what a method asks for and freezes the rest, before the module is sharded or compiled. `merge`
adds adapters to weights, and `unmerge` takes them out again.
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
