"""Load one plugin, before it comes near the others: hooks checked, declarations read."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pluggy

from nereus_core import hookspecs
from nereus_core.backend_status import requirement_of
from nereus_core.declaration import AdapterDeclaration
from nereus_core.errors import AdapterError, ConfigError


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point that loaded."""

    name: str
    distribution: str
    version: str
    module: object

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True, slots=True)
class Broken:
    """An entry point that did not load, and why."""

    name: str
    distribution: str
    version: str
    error: str

    def __str__(self) -> str:
        return f"{self.name}: {self.error}"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A plugin, and the adapters it declares."""

    plugin: Plugin
    declared: tuple[AdapterDeclaration, ...]


def hooks_manager() -> pluggy.PluginManager:
    """Return a manager that knows the core's hooks and no plugin."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    return manager


def chosen(points: Iterable[EntryPoint], only: Iterable[str] | None) -> list[EntryPoint]:
    """Sort entry points by name; with ``only``, keep those.

    Raises:
        ConfigError: ``only`` names an entry point that is not installed.
    """
    ordered = sorted(points, key=lambda p: (p.name, _origin(p)))
    if only is None:
        return ordered
    wanted, names = list(only), sorted({p.name for p in ordered})
    for name in wanted:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                "NEREUS_PLUGINS",
                f"no entry point {name!r} is installed",
                near[0] if near else None,
            )
    return [p for p in ordered if p.name in wanted]


def loaded(point: EntryPoint, *, strict: bool) -> Loaded | Broken:
    """Load an entry point; ``strict`` raises AdapterError where it does not load."""
    distribution, version = _origin(point)
    try:
        module = point.load()
        declared = _probed(module)
    # SystemExit too: a package that exits on import must not end the host.
    except (Exception, SystemExit) as error:
        broken = Broken(point.name, distribution, version, one_line(error))
        if strict:
            raise AdapterError(
                f"plugin {broken} (from {distribution} {version}; NEREUS_STRICT_PLUGINS is set)"
            ) from error
        return broken
    return Loaded(Plugin(point.name, distribution, version, module), declared)


def _origin(point: EntryPoint) -> tuple[str, str]:
    """Name the distribution an entry point comes from, and its version."""
    return (point.dist.name, point.dist.version) if point.dist else ("unknown distribution", "?")


def one_line(error: BaseException) -> str:
    """Write an error as ``Type: message`` on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(": ")


def _probed(module: object) -> tuple[AdapterDeclaration, ...]:
    """Check a plugin in a manager of its own, where a fault touches nobody; return declarations."""
    manager = hooks_manager()
    known = sorted(vars(manager.hook))
    marked = {
        name: opts for name in dir(module) if (opts := manager.parse_hookimpl_opts(module, name))
    }
    if not marked:
        raise AdapterError("implements no hook; mark functions with nereus_core.hookspecs.hookimpl")
    for name, opts in marked.items():
        hook = opts.get("specname") or name
        if hook not in known and not opts.get("optionalhook"):
            near = difflib.get_close_matches(hook, known, n=1, cutoff=0.4)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AdapterError(f"unknown hook {hook!r}{hint}")
    manager.register(module)
    found = tuple(_flattened(manager.hook.nereus_declare_adapter()))
    for declaration in found:
        requirement_of(declaration)
    return found


def _flattened(results: Iterable[object]) -> Iterator[AdapterDeclaration]:
    for result in results:
        for item in [result] if isinstance(result, AdapterDeclaration) else _items(result):
            if not isinstance(item, AdapterDeclaration):
                raise AdapterError(
                    "nereus_declare_adapter must return AdapterDeclaration(s), "
                    f"got {type(item).__name__}"
                )
            yield item


def _items(result: object) -> Iterable[object]:
    return result if isinstance(result, Iterable) else [result]
