"""attach: a job under Nereus in two lines, from a configuration or its path."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nereus_core.attach import attached
from nereus_core.config import NereusConfig
from nereus_core.controller import Controller
from nereus_core.events import EventLog
from nereus_core.registry import Registry


@contextmanager
def attach(handle: object, config: NereusConfig | Path | str) -> Iterator[Controller]:
    """Put a running job under Nereus until the context ends; the job itself goes on.

    Args:
        handle: the framework's own object that the configured adapter expects.
        config: a configuration, or the path of a ``nereus.toml``.

    Yields:
        The controller; call its ``at_boundary()`` after every RL step.

    Raises:
        ConfigError: the configuration does not hold.
        AdapterError: the adapter is absent, broken, or the handle is not its own.
    """
    settings = config if isinstance(config, NereusConfig) else NereusConfig.load(Path(config))
    with (
        EventLog(settings.run_dir / "events.jsonl", time.monotonic) as log,
        attached(Registry.load(), handle, settings, log, time.monotonic) as controller,
    ):
        yield controller
        controller.finished("done")
