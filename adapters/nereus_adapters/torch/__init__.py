"""The torch backend: an RL job on this machine's CPU or GPUs, without any other framework.

Importing this package imports no torch; the hooks do when they are called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nereus_core.capabilities import Capabilities, Feature, full, unsupported
from nereus_core.declaration import AdapterDeclaration
from nereus_core.errors import WrongHandle
from nereus_core.hookspecs import hookimpl
from nereus_core.workload import Stage

if TYPE_CHECKING:
    from nereus_adapters.torch.adapter import TorchAdapter
    from nereus_adapters.torch.harness import TorchHarness
    from nereus_adapters.torch.launch import TorchLaunched
    from nereus_core.config import NereusConfig

NAME = "torch"

_EVERY_STAGE = {stage: full() for stage in Stage}
CAPABILITIES = Capabilities(
    split=_EVERY_STAGE,
    merge=_EVERY_STAGE,
    extend=_EVERY_STAGE,
    destroy=_EVERY_STAGE,
    features={
        **{feature: full() for feature in Feature},
        Feature.ASYNC_BOUNDARY: unsupported("the job is synchronous: generation waits for weights"),
        Feature.PARTIAL_ROLLOUT: unsupported("no request is in flight at a safe boundary"),
        Feature.EFFICIENCY_PROBE: unsupported("stage seconds are measured, classes are not"),
    },
)


@hookimpl
def nereus_declare_adapter() -> AdapterDeclaration:
    """Declare the backend without importing it."""
    return AdapterDeclaration(
        NAME,
        "the embedded default: PPO, GRPO and ReMax on torch.distributed, CPU or CUDA",
        CAPABILITIES,
        requirement="torch>=2.11",
        install="pip install 'nereus[torch]'",
        tiers=("real", "gpu"),
    )


@hookimpl
def nereus_create_adapter(name: str, handle: object, config: NereusConfig) -> TorchAdapter | None:
    """Attach to a running job."""
    if name != NAME:
        return None
    from nereus_adapters.torch.adapter import TorchAdapter
    from nereus_adapters.torch.job import TorchJob

    if not isinstance(handle, TorchJob):
        raise WrongHandle(NAME, handle, "a nereus_adapters.torch.job.TorchJob")
    return TorchAdapter(handle)


@hookimpl
def nereus_launch(name: str, config: NereusConfig) -> TorchLaunched | None:
    """Start the job of ``config.job`` on the seats of ``config.backend``."""
    if name != NAME:
        return None
    from nereus_adapters.torch.launch import TorchLaunched

    return TorchLaunched.of(config)


@hookimpl(optionalhook=True)
def nereus_conformance_harness(
    name: str, tier: str, options: Mapping[str, str]
) -> TorchHarness | None:
    """Return the harness of the real tier (CPU) or the gpu tier; ``pool=ray`` for seats on Ray."""
    if name != NAME or tier not in ("real", "gpu"):
        return None
    from nereus_adapters.torch.harness import TorchHarness

    return TorchHarness("cpu" if tier == "real" else "cuda", pool_kind=options.get("pool", "local"))
