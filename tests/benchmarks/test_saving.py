"""Both kinds of saves must leave the same checkpoint."""

from __future__ import annotations

from dataclasses import replace

import torch

from lightning_d9d.checkpoint import open_directory
from tests.benchmarks.frame import measure
from tests.benchmarks.saving import ASYNCHRONOUS, SYNCHRONOUS, cases
from tests.harness.compare import assert_bitwise_equal


def test_both_save_the_same() -> None:
    saved = {}

    def read(contenders, device):
        for name, contender in contenders.items():
            contender.settle()
            checkpoint = open_directory(contender.path, alone=True)
            assert checkpoint.values["global_step"] == 1
            saved[name] = checkpoint.read()
        return {}

    measured = measure(replace(cases("cpu", quick=True)[0], afterwards=read), torch.device("cpu"))
    assert len(measured[ASYNCHRONOUS]["seconds_per_step"]) == 2
    assert any(name.startswith("optimizer_") for name in saved[SYNCHRONOUS])
    assert saved[SYNCHRONOUS].keys() == saved[ASYNCHRONOUS].keys()
    for name, tensor in saved[SYNCHRONOUS].items():
        assert_bitwise_equal(name, saved[ASYNCHRONOUS][name], tensor)
