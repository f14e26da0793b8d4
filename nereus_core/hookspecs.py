"""The pluggy hooks of Nereus, and the marker with which plugins implement them.

A plugin is a module named in the entry-point group ``nereus``:

    from nereus_core.hookspecs import hookimpl

    @hookimpl
    def nereus_declare_adapter():
        return AdapterDeclaration("acme", ...)

Laws: names begin with ``nereus_``; hooks are called with keyword arguments only; an implementation
may take fewer arguments than listed here, so adding one breaks nobody and removing one goes through
``warn_on_impl_args`` first; a hook is added when two real implementations want it. Plugins of one
hook are called in reverse alphabetical order of entry-point names unless they say ``tryfirst`` or
``trylast``. Every docstring ends with where and when the hook is called.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from nereus_core.adapter import Adapter, Receipt
    from nereus_core.admission import Decision
    from nereus_core.cluster import DeviceSpec, LinkSpec
    from nereus_core.config import NereusConfig
    from nereus_core.cost.op_classes import OpClass
    from nereus_core.declaration import AdapterDeclaration
    from nereus_core.launched import Launched
    from nereus_core.model import ModelSpec
    from nereus_core.primitives import Primitive
    from nereus_core.transition.execute import Outcome

PROJECT = "nereus"
"""Name of the pluggy project, and of the entry-point group that plugins register in."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

# --- What is installed ----------------------------------------------------------------------------


@hookspec
def nereus_declare_adapter() -> AdapterDeclaration | Iterable[AdapterDeclaration]:  # type: ignore[empty-body]
    """Declare an adapter: name, backend requirement, capabilities, seams.

    Must not import the backend: Nereus lists adapters it cannot run.

    Called on: any process that lists or creates adapters.
    Called when: the registry is loaded.
    """


@hookspec(firstresult=True)
def nereus_create_adapter(name: str, handle: object, config: NereusConfig) -> Adapter | None:
    """Build the adapter called *name* around a running job; None when the name is not yours.

    *handle* is the backend's own object (a verl trainer, what ``nereus_launch`` returned as
    ``handle``); check its type and raise WrongHandle. Import the backend here. Stops at the first
    result that is not None.

    Called on: the driver.
    Called when: Nereus attaches to a job, once per job.
    """


@hookspec(firstresult=True)
def nereus_launch(name: str, config: NereusConfig) -> Launched | None:
    """Start the job that ``config.job`` and ``config.backend`` describe; None when not yours.

    Validate both sections with ``config.validated`` so that all configuration errors read alike.
    An adapter that only attaches to jobs somebody else starts leaves this hook out. Stops at the
    first result that is not None.

    Called on: the driver.
    Called when: ``nereus run`` starts, once.
    """


@hookspec
def nereus_frameworks() -> Iterable[str]:  # type: ignore[empty-body]
    """Names of frameworks whose own command this plugin can run with Nereus in it.

    Called on: the driver.
    Called when: ``nereus run --NAME -- ARGUMENTS`` reads its command line.
    """


@hookspec(firstresult=True)
def nereus_run_framework(
    name: str, keys: Mapping[str, object], arguments: Sequence[str]
) -> int | None:
    """Run a framework's own command with Nereus in it; None when the name is not yours.

    *keys* are nested keys of the configuration, *arguments* the framework's own, untouched. Returns
    an exit code. Stops at the first result that is not None; only the plugin whose
    `nereus_frameworks` names the framework is called.

    Called on: the driver.
    Called when: ``nereus run --NAME -- ARGUMENTS``, once.
    """


# --- What the cost model knows --------------------------------------------------------------------


@hookspec
def nereus_device_specs() -> Iterable[DeviceSpec | LinkSpec]:  # type: ignore[empty-body]
    """Peak rates of devices and links the core has no entry for; every number has its source.

    Called on: the driver.
    Called when: a device or link is looked up by name.
    """


@hookspec(firstresult=True)
def nereus_efficiency_priors(device: str, model: ModelSpec) -> Mapping[OpClass, float] | None:
    """Calibrated efficiencies in (0, 1] to start from instead of the conservative prior.

    Stops at the first result that is not None.

    Called on: the driver.
    Called when: the cost model of a job is built.
    """


# --- What happens ---------------------------------------------------------------------------------


@hookspec(firstresult=True)
def nereus_veto(decision: Decision) -> str | None:
    """Refuse an admitted opportunistic transition by returning the reason.

    Never asked on the urgent path. Stops at the first result that is not None.

    Called on: the driver.
    Called when: admission has admitted, before anything is touched.
    """


@hookspec
def nereus_decided(decision: Decision) -> None:
    """See every decision of the controller, admitted or not.

    Called on: the driver.
    Called when: a decision stands (after ``nereus_veto``).
    """


@hookspec
def nereus_primitive_finished(op: Primitive, receipt: Receipt, predicted_s: float) -> None:
    """See every primitive that completed, with its receipt and the seconds that were predicted.

    Called on: the driver, perhaps on a worker thread of the transition.
    Called when: a primitive returned.
    """


@hookspec
def nereus_transition_finished(outcome: Outcome) -> None:
    """See every transition that ended: done, rolled back or failed.

    Called on: the driver.
    Called when: the boundary of the transition has closed.
    """
