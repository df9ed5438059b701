"""A batch without what the hooks of a `D9DModule` ask for: the error says what it has. Others stay as they are."""

from __future__ import annotations

import re
from collections import UserDict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_d9d import ConfigError, D9DStrategy, MeshConfig, StageInputs
from tests.harness.ranks import RankContext
from tests.strategy.pipelined import Pipelined, token_rows
from tests.strategy.plain import trainer
from tests.strategy.staged import Staged

X, Y = torch.zeros(4, 8), torch.zeros(4, dtype=torch.int64)
REMEDY = "; add the missing values in the DataLoader's collate_fn, or change the hook to use the batch's own"


class Encoding(UserDict[str, Any]):
    """A mapping with a method of its own for keys, as Hugging Face's."""


def fit(batch: Any, strategy: Any = None, module: Staged | None = None) -> None:
    loader: Any = DataLoader([batch], batch_size=None, collate_fn=lambda each: each)  # type: ignore[arg-type]
    trainer(strategy or D9DStrategy(), max_epochs=1).fit(module or Staged(), loader)


class Unpacking(Staged):
    def microbatch_inputs(self, microbatch: Any) -> StageInputs:
        x, _ = microbatch
        return StageInputs(first={"input": x})


def test_a_batch_that_cannot_be_unpacked() -> None:
    reason = re.escape("(ValueError: not enough values to unpack (expected 2, got 1)). It is a list of 1 with tensor")
    with pytest.raises(ConfigError, match=rf"Unpacking\.microbatch_inputs cannot use a batch {reason}"):
        fit([X], module=Unpacking())


@pytest.mark.parametrize(
    ("batch", "hook", "reason", "what"),
    [
        (
            *({"input": X, "y": Y}, "microbatch_inputs", "it has no 'x'"),
            "a dict with input: tensor float32 [4, 8], y: tensor int64 [4]",
        ),
        (Encoding({"y": Y}), "microbatch_inputs", "it has no 'x'", "an Encoding with y: tensor int64 [4]"),
        (
            *((X, Y), "microbatch_inputs", "TypeError: tuple indices must be integers or slices, not str"),
            "a tuple of 2 with tensor float32 [4, 8], tensor int64 [4]",
        ),
        (
            *({"x": X.tolist()}, "microbatch_inputs", "AttributeError: 'list' object has no attribute 'to'"),
            "a dict with x: a list of 4 with a list of 8, a list of 8, ...",
        ),
        ({"x": X}, "microbatch_loss", "it has no 'y'", "a dict with x: tensor float32 [4, 8]"),
        ("text", "microbatch_inputs", "TypeError: string indices must be integers, not 'str'", "a str 'text'"),
    ],
)
def test_what_a_hook_does_not_find(batch: Any, hook: str, reason: str, what: str) -> None:
    for strategy in (D9DStrategy(), "auto"):
        with pytest.raises(ConfigError) as raised:
            fit(batch, strategy)
        assert str(raised.value) == f"Staged.{hook} cannot use a batch ({reason}). It is {what}{REMEDY}"
        assert isinstance(raised.value.__cause__, KeyError | TypeError | AttributeError)


def test_the_weight_and_the_metrics() -> None:
    with pytest.raises(
        ConfigError, match=r"^Staged.microbatch_weight cannot use a batch \(it has no 'y'\)\. It is a dict"
    ):
        fit({"x": X}, module=Staged(known_weight=True))

    class Strict(Staged):
        def microbatch_metrics(self, output: Tensor, microbatch: Any) -> dict[str, Any]:
            return {"weight": microbatch["weight"]}

    with pytest.raises(
        ConfigError, match=r"Strict.microbatch_metrics cannot use a batch \(it has no 'weight'\)\. It is a"
    ):
        fit({"x": X, "y": Y}, module=Strict())


def test_bugs_stay_what_they_are() -> None:
    """What a hook calls raises: nobody knows whether it is about the batch. A note says what that was."""

    class Buggy(Staged):
        make: Callable[[], Any]

        def microbatch_inputs(self, microbatch: Any) -> StageInputs:
            self.make()
            return super().microbatch_inputs(microbatch)

    module = Buggy()
    for make, kind in ((lambda: len(3), TypeError), (lambda: torch.zeros(2) @ torch.zeros(3), RuntimeError)):  # type: ignore[arg-type]
        module.make = make
        with pytest.raises(kind) as raised:
            fit({"x": X, "y": Y}, module=module)
        assert (
            "each microbatch is a dict with x: tensor float32 [4, 8], y: tensor int64 [4]" in raised.value.__notes__[0]
        )


@pytest.mark.parametrize("hook", ["microbatch_inputs", "microbatch_loss", "microbatch_weight", "microbatch_metrics"])
@pytest.mark.parametrize("kind", [KeyError, IndexError, TypeError, ValueError, AttributeError])
def test_errors_that_a_hook_raises_itself_stay_what_they_are(hook: str, kind: type[Exception]) -> None:
    def refuse(self: Staged, *_: Any) -> Any:
        try:
            raise kind("x")
        except kind:
            with torch.no_grad():
                raise

    with pytest.raises(kind) as raised:
        fit({"x": X, "y": Y}, module=type("Refusing", (Staged,), {hook: refuse})())
    assert type(raised.value) is kind
    assert raised.value.args == ("x",)


def test_errors_of_functions_in_c_stay_what_they_are() -> None:
    class Converting(Staged):
        def microbatch_loss(self, output: Tensor, microbatch: Any) -> Any:
            return output.sum() * float("much")

    with pytest.raises(ValueError, match=r"^could not convert string to float: 'much'"):
        fit({"x": X, "y": Y}, module=Converting())


def test_batches_that_are_cut_say_what_they_are() -> None:
    text = r"^a batch is split into microbatches along dim 0, but it is {}. Its tensors must share one first size"
    for batch, described in (
        ("text", "a str 'text'"),
        ({}, "an empty dict"),
        ({"x": X[:0], "y": Y[:0]}, r"a dict with x: tensor float32 \[0, 8\], y: tensor int64 \[0\]"),
        ({"x": X, "y": Y[:3]}, r"a dict with x: tensor float32 \[4, 8\], y: tensor int64 \[3\]"),
    ):
        with pytest.raises(ConfigError, match=text.format(described)):
            fit(batch, D9DStrategy(microbatch_size=2))


@pytest.mark.ranks(2)
def test_both_ranks_of_a_pipeline_miss_an_input(rank: RankContext) -> None:
    rows = [{"tokens": row["ids"], **{k: v for k, v in row.items() if k != "ids"}} for row in token_rows(4)]
    run = trainer(
        D9DStrategy(mesh=MeshConfig(pipeline_parallel=2)), 2, rank.device.type, precision="64-true", max_epochs=1
    )
    with pytest.raises(
        ConfigError, match=r"microbatch_inputs cannot use a batch \(it has no 'ids'\)\. It is a dict with tokens"
    ):
        run.fit(Pipelined(), DataLoader(rows, batch_size=4))  # type: ignore[arg-type]
