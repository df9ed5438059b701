"""The Lightning strategy.

`train_step.py`: one optimizer step from top to bottom; start here. `eval_step.py`: validation, test and prediction.
`module.py`: `D9DModule`, what a model implements. `strategy.py`: `D9DStrategy`, the hooks Lightning calls, each short.
`precision.py`: gradient clipping. What is changed on Lightning's Trainer is in `lightning_d9d/loop/`; how ranks agree
while they run, in `lightning_d9d/coordination/`.
"""
