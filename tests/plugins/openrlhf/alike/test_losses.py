"""What a changed job learns is what a fixed one learns: digests prove state, not trajectory."""

import openrlhf_job
import pytest
from openrlhf_seen import adapt, drift, layouts, require_same_state

pytestmark = pytest.mark.real

FIGURES = ("critic_loss", "values", "kl", "return")
"""The actor's loss is rounding: one step on what was just sampled, with normed advantages."""
APART = 0.04
"""As far as two runs of one job were seen to end apart, and a quarter of the sixth that a lost step
is. Two runs whose responses happen to come in one order agree: what they differ by bounds nothing
below this."""
JOB = {
    "algo__advantage__estimator": "gae",
    "algo__advantage__is_correction_level": "off",
    "algo__kl__init_coef": 0.01,
    "algo__kl__use_loss": False,
    "algo__kl__estimator": "k1",
    "ds__grad_accum_dtype": "fp32",
    "actor__adam__lr": 1e-4,
    "actor__num_gpus_per_node": 2,
    "critic__num_gpus_per_node": 2,
    "data__max_samples": 48,
}


def fixed(assets, folder, **job):
    ran = openrlhf_job.run(
        openrlhf_job.flags(assets, folder, **job),
        folder,
        module="openrlhf.cli.train_ppo_ray",
    )
    assert ran.code == 0, ran.output[-6000:]
    return ran.steps()


def gaps(one, other):
    """Largest difference of each figure in any step, in parts of its largest value."""
    found = {}
    for figure in FIGURES:
        pairs = [(a[figure], b[figure]) for a, b in zip(one, other, strict=True)]
        found[figure] = max(abs(a - b) for a, b in pairs) / max(abs(a) for a, _ in pairs)
    return found


def test_a_changed_job_learns_what_a_fixed_one_learns(assets, recorded, tmp_path):
    """A job that is changed differs from a fixed one as two runs of the fixed one do.

    All see the same data. OpenRLHF takes responses in the order in which they come, gradients add
    up in that order, and Adam makes much of little: a run and its repetition end 4% apart, in parts
    of what was learned. That a step of six was lost, or fell due in the middle of a batch, would
    show at once: as a sixth.
    """
    job = JOB | {"train__agent_func_path": recorded}
    once = fixed(assets, tmp_path / "once", **job)
    again = fixed(assets, tmp_path / "again", **job)
    ran, records, _ = adapt(
        assets,
        tmp_path / "changed",
        {
            "1": {"actor/train": [[0]], "critic/train": [[1]]},
            "3": {"actor/train": [[1], [0]]},
            "4": {"critic/train": [[0], [1]]},
        },
        **job,
    )
    for record in records:
        require_same_state(record)
    assert layouts(records[-1], "actor/train") == layouts(records[-1], "critic/train") == [1, 1]
    changed = ran.steps()
    assert len(changed) == len(once) == len(again) == 6
    apart = {
        name: drift(assets / "model", tmp_path / "once/final", tmp_path / name / "final")
        for name in ("again", "changed")
    }
    assert apart["changed"] <= max(2 * apart["again"], APART), apart
    assert apart["changed"] < 1 / 12, apart
    own, between = gaps(once, changed), gaps(once, again)
    for figure in FIGURES:  # one pair of runs says roughly how large such differences are
        assert own[figure] <= max(4 * between[figure], APART), (figure, own, between)
