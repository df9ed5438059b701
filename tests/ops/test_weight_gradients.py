import threading
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_d9d.ops import WeightGradients, defer, split_linears, weight_gradients
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_tensors_close

SIZE = 6
on_every_device = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


class Layers(nn.Module):
    """Linears `a`, `b`, `c` and a way through them."""

    def __init__(self, way, num_out=(SIZE, SIZE, SIZE), dtype=torch.float64, device="cpu"):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Linear(SIZE, size) for size in num_out)
        self.way = way
        self.to(device, dtype)
        split_linears(self)

    def forward(self, x):
        return self.way(self, x)


def make_input(seed=0, dtype=torch.float64, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 4, SIZE, generator=generator).to(device, dtype).requires_grad_()


def plain_backward(stage, x):
    stage(x).square().sum().backward()
    return take_gradients(stage, x)


def input_backward(stage, x):
    gradients = WeightGradients()
    with defer(gradients):
        loss = stage(x).square().sum()
    gradients.backward(loss)
    return gradients


def split_backward(stage, x):
    input_backward(stage, x).accumulate()
    return take_gradients(stage, x)


def take_gradients(stage, *inputs):
    named = {**dict(stage.named_parameters()), **{f"x{i}": x for i, x in enumerate(inputs)}}
    gradients = {name: tensor.grad for name, tensor in named.items()}
    for tensor in named.values():
        tensor.grad = None
    return gradients


def assert_all_bitwise_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        if gradient is None:
            assert actual[name] is None, name
        else:
            assert_bitwise_equal(name, actual[name], gradient)


class CountedDouble(torch.autograd.Function):
    """A function of a user's own, with two results."""

    num_backwards = 0

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * x, x.square()

    @staticmethod
    def backward(ctx, *grad_outputs):
        CountedDouble.num_backwards += 1
        first, second = grad_outputs
        (x,) = ctx.saved_tensors
        return 2 * first + 2 * x * second


def through_chunks(m, x):
    q, k = m.a(x).chunk(2, dim=-1)
    return m.c(F.pad(q * k, (0, 3))) + m.b(x)


def through_unbind(m, x):
    q, k, v = m.a(x).unflatten(-1, (3, 2)).unbind(-2)
    return m.c(torch.cat([q * k, v, v], dim=-1)) + q.sum()


def through_split(m, x):
    q, _, v = m.a(x).split([1, 2, 3], dim=-1)
    return m.c(torch.cat([v.sin(), q * v], dim=-1))


def through_own_function(m, x):
    first, second = CountedDouble.apply(m.a(x))
    return m.b(first) * m.c(second)


WAYS = {
    "chunk": through_chunks,
    "unbind": through_unbind,
    "split with an unused part": through_split,
    "own function": through_own_function,
    "met twice": lambda m, x: m.a(m.b(m.a(x).sin())) + m.c(x),
    "met three times": lambda m, x: m.a(m.a(m.a(x).sin()).sin()),
    "same input thrice": lambda m, x: m.a(x) * m.b(x) + m.c(x),
    "residual": lambda m, x: x + m.b(F.silu(m.a(x)) * m.c(x)),
    "in place": lambda m, x: m.b(m.a(x).relu_()).add_(m.c(x)),
    "an unused layer's results": lambda m, x: (m.a(x), m.b(x))[1],
    "frozen between": lambda m, x: m.b(F.linear(m.a(x), m.c.weight.detach())),
}
MIXED_WAYS = {
    "module and functional": lambda m, x: m.a(x) + F.linear(x.sin(), m.a.weight),
    "functional and module": lambda m, x: F.linear(m.a(x), m.a.weight, m.a.bias),
    "weights times weights": lambda m, x: (
        x @ (m.a.weight @ m.b.weight) + (x @ m.a.weight).relu() @ m.b.weight + m.b(m.a(x))
    ),
    "weight as activation": lambda m, x: m.a(m.a.weight) @ m.b(x).flatten(0, 1).T,
    "transposed": lambda m, x: F.linear(m.a(x), m.a.weight.T),
}


@on_every_device
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_equals_a_full_backward_bit_by_bit(way, device):
    stage, x = Layers(way, device=device), make_input(device=device)
    expected = plain_backward(stage, x)
    assert_all_bitwise_equal(split_backward(stage, x), expected)


