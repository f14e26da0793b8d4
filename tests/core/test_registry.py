import logging
import os
from importlib.metadata import entry_points

import pytest

from nereus_core.config import NereusConfig
from nereus_core.errors import (
    AdapterError,
    BackendMissing,
    BackendVersion,
    ConfigError,
    DuplicateAdapter,
    NoSuchAdapter,
)
from nereus_core.registry import Registry

LAUNCHES = """
class Job:
    handle = "the job"
    finished = True
    def step(self): return {}
    def close(self): pass

@hookimpl
def nereus_launch(name, config):
    return Job()

@hookimpl
def nereus_create_adapter(name, handle):
    return (name, handle)
"""


def test_adapters_are_listed_by_name_with_their_origin(shelf):
    shelf.adapter("zeta", distribution="acme-rl", version="2.1")
    shelf.adapter("beta")
    found = shelf.registry("zeta", "beta").adapters()
    assert [a.declaration.name for a in found] == ["beta", "zeta"]
    assert str(found[1].plugin) == "zeta (acme-rl 2.1)"


def test_a_plugin_that_does_not_import_is_shown_and_harms_no_other(shelf):
    shelf.put("acme", "1.0", acme="import libacme_that_is_not_there")
    shelf.put("quits", "1.0", quits="import sys; sys.exit('no display')")
    shelf.adapter("good")
    registry = shelf.registry("acme", "good", "quits")
    assert [a.declaration.name for a in registry.adapters()] == ["good"]
    assert [(b.name, b.distribution, b.version) for b in registry.broken] == [
        ("acme", "acme", "1.0"),
        ("quits", "quits", "1.0"),
    ]
    assert "ModuleNotFoundError: No module named 'libacme_that_is_not_there'" in str(
        registry.broken[0]
    )


def test_strict_makes_a_broken_plugin_fatal_for_its_author(shelf):
    shelf.put("acme", "1.0", acme="1 / 0")
    with pytest.raises(AdapterError, match=r"acme: ZeroDivisionError.*acme 1\.0"):
        shelf.registry("acme", strict=True)


def test_an_unknown_hook_names_the_nearest_one(shelf):
    shelf.adapter("typo", more="@hookimpl\ndef nereus_decide(decision): pass\n")
    broken = shelf.registry("typo").broken
    assert "unknown hook 'nereus_decide'; did you mean 'nereus_decided'?" in broken[0].error


def test_a_hook_with_an_argument_it_does_not_have_is_broken(shelf):
    shelf.adapter("argument", more="@hookimpl\ndef nereus_decided(decision, colour): pass\n")
    assert "colour" in shelf.registry("argument").broken[0].error


def test_a_plugin_without_marked_hooks_is_told_what_to_do(shelf):
    shelf.put("bare", "1.0", bare="def nereus_declare_adapter(): pass")
    assert "mark functions with nereus_core.hookspecs.hookimpl" in str(
        shelf.registry("bare").broken[0]
    )


@pytest.mark.parametrize("value", ["42", "['name']", "None and 1 or object()"])
def test_a_declaration_of_another_type_is_broken(shelf, value):
    source = (
        "from nereus_core.hookspecs import hookimpl\n"
        f"@hookimpl\ndef nereus_declare_adapter(): return {value}\n"
    )
    shelf.put("odd", "1.0", odd=source)
    assert "must return AdapterDeclaration(s)" in shelf.registry("odd").broken[0].error


def test_a_requirement_that_is_not_pep_508_is_broken(shelf):
    shelf.adapter("req", requirement="verl >>> 9")
    assert "not PEP 508" in shelf.registry("req").broken[0].error


def test_two_distributions_with_one_adapter_name_are_both_named(shelf):
    shelf.adapter("same", distribution="first-dist")
    shelf.adapter("same", distribution="second-dist", version="3.0")
    with pytest.raises(DuplicateAdapter, match=r"first-dist 1\.0.*second-dist 3\.0"):
        shelf.registry("same")


def test_an_absent_adapter_lists_installed_and_broken(shelf):
    shelf.adapter("here")
    shelf.put("acme", "1.0", acme="1 / 0")
    registry = shelf.registry("here", "acme")
    with pytest.raises(NoSuchAdapter, match=r"no adapter 'her'; installed: here \(broken: acme: Z"):
        registry.create("her", object(), NereusConfig())


def test_restriction_to_a_plugin_that_is_not_there_names_the_nearest(shelf):
    shelf.adapter("present")
    with pytest.raises(ConfigError, match=r"NEREUS_PLUGINS.*'presnt'.*Did you mean 'present'"):
        shelf.registry("presnt")


def test_backend_status_without_importing_it(shelf):
    shelf.adapter("absent", requirement="no-such-dist>=1", install="pip install 'nereus[absent]'")
    shelf.adapter("old", requirement="pluggy<0.1")
    shelf.adapter("ready", requirement="pluggy>=1")
    shelf.adapter("none")
    found = {
        a.declaration.name: a.status
        for a in shelf.registry("absent", "old", "ready", "none").adapters()
    }
    assert (found["absent"].state, found["absent"].todo) == (
        "missing",
        "pip install 'nereus[absent]'",
    )
    assert (found["old"].state, found["old"].todo) == (
        "version mismatch",
        "pip install 'pluggy<0.1'",
    )
    assert found["ready"].state == "ready"
    assert found["ready"].installed
    assert (found["none"].state, found["none"].installed) == ("ready", None)


