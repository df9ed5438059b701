"""Costs of a model's layers and speeds of a machine; `Auto` predicts a step from both.

[Note: time of a layer] Matrix products run at `flops_per_second`. With few rows they run only as fast as their weights
are read from memory. All other operations move bytes at `bytes_per_second`. A forward and an input backward read the
weights of their products once a microbatch. A weight backward writes the gradients of all weights once, and has the
copies of weights and gradients. What is recomputed takes its forward's time once more. Messages in the midst of a layer
take as long as their link, and a latency each.

[Note: links of a node] Each rank has links to its node, and one to the network. A ring leaves a node once, so each of
its ranks there sends a part of that. If all send to all, each sends its own part of what goes to other nodes.

[Note: time of the host] The host launches kernels ahead of the device. So the forwards and backwards of a rank take as
long as the slower of the two, in the sum over its layers. If the host is slower, all actions of the rank take longer by
the same factor. Embedding, head and update count nothing: the host launches them in a few milliseconds a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from lightning_d9d.errors import ScheduleError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


ATTENTION_BACKWARD = 2.5
"""Operations of attention's backward over those of its forward: scores are computed again."""


class Moment(NamedTuple):
    """Bytes that exist for a time in a layer's backward, beside the kept tensors and the gradient of its output."""

    row_bytes: float
    """Bytes for each row; less than 0 if kept tensors have been freed."""
    gradient_bytes: float
    """Existing gradients of the layer's weights, in the dtype of the weights."""
    copies_bytes: float = 0.0
    """The part of `row_bytes` that has a row for each expert of a token."""


class HostSeconds(NamedTuple):
    """Seconds of the host to launch forward and backward of a layer in a microbatch, by `ParallelConfig.recompute`.

    The number of tokens does not matter.
    """

    none: float
    attention: float
    selective: float
    full: float

    def of(self, layer: LayerCosts) -> float:
        """Return the seconds of a layer."""
        match layer.recomputed:
            case "attention":
                return self.attention
            case "moved":
                return self.selective
            case "all":
                return self.full
        return self.none


HOST_SECONDS = (
    "sparse_host_seconds",
    "dense_host_seconds",
    "linear_adapter_host_seconds",
    "experts_adapter_host_seconds",
)
"""The fields with the seconds of the host, of a `Machine` and of a table that it is made from."""


class Messages(NamedTuple):
    """Messages of a layer that nobody computes beside: half of them in its forward, half in its backward."""

    row_bytes: float
    """Bytes that a rank sends for each row."""
    number: int
    """Messages of a microbatch."""
    num_ranks: int
    """The ranks that take part."""
    span: int
    """The number of consecutive ranks from the first to the last of them."""
    is_ring: bool = True
    """True if each sends to the next one alone; else to all others alike."""
    waits: int = 0
    """Times in a microbatch that the host waits for numbers of other ranks before it can launch what follows."""


