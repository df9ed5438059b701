"""Who computes what, and how ranks reach each other.

`config.py`: parallel degrees; `axes.py`: names of axes; `domains.py`: ranks split along axes; `groups.py`: process
groups; `collectives.py`: what Lightning and torch lack; `agreement.py`: what fails on one rank fails on all;
`sharding.py`: what a rank holds of a DTensor; `seeds.py`: whose random numbers are the same.
"""

from lightning_d9d.mesh.axes import Axis
from lightning_d9d.mesh.config import MeshConfig
from lightning_d9d.mesh.domains import MeshDomains

__all__ = ["Axis", "MeshConfig", "MeshDomains"]
