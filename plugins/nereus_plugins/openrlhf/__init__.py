"""OpenRLHF under Nereus: ``python -m nereus_plugins.openrlhf --nereus.enable <OpenRLHF flags>``.

The launcher takes the ``--nereus.*`` flags away, checks the seams, wraps one method of the two
trainer classes and then runs OpenRLHF's own `openrlhf.cli.train_ppo_ray` with the flags that are
left. Importing this package imports no OpenRLHF.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from nereus_core.hookspecs import hookimpl

FRAMEWORK = "openrlhf"


@hookimpl
def nereus_frameworks() -> Sequence[str]:
    """Name what ``nereus run --openrlhf -- FLAGS`` runs."""
    return (FRAMEWORK,)


@hookimpl
def nereus_run_framework(
    name: str, keys: Mapping[str, object], arguments: Sequence[str]
) -> int | None:
    """Run `train_ppo_ray` as the launcher does."""
    if name != FRAMEWORK:
        return None
    from nereus_plugins.openrlhf.launch import launched

    return launched({"enable": True, **keys}, arguments)