def test_creating_without_the_backend_says_how_to_install_it(shelf):
    shelf.adapter("absent", requirement="no-such-dist>=1", install="pip install 'nereus[absent]'")
    shelf.adapter("old", requirement="pluggy<0.1")
    registry = shelf.registry("absent", "old")
    with pytest.raises(BackendMissing, match=r"pip install 'nereus\[absent\]'"):
        registry.create("absent", object(), NereusConfig())
    with pytest.raises(BackendVersion, match=r"needs pluggy<0\.1, found"):
        registry.launch("old", NereusConfig())


def test_launch_and_create_ask_only_the_plugin_that_declared_the_name(shelf):
    shelf.adapter("mine", more=LAUNCHES)
    shelf.adapter("zz", more="@hookimpl\ndef nereus_launch(name): raise RuntimeError(name)\n")
    registry = shelf.registry("mine", "zz")
    launched = registry.launch("mine", NereusConfig())
    assert registry.create("mine", launched.handle, NereusConfig()) == ("mine", "the job")


def test_an_adapter_that_only_attaches_says_so(shelf):
    shelf.adapter("attach")
    registry = shelf.registry("attach")
    with pytest.raises(AdapterError, match="does not start jobs itself"):
        registry.launch("attach", NereusConfig())
    with pytest.raises(AdapterError, match="returned None"):
        registry.create("attach", object(), NereusConfig())


def test_an_observer_that_raises_is_logged_once_and_dropped(shelf, caplog):
    seen = "SEEN = []\n@hookimpl\ndef nereus_decided(decision):\n    SEEN.append(decision)\n"
    shelf.adapter("faulty", more=seen + "    raise ValueError('metrics down')\n")
    shelf.adapter("steady", more=seen)
    registry = shelf.registry("faulty", "steady")
    with caplog.at_level(logging.WARNING, logger="nereus"):
        for decision in range(3):
            registry.notify("nereus_decided", decision=decision)
    counts = {p.name: p.module.SEEN for p in registry.plugins}
    assert counts == {"faulty": [0], "steady": [0, 1, 2]}
    assert len(caplog.records) == 1
    assert "faulty (dist-faulty 1.0) failed in nereus_decided" in caplog.text
    assert "metrics down" in caplog.text


def test_veto_gives_the_first_reason_and_a_fault_refuses(shelf):
    shelf.adapter("calm", more="@hookimpl\ndef nereus_veto(decision): return None\n")
    assert shelf.registry("calm").veto(object()) is None
    shelf.adapter("night", more="@hookimpl\ndef nereus_veto(decision): return 'maintenance'\n")
    assert shelf.registry("calm", "night").veto(object()) == "maintenance (night (dist-night 1.0))"
    shelf.adapter("bad", more="@hookimpl\ndef nereus_veto(decision): raise OSError('gone')\n")
    assert "failed in nereus_veto: OSError: gone" in shelf.registry("bad").veto(object())


def test_plugins_add_devices(shelf):
    more = """
    from nereus_core.cluster import DeviceSpec, LinkSpec
    @hookimpl
    def nereus_device_specs():
        yield DeviceSpec("tpu-x", 1e15, 2**36, 1e12, 1e-6, 1e10, "test")
        yield LinkSpec("ici", 1e11, 1e-6, "test")
    """
    shelf.adapter("site", more=more)
    devices, links = shelf.registry("site").device_specs()
    assert devices["tpu-x"].peak_flops_per_s == 1e15
    assert "h100-sxm" in devices
    assert links["ici"].latency_s == 1e-6


def test_a_process_loads_once_and_a_forked_child_again(shelf, monkeypatch):
    shelf.adapter("one")
    registry = shelf.registry("one")
    assert Registry.load() is registry
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert Registry.load() is not registry


def test_of_takes_entry_points_as_an_argument(shelf):
    shelf.adapter("given")
    points = [p for p in entry_points(group="nereus") if p.name == "given"]
    assert Registry.of(points).declaration("given").summary == "for tests"


def test_rooms_add_their_own_hooks(shelf, tmp_path, monkeypatch):
    (shelf.folder / "room_specs.py").write_text(
        "import pluggy\n"
        "@pluggy.HookspecMarker('nereus')(firstresult=True)\n"
        "def nereus_conformance_harness(name, tier): ...\n"
    )
    import room_specs

    optional = "@hookimpl(optionalhook=True)\ndef nereus_conformance_harness(name, tier):"
    shelf.adapter("held", more=f"{optional} return f'{{name}} {{tier}}'\n")
    registry = shelf.registry("held")
    registry.add_hookspecs(room_specs)
    registry.add_hookspecs(room_specs)
    assert registry.ask("held", "nereus_conformance_harness", tier="real") == "held real"
