"""Who computes what: degrees (`config.py`), domains of ranks (`domains.py`), their process groups (`groups.py`), and the
collectives that torch and Lightning lack (`collectives.py`)."""

from lightning_d9d.mesh.config import MeshConfig
from lightning_d9d.mesh.domains import MeshDomains

__all__ = ["MeshConfig", "MeshDomains"]
