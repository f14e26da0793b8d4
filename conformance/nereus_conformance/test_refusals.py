"""What an adapter declares it cannot do, it refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from nereus_conformance.arrange import MODEL_STAGES, ONE, Arranger
from nereus_conformance.assertions import refused
from nereus_conformance.suite import Need
from nereus_core.capabilities import Feature
from nereus_core.errors import Unsupported
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.primitives import Kind, Merge, Primitive
from nereus_core.units import Unit
from nereus_core.workload import Stage

TP2 = Layout(2, 1)


def test_undeclared_power_is_refused(arrange: Arranger, refusal: Need) -> None:
    """A primitive or feature declared unsupported raises Unsupported and changes nothing.

    If this fails, check that the adapter asks its own table before it acts, or declare full().
    """
    if isinstance(refusal, Feature):
        _feature(arrange, refusal)
        return
    kind, stage = refusal
    layout, units = (ONE, 2) if kind in (Kind.MERGE, Kind.DESTROY) else (TP2, 1)
    if kind is Kind.EXTEND:
        layout = ONE
    subject = arrange(stage, layout, units, spare=1 if kind is Kind.EXTEND else 0)
    own = subject.own()
    build: dict[Kind, Callable[[], Primitive]] = {
        Kind.SPLIT: lambda: subject.split(own[0], ONE),
        Kind.MERGE: lambda: subject.merge(own, TP2),
        Kind.EXTEND: lambda: subject.extend(subject.spare),
        Kind.DESTROY: lambda: subject.destroy(own[-1]),
    }
    op = build[kind]()
    with subject.boundary(), refused(subject, Unsupported, str(op)):
        subject.perform(op)
    subject.step()


def _feature(arrange: Arranger, feature: Feature) -> None:
    match feature:
        case Feature.FINGERPRINT:
            subject = arrange()
            with refused(subject, Unsupported, "fingerprint"):
                subject.adapter.fingerprint(subject.own()[0].id)
        case Feature.MEMORY_PROBE:
            subject = arrange()
            subject.step()
            assert not subject.adapter.observe().peak_bytes, "undeclared figures are reported"
        case Feature.EFFICIENCY_PROBE:
            subject = arrange()
            subject.step()
            assert not subject.adapter.observe().efficiency, "undeclared figures are reported"
        case Feature.PIPELINE_STAGES:
            subject = arrange(Stage.TRAIN, num_units=2)
            own = subject.own()
            into = Unit(subject.fresh(1)[0], Layout(1, 2), (*own[0].devices, *own[1].devices))
            op = Merge(subject.op_id(), (own[0].id, own[1].id), into)
            with subject.boundary(), refused(subject, Unsupported, str(op)):
                subject.perform(op)
        case Feature.ASYNC_BOUNDARY:
            with pytest.raises(Unsupported):
                arrange(job=arrange.job(asynchronous=True))
        case Feature.COLOCATED_STAGES:
            job = arrange.job()
            placement = Placement(ONE, (job.cluster.healthy[:1],))
            plan = Plan(dict.fromkeys(job.workload.stages, placement))
            with pytest.raises(Unsupported):
                arrange.launch(job, plan, MODEL_STAGES[Stage.TRAIN])
        case _:
            pytest.skip(f"{feature.name} is about what is kept: there is no call to refuse")
