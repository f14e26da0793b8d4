"""verl's asynchronous trainers with vLLM's replicas, changed while they generate.

What is said of log-probabilities: every token that any server answered is compared with what the
actor's weights of that version make of it (`verl_cpu.answered.furthest`), however stale the step
that trains on it. verl's own figure compares a step's batch with the weights that the actor has by
then; of that those responses are taken whose tokens all come from these weights. In separate_async
it says nothing on a CPU: verl keeps a step's first weights for its later mini-batches by ``.cpu()``
(verl 0.9.1, fsdp_utils.py:1180), which copies nothing there, so these are compared with others.
"""

import pytest
from verl_cpu.alike import require_same_state
from verl_cpu.answered import furthest, moved, read, require_none_lost
from verl_cpu.command import SEPARATE
from verl_cpu.ulps import MOST

from nereus_core.events import TransitionFinished

pytestmark = pytest.mark.real

BATCH, RESPONSES, AHEAD = 8, 4, 6
"""Prompts a step, responses to each, prompts that verl submits before the first step. So when a
step ends six are under way or wait, and of those that it trains on two came after the last
weights."""
NEREUS = (
    "+nereus.enable=true",
    "+nereus.timeouts.step_s=600",
    "+nereus.timeouts.primitive_s=600",
    "+nereus.timeouts.boundary_s=600",
    "+nereus.policy.admission=never",
)
"""No decision but those that a test takes. A wait that fails ends the job, at the latest where the
job's own limit (`conftest.JOB_S`) does."""
LONG = 128
"""Tokens of a response at most; nearly all have as many."""
NARROW = "actor_rollout_ref.rollout.max_num_seqs=2"
"""A replica has two responses under way at a time: six prompts take longer than a step ends."""


STEPS, UNCHANGED = 9, 6
"""Of a job, and after which no change is made: what is lost in one has time to be missed. Before
the end of a job requests were seen to wait for up to two steps."""
NUM_BUSY = 8
"""Requests of the test's own, under way when replicas leave: the job's may all be answered."""


def require_right_answers(job):
    """Hold every request, and every log-probability that a server gave with it."""
    requests = read(job.work)
    require_none_lost(requests, NUM_BUSY + RESPONSES * (AHEAD + BATCH * STEPS), UNCHANGED)
    assert len([request for request in requests.values() if request.own]) == NUM_BUSY
    assert moved(requests)
    told = [piece for request in requests.values() for piece in request.told]
    assert {piece["tp"] for piece in told} == {1, 2}
    assert {piece["version"] for piece in told} >= set(range(STEPS))
    served = {process for record in job.forced for process in record["serve"]}
    assert {piece["process"] for piece in told} >= served
    apart = furthest(requests, job.work, job.work.parent / "assets0" / "model")
    print(f"log-probabilities by server and version, in units in the last place: {apart}")
    assert all(value <= MOST for value in apart.values()), apart


def require_fresh(job, steps):
    """Hold verl's own figure where it compares like with like."""
    apart = "training/rollout_log_probs_diff"
    fresh = [step for step in job.ran.metrics if step[f"{apart}_tokens_sum"] >= LONG]
    assert len(fresh) >= steps
    print(f"of fresh responses, the same: {[step[f'{apart}_ulps_max'] for step in fresh]}")
    assert all(step[f"{apart}_ulps_max"] <= MOST for step in fresh)


def require_last_synchronization(job):
    """Hold that every server on the balancer had the weights of the step before the change."""
    for record in job.forced:
        assert set(record["versions"].values()) == {record["step"] - 1}, record["versions"]


def outcomes(job):
    return [e.outcome for e in job.events if isinstance(e, TransitionFinished)]


ONE, TWO = {"actor/generate": ["tp1pp1", 2]}, {"actor/generate": ["tp2pp1", 2]}
LONE = {"actor/generate": ["tp1pp1", 1], "actor/train": ["tp1pp1", 1]}
COLOCATED = {
    1: TWO,
    2: {**ONE, "actor/train": ["tp1pp1", 2]},
    3: LONE,  # the ranks refuse to meet, once
    4: LONE,
    5: {**ONE, "actor/train": ["tp2pp1", 2]},
}


@pytest.fixture(scope="module")
def colocated(launch):
    found = launch(
        "colocated",
        "trainer.v1.trainer_mode=colocate_async",
        f"trainer.v1.colocate_async.num_warmup_batches={AHEAD / BATCH}",
        NARROW,
        *NEREUS,
        plans=COLOCATED,
        fault="refuse-join:3,busy:4",
        answers=True,
        response=LONG,
        steps=STEPS,
    )
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    assert len(found.ran.metrics) == STEPS
    return found


