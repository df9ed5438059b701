"""The Lightning strategy.

`train_step.py`: one optimizer step from top to bottom; start here. `eval_step.py`: validation, test and prediction.
`module.py`: `D9DModule`, what a model implements. `strategy.py`: `D9DStrategy`, the hooks Lightning calls, each short.
`precision.py`: gradient clipping. `progress.py`: the loss in the progress bar. `shutdown.py` and `watchdog.py`:
signals, failing ranks and ranks that hang.
"""
