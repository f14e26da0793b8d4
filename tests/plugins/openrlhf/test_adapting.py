"""Real `train_ppo_ray` jobs that change while they run.

Every transition is looked at from behind the adapter: tensors gathered by DeepSpeed's own means,
before and after; what engines generate; the driver's final save.
"""

import json

import openrlhf_job
import pytest

from nereus_core.events import RunFinished, TransitionFinished, read_events

pytestmark = pytest.mark.real

TIE = 0.06
"""Lead of a greedy token in logits below which bfloat16 may pick another: logits of this model
are below 4, where neighbors are 0.016 apart, and two computations differ by a few of those."""


def adapt(assets, folder, force, faults=None, call_s=240, ends="done", **changes):
    """Run a job with these transitions; returns it, what was seen of them, and its events."""
    words = ["--nereus.enable", "--nereus.mode=adapt", "--nereus.policy.admission=never",
             f"--nereus.run_dir={folder / 'run'}", f"--nereus.backend.call_s={call_s}"]  # fmt: skip
    seen = folder / "seen.jsonl"
    more = {
        "OPENRLHF_TEST_FORCE": json.dumps(force),
        "OPENRLHF_TEST_SEEN": str(seen),
        "OPENRLHF_TEST_FAULT": json.dumps(faults or {}),
        "OPENRLHF_TEST_GROUP_S": str(call_s),
    }
    words += openrlhf_job.flags(assets, folder, **changes)
    ran = openrlhf_job.run(words, folder, more=more)
    assert (ran.code == 0) == (ends == "done"), ran.output[-6000:]
    found = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [one["step"] for one in found] == [int(step) for step in force]
    events = [event for event, _ in read_events(folder / "run" / "events.jsonl")]
    assert isinstance(events[-1], RunFinished)
    assert events[-1].outcome.startswith(ends)
    return ran, found, events


def layouts(record, stage):
    """Units of a stage after a transition, each by its number of devices."""
    return [len(unit) for unit in record["after"]["plan"][stage]["units"]]


def require_same_state(record):
    """No bit of a master or a moment, and no counter, has changed; steps fall due as before."""
    before, after = record["before"]["at"], record["after"]["at"]
    assert before.keys() == after.keys()
    for stage, state in before.items():
        assert len(state["tensors"]) >= 3 * 27
        assert state["tensors"] == after[stage]["tensors"], stage
        for counter in ("steps", "scheduler", "global_steps"):
            assert state[counter] == after[stage][counter], (stage, counter)
        now = after[stage]
        assert now["micro_steps"] == now["global_steps"] * now["accumulation"]


def require_same_tokens(record):
    """Engines generate the actor's greedy tokens, up to ties of bfloat16."""
    engines, actor = record["tokens"]["engines"], record["tokens"]["actor"]
    assert len(engines) == len(record["after"]["plan"]["actor/generate"]["units"])
    if actor is None:
        return
    for outputs in engines:
        for tokens, own in zip(outputs, actor, strict=True):
            for token, expected, lead in zip(tokens, own["tokens"], own["leads"], strict=True):
                if token != expected:
                    assert lead < TIE, (tokens, own)
                    break


def require_saved(folder, count=27):
    """The driver saved the model through the ranks of the end."""
    from safetensors.torch import load_file

    (path,) = (folder / "final").glob("*.safetensors")
    assert len(load_file(path)) == count


def require_steps_fell_due(ran, records):
    """Every RL step was one optimizer step, also after the accumulation changed.

    A digest proves state, not trajectory: counted on from the old accumulation, a step would fall
    due in the middle of a batch, and gradients of two batches would mix.
    """
    assert [step["step"] for step in ran.steps()] == [1.0 + n for n in range(len(ran.steps()))]
    for record in records:
        for stage, state in record["before"]["at"].items():
            assert state["global_steps"] == record["step"], stage
            assert state["steps"] == [record["step"]], stage


