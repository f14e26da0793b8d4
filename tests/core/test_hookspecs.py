import inspect

import pluggy
import pytest

from nereus_core import hookspecs

HOOKS = {
    name: f
    for name, f in vars(hookspecs).items()
    if name.startswith("nereus_") and inspect.isfunction(f)
}
FIRST = {
    "nereus_create_adapter",
    "nereus_launch",
    "nereus_run_framework",
    "nereus_efficiency_priors",
    "nereus_veto",
}


def test_all_hooks_are_known_to_pluggy():
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    assert set(vars(manager.hook)) == set(HOOKS)


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_a_hook_says_where_and_when_it_is_called(name):
    doc = inspect.getdoc(HOOKS[name])
    assert "Called on: " in doc
    assert "Called when: " in doc


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_firstresult_is_declared_and_said(name):
    is_first = bool(HOOKS[name].nereus_spec["firstresult"])
    assert is_first == (name in FIRST)
    said = "Stops at the first" in " ".join(inspect.getdoc(HOOKS[name]).split())
    assert said == is_first


@pytest.mark.parametrize("name", sorted(HOOKS))
def test_every_argument_and_result_is_typed(name):
    annotations = HOOKS[name].__annotations__
    assert set(inspect.signature(HOOKS[name]).parameters) | {"return"} == set(annotations)


def test_an_implementation_may_take_fewer_arguments():
    class Plugin:
        @hookspecs.hookimpl
        def nereus_primitive_finished(self, op):
            return op

    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(Plugin())
    assert manager.hook.nereus_primitive_finished(op="op", receipt=None, predicted_s=1.0) == ["op"]
