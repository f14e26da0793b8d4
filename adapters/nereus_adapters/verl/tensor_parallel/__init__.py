"""tensor_parallel: an FSDP2 engine of verl's whose units hold one copy by tensor parallelism.

verl picks an engine by device and vendor (``verl.workers.engine.EngineRegistry``); this one's is
``nereus``. Importing this package imports neither torch nor verl.
"""

from __future__ import annotations

VENDOR_KEY, VENDOR = "VERL_ENGINE_VENDOR", "nereus"
"""How verl picks it, in every process of the job."""


def register() -> None:
    """Make the engine known to verl in this process; a second call changes nothing."""
    from verl.workers.engine.base import EngineRegistry

    from nereus_adapters.verl.tensor_parallel.engine import (
        TensorParallelWithLMHead,
        TensorParallelWithValueHead,
    )

    for engine in (TensorParallelWithLMHead, TensorParallelWithValueHead):
        known = EngineRegistry._engines.get(engine.model_type, {}).get("fsdp2", {})
        devices = [name for name in ("cuda", "npu") if (name, VENDOR) not in known]
        if devices:
            EngineRegistry.register(engine.model_type, "fsdp2", devices, VENDOR)(engine)