@pytest.mark.parametrize("way", MIXED_WAYS.values(), ids=MIXED_WAYS.keys())
def test_other_uses_of_a_weight_need_no_care(way):
    """The parts of a weight's gradient are then summed in another order."""
    stage, x = Layers(way), make_input()
    assert_tensors_close(split_backward(stage, x), plain_backward(stage, x))


def test_shared_modules_and_weights():
    stage, x = Layers(lambda m, x: m.b(m.a(x).sin()) + m.c(x)), make_input()
    stage.b.weight = stage.a.weight
    stage.c = stage.a
    assert_all_bitwise_equal(split_backward(stage, x), plain_backward(stage, x))


def test_input_backward_leaves_the_weights_alone():
    stage, x = Layers(lambda m, x: m.b(m.a(x).sin())), make_input()
    expected = plain_backward(stage, x)
    gradients = input_backward(stage, x)
    assert_bitwise_equal("dx", x.grad, expected["x0"])
    assert all(p.grad is None for p in stage.parameters())
    gradients.accumulate()
    x.grad = None
    gradients.accumulate()  # there is nothing more to add
    assert x.grad is None
    assert_bitwise_equal("da", stage.a.weight.grad, expected["a.weight"])


def test_interleaved_microbatches_accumulate():
    stage = Layers(WAYS["met twice"])
    inputs = [make_input(seed) for seed in range(3)]
    for x in inputs:
        stage(x).square().sum().backward()
    expected = take_gradients(stage, *inputs)
    under_way = [WeightGradients() for _ in inputs]
    losses = []
    for gradients, x in zip(under_way, inputs, strict=True):
        with defer(gradients):
            losses.append(stage(x).square().sum())
    for gradients, loss in zip(under_way, losses, strict=True):
        gradients.backward(loss)
    for gradients in under_way:
        gradients.accumulate()
    assert_tensors_close(take_gradients(stage, *inputs), expected)


def test_a_weight_in_two_stages():
    first, second = Layers(WAYS["met twice"]), Layers(lambda m, x: m.c(m.a(x)))
    second.a.weight = first.a.weight
    x = make_input()

    def expected():
        second(first(x)).square().sum().backward()
        return take_gradients(nn.ModuleList([first, second]), x)

    gradients = WeightGradients(), WeightGradients()
    with defer(gradients[0]):
        hidden = first(x)
    received = hidden.detach().requires_grad_()
    with defer(gradients[1]):
        loss = second(received).square().sum()
    gradients[1].backward(loss)
    gradients[0].backward(hidden, received.grad)
    assert first.a.weight.grad is None
    gradients[0].accumulate()
    gradients[1].accumulate()
    assert_tensors_close(take_gradients(nn.ModuleList([first, second]), x), expected())


def test_several_outputs_together_and_one_by_one():
    stage, x = Layers(lambda m, x: (m.a(x), m.b(x))), make_input()
    dys = [torch.randn(2, 4, SIZE, dtype=torch.float64) for _ in range(2)]
    torch.autograd.backward(stage(x), dys)
    expected = take_gradients(stage, x)
    gradients = WeightGradients()
    for together in (True, False):
        with defer(gradients):
            outputs = stage(x)
        if together:
            gradients.backward(outputs, dys)
        else:
            for output, dy in zip(outputs, dys, strict=True):
                gradients.backward(output, dy)
        gradients.accumulate()
        assert_all_bitwise_equal(take_gradients(stage, x), expected)


def test_functions_of_users_run_once():
    stage, x = Layers(through_own_function), make_input()
    CountedDouble.num_backwards = 0
    gradients = input_backward(stage, x)
    assert CountedDouble.num_backwards == 1
    gradients.accumulate()
    assert CountedDouble.num_backwards == 1


