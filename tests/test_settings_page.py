"""The page of all settings: its tables have every field of the configurations, with the defaults of the code."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_d9d import (
    CheckpointConfig,
    D9DStrategy,
    GradSyncConfig,
    MeshConfig,
    ParallelConfig,
    TimeoutConfig,
)
from lightning_d9d.datamodules import ChatDataModule, TokenDataModule
from lightning_d9d.mixing import ReplicaMixing
from lightning_d9d.models.qwen3_moe import Qwen3MoePretraining
from lightning_d9d.modules.balance import BalanceConfig
from lightning_d9d.optim import StochasticAdamW
from lightning_d9d.peft import LoRA
from lightning_d9d.schedule import Auto

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "settings.md"
ROW = re.compile(r"^\| `(\w+)` \| `(.*?)` \|", re.M)
CONFIGS = (
    MeshConfig,
    ParallelConfig,
    GradSyncConfig,
    CheckpointConfig,
    TimeoutConfig,
    ReplicaMixing,
    BalanceConfig,
    LoRA,
)


def shown(default: Any) -> str:
    return f"{type(default).__name__}()" if dataclasses.is_dataclass(default) else repr(default)


def rows_of(name: str) -> list[tuple[str, str]]:
    sections = re.split(r"^## `(\w+)`$", PAGE.read_text(encoding="utf-8"), flags=re.M)
    return ROW.findall(dict(zip(sections[1::2], sections[2::2], strict=True))[name])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)
def test_fields_and_defaults_of_a_config(config: Any) -> None:
    assert rows_of(config.__name__) == [(each.name, repr(each.default)) for each in dataclasses.fields(config)]


def test_arguments_of_the_strategy() -> None:
    defaults = {name: each.default for name, each in inspect.signature(D9DStrategy).parameters.items()}
    named = {name: shown(value) for name, value in defaults.items()}
    assert rows_of("D9DStrategy") == [*named.items()]


@pytest.mark.parametrize("owner", [Auto, Qwen3MoePretraining, TokenDataModule, ChatDataModule, StochasticAdamW])
def test_arguments_of_a_class(owner: type) -> None:
    defaults = {name: each.default for name, each in inspect.signature(owner).parameters.items()}
    named = {name: "required" if value is inspect.Parameter.empty else shown(value) for name, value in defaults.items()}
    assert rows_of(owner.__name__) == [*named.items()]
