import threading

import pytest

from nereus_core.errors import BoundaryTimeout, NotAtBoundary, WaitTimeout
from nereus_core.gate import Gate
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER


def test_a_gate_that_stays_closed_names_what_was_awaited():
    gate = Gate(0.05)
    gate.close_on([REF_INFER], 1.0)

    with (
        pytest.raises(WaitTimeout, match="the boundary that holds ref/infer to close"),
        gate.stages(REF_INFER),
    ):
        pass

    with pytest.raises(NotAtBoundary):
        gate.close_on([REF_INFER], 1.0)


def test_a_stage_that_is_not_held_runs_on_while_a_boundary_is_open():
    gate = Gate(5.0)
    gate.close_on([ACTOR_TRAIN], 1.0)
    passed = []

    def step():
        with gate.step():
            for stage in (ACTOR_GENERATE, ACTOR_TRAIN):
                with gate.stages(stage):
                    passed.append((stage, gate.held))

    thread = threading.Thread(target=step)
    thread.start()
    gate.open()
    thread.join(5.0)

    assert [stage for stage, _ in passed] == [ACTOR_GENERATE, ACTOR_TRAIN]
    assert passed[1][1] is None


def test_a_boundary_in_a_step_of_an_asynchronous_job_waits_for_weight_synchronisation():
    gate = Gate(5.0, asynchronous=True)
    with gate.step():
        with (
            gate.critical(),
            gate.stages(ACTOR_TRAIN),
            pytest.raises(BoundaryTimeout, match="actor/train was still running"),
        ):
            gate.close_on([ACTOR_TRAIN], 0.05)
        with gate.stages(ACTOR_GENERATE):
            assert gate.close_on([ACTOR_TRAIN], 1.0) == {ACTOR_TRAIN}


def test_stages_that_run_at_once_are_all_inside_until_each_has_ended():
    gate = Gate(5.0, asynchronous=True)
    with gate.stages(ACTOR_GENERATE, REF_INFER):
        with gate.stages(ACTOR_GENERATE):
            assert gate.inside == (ACTOR_GENERATE, REF_INFER, ACTOR_GENERATE)
        with pytest.raises(BoundaryTimeout):
            gate.close_on([ACTOR_GENERATE], 0.05)
        assert gate.close_on([ACTOR_TRAIN], 1.0) == {ACTOR_TRAIN}
    assert gate.inside == ()


def test_a_step_stops_where_a_harness_wants_it_and_the_boundary_names_the_stage():
    gate = Gate(5.0)
    gate.stop_at(ACTOR_TRAIN)

    def step():
        with gate.step():
            with gate.stages(ACTOR_TRAIN, receiving=True):  # receiving weights, it is not stopped
                pass
            with gate.stages(REF_INFER, ACTOR_TRAIN):
                pass

    thread = threading.Thread(target=step)
    thread.start()
    gate.wait_stopped()
    with pytest.raises(BoundaryTimeout, match="actor/train was still running"):
        gate.close_on([REF_INFER], 0.05)
    gate.go_on()

    assert gate.close_on([REF_INFER], 5.0) == {REF_INFER}
    thread.join(5.0)
    assert not thread.is_alive()