class Block(nn.Module):
    """Part of its way is recomputed in the backward; counts its forwards."""

    def __init__(self, use_reentrant, device="cpu"):
        super().__init__()
        self.inner = Layers(lambda m, x: m.c(F.silu(m.a(x)) * m.b(x)).sin(), device=device)
        self.outer = Layers(lambda m, x: m.a(x).cos() + m.b(x), device=device)
        self.use_reentrant = use_reentrant
        self.num_forwards = 0

    def counted(self, x):
        self.num_forwards += 1
        return self.inner(x)

    def forward(self, x):
        x = checkpoint(self.counted, self.outer(x), use_reentrant=self.use_reentrant)
        return checkpoint(self.counted, x, use_reentrant=self.use_reentrant)


@on_every_device
@pytest.mark.parametrize("use_reentrant", [False, True], ids=["non-reentrant", "reentrant"])
def test_checkpoints_recompute_once(use_reentrant, device):
    stage, x = Block(use_reentrant, device), make_input(device=device)
    expected = plain_backward(stage, x)
    stage.num_forwards = 0
    gradients = input_backward(stage, x)
    assert stage.num_forwards == 4
    waits = {name for name, p in stage.named_parameters() if p.grad is None}
    assert {"outer.a.weight", "outer.b.weight"} <= waits
    # A reentrant checkpoint differentiates what it recomputes by itself, at once.
    assert ("inner.a.weight" in waits) != use_reentrant
    gradients.accumulate()
    assert stage.num_forwards == 4
    assert_tensors_close(take_gradients(stage, x), expected)


@on_every_device
def test_checkpoints_of_plain_forwards_stay_plain(device):
    """Full backwards of other microbatches run between split ones."""
    stage, x, other = Block(False, device), make_input(device=device), make_input(1, device=device)
    expected = plain_backward(stage, x)
    other_expected = plain_backward(stage, other)
    gradients = WeightGradients()
    other_loss = stage(other).square().sum()
    with defer(gradients):
        loss = stage(x).square().sum()
    other_loss.backward()
    assert_tensors_close(take_gradients(stage, other), other_expected)
    gradients.backward(loss)
    gradients.accumulate()
    assert_tensors_close(take_gradients(stage, x), expected)


def test_hooks_are_called_once_with_the_whole_gradient():
    stage, x = Layers(WAYS["met twice"]), make_input()
    expected = plain_backward(stage, x)
    calls, values = [], []
    for name, p in stage.named_parameters():
        p.register_hook(values.append)
        p.register_post_accumulate_grad_hook(lambda p, name=name: calls.append((name, p.grad.clone())))
    gradients = input_backward(stage, x)
    assert calls == values == []
    gradients.accumulate()
    assert len(values) == len(calls) == 6
    assert_all_bitwise_equal(dict(calls), {name: expected[name] for name, _ in stage.named_parameters()})


def test_hooks_may_change_gradients():
    stage, x = Layers(WAYS["met twice"]), make_input()
    for p in stage.parameters():
        p.register_hook(lambda g: 3 * g)
    assert_all_bitwise_equal(split_backward(stage, x), plain_backward(stage, x))


def test_adds_into_flat_float32_gradients_of_bfloat16_weights():
    def run(backward):
        stage, x = Layers(lambda m, x: m.b(m.a(x)), dtype=torch.bfloat16), make_input(dtype=torch.bfloat16)
        parameters = [*stage.a.parameters(), *stage.b.parameters()]
        flat = torch.ones(sum(p.numel() for p in parameters))
        for p, view in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
            p.grad_dtype = None
            p.grad = view.view(p.shape)
        backward(stage, x)
        return flat

    expected = run(lambda stage, x: stage(x).square().sum().backward())
    assert expected.dtype == torch.float32
    assert not (expected == 1).all()
    assert_bitwise_equal("flat", run(lambda stage, x: input_backward(stage, x).accumulate()), expected)


class Owned(torch.autograd.Function):
    """Identity whose result has memory that a weak reference can watch."""

    @staticmethod
    def forward(ctx, x, watched, name):
        memory = x.detach().numpy().copy()
        watched[name] = weakref.ref(memory)
        return torch.from_numpy(memory)

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0], None, None


