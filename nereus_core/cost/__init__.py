"""What plans and transitions cost: seconds linear in inverse efficiency, bytes from shapes."""

from nereus_core.cost.cost_model import CostModel
from nereus_core.cost.efficiency import EfficiencyTable
from nereus_core.cost.interval import Interval
from nereus_core.cost.lengths import Lengths
from nereus_core.cost.op_classes import OpClass
from nereus_core.cost.stage_table import StageTable
from nereus_core.cost.step import StepCost

__all__ = [
    "CostModel",
    "EfficiencyTable",
    "Interval",
    "Lengths",
    "OpClass",
    "StageTable",
    "StepCost",
]
