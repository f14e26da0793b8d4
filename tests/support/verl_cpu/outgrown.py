"""A job whose batches outgrow the memory of two ranks: alone it dies, with Nereus it goes on.

Responses grow to the full length in one step. Activations do not shrink with more ranks (verl's
micro-batch is fixed per rank), but shards of parameters, gradients and moments do: on four ranks
each holds half as much of them, which leaves room for the activations. The limit is kept by the
kernel (`budget`).
"""

LENGTHS = (48, 128)
STEPS = 3
MODEL = {"hidden": 512, "layers": 4}
"""Eleven million parameters: 66 MB of parameters and moments on each of two ranks."""
SHAPE = {"devices": 2, "ray_devices": 4, "steps": STEPS, "response": 128, "micro": 4}
RANK_BYTES = 192_000_000
"""Of a rank's engine. Seen: 129 MB for the first batch on two ranks, 209 for a long one; 166 for a
long one on four."""
ROLLOUT_BYTES = 44_100_000
"""Of a replica's weights, which lie in its own process."""
OVERRIDES = (
    # One micro-batch for each of four ranks, and no more: what is held is of one micro-batch.
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    # One parameter after the other: Adam's temporaries are small, activations make the peak.
    "actor_rollout_ref.actor.optim.override_optimizer_config={foreach: False}",
)
SWITCH = (
    "+nereus.policy.admission=never",  # nothing opportunistic: only what is needed
    "+nereus.backend.max_devices=4",
    # Gathered layers and their gradients, 40 MB here, are in no prediction yet: a quarter is spare.
    "+nereus.policy.memory_headroom=0.235",
    f"+nereus.backend.device_memory_bytes={RANK_BYTES + ROLLOUT_BYTES}",
)
"""What Nereus may do, beside ``+nereus.enable=true``: grow, out of what Ray has free."""


def environment() -> dict[str, str]:
    """Return what limits a rank, and makes responses grow."""
    return {
        "VERL_CPU_MEMORY": str(RANK_BYTES),
        "VERL_CPU_LENGTHS": ",".join(map(str, LENGTHS)),
    }
