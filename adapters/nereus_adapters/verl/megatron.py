"""megatron: a layout as the keys of verl's Megatron engine (McoreEngineConfig). Pure.

Megatron cuts layers into pipeline stages of one size; first and last may be given sizes of their
own (num_layers_in_first_pipeline_stage and _last_, which verl hands on in
``override_transformer_config``). Where layers do not divide, stages in the middle get
ceil(layers / pp), or floor, and what is left lies at both ends, so that no stage is longer than the
cost model counts on.
"""

from __future__ import annotations

from collections.abc import Mapping

from nereus_core.layout import Layout

MISSING = (
    "tensors of its ranks, and its distributed optimizer's, are not among the states that are "
    "moved, and its process groups (megatron.core.parallel_state) are not rebuilt"
)
"""What keeps a Megatron job from being changed while it runs."""


def engine_config(layout: Layout, num_layers: int) -> dict[str, object]:
    """Return the keys of McoreEngineConfig that a layout sets.

    Args:
        layout: Of one unit.
        num_layers: Decoder layers of the model.

    Raises:
        ValueError: pp exceeds the layers, or leaves none for an end.
    """
    keys: dict[str, object] = {
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        # Megatron-core asserts tp > 1 where it is on; verl turns it off by itself.
        "sequence_parallel": layout.tp > 1,
        # Plans count on it: units share the optimizer's state out among themselves.
        "use_distributed_optimizer": True,
    }
    ends = uneven(num_layers, layout.pp)
    if ends:
        keys["override_transformer_config"] = dict(ends)
    return keys


def uneven(num_layers: int, pp: int) -> Mapping[str, int]:
    """Return layers of the first and the last stage where they differ from the others'.

    >>> uneven(30, 4)
    {'num_layers_in_first_pipeline_stage': 7, 'num_layers_in_last_pipeline_stage': 7}
    >>> uneven(32, 4)
    {}
    """
    if pp > num_layers:
        raise ValueError(f"pp={pp} exceeds num_layers={num_layers}")
    if num_layers % pp == 0:
        return {}
    most, least = -(-num_layers // pp), num_layers // pp
    for middle in (most, least):
        ends = num_layers - middle * (pp - 2)
        if 2 <= ends <= 2 * most:
            return {
                "num_layers_in_first_pipeline_stage": ends - ends // 2,
                "num_layers_in_last_pipeline_stage": ends // 2,
            }
    raise ValueError(f"{num_layers} layers do not make {pp} stages of at most {most}")
