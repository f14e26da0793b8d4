"""How far apart two jobs are, and how far apart a changed one may be from a fixed one.

What a change itself does to state is held to the last bit.
"""

import math

FIGURES = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean")
CRITIC_FIGURES = ("critic/vf_loss", "critic/grad_norm", "actor/kl_loss")
LEAST_SCALE = 0.25
"""Figures are means of terms of order 1 that may cancel, as PPO's policy loss does but for
rounding: a smaller one is measured by this. Chosen, not measured."""
TIMES = 4
"""One pair of fixed jobs says roughly how large such differences are; as for OpenRLHF."""
FLOOR = 32 * 2**-23
"""32 units in the last place of float32: what is left of a sum over some hundred tokens and two
layers when it is added up in another order. Two runs on one layout may agree to the last bit."""

TELLING = 1e-3
"""A step or a moment that was lost changes these figures by more. Chosen, not measured."""


def gaps(one, other, figures=FIGURES):
    """Largest difference of each figure in any step, in parts of its largest value."""
    found = {}
    for figure in figures:
        pairs = [(a[figure], b[figure]) for a, b in zip(one, other, strict=True)]
        assert all(math.isfinite(value) for pair in pairs for value in pair), (figure, pairs)
        scale = max(*(abs(a) for a, _ in pairs), LEAST_SCALE)
        found[figure] = max(abs(a - b) for a, b in pairs) / scale
    return found


def allowed(*fixed):
    """Return what a changed job may differ by, of the gaps between pairs of fixed jobs."""
    return {figure: max(TIMES * max(g[figure] for g in fixed), FLOOR) for figure in fixed[0]}


def require_same_state(record):
    """Hold parameters, moments, steps and schedules after a change to those before, bit by bit."""
    before, after = record["before"], record["after"]
    assert sorted(before) == sorted(after)
    changed = [name for name in before if before[name] != after[name]]
    assert not changed, f"after step {record['step']}: {changed[:5]}"
    slots = {name.split("/")[1] for name in before}
    assert {"param", "exp_avg", "exp_avg_sq", "step", "lr_scheduler"} <= slots
