"""Jobs that are changed while they run, and what must hold of each change.

Every transition is looked at from behind the adapter (openrlhf_cpu/forced.py): tensors gathered by
DeepSpeed's own means, before and after; what engines generate; the driver's final save.
"""

import json

import openrlhf_job

from nereus_core.events import RunFinished, read_events

TIE = 0.06
"""Lead of a greedy token in logits below which bfloat16 may pick another: logits of this model
are below 4, where neighbors are 0.016 apart, and two computations differ by a few of those."""


def adapt(
    assets,
    folder,
    force,
    faults=None,
    call_s=200,
    group_s=240,
    timeout_s=300,
    ends="done",
    leave=None,
    node=None,
    admission="never",
    step_s=3600,
    gpus=None,
    max_devices=None,
    **changes,
):
    """Run a job with these transitions; returns it, what was seen of them, and its events.

    Its Ray has 8 logical GPUs, with a second node 2 and those of the node; or ``gpus``.
    """
    gpus = gpus or (2 if node else 8)
    words = ["--nereus.enable", "--nereus.mode=adapt", f"--nereus.policy.admission={admission}",
             f"--nereus.run_dir={folder / 'run'}", f"--nereus.backend.call_s={call_s}",
             "--nereus.backend.start_s=240", f"--nereus.timeouts.step_s={step_s}"]  # fmt: skip
    if max_devices:
        words.append(f"--nereus.backend.max_devices={max_devices}")
    seen = folder / "seen.jsonl"
    more = {
        "OPENRLHF_TEST_FORCE": json.dumps(force),
        "OPENRLHF_TEST_LEAVE": json.dumps(leave or {}),
        "OPENRLHF_TEST_NODE": json.dumps(node or {}),
        "OPENRLHF_TEST_SEEN": str(seen),
        "OPENRLHF_TEST_FAULT": json.dumps(faults or {}),
        "OPENRLHF_TEST_GROUP_S": str(group_s),
    }
    words += openrlhf_job.flags(assets, folder, **changes)
    cluster = {"gpus": gpus}
    if node:
        late = "came" in node.values()
        code = openrlhf_job.LATE_NODE if late else openrlhf_job.SECOND_NODE
        cluster = {"gpus": gpus, "code": code}
    ran = openrlhf_job.run(words, folder, more=more, timeout_s=timeout_s, **cluster)
    assert (ran.code == 0) == (ends == "done"), ran.output[-6000:]
    found = [json.loads(line) for line in seen.read_text().splitlines()] if seen.exists() else []
    assert [one["step"] for one in found] == [
        int(step) for step in {**force, **(leave or {}), **(node or {})}
    ]
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


def require_sound_end(ran, records, folder, *, steps, kl=2e-3):
    """The job took all its steps, trained in each, and saved through the ranks of the end.

    ``kl`` bounds what engines generate against what the actor would, whatever the layouts: at every
    step their log-probabilities differ by rounding; in an asynchronous job also by a step.
    """
    logged = ran.steps()
    assert [step["step"] for step in logged] == [1.0 + n for n in range(steps)]
    assert all(abs(step["vllm_kl"]) < kl for step in logged)
    _require_steps_fell_due(records)
    _require_saved(folder)


def _require_steps_fell_due(records):
    """Every RL step was one optimizer step, also after the accumulation changed.

    A digest proves state, not trajectory: counted on from the old accumulation, a step would fall
    due in the middle of a batch, and gradients of two batches would mix.
    """
    for record in records:
        for stage, state in record["before"]["at"].items():
            assert state["global_steps"] == record["step"], stage
            assert state["steps"] == [record["step"]], stage


def _require_saved(folder, count=27):
    """The driver saved the model through the ranks of the end."""
    from safetensors.torch import load_file

    (path,) = (folder / "final").glob("*.safetensors")
    assert len(load_file(path)) == count


def weights(folder):
    """All weights of a saved model as one vector."""
    import torch
    from safetensors.torch import load_file

    (path,) = folder.glob("*.safetensors")
    loaded = load_file(path)
    return torch.cat([loaded[name].float().flatten() for name in sorted(loaded)])


def drift(start, end, other):
    """Say how far two models that began as one have come apart, in parts of what one learned."""
    began, ended = weights(start), weights(end)
    return float((weights(other) - ended).norm() / (ended - began).norm())
