"""Replicas that mix their weights with peers, in place of summing gradients over all of them.

`topology.py`: who mixes with whom in which round, as data. `rounds.py`: the rounds of a topology for a number of
replicas, checked and printed; `picture.py` draws them. `mixer.py`: the messages and the arithmetic on one rank.
`mean.py`: the mean of all replicas in place of each one's own values, and back.
"""

from lightning_d9d.mixing.topology import (
    TOPOLOGIES,
    AlternatingExpRing,
    Complete,
    Edge,
    OnePeerExp,
    ReplicaMixing,
    Ring,
    Topology,
)

__all__ = [
    "TOPOLOGIES",
    "AlternatingExpRing",
    "Complete",
    "Edge",
    "OnePeerExp",
    "ReplicaMixing",
    "Ring",
    "Topology",
]
