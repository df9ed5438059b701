"""Plans of runs by arithmetic: memory, bubble, traffic and time of any number of ranks, on a laptop.

`lightning_d9d.memory` has the arithmetic of memory and traffic, which the strategy's check uses, too.
"""

from lightning_d9d.plan.machine import MachineTable, machine_of, shipped
from lightning_d9d.plan.measure import Sizes, measure
from lightning_d9d.plan.page import write_page
from lightning_d9d.plan.planning import Plan, RankPlan, plan, plan_of
from lightning_d9d.plan.search import search

__all__ = [
    "MachineTable",
    "Plan",
    "RankPlan",
    "Sizes",
    "machine_of",
    "measure",
    "plan",
    "plan_of",
    "search",
    "shipped",
    "write_page",
]
