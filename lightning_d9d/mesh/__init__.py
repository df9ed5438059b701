"""Process groups and the collectives that Lightning and torch lack. `collectives.py`: broadcast of many tensors."""
