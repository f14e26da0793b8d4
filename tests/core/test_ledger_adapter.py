import pytest

from nereus_core.capabilities import Capabilities
from nereus_core.cluster import Cluster
from nereus_core.device_specs import CPU_SEAT, LOOPBACK
from nereus_core.errors import Infeasible, PlanError, UnitLost
from nereus_core.layout import Layout
from nereus_core.ledger import Done, Ledger, Standing
from nereus_core.ledger_adapter import LedgerAdapter, alive, require_plan
from nereus_core.phases import Phase
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Destroy, OpId, created, ended
from nereus_core.sim.models import TINY
from nereus_core.units import Unit, UnitId, UnitMap
from nereus_core.workload import (
    ACTOR_GENERATE,
    ACTOR_TRAIN,
    FLOAT32,
    REF_INFER,
    Job,
    grpo,
)

CLUSTER = Cluster.homogeneous(1, 4, CPU_SEAT, LOOPBACK, LOOPBACK)
D = CLUSTER.devices
JOB = Job(grpo(), {"actor": TINY, "ref": TINY}, CLUSTER, 8, 8, 8, FLOAT32)
ONE = Layout(1, 1)


def unit(stage, serial, device):
    return Unit(UnitId(stage, serial), ONE, (device,))


PAIR = (unit(ACTOR_TRAIN, 0, D[0]), unit(ACTOR_TRAIN, 1, D[1]))
END = Destroy(OpId("end"), PAIR[1].id)


class Small(LedgerAdapter):
    """Units are all it has; every phase is entered."""

    def __init__(self):
        super().__init__(Ledger(Capabilities.everything()))
        self.alive, self.performed = UnitMap(PAIR), 0

    def _standing(self):
        return Standing(JOB, self.alive, frozenset({ACTOR_TRAIN}))

    def _do(self, op, units, enter):
        self.performed += 1
        for phase in (Phase.PREPARE, Phase.TRANSFER, Phase.VERIFY, Phase.COMMIT):
            enter(phase)
        self.alive = self.alive.replace(ended(op), created(op))
        enter(Phase.RELEASE)
        return Done(moved_bytes=5)


def test_a_fault_is_told_of_every_phase_after_whoever_watches_and_of_the_units():
    adapter, told = Small(), []
    adapter.watch(lambda op, phase: told.append((op, phase)))
    adapter.fault = lambda op, phase, units: told.append((op, phase, units))
    assert adapter.destroy(END).moved_bytes == 5
    assert told == [one for p in Phase for one in ((END, p), (END, p, UnitMap(PAIR)))]


@pytest.mark.parametrize("phase", [phase for phase in Phase if phase.may_abort])
def test_a_fault_before_release_leaves_units_and_no_receipt(phase):
    adapter = Small()

    def strike(op, now, units):
        if now is phase:
            raise Infeasible("struck", op)

    adapter.fault = strike
    with pytest.raises(Infeasible, match="struck"):
        adapter.destroy(END)
    assert adapter.alive == UnitMap(PAIR)
    adapter.fault = None
    assert adapter.destroy(END).ended == (PAIR[1].id,)
    assert adapter.performed == 2


def test_a_fault_in_release_is_raised_and_the_receipt_is_kept():
    adapter = Small()

    def strike(op, phase, units):
        if phase is Phase.RELEASE:
            raise UnitLost([PAIR[0].id], (), "a device failed")

    adapter.fault = strike
    with pytest.raises(UnitLost, match="a device failed"):
        adapter.destroy(END)
    assert adapter.alive == UnitMap(PAIR[:1])
    assert adapter.destroy(END).ended == (PAIR[1].id,)
    assert adapter.performed == 1


def test_a_unit_that_is_not_alive_is_lost():
    assert alive(PAIR[0].id, UnitMap(PAIR)) is PAIR[0]
    with pytest.raises(UnitLost, match="not alive"):
        alive(PAIR[1].id, UnitMap(PAIR[:1]))


def test_a_plan_is_required_to_be_valid_and_that_of_the_units_alive():
    units = UnitMap([unit(ACTOR_GENERATE, 0, D[0]), *PAIR, unit(REF_INFER, 0, D[2])])
    plan = Plan.of_units(units)
    require_plan(plan, JOB, units)
    other = Plan(dict(plan) | {ACTOR_TRAIN: Placement(ONE, ((D[0],), (D[3],)))})
    with pytest.raises(PlanError, match=r"actor/train: actor/train#0.* alive, the plan says"):
        require_plan(other, JOB, units)
    with pytest.raises(PlanError, match="no unit alive"):
        require_plan(plan, JOB, UnitMap(u for u in units.values() if u.model_stage != REF_INFER))
    lost = JOB.on(CLUSTER.without({D[1]}))
    with pytest.raises(PlanError):
        require_plan(plan, lost, units)
