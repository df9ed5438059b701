"""What a stage does with gradients whose memory is also another's."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_d9d.pipeline.stage import Stage
from lightning_d9d.sync.buckets import BucketGroup, GradientBuckets


class Sums(nn.Module):
    """A module whose first two weights get views of one gradient, at its start and further in. The third gets its
    own."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.rest = nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(3, 3))
        self.matrix = nn.Parameter(torch.ones(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.matrix + self.whole) + torch.cat([torch.zeros(1, 3), self.rest])


def run(module: Sums) -> None:
    stage = Stage(module)
    output = stage.forward(0, [], None, {"x": torch.ones(4, 3)}, splits_backward=False)
    stage.keep(0, [output])
    stage.backward(0, [torch.ones(4, 3)])


def test_gradients_stay_in_their_bucket() -> None:
    module = Sums()
    buckets = GradientBuckets([BucketGroup(list(module.parameters()), None)])
    run(module)
    (bucket,) = buckets.buckets
    assert all(parameter.grad is view for parameter, view in zip(bucket.parameters, bucket.views, strict=True))


def test_gradients_that_overlap_are_copied() -> None:
    module = Sums()
    run(module)
    assert module.whole.grad is not None
    assert module.rest.grad is not None
    module.whole.grad += 1
    assert module.rest.grad.tolist() == torch.ones(3, 3).tolist()
