"""The registry: plugins of the entry-point group ``nereus``, each loaded for itself.

A plugin that does not load is listed as Broken and harms no other. Two environment variables
steer loading: ``NEREUS_PLUGINS=a,b`` loads only these entry points, ``NEREUS_STRICT_PLUGINS=1``
turns a broken plugin into an error (for its author).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Self

import pluggy

from nereus_core import hookspecs
from nereus_core.backend_status import (
    BackendStatus,
    backend_status,
    require_backend,
)
from nereus_core.cluster import DeviceSpec, LinkSpec
from nereus_core.declaration import AdapterDeclaration
from nereus_core.device_specs import DEVICE_SPECS, LINK_SPECS
from nereus_core.errors import AdapterError, DuplicateAdapter, NoSuchAdapter
from nereus_core.loading import Broken, Loaded, Plugin, chosen, hooks_manager, loaded, one_line

if TYPE_CHECKING:
    from nereus_core.adapter import Adapter
    from nereus_core.admission import Decision
    from nereus_core.config import NereusConfig
    from nereus_core.cost.op_classes import OpClass
    from nereus_core.launched import Launched
    from nereus_core.model import ModelSpec

_log = logging.getLogger("nereus")


@dataclass(frozen=True, slots=True)
class Installed:
    """A declared adapter, the plugin it comes from, and whether its backend is there."""

    declaration: AdapterDeclaration
    plugin: Plugin
    status: BackendStatus


class Registry:
    """The plugins of one process.

    `load` reads what is installed, once per process (a forked child loads again); `of` takes entry
    points as an argument.
    """

    _of_process: ClassVar[dict[int, Registry]] = {}

    def __init__(self) -> None:
        self._manager = hooks_manager()
        self._plugins: list[Plugin] = []
        self._broken: list[Broken] = []
        self._declared: dict[str, tuple[AdapterDeclaration, Plugin]] = {}
        self._dropped: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def load(cls) -> Registry:
        """Return this process's registry; the first call reads entry points and the environment."""
        pid = os.getpid()
        if pid not in cls._of_process:
            listed = os.environ.get("NEREUS_PLUGINS")
            only = None if listed is None else [n.strip() for n in listed.split(",") if n.strip()]
            strict = os.environ.get("NEREUS_STRICT_PLUGINS", "") not in ("", "0")
            found = entry_points(group=hookspecs.PROJECT)
            cls._of_process = {pid: cls.of(found, only=only, strict=strict)}
        return cls._of_process[pid]

    @classmethod
    def of(
        cls,
        points: Iterable[EntryPoint],
        *,
        only: Iterable[str] | None = None,
        strict: bool = False,
    ) -> Self:
        """Load entry points one at a time, sorted by name.

        Args:
            points: entry points of the group ``nereus``.
            only: names to load; None loads all.
            strict: raise AdapterError for the first broken plugin instead of listing it.

        Raises:
            DuplicateAdapter: two plugins declare one adapter name.
            ConfigError: ``only`` names an entry point that is not installed.
        """
        registry = cls()
        for point in chosen(points, only):
            registry._add(loaded(point, strict=strict))
        return registry

    def _add(self, found: Loaded | Broken) -> None:
        if isinstance(found, Broken):
            self._broken.append(found)
            return
        plugin = found.plugin
        for declaration in found.declared:
            if declaration.name in self._declared:
                first = self._declared[declaration.name][1]
                raise DuplicateAdapter(declaration.name, str(first), str(plugin))
            self._declared[declaration.name] = (declaration, plugin)
        self._plugins.append(plugin)
        self._manager.register(plugin.module, name=str(plugin))

    # --- What is there ------------------------------------------------------------------------

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """Plugins that loaded, sorted by name."""
        return tuple(self._plugins)

    @property
    def broken(self) -> tuple[Broken, ...]:
        """Plugins that did not load, sorted by name."""
        return tuple(self._broken)

    def adapters(self) -> tuple[Installed, ...]:
        """Declared adapters, sorted by name, with the state of their backends."""
        return tuple(self.installed(name) for name in sorted(self._declared))

    def installed(self, name: str) -> Installed:
        """Return one adapter; raises NoSuchAdapter listing installed and broken."""
        declaration, plugin = self._find(name)
        return Installed(declaration, plugin, backend_status(declaration))

    def declaration(self, name: str) -> AdapterDeclaration:
        """Return what an adapter declares; raises NoSuchAdapter listing installed and broken."""
        return self._find(name)[0]

    def _find(self, name: str) -> tuple[AdapterDeclaration, Plugin]:
        if name not in self._declared:
            raise NoSuchAdapter(name, sorted(self._declared), [str(b) for b in self._broken])
        return self._declared[name]

    def device_specs(self) -> tuple[Mapping[str, DeviceSpec], Mapping[str, LinkSpec]]:
        """Return devices and links by name: the core's, then those of plugins."""
        devices, links = dict(DEVICE_SPECS), dict(LINK_SPECS)
        for plugin in self._plugins:
            for specs in self._call(plugin, "nereus_device_specs"):
                for spec in specs:
                    if isinstance(spec, DeviceSpec):
                        devices[spec.name] = spec
                    else:
                        links[spec.name] = spec
        return devices, links

    def efficiency_priors(self, device: str, model: ModelSpec) -> Mapping[OpClass, float] | None:
        """Ask plugins for calibrated efficiencies of a model on a device."""
        found: Mapping[OpClass, float] | None = self._manager.hook.nereus_efficiency_priors(
            device=device, model=model
        )
        return found

    # --- Jobs ---------------------------------------------------------------------------------

    def launch(self, name: str, config: NereusConfig) -> Launched:
        """Start the job of a configuration through the adapter that it names.

        Raises:
            NoSuchAdapter, BackendMissing, BackendVersion: it cannot run here.
            AdapterError: the adapter only attaches to jobs that somebody else starts.
        """
        require_backend(self.declaration(name))
        launched: Launched | None = self.ask(name, "nereus_launch", config=config)
        if launched is None:
            raise AdapterError(
                f"adapter {name!r} does not start jobs itself; "
                "start the job with its framework and turn Nereus on there."
            )
        return launched

    def create(self, name: str, handle: object, config: NereusConfig) -> Adapter:
        """Attach an adapter to a running job.

        Raises:
            NoSuchAdapter, BackendMissing, BackendVersion: it cannot run here.
            WrongHandle: the handle is not its framework's job.
        """
        require_backend(self.declaration(name))
        adapter: Adapter | None = self.ask(
            name, "nereus_create_adapter", handle=handle, config=config
        )
        if adapter is None:
            raise AdapterError(
                f"adapter {name!r} is declared by {self._find(name)[1]}, but its "
                "nereus_create_adapter returned None for that name."
            )
        return adapter

    def frameworks(self) -> tuple[str, ...]:
        """Return the frameworks whose own command a plugin can run, sorted.

        Raises:
            DuplicateAdapter: two plugins name one framework.
        """
        return tuple(sorted(self._runners()))

    def _runners(self) -> dict[str, Plugin]:
        found: dict[str, Plugin] = {}
        for plugin in self._plugins:
            for names in self._call(plugin, "nereus_frameworks"):
                for name in names:
                    if (first := found.setdefault(name, plugin)) is not plugin:
                        raise DuplicateAdapter(name, str(first), str(plugin), "framework")
        return found

    def run_framework(self, name: str, keys: Mapping[str, object], arguments: Sequence[str]) -> int:
        """Run a framework's own command with Nereus in it; returns its exit code.

        Raises:
            AdapterError: no installed plugin runs that framework.
            DuplicateAdapter: two plugins name one framework.
        """
        runners, code = self._runners(), None
        if name in runners:
            run = self._caller(runners[name], "nereus_run_framework")
            code = run(name=name, keys=keys, arguments=arguments)
        if code is None:
            known = ", ".join(sorted(runners)) or "none"
            raise AdapterError(
                f"no installed plugin runs {name!r}; those that can be run: {known}."
            )
        return int(code)

    def add_hookspecs(self, specs: ModuleType) -> None:
        """Add a room's own hooks; adding the same specs again does nothing."""
        with self._lock:
            known = vars(self._manager.hook)
            names = [n for n in dir(specs) if self._manager.parse_hookspec_opts(specs, n)]
            if any(n not in known or known[n].spec is None for n in names):
                self._manager.add_hookspecs(specs)

    def ask(self, adapter: str, hook: str, **kwargs: object) -> Any:
        """Call a firstresult hook of the one plugin that declared an adapter.

        Other plugins are not asked: their faults are no business of this adapter. ``name`` is
        passed along.
        """
        plugin = self._find(adapter)[1]
        return self._caller(plugin, hook)(name=adapter, **kwargs)

    # --- What happens -------------------------------------------------------------------------

    def notify(self, hook_name: str, /, **kwargs: object) -> None:
        """Tell every plugin; one that raises is logged once with its name and not told again.

        Thread-safe: primitives finish on worker threads.
        """
        for plugin in self._plugins:
            with self._lock:
                if str(plugin) in self._dropped:
                    continue
            try:
                self._call(plugin, hook_name, **kwargs)
            except Exception:  # an observer must never stop a training step
                with self._lock:
                    first = str(plugin) not in self._dropped
                    self._dropped.add(str(plugin))
                if first:
                    _log.warning(
                        "plugin %s failed in %s and is not told further events",
                        plugin,
                        hook_name,
                        exc_info=True,
                    )

    def veto(self, decision: Decision) -> str | None:
        """Return the first reason a plugin gives against an admitted opportunistic transition.

        A plugin that raises here refuses, with the error as its reason: what may be refused for a
        cause nobody can name is better not done.
        """
        for plugin in self._plugins:
            try:
                reason = self._caller(plugin, "nereus_veto")(decision=decision)
            except Exception as error:  # see above: the reason reaches the decision's record
                return f"plugin {plugin} failed in nereus_veto: {one_line(error)}"
            if reason is not None:
                return f"{reason} ({plugin})"
        return None

    def _caller(self, plugin: Plugin, hook: str) -> pluggy.HookCaller:
        others = [p.module for p in self._plugins if p is not plugin]
        return self._manager.subset_hook_caller(hook, remove_plugins=others)

    def _call(self, plugin: Plugin, hook: str, **kwargs: object) -> list[Any]:
        results: list[Any] = self._caller(plugin, hook)(**kwargs)
        return results
