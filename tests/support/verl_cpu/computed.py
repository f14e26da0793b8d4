"""What an engine computed and learned, held to what another did (`verl_cpu.engines.outcome`)."""

from verl_cpu.engines import RATE, STEPS

ULPS = 64 * 2**-23
"""Of float32: sums over a few hundred terms, added up in another order, in two steps."""


def require_alike(ours, verls):
    """Compare outputs, losses, norms, weights and moments; raises AssertionError."""
    assert "error" not in ours, ours
    assert len(ours["grad_norms"]) == STEPS
    assert all(ours["grad_norms"])
    for key in ("outputs", "after"):
        scale = verls[key].abs().max()
        assert (ours[key] - verls[key]).abs().max() <= ULPS * scale, key
    assert (verls["after"] - verls["outputs"]).abs().max() > 1e-3  # it has learned something
    for key in ("losses", "grad_norms"):
        for mine, other in zip(ours[key], verls[key], strict=True):
            assert abs(mine - other) <= ULPS * abs(other), key
    assert [*ours["weights"]] == [*verls["weights"]]  # every rank has all of them, in verl's order
    for name, tensor in verls["weights"].items():
        # Adam divides gradients by their size, so that the least ones' rounding shows.
        allowed = ULPS * tensor.abs().max() + 0.01 * RATE
        assert (ours["weights"][name] - tensor).abs().max() <= allowed, name
    assert sorted(ours["moments"]) == sorted(verls["moments"])
    for name, moment in verls["moments"].items():
        scale = moment.abs().max()
        assert scale > 0, name
        # Squares of gradients: twice their relative difference.
        assert (ours["moments"][name] - moment).abs().max() <= 4 * ULPS * scale, name
