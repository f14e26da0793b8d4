"""flags: tells ``--nereus.*`` from OpenRLHF's own flags, which pass through untouched."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from typing import Any

from nereus_core.errors import ConfigError

PREFIX = "--nereus."


def split_flags(argv: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Split a command line.

    A flag is written ``--nereus.mode advise`` or ``--nereus.mode=advise``; without a value it is
    true. Values are read as TOML where they are TOML, else as text.

    Returns:
        Nested values of the ``--nereus.*`` flags, and all other words in their order.

    Raises:
        ConfigError: a key is empty, or both a value and a section.

    >>> split_flags(["--nereus.enable", "--a.b", "1", "--nereus.policy.delta=0.1"])
    ({'enable': True, 'policy': {'delta': 0.1}}, ['--a.b', '1'])
    """
    found: dict[str, Any] = {}
    rest: list[str] = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith(PREFIX):
            rest.append(word)
            continue
        key, separator, text = word.removeprefix(PREFIX).partition("=")
        value: Any = True
        if separator:
            value = _value(text)
        elif words and not words[0].startswith("--"):
            value = _value(words.pop(0))
        _put(found, key, value)
    return found, rest


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"it = {text}")["it"]
    except tomllib.TOMLDecodeError:
        return text


def _put(values: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = key.split(".")
    if not all([*sections, last]):
        raise ConfigError(f"{PREFIX}{key}", "names no key; expected e.g. --nereus.mode advise")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise ConfigError(f"{PREFIX}{key}", f"{section!r} was given a value before")
    values[last] = value
