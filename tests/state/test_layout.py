from __future__ import annotations

import itertools

import torch

from lightning_d9d.state import Piece, tensor_shapes, whole_box

PIECES = [  # of a parameter [3, 4, 5]: of each matrix the upper and the lower half, the lower ones in one tensor
    *(Piece((range(i, i + 1), range(2), range(5)), f"upper.{i}", whole_box((2, 5))) for i in range(3)),
    *(Piece((range(i, i + 1), range(2, 4), range(5)), "lower", (range(2 * i, 2 * i + 2), range(5))) for i in range(3)),
]


def test_slices_of_all_holders_make_up_the_tensors() -> None:
    whole = torch.arange(60).view(3, 4, 5)
    tensors = {name: torch.full(shape, -1) for name, shape in tensor_shapes(PIECES).items()}
    cuts = ([range(1), range(1, 3), range(3, 3)], [range(3), range(3, 4)], [range(2), range(2, 5)])
    for held in itertools.product(*cuts):
        local = whole[tuple(slice(r.start, r.stop) for r in held)]
        for piece in PIECES:
            if overlap := piece.overlap(held):
                in_held, in_tensor = overlap
                assert (tensors[piece.tensor][in_tensor] == -1).all()
                tensors[piece.tensor][in_tensor] = local[in_held]
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {
        **{f"upper.{i}": whole[i, :2].tolist() for i in range(3)},
        "lower": whole[:, 2:].flatten(0, 1).tolist(),
    }
