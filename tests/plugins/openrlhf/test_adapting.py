"""Real `train_ppo_ray` jobs that change while they run.

Every transition is looked at from behind the adapter: tensors gathered by DeepSpeed's own means,
before and after; the driver's final save; losses beside those of a job that never changed.
"""

import json

import openrlhf_job
import pytest

from nereus_core.events import RunFinished, TransitionFinished, read_events

pytestmark = pytest.mark.real

TIE = 0.06
"""Lead of a greedy token in logits below which bfloat16 may pick another: logits of this model
are below 4, where neighbors are 0.016 apart, and two computations differ by a few of those."""


def adapt(assets, folder, force, faults=None, call_s=60, **changes):
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
    ran = openrlhf_job.run(words, folder, more=more, timeout_s=420)
    assert ran.code == 0, ran.output[-6000:]
    found = [json.loads(line) for line in seen.read_text().splitlines()]
    assert [one["step"] for one in found] == [int(step) for step in force]
    events = [event for event, _ in read_events(folder / "run" / "events.jsonl")]
    assert isinstance(events[-1], RunFinished)
    assert events[-1].outcome == "done"
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


PPO = {
    "algo__advantage__estimator": "gae",
    "algo__kl__use_loss": False,
    "algo__kl__estimator": "k1",
    "rollout__top_p": 1e-6,  # so that every run samples the same
    "vllm__num_engines": 2,
    "actor__num_gpus_per_node": 2,
    "critic__num_gpus_per_node": 2,
    "ref__num_gpus_per_node": 2,
    "data__max_samples": 40,
}


def test_ppo_changes_engines_actor_critic_and_reference_and_trains_on(assets, tmp_path):
    fixed = openrlhf_job.run(
        openrlhf_job.flags(assets, tmp_path / "fixed", **PPO), tmp_path / "fixed"
    )
    assert fixed.code == 0, fixed.output[-4000:]
    assert "[nereus]" not in fixed.output  # without the switch it is OpenRLHF and nothing else
    ran, (one, two, three, four), events = adapt(
        assets,
        tmp_path / "adapted",
        {
            "1": {"actor/generate": [[0, 1]], "critic/train": [[6]]},
            "2": {"actor/train": [[2]], "ref/infer": [[4]]},
            "3": {"actor/generate": [[0], [1]], "actor/train": [[2, 3]]},
            "4": {"critic/train": [[6], [7]], "actor/train": [[2], [3]], "ref/infer": [[4], [5]]},
        },
        **PPO,
    )
    assert (layouts(one, "actor/generate"), layouts(one, "critic/train")) == ([2], [1])
    assert (layouts(two, "actor/train"), layouts(two, "ref/infer")) == ([1], [1])
    assert (layouts(three, "actor/generate"), layouts(three, "actor/train")) == ([1, 1], [2])
    assert (layouts(four, "critic/train"), layouts(four, "actor/train")) == ([1, 1], [1, 1])
    for record in (one, two, three, four):
        require_same_state(record)
        require_same_tokens(record)
    done = [event for event in events if isinstance(event, TransitionFinished)]
    assert [event.outcome for event in done] == ["done"] * 4
    require_saved(tmp_path / "adapted")
    # A digest proves state, not trajectory: gradients of two batches that mix, or are dropped, show
    # in the norms of the steps that follow.
    steps, expected = ran.steps(), fixed.steps()
    assert len(steps) == len(expected) == 5
    for now, then in zip(steps, expected, strict=True):
        assert abs(now["vllm_kl"]) < 2e-3
        for name in ("actor_grad_norm", "critic_grad_norm", "critic_loss"):
            assert now[name] == pytest.approx(then[name], rel=0.1), (now["step"], name)
        for name in ("actor_lr", "critic_lr"):
            assert now[name] == pytest.approx(then[name], rel=1e-6)


def test_grpo_on_zero3_changes_the_number_of_its_ranks(assets, tmp_path):
    _, (one, two), _ = adapt(
        assets,
        tmp_path,
        {"1": {"actor/train": [[1]]}, "2": {"actor/train": [[2], [1]]}},
        ds__zero_stage=3,
        actor__num_gpus_per_node=2,
        data__max_samples=24,
    )
    assert (layouts(one, "actor/train"), layouts(two, "actor/train")) == ([1], [1, 1])
    for record in (one, two):
        require_same_state(record)
        require_same_tokens(record)
    require_saved(tmp_path)


def test_an_asynchronous_job_generates_on_its_new_engines(assets, tmp_path):
    ran, (one, two), _ = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/generate": [[0, 1]], "actor/train": [[2]]},
            "2": {"actor/generate": [[0], [1]]},
        },
        train__async_enable=True,
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


def test_what_fails_while_a_job_changes_leaves_the_old_job(assets, tmp_path):
    ran, (rank, engine, hung), _ = adapt(
        assets,
        tmp_path,
        {
            "1": {"actor/train": [[2]]},
            "2": {"actor/generate": [[0]]},
            "3": {"actor/generate": [[0]]},
        },
        faults={"1": ["killed rank"], "2": ["killed engine"], "3": ["hung engine"]},
        call_s=30,
        vllm__num_engines=2,
        actor__num_gpus_per_node=2,
        data__max_samples=32,
    )
    for record in (rank, engine, hung):
        assert record["after"]["plan"] == record["before"]["plan"]
        require_same_state(record)
        require_same_tokens(record)
    assert len(ran.steps()) == 4
    assert "waited 30 s for the" in ran.output
    require_saved(tmp_path)