def test_memory_is_freed_as_soon_as_nothing_waits_for_it(monkeypatch):
    monkeypatch.setattr(weight_gradients, "_BYTES_AT_ONCE", 1)
    watched = {}

    def way(m, x):
        before = Owned.apply(m.a(x), watched, "needed by sin")
        inside = Owned.apply(before.sin(), watched, "needed by b")
        after = Owned.apply(m.b(inside), watched, "needed by cos")
        return m.c(Owned.apply(after.cos(), watched, "needed by c"))

    def alive():
        return {name for name, memory in watched.items() if memory() is not None}

    stage, x = Layers(way), make_input()
    gradients = WeightGradients()
    with defer(gradients):
        loss = stage(x).square().sum()
    assert alive() == {"needed by sin", "needed by b", "needed by cos", "needed by c"}
    gradients.backward(loss)
    assert alive() == {"needed by b", "needed by c"}
    at_hooks = []
    for layer in (stage.c, stage.b):
        layer.weight.register_post_accumulate_grad_hook(lambda _: at_hooks.append(alive()))
    gradients.accumulate()
    assert at_hooks == [{"needed by b"}, set()]


def test_exceptions_leave_nothing_behind():
    fails = True

    def hook(_):
        if fails:
            raise ValueError("in backward")

    def way(m, x):
        h = m.a(x)
        h.register_hook(hook)
        return m.c(m.b(h))

    stage, x = Layers(way), make_input()
    gradients = WeightGradients()
    with defer(gradients):
        loss = stage(x).square().sum()
    with pytest.raises(ValueError, match="in backward"):
        gradients.backward(loss)
    gradients.accumulate()
    assert all(gradient is None for gradient in take_gradients(stage, x).values())
    assert not weight_gradients._split_tasks
    fails = False
    with defer(gradients):
        loss = stage(x).square().sum()
    gradients.backward(loss)
    gradients.accumulate()
    assert_all_bitwise_equal(take_gradients(stage, x), plain_backward(stage, x))


def test_deferred_ends_under_exceptions_and_nests():
    def way(m, x):
        if x is None:
            raise ValueError("in forward")
        return m.a(x)

    outer, inner = WeightGradients(), WeightGradients()
    stage, x = Layers(way), make_input()
    losses = {}
    with defer(outer):
        with defer(inner):
            losses[inner] = stage(x).sum()
        with pytest.raises(ValueError, match="in forward"), defer(inner):
            stage(None)
        losses[outer] = stage(x).sum()
    with pytest.raises(ValueError, match="in forward"), defer(inner):
        stage(None)
    stage(x).sum().backward()
    expected = take_gradients(stage.a)
    for gradients, loss in losses.items():
        gradients.backward(loss)
        assert stage.a.weight.grad is None
        gradients.accumulate()
        assert_all_bitwise_equal(take_gradients(stage.a), expected)


def test_outputs_as_edges_of_the_graph():
    """The values of the outputs have been sent away and freed."""
    stage, x = Layers(lambda m, x: checkpoint(m.b, m.a(x).sin(), use_reentrant=False)), make_input()
    dy = torch.randn(2, 4, SIZE, dtype=torch.float64)
    stage(x).backward(dy)
    expected = take_gradients(stage, x)
    gradients = WeightGradients()
    with defer(gradients):
        edge = get_gradient_edge(stage(x))
    gradients.backward([edge], [dy])
    assert stage.a.weight.grad is stage.b.weight.grad is None
    gradients.accumulate()
    assert_all_bitwise_equal(take_gradients(stage, x), expected)


def test_threads_have_objects_of_their_own():
    num_threads = 3
    barrier = threading.Barrier(num_threads, timeout=60)
    stages = [Block(False) for _ in range(num_threads)]
    inputs = [make_input(seed) for seed in range(num_threads)]
    expected = [plain_backward(stage, x) for stage, x in zip(stages, inputs, strict=True)]
    actual = [None] * num_threads
    errors = []

    def split(index):
        gradients = WeightGradients()
        with defer(gradients):
            barrier.wait()
            loss = stages[index](inputs[index]).square().sum()
            barrier.wait()
        gradients.backward(loss)
        barrier.wait()
        gradients.accumulate()

    def plain(index):
        barrier.wait()
        loss = stages[index](inputs[index]).square().sum()
        barrier.wait()
        loss.backward()
        barrier.wait()

    def run(function, index):
        try:
            function(index)
            actual[index] = take_gradients(stages[index], inputs[index])
        except BaseException as error:
            barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=run, args=(f, i)) for i, f in enumerate((split, plain, split))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for ours, theirs in zip(actual, expected, strict=True):
        assert_tensors_close(ours, theirs)


