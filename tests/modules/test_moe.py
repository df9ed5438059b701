import pytest
import torch

from lightning_d9d.modules import SparseMoE, SwiGLU
from lightning_d9d.ops import WeightGradients, defer
from tests.harness.compare import assert_bitwise_equal, assert_close_named, assert_gradients_equal
from tests.harness.tolerances import Kind

HIDDEN, INTERMEDIATE, NUM_EXPERTS, TOP_K = 32, 48, 8, 3


def make_moe(normalize=True, dtype=torch.float32, intermediate=INTERMEDIATE):
    torch.manual_seed(0)
    moe = SparseMoE(HIDDEN, intermediate, NUM_EXPERTS, TOP_K, normalize=normalize, initializer_range=0.3)
    return moe.to(dtype)


def one_token_at_a_time(moe, x):
    """The definition of a mixture: for each token, the weighted sum of its experts' SwiGLU."""
    rows = []
    for token in x.flatten(0, -2):
        probabilities = (moe.gate.weight @ token).softmax(0)
        weights, indices = probabilities.topk(moe.gate.top_k)
        if moe.gate.normalize:
            weights = weights / weights.sum()
        row = torch.zeros_like(token)
        for weight, index in zip(weights, indices.tolist(), strict=True):
            gate, up = (moe.experts.gate_up_proj[index] @ token).chunk(2)
            row = row + weight * (moe.experts.down_proj[index] @ (torch.nn.functional.silu(gate) * up))
        rows.append(row)
    return torch.stack(rows).view_as(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("intermediate", [INTERMEDIATE, 45], ids=["native", "fallback"])
def test_equals_the_definition(normalize, dtype, intermediate):
    moe = make_moe(normalize, dtype, intermediate)
    x = torch.randn(2, 9, HIDDEN, dtype=dtype, requires_grad=True)
    gradient = torch.randn_like(x)
    parameters = dict(x=x, **dict(moe.named_parameters()))

    expected = one_token_at_a_time(moe, x)
    expected_gradients = torch.autograd.grad(expected, parameters.values(), gradient)
    actual = moe(x)
    gradients = torch.autograd.grad(actual, parameters.values(), gradient)

    assert_close_named("output", actual, expected)
    for name, ours, theirs in zip(parameters, gradients, expected_gradients, strict=True):
        assert_close_named(name, ours, theirs)


def test_expert_without_tokens_gets_a_zero_gradient():
    moe = make_moe()
    x = torch.randn(5, HIDDEN).abs()
    with torch.no_grad():
        moe.gate.weight[2] = -1e3  # never among the most probable for positive inputs
    moe(x).square().sum().backward()
    for name in ("gate_up_proj", "down_proj"):
        gradient = getattr(moe.experts, name).grad
        assert not gradient[2].any(), name
        assert gradient.any(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(0, HIDDEN), (2, 0, HIDDEN)])
def test_no_tokens_give_zero_gradients(shape, dtype):
    moe = make_moe(dtype=dtype)
    x = torch.zeros(shape, dtype=dtype, requires_grad=True)
    y = moe(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape
    for name, parameter in moe.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_no_values_are_read_on_the_host():
    # A meta tensor has no values: .item(), .cpu(), boolean indexing and the like raise on it.
    with torch.device("meta"):
        x = torch.randn(2, 9, HIDDEN, dtype=torch.bfloat16)
        moe = make_moe(dtype=torch.bfloat16)
        moe(x).sum().backward()
        assert moe.experts.down_proj.grad is not None


@pytest.mark.parametrize("normalize", [True, False])
@pytest.mark.parametrize("autocast", [False, True])
def test_the_router_is_that_of_float32_copies(normalize, autocast):
    moe = make_moe(normalize, torch.float32 if autocast else torch.bfloat16)
    x = torch.randn(50, HIDDEN, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        indices, weights, _ = moe.gate(x)
    copy, wide = x.detach().float().requires_grad_(), make_moe(normalize, moe.gate.weight.dtype).gate.float()
    expected = (copy @ wide.weight.t()).softmax(-1)
    expected, expected_indices = expected.topk(TOP_K)
    expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
    assert weights.dtype == torch.float32
    assert torch.equal(indices, expected_indices)
    assert_close_named("weights", weights, expected, kind=Kind.GRADIENT)
    gradient = torch.randn_like(weights)
    actual = torch.autograd.grad(weights, [x, moe.gate.weight], gradient)
    assert [each.dtype for each in actual] == [x.dtype, moe.gate.weight.dtype]
    for ours, theirs in zip(actual, torch.autograd.grad(expected, [copy, wide.weight], gradient), strict=True):
        assert_close_named("gradient", ours, theirs)


@pytest.mark.parametrize("normalize", [True, False])
def test_shared_expert_equals_transformers(normalize):
    from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig
    from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

    sizes = dict(num_experts=NUM_EXPERTS, num_experts_per_tok=TOP_K, moe_intermediate_size=INTERMEDIATE)
    config = Qwen2MoeConfig(
        hidden_size=HIDDEN, shared_expert_intermediate_size=20, norm_topk_prob=normalize, **sizes, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    torch.manual_seed(0)
    moe = SparseMoE(
        HIDDEN,
        INTERMEDIATE,
        NUM_EXPERTS,
        TOP_K,
        normalize=normalize,
        initializer_range=0.3,
        shared_intermediate_size=20,
    )
    reference = Qwen2MoeSparseMoeBlock(config)
    reference.load_state_dict(moe.state_dict())
    x = torch.randn(2, 9, HIDDEN)
    y, expected = moe(x), reference(x)
    assert_close_named("output", y, expected, kind=Kind.OUTPUT)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert_gradients_equal(moe, reference)


def test_swiglu_equals_one_expert():
    moe = make_moe()
    mlp = SwiGLU(HIDDEN, INTERMEDIATE, initializer_range=0.3)
    with torch.no_grad():
        mlp.gate_proj.weight.copy_(moe.experts.gate_up_proj[1, :INTERMEDIATE])
        mlp.up_proj.weight.copy_(moe.experts.gate_up_proj[1, INTERMEDIATE:])
        mlp.down_proj.weight.copy_(moe.experts.down_proj[1])
    x = torch.randn(6, HIDDEN)
    offsets = torch.tensor([0] + [6] * (NUM_EXPERTS - 1), dtype=torch.int32)
    assert_close_named("output", moe.experts(x, torch.full((6,), 0.5), offsets), 0.5 * mlp(x), kind=Kind.OUTPUT)


@pytest.mark.parametrize("intermediate", [INTERMEDIATE, 45], ids=["native", "fallback"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_weight_gradients_can_wait(intermediate, dtype):
    moe = make_moe(dtype=dtype, intermediate=intermediate)
    x = torch.randn(2, 9, HIDDEN, dtype=dtype, requires_grad=True)
    expected = torch.autograd.grad(moe(x).square().sum(), [x, *moe.parameters()])
    gradients = WeightGradients()
    with defer(gradients):
        loss = moe(x).square().sum()
    gradients.backward(loss)
    assert all(parameter.grad is None for parameter in moe.parameters())
    gradients.accumulate()
    for (name, tensor), gradient in zip([("x", x), *moe.named_parameters()], expected, strict=True):
        assert_bitwise_equal(name, tensor.grad, gradient)
