"""The one room where objects of Lightning's Trainer are changed.

`patches.py`: what is replaced for a run, and how it is put back; start here. `shutdown.py`: signals and failing ranks.
`interrupt.py`: Ctrl-C and SIGTERM in one process. `uneven.py`: loaders of unequal lengths. `none_batches.py`: loaders
that give None. `deferred_saves.py`: saves inside of accumulation windows. `display.py` and `progress.py`: progress bars
and summaries. `launch.py`: before ranks join.
"""
