"""What `configure_stage` gives to tensors without values is what they start with, on every mesh."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from lightning_d9d import ConfigError
from lightning_d9d.pipeline.initial_weights import materialize, recorded_values
from lightning_d9d.pipeline.recorded_values import Recording
from tests.harness.ranks import RankContext

CPU = torch.device("cpu")


def built(
    build: Callable[[], nn.Module], seed: int = 0, spread: Callable[[nn.Module], Any] | None = None
) -> tuple[nn.Module, list[str]]:
    with torch.device("meta"), Recording() as recording:
        module = build()
    recorded = recorded_values(recording, module)
    if spread is not None:
        spread(module)
    return module, materialize(module, CPU, seed, recorded)


def start(build: Callable[[], nn.Module], seed: int = 0) -> dict[str, Tensor]:
    module, lost = built(build, seed)
    assert not lost
    return {name: tensor.detach() for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def weight_after(change: Callable[[Tensor], Any], *shape: int) -> Tensor:
    def build() -> nn.Module:
        layer = nn.Linear(shape[1], shape[0])
        layer.weight = nn.Parameter(torch.empty(shape))
        with torch.no_grad():
            change(layer.weight)
        return layer

    return start(build)["weight"]


CONSTANTS: dict[str, Callable[[Tensor], Any]] = {
    "constant": lambda w: nn.init.constant_(w, 3.0),
    "zeros": nn.init.zeros_,
    "eye": nn.init.eye_,
    "fill": lambda w: w.data.fill_(2.0),
    "row": lambda w: (nn.init.ones_(w), w[1].zero_()),
    "item": lambda w: (w.fill_(1), w.__setitem__((0, 2), 7.0)),
    "numbers": lambda w: w.copy_(torch.tensor([[1.0, 2, 3, 4]] * 6)),
    "from the CPU": lambda w: w.copy_(torch.arange(24.0, device="cpu").view(6, 4)),
    "computed": lambda w: w.copy_(torch.arange(24).view(4, 6).T / 7 + torch.as_tensor(2.0)),
    "of another": lambda w: (w.fill_(1), w[:3].copy_(w[3:] * 5)),
    "chunks": lambda w: [nn.init.constant_(part, n) for n, part in enumerate(w.chunk(3, dim=1))],
}


@pytest.mark.parametrize("name", CONSTANTS)
def test_constants_are_those_of_a_device_with_values(name: str) -> None:
    with torch.no_grad():
        CONSTANTS[name](expected := torch.empty(6, 4))
    assert torch.equal(weight_after(CONSTANTS[name], 6, 4), expected)


def test_a_source_may_change_afterwards() -> None:
    source = torch.ones(6, 4)
    with torch.device("meta"), Recording() as recording:
        layer = nn.Linear(4, 6)
        layer.weight.data.copy_(source)
        source.zero_()
    materialize(layer, CPU, 0, recorded_values(recording, layer))
    assert torch.equal(layer.weight, torch.ones(6, 4))


@pytest.mark.parametrize(
    ("change", "mean", "std"),
    [
        (lambda w: nn.init.normal_(w, 2.0, 0.5), 2.0, 0.5),
        (lambda w: w.data.normal_(std=0.02), 0.0, 0.02),
        (lambda w: nn.init.uniform_(w, 1.0, 3.0), 2.0, 1 / math.sqrt(3)),
        (lambda w: nn.init.trunc_normal_(w, std=0.02), 0.0, 0.02),
        (lambda w: nn.init.trunc_normal_(w, std=1.0, a=-0.1, b=0.1), 0.0, 0.2 / math.sqrt(12)),
        (lambda w: nn.init.xavier_uniform_(w), 0.0, math.sqrt(2 / 360)),
        (lambda w: nn.init.kaiming_normal_(w), 0.0, math.sqrt(2 / 160)),
        (lambda w: (nn.init.normal_(w), w.mul_(0.25)), 0.0, 0.25),
        (lambda w: w.copy_(torch.randn_like(w) * 3), 0.0, 3.0),
        (lambda w: nn.init.sparse_(w, 0.5, std=1.0), 0.0, math.sqrt(0.5)),
    ],
)
def test_random_values_have_the_distribution_that_was_asked_for(
    change: Callable[[Tensor], Any], mean: float, std: float
) -> None:
    weight = weight_after(change, 200, 160)
    assert float(weight.mean()) == pytest.approx(mean, abs=0.02 * std + 1e-8)
    assert float(weight.std()) == pytest.approx(std, rel=0.02)


def test_orthogonal_matrices_and_kernels_that_pass_through() -> None:
    weight = weight_after(nn.init.orthogonal_, 5, 8)
    torch.testing.assert_close(weight @ weight.T, torch.eye(5))
    kernels = weight_after(nn.init.dirac_, 3, 3, 5)
    assert torch.equal(kernels, nn.init.dirac_(torch.empty(3, 3, 5)))


def test_constructors_may_give_values() -> None:
    """No reset says them, or that of a parent class says others."""

    class Layer(nn.Linear):
        table: Tensor

        def __init__(self) -> None:
            super().__init__(4, 4)
            nn.init.zeros_(self.weight)
            self.scale = nn.Parameter(torch.ones(4) * 3)
            self.temperature = nn.Parameter(torch.tensor(0.5))
            self.noise = nn.Parameter(torch.randn(1000))
            self.register_buffer("table", torch.arange(4))

    values = start(lambda: nn.ModuleDict({"layer": Layer()}))
    assert torch.equal(values["layer.weight"], torch.zeros(4, 4))
    assert torch.equal(values["layer.scale"], torch.full((4,), 3.0))
    assert float(values["layer.temperature"]) == 0.5
    assert float(values["layer.noise"].std()) == pytest.approx(1, rel=0.1)
    assert torch.equal(values["layer.table"], torch.arange(4))
    assert 0 < float(values["layer.bias"].abs().max()) <= 0.5  # as nn.Linear has it


def init_weights(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.constant_(module.bias, 0.1)
    elif isinstance(module, nn.Embedding):
        nn.init.trunc_normal_(module.weight, std=0.5)
        module.weight.data[2].zero_()


class Transformer(nn.Module):
    """A model with an `_init_weights` of the usual kind; `layers` are those of a stage."""

    def __init__(self, layers: range = range(3)) -> None:
        super().__init__()
        self.embedding = nn.Embedding(17, 8)
        self.layers = nn.ModuleDict({str(i): nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for i in layers})
        self.norm = nn.LayerNorm(8)
        self.apply(init_weights)


def test_apply_is_kept_and_the_rest_is_as_without() -> None:
    values, again, other = start(Transformer), start(Transformer), start(Transformer, seed=1)
    assert all(torch.equal(values[name], again[name]) for name in values)
    for name in ("embedding.weight", "layers.1.linear1.weight", "layers.2.self_attn.out_proj.weight"):
        assert not torch.equal(values[name], other[name])
    assert torch.equal(values["embedding.weight"][2], torch.zeros(8))
    assert float(values["layers.0.linear2.weight"].std()) == pytest.approx(0.02, rel=0.3)
    # The reset of MultiheadAttention, which runs for its own parameters, sets this one to zero.
    assert torch.equal(values["layers.0.self_attn.out_proj.bias"], torch.full((8,), 0.1))
    assert float(values["layers.0.self_attn.in_proj_weight"].abs().max()) > 0.1
    assert torch.equal(values["norm.weight"], torch.ones(8))


def test_values_do_not_depend_on_the_stage_or_on_what_was_drawn_before() -> None:
    whole = start(Transformer)
    torch.rand(3)
    assert all(torch.equal(value, whole[name]) for name, value in start(lambda: Transformer(range(2, 3))).items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes_draw_the_same_numbers(dtype: torch.dtype) -> None:
    whole = start(Transformer)
    torch.set_default_dtype(dtype)
    try:
        built_so = start(Transformer)
    finally:
        torch.set_default_dtype(torch.float32)
    converted = start(lambda: Transformer().to(dtype))
    for name, value in whole.items():
        assert built_so[name].dtype == converted[name].dtype == dtype
        torch.testing.assert_close(built_so[name], value.to(dtype))
        torch.testing.assert_close(converted[name], value.to(dtype))


def test_what_nobody_gave_is_as_without_a_recording() -> None:
    def build() -> nn.Module:
        attention = nn.MultiheadAttention(8, 2)
        return nn.ModuleList([nn.Linear(8, 8), attention, nn.BatchNorm1d(8), copy.deepcopy(attention)])

    values = start(build)
    with torch.device("meta"):
        module = build()
    materialize(module, CPU, 0)
    assert all(torch.equal(values[name], tensor) for name, tensor in module.state_dict().items())


def test_an_explicit_reset_is_a_default_again() -> None:
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        nn.init.zeros_(layer.weight)
        layer.reset_parameters()
        return layer

    assert torch.equal(start(build)["weight"], start(lambda: nn.Linear(4, 4))["weight"])


def test_a_reset_of_the_whole_is_kept() -> None:
    """The module of the reset owns no parameter, so nothing else would run it."""

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = nn.Linear(4, 4)
            self.reset_parameters()

        def reset_parameters(self) -> None:
            nn.init.ones_(self.part.weight)

    assert torch.equal(start(Whole)["part.weight"], torch.ones(4, 4))


def test_ties_stay_and_what_is_computed_from_a_parameter_fits_it() -> None:
    def build() -> nn.Module:
        module = nn.ModuleDict({"embedding": nn.Embedding(9, 4), "head": nn.Linear(4, 9, bias=False)})
        module["head"].weight = module["embedding"].weight
        nn.init.normal_(module["head"].weight, std=0.1)
        module["normed"] = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        module["copy"] = nn.Linear(4, 9)
        module["copy"].weight.data.copy_(module["embedding"].weight.data)
        return module

    module, _ = built(build)
    assert module["embedding"].weight is module["head"].weight
    assert torch.equal(module["copy"].weight, module["embedding"].weight)
    original = module["normed"].parametrizations.weight  # type: ignore[union-attr]
    torch.testing.assert_close(original.original0, original.original1.norm(dim=1, keepdim=True))


def with_generator(layer: nn.Linear) -> None:
    nn.init.normal_(layer.weight, generator=torch.Generator(device="cpu"))


def of_unknown(layer: nn.Linear) -> None:
    layer.weight.data.copy_(layer.weight.new_tensor([[2.0] * 4] * 4))


@pytest.mark.parametrize(
    ("change", "reason"),
    [(with_generator, "normal_, .*torch.Generator"), (of_unknown, "copy_, .*unknown values.*device='cpu'")],
)
def test_what_cannot_be_kept_is_refused(change: Callable[[nn.Linear], None], reason: str) -> None:
    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        change(layer)
        return nn.ModuleDict({"layer": layer})

    with pytest.raises(ConfigError, match=rf"'layer.weight' a value by {reason}.*reset_par"):
        start(build)


def test_a_part_without_a_value_is_refused() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))
            nn.init.ones_(self.weight[:2])

    with pytest.raises(ConfigError, match=r"sets only a part of 'weight'"):
        start(Rows)


def test_parameters_of_other_classes_are_recorded() -> None:
    class Routed(nn.Parameter):
        pass

    def build() -> nn.Module:
        layer = nn.Linear(4, 4)
        layer.weight = Routed(torch.empty(4, 4))
        nn.init.ones_(layer.weight)
        return layer

    assert torch.equal(start(build)["weight"], torch.ones(4, 4))


def test_what_was_exchanged_is_told() -> None:
    def exchange(module: nn.Module) -> None:
        with torch.device("meta"):
            module.embedding = nn.Embedding(18, 8)

    assert built(Transformer, spread=exchange)[1] == ["embedding.weight"]


@pytest.mark.ranks(2)
def test_shards_are_those_of_the_whole(rank: RankContext) -> None:
    def shard(module: nn.Module) -> None:
        mesh = init_device_mesh(rank.device.type, (2,))
        for layer in module.layers.values():  # type: ignore[operator, union-attr]
            fully_shard(layer, mesh=mesh)
        fully_shard(module, mesh=mesh)

    whole = start(Transformer)
    for name, tensor in built(Transformer, spread=shard)[0].state_dict().items():
        assert isinstance(tensor, DTensor)
        assert torch.equal(tensor.full_tensor().cpu(), whole[name]), name
