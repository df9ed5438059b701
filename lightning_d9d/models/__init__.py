"""Models in plain torch, one package each.

A model's package holds its configuration (`config.py`) and the network on one device (`model.py`). `huggingface.py`
reads and writes its Hugging Face layout. `module.py` has the LightningModules that train it, and only this file imports
Lightning.
"""
