"""settings: the ``nereus.*`` keys of a framework's own command line as a NereusConfig."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from nereus_core.config import NereusConfig
from nereus_core.errors import ConfigError

SWITCH, FILE = "enable", "config"
"""Keys of a plugin's own: whether Nereus is on, and the file that the other keys are laid over."""


def settings_of(
    keys: Mapping[str, Any] | None,
    *,
    adapter: str,
    defaults: Mapping[str, Any] | None = None,
) -> NereusConfig | None:
    """Read the ``nereus`` section of a job's command line; None unless it switches Nereus on.

    Args:
        keys: Plain nested values, e.g. ``{"enable": True, "mode": "advise"}``. ``config`` names a
            ``nereus.toml``; every other key is one of NereusConfig and wins over that file.
        adapter: The plugin's own, unless file or keys name another.
        defaults: What holds for this framework where neither file nor keys say otherwise.

    Raises:
        ConfigError: a key or value cannot be used; names the nearest known one.

    >>> settings_of({"enable": True, "mode": "advise"}, adapter="verl").mode
    'advise'
    >>> settings_of({"mode": "advise"}, adapter="verl") is None
    True
    """
    values = dict(keys or {})
    switch = values.pop(SWITCH, False)
    if not isinstance(switch, bool):
        raise ConfigError(f"nereus.{SWITCH}", f"got {switch!r}; expected true or false")
    if not switch:
        return None
    file = values.pop(FILE, None)
    base = merged({"adapter": adapter}, defaults or {})
    if file is not None:
        base = merged(base, NereusConfig.load(Path(str(file))).model_dump(exclude_unset=True))
    return NereusConfig.of(merged(base, values))


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Lay nested changes over nested values.

    >>> merged({"policy": {"delta": 0.1, "min_saving": 0.2}}, {"policy": {"delta": 0.3}})
    {'policy': {'delta': 0.3, 'min_saving': 0.2}}
    """
    found = dict(values)
    for key, change in changes.items():
        old = found.get(key)
        if isinstance(old, Mapping) and isinstance(change, Mapping):
            found[key] = merged(old, change)
        else:
            found[key] = change
    return found