class TestColocateAsync:
    def test_all_but_the_change_that_is_refused_are_made(self, colocated):
        assert outcomes(colocated) == ["done", "done", "rolled_back", "done", "done"]
        assert [len(record["serve"]) for record in colocated.forced] == [1, 2, 2, 1, 2]
        assert [record["world"] for record in colocated.forced] == [2, 2, 2, 1, 2]

    def test_state_is_the_same_bit_for_bit(self, colocated):
        for record in colocated.forced:
            require_same_state(record)
            assert record["alike"] == [True, True]  # of units that hold a copy each

    def test_every_replica_on_the_balancer_serves_the_last_synchronization(self, colocated):
        require_last_synchronization(colocated)

    def test_a_layout_that_comes_back_starts_no_process(self, colocated):
        whole, *others = [record["serve"] for record in colocated.forced]
        pair = colocated.forced[0]["served"]
        assert whole[0] not in pair
        assert others == [pair, pair, pair[:1], pair]

    def test_no_answer_is_lost_and_each_is_of_the_weights_it_says(self, colocated):
        require_right_answers(colocated)
        require_fresh(colocated, 4)


SEPARATED = {
    1: {"actor/generate": ["tp1pp1", [2, 3]]},
    2: {"actor/generate": ["tp1pp1", [3]]},
    3: {"actor/train": ["tp1pp1", [0]]},  # the ranks refuse to meet, once
    4: {"actor/generate": ["tp2pp1", [2, 3]]},
    5: {"actor/generate": ["tp1pp1", [2]], "actor/train": ["tp2pp1", [0, 3]]},
    "6+": {"actor/generate": ["tp1pp1", [1]]},
}
"""Devices 0 and 1 are the trainers', 2 verl's own replica's, 3 is Ray's to give. After step 5 the
trainers have one that was a replica's, in step 6 a replica one that verl gave the trainers. When
verl's own replica leaves after step 2, it and the other are at requests of the test's own."""
MOMENTS = [str(moment) for moment in SEPARATED]


@pytest.fixture(scope="module")
def separated(launch):
    found = launch(
        "separated",
        *SEPARATE,
        f"trainer.v1.separate_async.num_warmup_batches={AHEAD / BATCH}",
        NARROW,
        *NEREUS,
        "+nereus.backend.max_devices=4",
        plans=SEPARATED,
        fault="refuse-join:3,late:2:0,busy:2",
        answers=True,
        response=LONG,
        steps=STEPS,
        ray_devices=4,
    )
    assert found.ran.returncode == 0, found.ran.output[-6000:]
    assert len(found.ran.metrics) == STEPS
    return found


def units(record, stage):
    return [len(unit) for unit in record["plan"][stage]["units"]]


class TestSeparateAsync:
    def test_all_but_the_change_that_is_refused_are_made(self, separated):
        assert outcomes(separated) == ["done", "done", "rolled_back", "done", "done", "done"]
        seen = [units(record, "actor/generate") for record in separated.forced]
        assert seen == [[1, 1], [1], [1], [2], [1], [1]]
        assert [units(record, "actor/train") for record in separated.forced] == [[2]] * 6
        assert [f"{record['step']}{record['moment']}" for record in separated.forced] == MOMENTS

    def test_state_is_the_same_bit_for_bit(self, separated):
        for record in separated.forced:
            require_same_state(record)
            assert record["alike"] == [True, True]  # of units that hold a copy each

    def test_devices_go_between_the_pools_and_back_to_ray(self, separated):
        """Of four: those of ranks and replicas, and those that verl gave the trainers, are held."""
        assert [record["free"] for record in separated.forced] == [0, 1, 1, 0, 0, 1]

    def test_every_replica_on_the_balancer_serves_the_last_synchronization(self, separated):
        require_last_synchronization(separated)

    def test_no_answer_is_lost_and_each_is_of_the_weights_it_says(self, separated):
        require_right_answers(separated)

    def test_a_request_that_comes_when_its_server_has_left_is_answered_elsewhere(self, separated):
        late = [request for request in read(separated.work).values() if request.late]
        assert len(late) == 1
        assert late[0].got
        assert (late[0].pieces[0]["reason"], late[0].pieces[0]["tokens"]) == ("aborted", [])
        assert late[0].told[0]["server"] != late[0].pieces[0]["server"]