def test_gradients_taken_inside_the_forward_are_not_noted():
    """Examples are forces, the gradient of an energy by the positions."""

    def way(m, x):
        (force,) = torch.autograd.grad(m.b(m.a(x).sin()).sum(), x)
        return m.c(x) * force

    stage, x = Layers(way), make_input()
    assert_all_bitwise_equal(split_backward(stage, x), plain_backward(stage, x))


def test_gradients_of_weights_taken_inside_the_forward_raise():
    stage, x = Layers(lambda m, x: torch.autograd.grad(m.a(x).sum(), m.a.weight)[0]), make_input()
    with (
        defer(WeightGradients()),
        pytest.raises(RuntimeError, match="not have been used in the graph"),
    ):
        stage(x)


def test_differentiating_twice_raises():
    def way(m, x):
        (force,) = torch.autograd.grad(m.b(m.a(x).sin()).sum(), x, create_graph=True)
        return force

    stage, x = Layers(way), make_input()
    with (
        defer(WeightGradients()),
        pytest.raises(RuntimeError, match=r"differentiates twice.*without split backwards"),
    ):
        stage(x)


@pytest.mark.parametrize("has_gradient", [False, True])
def test_memory_shared_with_another_gradient_is_noticed(has_gradient):
    """Autograd may hand one tensor's memory to several: the second microbatch adds into what the first one noted."""
    table = torch.zeros(4, SIZE, dtype=torch.float64, requires_grad=True)
    stage = Layers(lambda m, x: m.a(x[:1]) + table.unsqueeze(0))
    inputs = [make_input(seed) for seed in range(2)]
    if has_gradient:
        table.grad = torch.zeros_like(table)
    gradients = [input_backward(stage, x) for x in inputs]
    if has_gradient:
        for each in gradients:
            each.accumulate()
        actual = take_gradients(stage)["a.weight"]
        for x in inputs:
            stage(x).square().sum().backward()
        # table's values have not changed, so neither have the gradients
        assert_close_named("a.weight", actual, take_gradients(stage)["a.weight"])
    else:
        with pytest.raises(RuntimeError, match=r"\(4, 6\).*modified in place"):
            gradients[0].accumulate()


def test_autocast_of_a_whole_stage():
    stage, x = Layers(WAYS["residual"], dtype=torch.float32), make_input(dtype=torch.float32)
    way = stage.way
    # The input is no leaf: autocast would cast a leaf only once and add its gradients in bfloat16.
    stage.way = torch.autocast("cpu", torch.bfloat16)(lambda m, x: way(m, 2 * x))
    actual = split_backward(stage, x)
    assert {gradient.dtype for gradient in actual.values()} == {torch.float32}
    assert_all_bitwise_equal(actual, plain_backward(stage, x))


@pytest.mark.gpu
def test_work_on_another_stream():
    """The note is made on the stream of the op, and used on that of the caller."""
    side = torch.cuda.Stream()

    def way(m, x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            h = m.a(x)
            for _ in range(20):
                h = m.b(h).tanh()
        torch.cuda.current_stream().wait_stream(side)
        h.record_stream(torch.cuda.current_stream())
        return m.c(h)

    stage = Layers(way, device="cuda")
    x = torch.randn(4096, SIZE, dtype=torch.float64, device="cuda", requires_grad=True)
    expected = plain_backward(stage, x)
    for _ in range(5):
        assert_tensors_close(split_backward(stage, x), expected)


def test_ops_note_leaves_under_any_saved_tensor_hooks():
    """What a hook hands back is another tensor than the parameter."""
    stage, x = Layers(WAYS["met twice"]), make_input()
    expected = plain_backward(stage, x)
    gradients = WeightGradients()
    with defer(gradients), torch.autograd.graph.save_on_cpu():
        loss = stage(x).square().sum()
    gradients.backward(loss)
    gradients.accumulate()
    assert_all_bitwise_equal(take_gradients(stage, x), expected)
