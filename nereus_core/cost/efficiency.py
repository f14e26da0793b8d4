"""EfficiencyTable: achieved / peak per operation class, learned from measured stage seconds.

The unknowns are the logarithms of the inverse efficiencies, one residual per model-stage (what a
class number cannot say about that stage on this machine: shared cores, a slow tokenizer), and one
per layout of a stage that was seen (what it cannot say about that layout: a plan that ran better
than its like is known to have, wherever the job has been since). A stage's predicted seconds are
``(work . inverse) * exp(residuals)``. Each measurement corrects all
unknowns at once, in proportion to their share of that stage and their uncertainty: a recursive
ridge regression toward the prior (an extended Kalman filter), in log space because errors of
seconds are relative. Outliers move it by a bounded amount (Huber); efficiencies stay in (0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from nereus_core.cluster import Cluster
from nereus_core.cost.curves import CHOSEN
from nereus_core.cost.kalman import gain, shrunk
from nereus_core.cost.op_classes import CLASSES, INDEX, FloatArray, IntArray, OpClass
from nereus_core.layout import Layout
from nereus_core.workload import ModelStage

_PRIOR_DEVIATION = 0.5
"""Of a log inverse efficiency before it is seen: a factor 1.65; chosen, not measured."""
_RESIDUAL_DEVIATION = 0.15
"""Of a model-stage's log residual before it is seen; chosen, not measured."""
_MISFIT_DEVIATION = 0.065
"""Of a layout's log residual before it is seen. Source: five-fold error of a white-box model of
this form on vTrain's measured multi-node plans."""
_NOISE_DEVIATION = 0.05
"""Of one measured stage time, in logs; chosen, not measured."""
_FIRST_STEP_NOISE = 0.5
"""The same in a job's first step, which also pays for warming up; chosen, not measured."""
_DRIFT_DEVIATION = 0.01
"""How far an unknown wanders per step: keeps the regression awake; chosen, not measured."""
_HUBER = 2.0
"""Standard deviations beyond which a measurement pulls no harder; chosen, not measured."""
_PERSISTENT = 2
"""Outliers in a row, on the same side, after which it is the world that changed."""
_ITERATIONS = 4
"""Relinearizations per measurement; three suffice for a factor of 10."""
_MAX_LOG_INVERSE = math.log(1e4)
"""An efficiency below one in ten thousand is left to the residual."""


Seen = ModelStage | tuple[ModelStage, Layout]
"""What has a residual: a stage, and a layout of it."""


