"""The core's README says what the code has: nothing is left out, and defaults are the real ones."""

import dataclasses
import inspect
import re
import types
from pathlib import Path

import pytest
from pydantic import BaseModel

from nereus_core import errors, events, hookspecs
from nereus_core.capabilities import Feature
from nereus_core.config import NereusConfig
from nereus_core.primitives import Kind

README = (Path(__file__).parents[2] / "nereus_core" / "README.md").read_text(encoding="utf-8")
CELLS = [
    [cell.strip() for cell in line.strip().strip("|").split("|")]
    for line in README.splitlines()
    if line.startswith("|")
]
FIRST = {row[0]: row for row in CELLS}

HOOKS = [f for n, f in vars(hookspecs).items() if n.startswith("nereus_") and inspect.isfunction(f)]
ERRORS = [
    e
    for e in vars(errors).values()
    if inspect.isclass(e) and issubclass(e, errors.NereusError) and e is not errors.NereusError
]


def config_keys(model: type[BaseModel], at: str = ""):
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from config_keys(field.annotation, f"{at}{name}.")
        else:
            yield f"{at}{name}", field.get_default(call_default_factory=True)


@pytest.mark.parametrize("hook", HOOKS, ids=lambda h: h.__name__)
def test_every_hook_is_documented_with_its_arguments(hook):
    call = f"`{hook.__name__}({', '.join(inspect.signature(hook).parameters)})`"
    assert FIRST[call][2] == ("yes" if hook.nereus_spec["firstresult"] else "")


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: e.__name__)
def test_every_error_is_documented(error):
    assert f"`{error.__name__}`" in FIRST


@pytest.mark.parametrize("feature", Feature)
def test_every_feature_is_documented(feature):
    assert f"`{feature}`" in FIRST


@pytest.mark.parametrize("kind", Kind)
def test_every_primitive_is_documented(kind):
    assert str(kind).title() in FIRST


@pytest.mark.parametrize("event", events.Event.__args__, ids=lambda e: e.__name__)
def test_every_event_is_documented(event):
    assert dataclasses.is_dataclass(event)
    assert f"`{event.__name__}`" in FIRST


@pytest.mark.parametrize(
    ("key", "default"), [*config_keys(NereusConfig)], ids=lambda v: str(v)[:30]
)
def test_every_configuration_key_is_documented_with_its_default(key, default):
    shown = FIRST[f"`{key}`"][1].strip("`")
    if isinstance(default, bool):
        expected = str(default).lower()
    elif isinstance(default, str | Path):
        expected = f'"{default}"'
    elif default is None:
        expected = "none"
    elif isinstance(default, tuple):
        expected = "[]"
    elif isinstance(default, dict | types.MappingProxyType):
        expected = "{}"
    else:
        expected = f"{default:g}"
    assert shown == expected


def test_no_row_documents_what_is_gone():
    hooks = set(re.findall(r"`(nereus_[a-z_]+)\(", README))
    assert hooks == {h.__name__ for h in HOOKS}
    keys = {k for k, _ in config_keys(NereusConfig)}
    dotted = set(
        re.findall(r"^\| `((?:policy|constraints|timeouts|checkpoint)\.[a-z_]+)`", README, re.M)
    )
    assert dotted == {k for k in keys if "." in k}
    ours = {e.__name__ for e in ERRORS}
    table = README.partition("## Errors")[2].partition("## Rows")[0]
    assert set(re.findall(r"^\| `([A-Za-z]+)`", table, re.M)) == ours


def test_environment_variables_of_the_registry_are_documented():
    import nereus_core.registry

    read = set(re.findall(r'environ\.get\("(NEREUS_\w+)"', inspect.getsource(nereus_core.registry)))
    assert read
    assert {v for v in read if v not in README} == set()
