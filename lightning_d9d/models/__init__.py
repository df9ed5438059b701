"""Models in plain torch, one package each.

A model's package holds its configuration (`config.py`), the network on one device (`model.py`), its Hugging Face layout
on disk (`huggingface.py`) and the LightningModules that train it (`module.py`, the only file that imports Lightning).
"""