@dataclass(frozen=True, kw_only=True)
class LayerCosts:
    """Costs of one layer for one row of a batch (one sequence) on one rank: computed, moved and kept.

    Moved bytes are those of all operations but matrix products and attention, each input and output once.

    Raises:
        ScheduleError: A number is negative or not finite.
    """

    forward_flops: float = 0.0
    backward_input_flops: float = 0.0
    """Operations for the gradient of the layer's input; they include attention's whole backward."""
    backward_weight_flops: float = 0.0
    """Operations for the gradients of the weights."""
    forward_bytes: float = 0.0
    backward_input_bytes: float = 0.0
    backward_weight_bytes: float = 0.0
    weight_bytes: float = 0.0
    """Bytes of the parameters, for any number of rows."""
    copied_bytes: float = 0.0
    """Bytes moved for any number of rows: copies of gathered weights and of gradients."""
    activation_bytes: float = 0.0
    """Bytes kept from forward to backward."""
    selective_bytes: float | None = None
    """Bytes kept with `recompute="selective"`; None if unknown."""
    attention_bytes: float | None = None
    """Bytes kept with `recompute="attention"`; None if unknown."""
    split_activation_bytes: float = 0.0
    """Bytes kept from input backward to weight backward, if they are split: inputs of products and their gradients.
    """
    is_compiled: bool = False
    """True if the backward is one compiled function, which runs in the input phase."""
    output_bytes: float = 0.0
    """Bytes sent to the next stage if the layer is a stage's last, and back as its gradient. The layer's input has the
    same size; with `recompute="full"` only the input is kept.
    """
    frozen_bytes: float | None = None
    """Bytes kept if the layer's matrices are frozen and have no adapters; None if unknown."""
    forward_peak_bytes: float = 0.0
    """The largest memory of the layer while its forward runs, including kept tensors and its output."""
    backward_moments: tuple[Moment, ...] = ()
    """The moments of the backward with the largest memory; empty if unknown."""
    attention_flops: float = 0.0
    """The part of `forward_flops` for attention's scores and their sums. Those of its backward are in
    `backward_input_flops`.
    """
    grouped_flops: float = 0.0
    """The part of `forward_flops` for grouped products. Each part of the backward has as many."""
    block_bytes: float = 0.0
    """Bytes of the layer's largest activation; 0 if unknown."""
    dispatch_bytes: float = 0.0
    """Buffer of the tokens that are sent to experts on other ranks; it is freed when they have arrived."""
    copies_bytes: float = 0.0
    """The part of `activation_bytes` that has a row for each expert of a token; 0 if unknown."""
    state_bytes: float | None = None
    """Bytes of weights, gradients and optimizer states that a rank keeps; None: a multiple of `weight_bytes`."""
    recomputed: str = "nothing"
    """The part of the forward that the backward computes again: "nothing", "all", "attention" or "moved"."""
    messages: tuple[Messages, ...] = ()
    """Messages that ranks send each other in the midst of the layer."""
    is_launched: bool = True
    """True if the host launches each kernel, because the layer is neither compiled nor captured."""
    linear_adapters: float = 0.0
    """The number of linear layers with adapters."""
    experts_adapters: float = 0.0
    """The number of weights of experts with adapters."""

    def __post_init__(self) -> None:
        check_numbers(self)


def check_numbers(of: DataclassInstance) -> None:
    """Refuse a dataclass with a float that is not finite or below 0, or an int below 1.

    Raises:
        ScheduleError: The message names class, field and value.
    """
    for name, kind, is_optional in _numbers(type(of)):
        value = getattr(of, name)
        if is_optional and value is None:
            continue
        number, least = ("whole", 1) if kind == "int" else ("finite", 0)
        is_number = isinstance(value, int) or (kind == "float" and isinstance(value, float) and math.isfinite(value))
        if not is_number or isinstance(value, bool) or value < least:
            raise ScheduleError(f"{type(of).__name__}.{name}={value!r} must be a {number} number of at least {least}")


def check_host_seconds(of: DataclassInstance) -> None:
    """Make `HostSeconds` of lists in the fields `HOST_SECONDS`, and refuse numbers that cannot be seconds.

    Raises:
        ScheduleError: The message names class, field and value.
    """
    for name in HOST_SECONDS:
        if (given := getattr(of, name)) is not None:
            seconds = HostSeconds(*given)
            if not all(isinstance(each, int | float) and 0 <= each < math.inf for each in seconds):
                raise ScheduleError(f"{type(of).__name__}.{name}={given!r} must be finite numbers of at least 0")
            object.__setattr__(of, name, seconds)


