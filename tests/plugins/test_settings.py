import pytest

from nereus_core.errors import ConfigError
from nereus_plugins.settings import settings_of


def test_nothing_is_switched_on_by_other_keys():
    assert settings_of(None, adapter="verl") is None
    assert settings_of({}, adapter="verl") is None
    assert settings_of({"mode": "adapt", "enable": False}, adapter="verl") is None


def test_keys_win_over_the_file_and_the_file_over_the_plugin(tmp_path):
    file = tmp_path / "nereus.toml"
    file.write_text(
        'adapter = "other"\nmode = "observe"\n[policy]\ndelta = 0.1\nmin_saving = 0.2\n'
    )
    keys = {"enable": True, "config": str(file), "policy": {"delta": 0.3}}
    found = settings_of(keys, adapter="verl")
    assert (found.adapter, found.mode) == ("other", "observe")
    assert (found.policy.delta, found.policy.min_saving) == (0.3, 0.2)
    assert settings_of({"enable": True}, adapter="verl").adapter == "verl"


def test_what_holds_for_a_framework_gives_way_to_the_file_and_the_keys(tmp_path):
    file = tmp_path / "nereus.toml"
    file.write_text("[constraints]\nmax_tp = 4\n")
    keys = {"enable": True, "config": str(file)}
    defaults = {"constraints": {"max_pp": 1, "max_tp": 2}}
    found = settings_of(keys, adapter="verl", defaults=defaults)
    assert (found.constraints.max_pp, found.constraints.max_tp) == (1, 4)
    keys["constraints"] = {"max_pp": 2}
    assert settings_of(keys, adapter="verl", defaults=defaults).constraints.max_pp == 2


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"enable": "maybe"}, r"nereus\.enable"),
        ({"enable": True, "polcy": {}}, "policy"),
        ({"enable": True, "mode": "advice"}, "advise"),
        ({"enable": True, "config": "/nowhere/nereus.toml"}, "nowhere"),
    ],
)
def test_a_key_that_cannot_be_used_is_named(keys, message):
    with pytest.raises(ConfigError, match=message):
        settings_of(keys, adapter="verl")
