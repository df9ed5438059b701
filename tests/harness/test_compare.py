import pytest
import torch
from torch import nn

from tests.harness.compare import (
    assert_bitwise_equal,
    assert_close_named,
    assert_gradients_equal,
    assert_tensors_close,
)
from tests.harness.tolerances import TOLERANCES, Kind, Tolerance, tolerance_for


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_error_just_inside_and_outside_the_table(dtype):
    expected = torch.randn(50, 3, dtype=torch.float64)
    direction = torch.randn_like(expected)
    allowed = TOLERANCES[dtype][Kind.GRADIENT].relative * expected.norm()
    if dtype == torch.float32:
        expected = expected.float().double()  # so that only `direction` is an error
    step = direction / direction.norm() * allowed
    assert_close_named("weight", (expected + 0.9 * step).to(dtype), expected.to(dtype))
    with pytest.raises(AssertionError, match=r"^weight: \|\|actual - expected\|\| = .* exceeds"):
        assert_close_named("weight", (expected + 1.2 * step).to(dtype), expected.to(dtype))


def test_coarser_dtype_rules():
    assert tolerance_for(Kind.GRADIENT, torch.float64, torch.float32) is TOLERANCES[torch.float32][Kind.GRADIENT]
    assert tolerance_for(Kind.LOSS, torch.bfloat16, torch.float32) is TOLERANCES[torch.bfloat16][Kind.LOSS]


def test_bf16_gradient_is_judged_by_angle_and_norm():
    expected = torch.randn(400)
    assert_close_named("g", expected.bfloat16(), expected)
    with pytest.raises(AssertionError, match=r"g: \|\|actual\|\| = .* differ by more than"):
        assert_close_named("g", 1.1 * expected.bfloat16(), expected)
    turned = torch.cat([expected[:200], expected[200:].roll(100)])
    with pytest.raises(AssertionError, match=r"g: 1 - cos\(actual, expected\) = .* exceeds 0.01"):
        assert_close_named("g", turned.bfloat16(), expected)


def test_other_shape_and_non_finite_values_are_differences():
    with pytest.raises(AssertionError, match=r"x: shape \[2\], expected \[1, 2\]"):
        assert_close_named("x", torch.ones(2), torch.ones(1, 2))
    with pytest.raises(AssertionError, match="x: 1 of 2 elements of actual are not finite"):
        assert_close_named("x", torch.tensor([1.0, float("nan")]), torch.ones(2), tolerance=Tolerance(absolute=1e9))
    with pytest.raises(AssertionError, match="of expected are not finite"):
        assert_close_named("x", torch.ones(1), torch.tensor([float("inf")]))


def test_expected_zero_allows_no_relative_error():
    assert_close_named("zero", torch.zeros(3), torch.zeros(3))
    with pytest.raises(AssertionError, match=r"zero: .* exceeds 0 "):
        assert_close_named("zero", torch.full((3,), 1e-20), torch.zeros(3))


def test_gradients_of_modules_lists_every_difference():
    torch.manual_seed(0)
    ours, theirs = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    theirs.load_state_dict(ours.state_dict())
    assert_gradients_equal(ours, theirs)  # none on either side
    batch = torch.randn(5, 3)
    for module in (ours, theirs):
        module(batch).square().sum().backward()
    assert_gradients_equal(ours, theirs)
    parameters = dict(ours.named_parameters())
    parameters["0.weight"].grad = torch.ones(4, 3)
    parameters["1.bias"].grad = None
    with pytest.raises(AssertionError) as raised:
        assert_gradients_equal(ours, theirs)
    assert "2 of 4 tensors differ" in str(raised.value)
    assert "0.weight: ||actual - expected||" in str(raised.value)
    assert "1.bias: actual is None, the other is not" in str(raised.value)


def test_renamed_and_missing_names():
    ours, theirs = nn.ModuleDict({"a": nn.Linear(2, 2)}), nn.ModuleDict({"b": nn.Linear(2, 2)})
    assert_gradients_equal(ours, theirs, rename=lambda name: name.replace("a.", "b."))
    with pytest.raises(AssertionError, match="a: only in actual\n  b: only in expected"):
        assert_tensors_close({"a": torch.ones(1)}, {"b": torch.ones(1)})


def test_bitwise_equality():
    tensor = torch.tensor([[0.0, float("nan")], [1.0, 2.0]])
    assert_bitwise_equal("x", tensor, tensor.clone())
    assert_bitwise_equal("x", torch.tensor(3), torch.tensor(3))
    other = torch.tensor([[-0.0, float("nan")], [1.0, 2.0]])
    with pytest.raises(AssertionError, match=r"x: 1 of 4 elements differ .* first at \[0, 0\]: -0\.0, expected 0\.0"):
        assert_bitwise_equal("x", other, tensor)
    with pytest.raises(AssertionError, match=r"dtype torch\.float64, expected torch\.float32"):
        assert_bitwise_equal("x", tensor.double(), tensor)
