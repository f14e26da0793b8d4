"""The planner's optimum against SCIP's, on the same space and from the same tables."""

from __future__ import annotations

import math

import pytest
from planner_cases import CASES, LENGTHS, small_problem

pytest.importorskip("pyscipopt", reason="pyscipopt is not installed: no judge of optima")

from scip_planner import solve

from nereus_core.cost import CostModel
from nereus_core.errors import NoFeasiblePlan
from nereus_core.planner import Constraints, best
from nereus_core.planner.space import Space
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

LIMIT_S = 120.0
SAME = 1e-6  # SCIP's own tolerances


def agree(cost, lengths, constraints) -> None:
    judged = solve(Space.of(cost, lengths, constraints, None), LIMIT_S)
    assert judged.status in ("optimal", "infeasible")
    try:
        found = best(cost, lengths, constraints).best.step.step.mean_s
    except NoFeasiblePlan:
        found = math.inf
    assert judged.seconds + cost.between.seconds == pytest.approx(found, rel=SAME)


@pytest.mark.parametrize("seed", range(1000, 1020))
def test_scip_finds_no_better_plan_on_small_problems(seed):
    agree(*small_problem(seed), Constraints(degrees="divisors" if seed % 2 else "powers_of_two"))


def test_scip_finds_no_better_plan_where_stages_must_share():
    constraints = Constraints(
        colocate=(frozenset({ACTOR_TRAIN, REF_INFER}),), max_tp=4, min_dp={ACTOR_GENERATE: 2}
    )
    agree(CostModel(CASES["8B GRPO"].job(8)), LENGTHS, constraints)
