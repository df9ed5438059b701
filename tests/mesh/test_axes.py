"""Names of axes are equal to plain strings, and plain strings are what leaves the package."""

from __future__ import annotations

import io
import json

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from lightning_d9d import ConfigError
from lightning_d9d.mesh import Axis, MeshConfig, MeshDomains
from lightning_d9d.mesh.seeds import seed_for
from tests.mesh.fake_world import MESHES, fake_world


def test_every_axis_of_a_mesh_has_a_name() -> None:
    config = MESHES["every axis"]
    shapes = [*config.domains().values(), *config.split_tensor(1).values(), config.expert_weights()]
    weights = {Axis.DP_CP_REPLICATE}  # `MeshDomains.weights` makes it of two others
    assert {axis for shape in shapes for axis in shape} | weights == {*Axis}
    assert {type(axis) for shape in shapes for axis in shape} == {str}


def test_sizes_and_coordinates_are_found_by_strings_and_by_axes() -> None:
    with fake_world(5, 8):
        domains = MeshDomains.build(MESHES["8"], "cpu")
        for found in (domains.sizes, domains.coordinates):
            assert {type(axis) for axis in found} == {str}
            assert all(found[axis] == found[axis.value] for axis in Axis if axis in found)
            assert json.loads(json.dumps(found)) == found
        assert domains.group("tp") is domains.group(Axis.TP)


def test_torch_loads_what_a_checkpoint_has_of_axes_without_running_code() -> None:
    domains = MeshDomains.build(MeshConfig(), "cpu")
    module = nn.Linear(2, 2, bias=False)
    meshes = [domains.weights, domains.expert_weights, domains.for_axes(Axis.DP_REPLICATE, Axis.TP), domains.flat]
    assert {type(name) for mesh in meshes for name in mesh.mesh_dim_names or ()} == {str}
    tensors = [distribute_tensor(module.weight, mesh, [Shard(0)] * mesh.ndim) for mesh in meshes]
    file = io.BytesIO()
    torch.save({"tensors": tensors, "sizes": domains.sizes, "coordinates": domains.coordinates}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded["sizes"] == domains.sizes
    assert all(isinstance(each, DTensor) for each in loaded["tensors"])
    domains.close()


def test_errors_show_plain_names() -> None:
    domains = MeshDomains.build(MeshConfig(), "cpu")
    with pytest.raises(ConfigError, match=r"no domain has the axes 'tp', 'pp' in this order"):
        domains.for_axes(Axis.TP, Axis.PP)
    assert f"{Axis.TP} {Axis.TP!r} {[Axis.TP]}" == "tp 'tp' ['tp']"


def test_seeds_are_the_same_for_axes_and_for_strings() -> None:
    plain = {"pp": 1, "dp": 2, "cp": 3, "tp": 4}
    named = {Axis(axis): place for axis, place in plain.items()}
    assert seed_for(1, purpose="sharded_dropout", coordinates=named) == seed_for(
        1, purpose="sharded_dropout", coordinates=plain
    )
