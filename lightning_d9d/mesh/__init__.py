"""The mesh of ranks, and how ranks communicate.

`config.py` has parallel degrees, `axes.py` names of axes, `domains.py` meshes over all ranks, and `groups.py` process
groups. `collectives.py` has collectives that Lightning and torch lack, and `agreement.py` errors that all ranks raise
together. `sharding.py` has shards of DTensors, and `seeds.py` random numbers that ranks share or do not share.
"""

from lightning_d9d.mesh.axes import Axis
from lightning_d9d.mesh.config import MeshConfig
from lightning_d9d.mesh.domains import MeshDomains

__all__ = ["Axis", "MeshConfig", "MeshDomains"]
