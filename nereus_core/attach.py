"""attached: a running job under a controller; behind ``nereus run`` and behind every plugin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

from nereus_core.adapter import Capable
from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.events import EventLog
from nereus_core.registry import Registry
from nereus_core.transition import Journal

JOURNAL = "journal.log"
"""The journal of a run, in its folder."""


@contextmanager
def attached(
    registry: Registry,
    handle: object,
    config: NereusConfig,
    log: EventLog,
    clock: Callable[[], float],
) -> Iterator[Controller]:
    """Yield a controller for a job; what ends the block by an error is recorded as the run's end.

    A block that ends well calls ``finished`` itself: only it knows whether the job is done. With
    ``enabled = false`` the mode is observe.

    Raises:
        AdapterError: the adapter is absent, broken, or the handle is not its own.
    """
    if not config.enabled:
        config = config.model_copy(update={"mode": "observe"})
    with (
        closing(registry.create(config.adapter, handle, config)) as adapter,
        closing(Journal(config.run_dir / JOURNAL)) as journal,
    ):
        found, job = registry.installed(config.adapter), adapter.job()
        trained = job.models[job.workload.stages[0].model]
        controller = Controller(
            adapter,
            config,
            log,
            registry.notify,
            clock,
            veto=registry.veto,
            capabilities=adapter.capabilities
            if isinstance(adapter, Capable)
            else found.declaration.capabilities,
            backend_version=found.status.installed,
            measured=registry.efficiency_priors(job.cluster.device_spec.name, trained),
            journal=journal,
        )
        try:
            controller.recover()
            yield controller
        except KeyboardInterrupt:
            controller.finished("interrupted")
            raise
        except Exception as error:
            controller.finished(f"failed: {type(error).__name__}: {error}")
            raise