@cache
def _numbers(kind: type[DataclassInstance]) -> tuple[tuple[str, str, bool], ...]:
    """Return name and type of the fields of a dataclass that have numbers, and whether they may be None."""
    found = ((each.name, *str(each.type).partition(" | None")[:2]) for each in fields(kind))
    return tuple((name, of, bool(optional)) for name, of, optional in found if of in ("float", "int"))


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """A model from the viewpoint of a pipeline: layers between which it can be split, and parts before and after them.

    Raises:
        ScheduleError: The model has no layers.
    """

    before: LayerCosts = field(default_factory=LayerCosts)
    """The part that is always on the first stage, such as the embedding."""
    layers: tuple[LayerCosts, ...]
    """The layers in order. Each stage has at least one."""
    after: LayerCosts = field(default_factory=LayerCosts)
    """The part that is always on the last stage, such as the final norm, the head and the loss."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise ScheduleError("ModelCosts.layers is empty; a pipeline needs at least one layer")

    def compiled(self) -> ModelCosts:
        """Return the costs with layers whose backward is one compiled function, which runs in the input phase."""
        changes = dict(is_compiled=True, is_launched=False, split_activation_bytes=0.0)
        return replace(self, layers=tuple(replace(layer, **changes) for layer in self.layers))

    @property
    def parts(self) -> tuple[LayerCosts, ...]:
        """All parts in order: `before`, the layers, `after`."""
        return (self.before, *self.layers, self.after)


class LayerSeconds(NamedTuple):
    """Seconds that the actions of a layer take."""

    forward: float
    backward_input: float
    backward_weight: float
    backward: float


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Speeds at which one rank computes and sends.

    The defaults are of an NVIDIA H200 with torch 2.11 in bfloat16. The package's kernels were measured to reach them
    together on the layers and the head of a Qwen3-MoE model. Slower kernels, such as those of plain torch modules, take
    up to twice as long. `MeasuredCosts` of a run are more accurate than any speed.

    Raises:
        ScheduleError: A number is negative, or a speed is 0.
    """

    flops_per_second: float = 580e12
    """Operations per second in products: attention 430 to 610e12, projections 670 to 690e12, grouped products 475 to
    570e12, head 695e12.
    """
    grouped_flops_per_second: float | None = None
    """Operations per second in grouped products; None uses the rate of other products."""
    attention_forward_flops_per_second: float | None = None
    """Operations per second in the forward of attention; None uses the rate of products."""
    attention_backward_flops_per_second: float | None = None
    """Operations per second in the backward of attention; None uses the rate of products."""
    bytes_per_second: float = 4.26e12
    """Bytes per second to and from memory, reads and writes together, as in a copy."""
    link_bytes_per_second: float = 160e9
    """Bytes per second from one pipeline rank to the next: half of the rate measured in an all-to-all over NVLink."""
    link_latency: float = 20e-6
    """Seconds between the end of sending a message and its arrival; assumed."""
    action_seconds: float = 30e-6
    """Seconds that an action takes beside its kernels; assumed."""
    gpus_per_node: int = 8
    """Consecutive ranks that fast links join."""
    exchange_bytes_per_second: float = 320e9
    """Bytes per second that a rank sends to all others of its node."""
    network_bytes_per_second: float = 40e9
    """Bytes per second that a rank sends to other nodes; a network of 400 Gb/s for each, four fifths used."""
    wait_seconds: float = 0.0
    """Seconds from such a wait until the device is busy again."""
    host_share: float = 0.0
    """The share of their time that kernels take longer in a step than alone."""
    overlapped: float = 1.0
    """Duration of an overlapped pair as a share of the sum of its two actions. It is below 1 if one action computes
    while the other's experts exchange tokens.
    """
    sparse_host_seconds: HostSeconds | None = None
    """The host's seconds for a layer with experts; None if not known."""
    dense_host_seconds: HostSeconds | None = None
    """The same for a layer without experts."""
    linear_adapter_host_seconds: HostSeconds | None = None
    """The seconds that each adapter of a linear layer adds to these; None counts nothing."""
    experts_adapter_host_seconds: HostSeconds | None = None
    """The seconds that each adapter of a weight of experts adds; None counts nothing."""

    def __post_init__(self) -> None:
        check_numbers(self)
        check_host_seconds(self)
        speeds = ("flops_per_second", "bytes_per_second", "link_bytes_per_second")
        for name in (*speeds, "exchange_bytes_per_second", "network_bytes_per_second"):
            if getattr(self, name) == 0:
                raise ScheduleError(f"Machine.{name}=0 must be greater than 0")

    def seconds(self, layer: LayerCosts, num_rows: float) -> LayerSeconds:
        """Return how long `layer` takes for a microbatch, with its messages; `schedule/layers.py` has the formulas."""
        computed, sent = self.computed(layer, num_rows), self.message_seconds(layer, num_rows) / 2
        forward, inputs = computed.forward + sent, computed.backward_input + self.again(layer, num_rows) + sent
        return LayerSeconds(forward, inputs, computed.backward_weight, inputs + computed.backward_weight)

    def link(self, span: int) -> float:
        """Return the bytes per second that a rank sends to another one so many ranks away."""
        return self.exchange_bytes_per_second if span <= self.gpus_per_node else self.network_bytes_per_second

    def spread_bytes(self, num_bytes: float, num_ranks: int, span: int, *, is_ring: bool) -> tuple[float, float]:
        """Return the bytes that a rank sends within its node, and to others; `schedule/layers.py` has the formulas.

        Args:
            num_bytes: All that it sends.
            num_ranks: The ranks that take part.
            span: The number of consecutive ranks from the first to the last of them.
            is_ring: True if each sends to the next one alone; else to all others alike.
        """
        if span <= self.gpus_per_node or num_ranks == 1:
            return num_bytes, 0.0
        near = min(num_ranks, max(1, num_ranks * self.gpus_per_node // span))
        far = num_bytes / near if is_ring else num_bytes * (num_ranks - near) / (num_ranks - 1)
        return num_bytes - far, far

    def send_seconds(self, near: float, far: float) -> float:
        """Return how long it takes to send within the node and to others at the same time."""
        return max(near / self.exchange_bytes_per_second, far / self.network_bytes_per_second)

    def message_seconds(self, layer: LayerCosts, num_rows: float) -> float:
        """Return how long the messages of a layer take, forward and backward together."""
        return sum(
            self.send_seconds(
                *self.spread_bytes(num_rows * each.row_bytes, each.num_ranks, each.span, is_ring=each.is_ring)
            )
            + each.number * self.link_latency
            + each.waits * self.wait_seconds
            for each in layer.messages
        )

    def host_seconds(self, layers: Iterable[LayerCosts]) -> float | None:
        """Return how long the host takes to launch layers in a microbatch; None if it is not known."""
        found = 0.0
        for layer in layers:
            whole = self.sparse_host_seconds if layer.grouped_flops else self.dense_host_seconds
            if whole is None or not layer.is_launched:
                return None
            found += whole.of(layer)
            for number, adapter in (
                (layer.linear_adapters, self.linear_adapter_host_seconds),
                (layer.experts_adapters, self.experts_adapter_host_seconds),
            ):
                found += 0.0 if adapter is None else number * adapter.of(layer)
        return found

    def again(self, layer: LayerCosts, num_rows: float) -> float:
        """Return how long it takes to compute again what a layer did not keep."""
        slower = 1 + self.host_share
        match layer.recomputed:
            case "all":
                return self.computed(layer, num_rows).forward
            case "attention":
                rate = self.attention_forward_flops_per_second or self.flops_per_second
                return slower * num_rows * layer.attention_flops / rate
            case "moved":
                return slower * num_rows * layer.forward_bytes / self.bytes_per_second
        return 0.0

    def computed(self, layer: LayerCosts, num_rows: float) -> LayerSeconds:
        """Return how long the computation of a layer takes if all is kept, without messages."""

        def action(flops: float, moved: float, weight_bytes: float, attended: float, rate: float | None) -> float:
            grouped = min(layer.grouped_flops, flops - attended)
            seconds = (flops - attended - grouped) / self.flops_per_second
            seconds += grouped / (self.grouped_flops_per_second or self.flops_per_second)
            products = max(num_rows * seconds, weight_bytes / self.bytes_per_second)
            attention = num_rows * attended / (rate or self.flops_per_second)
            return (1 + self.host_share) * (products + attention + num_rows * moved / self.bytes_per_second)

        weights = layer.weight_bytes
        forward = action(
            layer.forward_flops,
            layer.forward_bytes,
            weights if layer.forward_flops else 0,
            min(layer.attention_flops, layer.forward_flops),
            self.attention_forward_flops_per_second,
        )
        inputs = action(
            layer.backward_input_flops,
            layer.backward_input_bytes,
            weights if layer.backward_input_flops else 0,
            min(ATTENTION_BACKWARD * layer.attention_flops, layer.backward_input_flops),
            self.attention_backward_flops_per_second,
        )
        gradients = action(layer.backward_weight_flops, layer.backward_weight_bytes, weights, 0.0, None)
        gradients += layer.copied_bytes / self.bytes_per_second
        if layer.is_compiled:
            inputs, gradients = inputs + gradients, 0.0
        return LayerSeconds(forward, inputs, gradients, inputs + gradients)
