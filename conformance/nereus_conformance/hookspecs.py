"""The hook through which an adapter's plugin gives the suite a harness.

Implement it with ``hookimpl(optionalhook=True)``: then the plugin needs nothing of the suite.
"""

from __future__ import annotations

from collections.abc import Mapping

from nereus_core.harness import Harness
from nereus_core.hookspecs import hookspec


@hookspec(firstresult=True)
def nereus_conformance_harness(name: str, tier: str, options: Mapping[str, str]) -> Harness | None:
    """Return a harness for adapter *name* in a tier, or None when there is none.

    *options* are the ``--harness KEY=VALUE`` of the run: what an adapter has more than one of (the
    torch adapter's ``pool=ray``); an implementation that has none leaves the argument out.

    Import the backend here. Stops at the first result that is not None.

    Called on: the process that runs pytest.
    Called when: the first case that launches a job begins; once per run.
    """