def test_ppo_changes_engines_actor_and_critic_and_trains_on(assets, tmp_path):
    ran, (one, two, three, four), events = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/generate": [[0, 1]], "critic/train": [[1]]},
            "2": {"actor/train": [[0]]},
            "3": {"actor/generate": [[0], [1]], "actor/train": [[0, 1]]},
            "4": {"critic/train": [[1], [0]], "actor/train": [[0], [1]]},
        },
        algo__advantage__estimator="gae",
        algo__kl__use_loss=False,
        algo__kl__estimator="k1",
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        critic__num_gpus_per_node=2,
        data__max_samples=40,
    )
    assert (layouts(one, "actor/generate"), layouts(one, "critic/train")) == ([2], [1])
    assert layouts(two, "actor/train") == [1]
    assert (layouts(three, "actor/generate"), layouts(three, "actor/train")) == ([1, 1], [2])
    assert (layouts(four, "critic/train"), layouts(four, "actor/train")) == ([1, 1], [1, 1])
    for record in (one, two, three, four):
        require_same_state(record)
        require_same_tokens(record)
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert [event.outcome for event in done] == ["done"] * 4
    require_steps_fell_due(ran, (one, two, three, four))
    # what engines generate is what the actor would: at every step, whatever the layouts
    assert all(abs(step["vllm_kl"]) < 2e-3 for step in ran.steps())
    require_saved(tmp_path)


def test_grpo_on_zero3_changes_the_number_of_its_ranks(assets, tmp_path):
    ran, (one, two), _ = adapt(
        assets,
        tmp_path,
        {"1": {"actor/train": [[0]]}, "2": {"actor/train": [[1], [0]]}},
        ds__zero_stage=3,
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        actor__num_gpus_per_node=2,
        data__max_samples=24,
    )
    assert (layouts(one, "actor/train"), layouts(two, "actor/train")) == ([1], [1, 1])
    for record in (one, two):
        require_same_state(record)
    require_steps_fell_due(ran, (one, two))
    # no rank has all of the model to compare tokens with: the engines' log-probabilities stand in
    assert len(ran.steps()) == 3
    assert all(abs(step["vllm_kl"]) < 2e-3 for step in ran.steps())
    require_saved(tmp_path)


def test_an_asynchronous_job_generates_on_its_new_engines(assets, tmp_path):
    ran, (one, two), _ = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/generate": [[0, 1]], "actor/train": [[0]]},
            "2": {"actor/generate": [[0], [1]]},
        },
        train__async_enable=True,
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        data__max_samples=40,
    )
    assert (layouts(one, "actor/generate"), layouts(two, "actor/generate")) == ([2], [1, 1])
    for record in (one, two):
        require_same_state(record)
    assert len(ran.steps()) == 5
    assert all(abs(step["vllm_kl"]) < 0.1 for step in ran.steps())
    require_saved(tmp_path)


def test_what_fails_while_a_job_changes_leaves_the_old_job_and_what_dies_is_named(assets, tmp_path):
    ran, (rank, engine, hung), events = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/train": [[1]]},
            "2": {"actor/generate": [[0]]},
            "3": {"actor/generate": [[0]]},
        },
        faults={
            "1": ["killed rank"],
            "2": ["killed engine"],
            "3": ["hung engine"],
            "4": ["dead engine"],
        },
        call_s=60,
        ends="failed: ",
        algo__kl__init_coef=0,
        algo__kl__use_loss=False,
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        data__max_samples=40,
    )
    for record in (rank, engine, hung):
        assert record["after"]["plan"] == record["before"]["plan"]
        require_same_state(record)
        require_same_tokens(record)
    failed = [event for event in events if isinstance(event, TransitionFinished)]
    assert len(failed) == 3
    # an engine that dies between steps ends the job, with a name, instead of waiting for ever
    assert len(ran.steps()) == 4
    assert "ActorDiedError" in events[-1].outcome
