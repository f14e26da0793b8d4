"""From stage seconds to step seconds: dataflow over stages that share devices or do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from nereus_core.cost.interval import Interval
from nereus_core.workload import ModelStage, Stage, Workload


@dataclass(frozen=True, slots=True)
class StepCost:
    """Predicted seconds of one RL step and of each model-stage in it."""

    step: Interval
    stage_s: Mapping[ModelStage, float]


def step_seconds(
    workload: Workload,
    stage_s: Mapping[ModelStage, float],
    sharing: Callable[[ModelStage, ModelStage], bool],
) -> float:
    """Return when the last stage ends.

    A stage begins when what it needs has ended and no earlier stage of the order still holds one of
    its devices. Asynchronous: the generation side and the rest overlap, the slower decides.
    """
    ends: dict[ModelStage, float] = {}
    for node in workload.nodes:
        waits = [
            end
            for other, end in ends.items()
            if (other in node.after and not _overlaps(workload, other))
            or sharing(other, node.model_stage)
        ]
        ends[node.model_stage] = max(waits, default=0.0) + stage_s[node.model_stage]
    return max(ends.values())


def _overlaps(workload: Workload, stage: ModelStage) -> bool:
    """Whether later stages work on the previous batch while this one makes the next."""
    return workload.asynchronous and stage.stage is Stage.GENERATE
