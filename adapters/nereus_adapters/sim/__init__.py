"""The reference adapter: a job in memory, and the specification of an adapter that runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from nereus_core.capabilities import Capabilities
from nereus_core.declaration import AdapterDeclaration
from nereus_core.errors import WrongHandle
from nereus_core.hookspecs import hookimpl

if TYPE_CHECKING:
    from collections.abc import Mapping

    from nereus_adapters.sim.adapter import SimAdapter
    from nereus_adapters.sim.harness import SimHarness
    from nereus_adapters.sim.launch import SimLaunched
    from nereus_core.config import NereusConfig

NAME = "sim"
CAPABILITIES = Capabilities.everything()


@hookimpl
def nereus_declare_adapter() -> AdapterDeclaration:
    """Declare that everything works."""
    return AdapterDeclaration(
        NAME, "a simulated cluster in memory: the reference for adapters", CAPABILITIES
    )


@hookimpl
def nereus_create_adapter(name: str, handle: object, config: NereusConfig) -> SimAdapter | None:
    """Attach to a simulated job."""
    from nereus_adapters.sim.adapter import SimAdapter
    from nereus_core.sim.job import SimJob

    if name != NAME:
        return None
    if not isinstance(handle, SimJob):
        raise WrongHandle(NAME, handle, "a nereus_core.sim.job.SimJob")
    return SimAdapter(handle)


@hookimpl
def nereus_launch(name: str, config: NereusConfig) -> SimLaunched | None:
    """Start a simulated job from ``config.job`` and ``config.backend``."""
    from nereus_adapters.sim.launch import SimLaunched

    return SimLaunched.of(config) if name == NAME else None


@hookimpl(optionalhook=True)
def nereus_conformance_harness(
    name: str, tier: str, options: Mapping[str, str]
) -> SimHarness | None:
    """Return the harness of the contract tier; with ``stages=together`` all hold one set."""
    from nereus_adapters.sim.harness import SimHarness

    if name != NAME or tier != "contract":
        return None
    return SimHarness(together=options.get("stages") == "together")
