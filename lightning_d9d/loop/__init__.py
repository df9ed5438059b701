"""The only package where objects of Lightning's Trainer are changed.

`patches.py`: everything that a run replaces, and how it is restored; start here. `shutdown.py`: signals and failing
ranks. `interrupt.py`: Ctrl-C and SIGTERM in one process. `uneven.py`: loaders of unequal lengths. `none_batches.py`:
loaders that yield None. `deferred_saves.py`: saves inside of accumulation windows. `display.py` and `progress.py`:
progress bars and summaries. `launch.py`: checks and settings before ranks join.
"""
