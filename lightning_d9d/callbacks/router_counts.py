"""`RouterCounts`: which experts the tokens of a fit visit, where the model has no balance that counts them."""

from __future__ import annotations

import re

import lightning as L
import torch
from torch import Tensor

from lightning_d9d.mesh.agreement import Ranks
from lightning_d9d.modules import BalanceConfig, ExpertBalance, TopKRouter, expert_load
from lightning_d9d.strategy.module import D9DModule
from lightning_d9d.strategy.optimizers import first_names


def named_routers(module: L.LightningModule) -> dict[str, TopKRouter]:
    """Return the routers of this rank's stages by the names of their parameters, without `.weight`. Local."""
    names = first_names(module.state_dict(keep_vars=True))
    routers = (part for part in module.modules() if isinstance(part, TopKRouter))
    return {names[router.weight].removesuffix(".weight"): router for router in routers}


class RouterCounts:
    """Lets routers that have no `ExpertBalance` count tokens until `close`. Collective over all ranks.

    Args:
        module: In a fit.
    """

    def __init__(self, module: D9DModule) -> None:
        self._device = module.device
        self._own = {name: router for name, router in named_routers(module).items() if router.balance is None}
        for router in self._own.values():
            with torch.device(router.weight.device):
                router.balance = ExpertBalance(len(router.weight), BalanceConfig())
        sizes = {name: len(router.weight) for name, router in self._own.items()}
        self._sizes: dict[str, int] = {}
        """How many experts each router of the whole model has, in one order on all ranks."""
        for theirs in Ranks().all_gather(sizes):
            self._sizes |= theirs
        layers = [re.search(r"\blayers\.(\d+)\b", name) for name in self._sizes]
        numbers = [layer and layer[1] for layer in layers]
        are_layers = None not in numbers and len({*numbers}) == len(numbers)
        self._labels = [f"layer_{number}" for number in numbers] if are_layers else list(self._sizes)

    def take(self) -> Tensor | None:
        """Return the tokens of each expert that this rank has counted since the last time. Local.

        Returns:
            Float64 `[all experts of all routers]`, 0 for routers of other ranks; None without routers.
        """
        if not self._sizes:
            return None
        own = {name: router.balance.tokens_per_expert for name, router in self._own.items() if router.balance}
        parts = [
            own[name].double() if name in own else torch.zeros(size, dtype=torch.float64, device=self._device)
            for name, size in self._sizes.items()
        ]
        if own:
            torch._foreach_zero_([*own.values()])
        return torch.cat(parts)

    def values(self, sums: Tensor) -> dict[str, Tensor]:
        """Return what is logged. Local, without a host sync.

        Args:
            sums: What `take` returned, added up over all ranks.
        """
        if not self._sizes:
            return {}
        found: dict[str, Tensor] = {}
        for label, counts in zip(self._labels, sums.split([*self._sizes.values()]), strict=True):
            load, entropy = expert_load(counts).unbind()
            found |= {f"expert_load/{label}": load, f"expert_entropy/{label}": entropy}
        return found

    def close(self) -> None:
        """Let routers be as they were. Local."""
        for router in self._own.values():
            router.balance = None
        self._own = {}
