"""The hook through which an adapter's plugin gives the suite a harness.

Implement it with ``hookimpl(optionalhook=True)``: then the plugin needs nothing of the suite.
"""

from __future__ import annotations

from nereus_core.harness import Harness
from nereus_core.hookspecs import hookspec


@hookspec(firstresult=True)
def nereus_conformance_harness(name: str, tier: str) -> Harness | None:
    """Return a harness for adapter *name* in a tier, or None when there is none.

    Import the backend here. Stops at the first result that is not None.

    Called on: the process that runs pytest.
    Called when: the first case that launches a job begins; once per run.
    """