@dataclass(frozen=True, slots=True, eq=False)
class EfficiencyTable:
    """Immutable; `refined` returns a new one. Unknowns: all classes, then residuals."""

    log_inverse: FloatArray
    """[num_classes], at least 0."""
    log_residual: Mapping[Seen, float]
    covariance: FloatArray
    """[num_classes + num_residuals, the same]; those in the order of `log_residual`."""
    streaks: Mapping[ModelStage, int]
    """Outliers in a row per stage, negative when measured below predicted."""
    source: str

    @classmethod
    def prior(cls, cluster: Cluster, measured: Mapping[OpClass, float] | None = None) -> Self:
        """Start conservatively, or from efficiencies measured elsewhere for this kind of device.

        Raises:
            ValueError: a measured efficiency lies outside (0, 1].
        """
        given = dict(measured or {})
        for op_class, value in given.items():
            if not 0 < value <= 1:
                raise ValueError(f"efficiency of {op_class} is {value}; expected in (0, 1]")
        values = [given.get(c, CHOSEN[c]) for c in CLASSES]
        # What was measured on such a device is trusted three times as much as what was chosen.
        deviations = [_PRIOR_DEVIATION / (3 if c in given else 1) for c in CLASSES]
        source = f"chosen, not measured, for {cluster.device_spec.name}"
        if given:
            source = f"{source}; measured elsewhere: {', '.join(given)}"
        return cls(-np.log(values), {}, np.diag(np.square(deviations)), {}, source)

    def of(self, op_class: OpClass) -> float:
        """Achieved / peak, in (0, 1]."""
        return float(np.exp(-self.log_inverse[INDEX[op_class]]))

    def uncertainty(self, op_class: OpClass) -> float:
        """Standard deviation of the logarithm of the efficiency."""
        return math.sqrt(self.covariance[INDEX[op_class], INDEX[op_class]])

    @property
    def inverse(self) -> FloatArray:
        """1 / efficiency per class: seconds = ideal seconds . inverse."""
        return np.exp(self.log_inverse)

    def residual(self, stage: ModelStage, layout: Layout) -> float:
        """Factor on all seconds of a model-stage in a layout; 1 until one of them is seen."""
        own = self.log_residual.get((stage, layout), 0.0)
        return math.exp(self.log_residual.get(stage, 0.0) + own)

    def seconds(self, stage: ModelStage, layout: Layout, work: FloatArray) -> float:
        """Predict a stage's seconds from its work [num_classes]."""
        return float(work @ self.inverse) * self.residual(stage, layout)

    def table(self, stage: ModelStage, tp: IntArray, pp: IntArray, work: FloatArray) -> FloatArray:
        """Predict the seconds of many layouts of a stage, one for each row of work."""
        seconds = work @ self.inverse * math.exp(self.log_residual.get(stage, 0.0))
        for key, own in self.log_residual.items():
            if isinstance(key, tuple) and key[0] == stage:
                seconds[(tp == key[1].tp) & (pp == key[1].pp)] *= math.exp(own)
        return np.asarray(seconds)

    def deviation(
        self, parts: Sequence[tuple[ModelStage | None, Layout | None, FloatArray]]
    ) -> float:
        """Standard deviation in seconds of a signed sum of stage seconds.

        Args:
            parts: per term its model-stage and layout (None where no residual applies) and its
                *weighted* seconds per class [num_classes]; signs make it a difference, in which
                what two plans share cancels.
        """
        gradient = np.zeros(len(self.covariance))
        at = {key: len(CLASSES) + i for i, key in enumerate(self.log_residual)}
        unseen: dict[Seen, float] = {}
        for stage, layout, seconds in parts:
            gradient[: len(CLASSES)] += seconds
            if stage is None or layout is None:
                continue
            total = float(seconds.sum())
            for key in (stage, (stage, layout)):
                if key in at:
                    gradient[at[key]] += total
                else:
                    unseen[key] = unseen.get(key, 0.0) + total
        variance = float(gradient @ self.covariance @ gradient)
        variance += sum((_unseen(key) * s) ** 2 for key, s in unseen.items())
        return math.sqrt(max(0.0, variance))

    def refined(
        self,
        measured: Mapping[ModelStage, tuple[Layout, FloatArray, float]],
        *,
        efficiency: Mapping[str, float] | None = None,
        first_step: bool = False,
    ) -> EfficiencyTable:
        """Learn from one step.

        Args:
            measured: per model-stage its layout, ideal work [num_classes] and wall seconds.
            efficiency: achieved / peak by class, where the backend measures it; others ignored.
            first_step: the step also paid for warming up and counts for less.
        """
        table = self._with(s for stage, seen in measured.items() for s in (stage, (stage, seen[0])))
        table = replace(table, covariance=table._loosened(_DRIFT_DEVIATION**2))
        for name, value in (efficiency or {}).items():
            if name in list(OpClass) and 0 < value <= 1:
                table = table._corrected_class(OpClass(name), value)
        for stage, (layout, work, seconds) in measured.items():
            if seconds > 0 and work.sum() > 0:
                noise = _FIRST_STEP_NOISE if first_step else _NOISE_DEVIATION
                table = table._corrected(stage, layout, work, math.log(seconds), noise)
        return table

    def _loosened(self, variances: FloatArray | float) -> FloatArray:
        """Covariance with variances added, none beyond its prior: the unseen stays as it was."""
        residuals = [_unseen(key) for key in self.log_residual]
        prior = np.square([_PRIOR_DEVIATION] * len(CLASSES) + residuals)
        room = np.maximum(0.0, prior - np.diag(self.covariance))
        return np.asarray(self.covariance + np.diag(np.minimum(variances, room)))

    def _with(self, keys: Iterable[Seen]) -> EfficiencyTable:
        new = [key for key in keys if key not in self.log_residual]
        if not new:
            return self
        size = len(self.covariance)
        grown = np.diag(np.square([0.0] * size + [_unseen(key) for key in new]))
        grown[:size, :size] = self.covariance
        residuals = {**self.log_residual, **dict.fromkeys(new, 0.0)}
        return replace(self, log_residual=residuals, covariance=grown)

    def _corrected_class(self, op_class: OpClass, value: float) -> EfficiencyTable:
        """Take one class's efficiency as measured, with a stage time's noise."""
        jacobian = np.zeros(len(self.covariance))
        jacobian[INDEX[op_class]] = 1.0
        state = self._state()
        weights, _ = gain(self.covariance, jacobian, _NOISE_DEVIATION)
        surprise = -math.log(value) - state[INDEX[op_class]]
        return self._moved(
            state + weights * surprise,
            shrunk(self.covariance, weights, jacobian, _NOISE_DEVIATION),
        )

    def _corrected(
        self,
        stage: ModelStage,
        layout: Layout,
        work: FloatArray,
        log_seconds: float,
        noise: float,
    ) -> EfficiencyTable:
        """Take one measured stage time: iterated, with the pull of outliers bounded."""
        keys = list(self.log_residual)
        at = [len(CLASSES) + keys.index(key) for key in (stage, (stage, layout))]
        prior, covariance = self._state(), self.covariance
        _, jacobian = _predict(prior, work, at)
        _, deviation = gain(covariance, jacobian, noise)
        surprise = log_seconds - _predict(prior, work, at)[0]
        streak = 0
        if abs(surprise) > _HUBER * deviation:
            before = self.streaks.get(stage, 0)
            side = 1 if surprise > 0 else -1
            streak = before + side if before * side >= 0 else side
        if abs(streak) >= _PERSISTENT:
            # Not an outlier any more: forget how certain this stage's unknowns were.
            covariance = self._loosened(jacobian)
            _, deviation = gain(covariance, jacobian, noise)
        limit = _HUBER * deviation
        target = log_seconds - surprise + max(-limit, min(limit, surprise))
        state, free = prior, np.ones(len(prior), dtype=np.bool_)
        for _ in range(_ITERATIONS):
            predicted, jacobian = _predict(state, work, at)
            # Iterated extended Kalman filter: relinearize around the newest state. Efficiencies
            # that have reached their bound stay there and leave the rest to the others.
            weights, _ = gain(covariance, jacobian * free, noise)
            weights = weights * free
            moved = prior + weights * (target - predicted - jacobian @ (prior - state))
            state = np.concatenate([_bounded(moved), moved[len(CLASSES) :]])
            free &= state == moved
        jacobian = jacobian * free
        table = self._moved(state, shrunk(covariance, weights, jacobian, noise))
        return replace(table, streaks={**self.streaks, stage: streak})

    def _state(self) -> FloatArray:
        return np.concatenate([self.log_inverse, list(self.log_residual.values())])

    def _moved(self, state: FloatArray, covariance: FloatArray) -> EfficiencyTable:
        classes = _bounded(state)
        residuals = dict(zip(self.log_residual, map(float, state[len(CLASSES) :]), strict=True))
        return replace(self, log_inverse=classes, log_residual=residuals, covariance=covariance)


def _bounded(state: FloatArray) -> FloatArray:
    """Log inverse efficiencies of a state, kept where efficiencies are in (0, 1]."""
    return np.clip(state[: len(CLASSES)], 0.0, _MAX_LOG_INVERSE)


def _unseen(key: Seen) -> float:
    """Deviation of a log residual before it is seen."""
    return _MISFIT_DEVIATION if isinstance(key, tuple) else _RESIDUAL_DEVIATION


def _predict(state: FloatArray, work: FloatArray, at: list[int]) -> tuple[float, FloatArray]:
    """Log seconds of a stage whose residuals sit at ``at``, and its derivative by each unknown."""
    seconds = work * np.exp(state[: len(CLASSES)])
    total = float(seconds.sum())
    jacobian = np.zeros(len(state))
    jacobian[: len(CLASSES)] = seconds / total  # d log(sum_k w_k e^x_k) / d x_k = share of class k
    jacobian[at] = 1.0
    return math.log(total) + float(state[at].sum()), jacobian
