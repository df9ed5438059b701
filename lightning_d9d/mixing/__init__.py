"""Replicas that mix their weights with peers, instead of summing gradients over all replicas.

`topology.py`: which replicas mix in which round, as data. `rounds.py`: the rounds of a topology for a number of
replicas, checked and printed; `picture.py` draws them. `mixer.py`: a round on one rank. `messages.py`: what replicas of
an edge send each other, and the arithmetic; `pushes.py`: copies in place of messages on one host. `mean.py`: the mean
of all replicas in place of each replica's own values, and back.
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
