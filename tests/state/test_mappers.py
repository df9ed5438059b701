"""What mappers make of tensors, of views without data, and what they refuse."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from lightning_d9d.errors import StateError
from lightning_d9d.state import (
    Cast,
    Concatenate,
    Distribute,
    Gather,
    Identity,
    Inverse,
    Mapper,
    Parallel,
    Prefix,
    Rename,
    Select,
    Sequential,
    Share,
    Spec,
    Split,
    Stack,
    Transpose,
)
from tests.harness.compare import assert_bitwise_equal
from tests.harness.ranks import RankContext

A, B, C = (torch.arange(12.0).view(3, 4) + 100 * i for i in range(3))
LEAVES: dict[str, tuple[Mapper, dict[str, Tensor], dict[str, Tensor]]] = {
    "identity": (Identity(["a"]), {"a": A}, {"a": A}),
    "rename": (Rename("a", "b"), {"a": A}, {"b": A}),
    "select": (Select("a", {"first": 0, "last": 2}), {"a": A}, {"first": A[0], "last": A[2]}),
    "select a column": (Select("a", {"x": 1}, dim=-1), {"a": A}, {"x": A[:, 1]}),
    "stack": (Stack(["a", "b", "c"], "s"), {"a": A, "b": B, "c": C}, {"s": torch.stack([A, B, C])}),
    "stack inside": (Stack(["a", "b"], "s", dim=1), {"a": A, "b": B}, {"s": torch.stack([A, B], 1)}),
    "stack last": (Stack(["a", "b"], "s", dim=-1), {"a": A, "b": B}, {"s": torch.stack([A, B], -1)}),
    "split": (Split("a", {"x": 1, "y": 2}), {"a": A}, {"x": A[:1], "y": A[1:]}),
    "split columns": (Split("a", {"x": 1, "y": 3}, dim=1), {"a": A}, {"x": A[:, :1], "y": A[:, 1:]}),
    "concatenate": (Concatenate(["a", "b"], "s"), {"a": A, "b": B[:2]}, {"s": torch.cat([A, B[:2]])}),
    "concatenate columns": (Concatenate(["a", "b"], "s", dim=1), {"a": A, "b": B}, {"s": torch.cat([A, B], 1)}),
    "transpose": (Transpose(["a", "b"]), {"a": A, "b": B}, {"a": A.T, "b": B.T}),
    "cast": (Cast(["a"], torch.bfloat16), {"a": A}, {"a": A.bfloat16()}),
    "scalar": (Stack(["a", "b"], "s"), {"a": torch.tensor(1), "b": torch.tensor(2)}, {"s": torch.tensor([1, 2])}),
}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_bitwise_equal(name, actual[name], tensor)


@pytest.mark.parametrize("leaf", LEAVES)
def test_leaves(leaf: str) -> None:
    mapper, inputs, outputs = LEAVES[leaf]
    assert_same(mapper.apply(inputs), outputs)
    assert_same(dict(mapper.stream(inputs.items())), outputs)
    on_meta = {name: tensor.to("meta") for name, tensor in inputs.items()}
    assert {name: tuple(view.shape) for name, view in mapper.plan(on_meta).items()} == {
        name: tuple(tensor.shape) for name, tensor in outputs.items()
    }


@pytest.mark.parametrize("leaf", [leaf for leaf in LEAVES if not leaf.startswith("select")])
def test_inverse_gives_the_inputs_again(leaf: str) -> None:
    mapper, inputs, outputs = LEAVES[leaf]
    assert_same(mapper.inverse(inputs).apply(outputs), inputs)


def test_inputs_stay_as_they_are_and_results_are_no_views_of_them() -> None:
    whole = A.clone()
    parts = Split("a", {"x": 1, "y": 2}).apply({"a": whole})
    parts["y"].zero_()
    assert_bitwise_equal("a", whole, A)
    assert parts["x"].untyped_storage().nbytes() == parts["x"].nbytes


LAYER = Parallel(
    [Concatenate(["q.weight", "k.weight", "v.weight"], "qkv.weight"), Transpose(["out.weight"]), Identity(["norm"])]
)
NAMES = {"q.weight": (4, 3), "k.weight": (2, 3), "v.weight": (2, 3), "out.weight": (3, 4), "norm": (3,)}


def layers(number: int = 2) -> dict[str, Tensor]:
    return {f"layers.{i}.{name}": torch.randn(shape) for i in range(number) for name, shape in NAMES.items()}


def model() -> Mapper:
    of_layers = Parallel(Prefix(LAYER, f"layers.{i}.", f"h.{i}.") for i in range(2))
    return Sequential([of_layers, Stack([f"h.{i}.qkv.weight" for i in range(2)], "qkv"), Cast(["qkv"], torch.float64)])


def test_composition() -> None:
    tensors = layers()
    expected = {f"h.{i}.norm": tensors[f"layers.{i}.norm"] for i in range(2)}
    expected |= {f"h.{i}.out.weight": tensors[f"layers.{i}.out.weight"].T for i in range(2)}
    merged = [torch.cat([tensors[f"layers.{i}.{name}.weight"] for name in "qkv"]) for i in range(2)]
    expected["qkv"] = torch.stack(merged).double()
    assert_same(model().apply(tensors), expected)
    assert_same(dict(model().stream(tensors.items())), expected)
    assert_same(Inverse(model(), tensors).apply(expected), tensors)


def test_a_plan_is_printed() -> None:
    printed = Sequential([Concatenate(["q", "k"], "qk"), Rename("n", "norm")])
    assert str(printed) == "q, k -> qk\nn -> norm"
    specs = {"q": Spec((4, 3), torch.bfloat16), "k": Spec((2, 3), torch.bfloat16), "n": Spec((3,))}
    assert printed.describe(specs) == ("q [4, 3] bfloat16, k [2, 3] bfloat16 -> qk [6, 3] bfloat16\nn [3] -> norm [3]")


def test_sequences_pass_names_through_and_merge_groups() -> None:
    sequence = Sequential([Rename("a", "x"), Split("x", {"y": 1, "z": 2}), Stack(["z", "b"], "s")])
    assert [(set(group.inputs), set(group.outputs)) for group in sequence.groups] == [({"a", "b"}, {"y", "s"})]
    assert_same(sequence.apply({"a": A, "b": B[1:]}), {"y": A[:1], "s": torch.stack([A[1:], B[1:]])})
    apart = Sequential([Parallel([Rename("a", "b"), Rename("b", "a")]), Identity(["c"])])
    assert_same(apart.apply({"a": A, "b": B, "c": C}), {"a": B, "b": A, "c": C})
    assert len(apart.groups) == 3


def test_groups_are_forgotten_when_they_are_done() -> None:
    given: dict[str, weakref.ref[Tensor]] = {}

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name in ("a0", "b0", "a1", "unknown", "b1"):
            tensor = torch.zeros(3)
            given[name] = weakref.ref(tensor)
            yield name, tensor

    stream = Parallel([Stack([f"{x}0", f"{x}1"], x) for x in "ab"]).stream(tensors())
    assert next(stream)[0] == "a"
    assert next(stream)[0] == "b"
    assert [name for name, tensor in given.items() if tensor() is not None] == ["b0", "b1"]
    assert list(stream) == []


def test_an_incomplete_group_is_named() -> None:
    with pytest.raises(StateError, match="k never arrived, but qk is made from it"):
        list(Concatenate(["q", "k"], "qk").stream([("q", A)]))


def test_shares_of_ranks_make_up_the_whole() -> None:
    tensors = layers(3)
    mapper = Parallel(Prefix(LAYER, f"layers.{i}.") for i in range(3))
    shares = [Share(mapper, rank, 2) for rank in range(2)]
    assert sorted(group for share in shares for group in share.groups) == sorted(mapper.groups)
    parts = [share.apply(tensors) for share in shares]
    assert not parts[0].keys() & parts[1].keys()
    assert_same({**parts[0], **parts[1]}, {name: mapper.apply(tensors)[name] for name in {**parts[0], **parts[1]}})
    assert {**parts[0], **parts[1]}.keys() == {name for group in mapper.groups for name in group.outputs}


def test_the_rest_stays_as_it_is() -> None:
    mapper = Rename("a", "z").with_rest(["a", "b"])
    assert_same(mapper.apply({"a": A, "b": B}), {"z": A, "b": B})


REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "two take one": (lambda: Parallel([Rename("a", "b"), Rename("a", "c")]), "a is among the inputs of two"),
    "two make one": (lambda: Parallel([Rename("a", "c"), Rename("b", "c")]), "c is among the outputs of two"),
    "twice in a leaf": (lambda: Stack(["a", "a"], "s"), "Stack names a twice"),
    "nothing in a leaf": (lambda: Stack([], "s"), "Stack has no inputs or no outputs"),
    "already taken": (
        lambda: Sequential([Rename("a", "b"), Rename("a", "c")]),
        "a is taken by two mappers in sequence",
    ),
    "in the way": (lambda: Sequential([Identity(["b"]), Rename("a", "b")]), "b is made by a mapper, but"),
    "no such rank": (lambda: Share(Identity(["a"]), 2, 2), "rank 2 of 2"),
    "missing": (lambda: Stack(["a", "x"], "s").apply({"a": A}), "x: this input of the mapper is missing"),
    "shapes": (lambda: Stack(["a", "b"], "s").apply({"a": A, "b": A.T}), r"a \[3, 4\] and b \[4, 3\].*to s"),
    "dtypes": (lambda: Stack(["a", "b"], "s").apply({"a": A, "b": A.double()}), "a is .*32 but b .*64.*Cast"),
    "no such dim": (lambda: Split("a", {"x": 3}, dim=2).apply({"a": A}), "a has 2 dims, so 2 is not one of them"),
    "not all": (lambda: Split("a", {"x": 1, "y": 1}).apply({"a": A}), r"a \[3, 4\] cannot be split .*\[1, 1\], 2 tog"),
    "no such child": (lambda: Select("a", {"x": 3}).apply({"a": A}), "has no child 3 in dim 0 for x"),
    "a child twice": (lambda: Select("a", {"x": 1, "y": 1}), "x and y are both child 1 of a; take each child once"),
    "lossy": (lambda: Select("a", {"x": 0}).inverse({"a": A}), "the mapper does not keep all of a"),
    "wrong way": (lambda: Transpose(["a"]).inverse({"a": A}).apply({"a": A}), r"a has shape \[3, 4\] but should"),
    "whole already": (lambda: Gather(["a"]).apply({"a": A}), "a is not a DTensor"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case: str) -> None:
    action, message = REFUSED[case]
    with pytest.raises(StateError, match=message):
        action()


def test_each_cast_rounds() -> None:
    precise = {"a": torch.tensor([1 + 2**-12, 3.0])}
    rounded = {"a": precise["a"].bfloat16().float()}
    twice = Sequential([Cast(["a"], torch.bfloat16), Cast(["a"], torch.float32)])
    assert_same(twice.apply(precise), rounded)
    assert_same(Sequential([twice, Transpose(["a"], 0, 0)]).apply(precise), rounded)
    stacked = Sequential([Cast(["a"], torch.bfloat16), Stack(["a"], "a"), Cast(["a"], torch.float32)])
    assert_same(stacked.apply(precise), {"a": rounded["a"][None]})
    back = Sequential(
        [Cast(["a"], torch.float32).inverse({"a": Spec((2,), torch.bfloat16)}), Cast(["a"], torch.float32)]
    )
    assert_same(back.apply(precise), rounded)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_any_chain_is_what_torch_makes_and_goes_back(data: st.DataObject) -> None:
    """Chains of leaves on one tensor, and for any box of the outcome, what is read of the source alone."""
    shape = tuple(data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    source = torch.arange(torch.Size(shape).numel()).view(shape)
    mappers: list[Mapper] = []
    expected = source
    for step in range(data.draw(st.integers(0, 5))):
        dim = data.draw(st.integers(0, expected.ndim - 1))
        kind = data.draw(st.sampled_from(["transpose", "cut", "unstack", "stack"]))
        if kind == "transpose":
            other = data.draw(st.integers(0, expected.ndim - 1))
            mappers.append(Transpose(["t"], dim, other))
            expected = expected.transpose(dim, other)
        elif kind == "cut":  # and put together the other way round
            at = data.draw(st.integers(1, expected.shape[dim]))
            if at == expected.shape[dim]:
                continue
            mappers += [Split("t", {f"x{step}": at, f"y{step}": expected.shape[dim] - at}, dim)]
            mappers += [Concatenate([f"y{step}", f"x{step}"], "t", dim)]
            first, second = expected.split([at, expected.shape[dim] - at], dim)
            expected = torch.cat([second, first], dim)
        elif kind == "unstack" and expected.ndim > 1:
            children = {f"c{step}.{i}": i for i in range(expected.shape[dim])}
            new = data.draw(st.integers(0, expected.ndim - 1))
            mappers += [Select("t", children, dim), Stack([*children][::-1], "t", new)]
            expected = torch.stack(expected.unbind(dim)[::-1], new)
        elif kind == "stack" and expected.ndim < 4:
            mappers += [Stack(["t"], "t", dim)]
            expected = expected.unsqueeze(dim)
    chain = Sequential([Identity(["t"]), *mappers])
    assert_same(chain.apply({"t": source}), {"t": expected.contiguous()})
    assert_same(chain.inverse({"t": source}).apply({"t": expected}), {"t": source})
    bounds = [sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in expected.shape]
    held = tuple(range(start, stop) for start, stop in bounds)
    values = torch.full([len(r) for r in held], -1)
    for part in chain.plan({"t": source})["t"].boxes:
        if of_box := part.within(held):
            values[of_box.place_index()] = of_box.take(source)
    assert torch.equal(values, expected[tuple(slice(*each) for each in bounds)])


@pytest.mark.ranks(2)
def test_distribute_and_gather(rank: RankContext) -> None:
    mesh = init_device_mesh(rank.device.type, (2,))
    whole = torch.arange(15.0).view(5, 3)
    mapper = Sequential([Transpose(["a"]), Distribute(["a"], mesh, [Shard(1)]), Rename("a", "b")])
    cut = mapper.apply({"a": whole})["b"]
    assert isinstance(cut, DTensor)
    assert cut.placements == (Shard(1),)
    assert torch.equal(cut.to_local().cpu(), whole.T.chunk(2, 1)[rank.rank])
    assert_same(Sequential([Gather(["b"]), Rename("b", "a"), Transpose(["a"])]).apply({"b": cut}), {"a": whole})
    again = Sequential([Gather(["b"]), Distribute(["b"], mesh, [Replicate()])]).apply({"b": cut})["b"]
    assert torch.equal(again.to_local().cpu(), whole.T)  # type: ignore[attr-defined]
    assert Rename("b", "c").apply({"b": cut})["c"] is cut
    with pytest.raises(StateError, match="b is sharded over ranks and cannot be transposed; put Gather before it"):
        Transpose(["b"]).apply({"b": cut})
    with pytest.raises(StateError, match="b is sharded over ranks and cannot be distributed again"):
        Distribute(["b"], mesh, [Shard(0)]).apply({"b": cut})
    with pytest.raises(StateError, match="Partial"):
        Distribute(["a"], mesh, [Partial()])
    uneven = distribute_tensor(whole.to(rank.device), mesh, [Shard(0)])
    assert_same(Gather(["a"]).apply({"a": uneven}), {"a": whole})


@pytest.mark.ranks(2)
def test_what_is_changed_while_it_is_whole(rank: RankContext) -> None:
    """Cut as the sources were, and yet none of them."""
    mesh = init_device_mesh(rank.device.type, (2,))
    whole = {name: torch.randn(4, 4, generator=torch.Generator().manual_seed(i)) for i, name in enumerate("qkv")}
    cut = {name: distribute_tensor(tensor.to(rank.device), mesh, [Shard(0)]) for name, tensor in whole.items()}

    def apply(mapper: Mapper, name: str) -> Tensor:
        chain = Sequential([Gather(mapper.group_of), mapper, Distribute([name], mesh, [Shard(0)])])
        return chain.apply(cut)[name].full_tensor().cpu()  # type: ignore[attr-defined]

    assert_bitwise_equal("transposed", apply(Transpose(["q"]), "q"), whole["q"].T)
    assert_bitwise_equal("merged", apply(Concatenate([*"qkv"], "qkv"), "qkv"), torch.cat([*whole.values()]))
    turned = Sequential([Split("q", {"x": 2, "y": 2}), Concatenate(["y", "x"], "q")])
    assert_bitwise_equal("turned", apply(turned, "q"), whole["q"].roll(2, 0))
    same = Sequential([Gather(["q"]), Distribute(["q"], mesh, [Shard(0)])])
    assert same.apply(cut)["q"] is cut["q"]
