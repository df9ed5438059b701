"""The Lightning strategy.

`train_step.py`: one optimizer step from top to bottom; start here. `eval_step.py`: validation, test and prediction.
`module.py`: `D9DModule`, what a model implements. `strategy.py`: `D9DStrategy`, the hooks Lightning calls, each short.
`precision.py`: gradient clipping. `lightning_d9d/loop/` changes Lightning's Trainer; `lightning_d9d/coordination/` has
the agreement of ranks while they run.
"""
