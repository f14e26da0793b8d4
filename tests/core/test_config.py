import pytest
from pydantic import BaseModel, ValidationError

from nereus_core.config import NereusConfig, validated
from nereus_core.errors import ConfigError


def write(tmp_path, text):
    path = tmp_path / "nereus.toml"
    path.write_text(text)
    return path


def test_an_empty_file_gives_the_defaults(tmp_path):
    assert NereusConfig.load(write(tmp_path, "")) == NereusConfig()


def test_what_is_written_is_read(tmp_path):
    config = NereusConfig.load(
        write(
            tmp_path,
            """
            mode = "advise"
            adapter = "sim"
            run_dir = "runs/x"
            [policy]
            tokens_change = 0.5
            [constraints]
            max_tp = 4
            colocate = [["actor/train", "ref/infer"]]
            pin = { "ref/infer" = "tp1pp1" }
            [timeouts]
            step_s = 10
            [job]
            anything = { the = "adapter", reads = [1, 2] }
            """,
        )
    )
    assert (config.mode, config.adapter, config.run_dir.name) == ("advise", "sim", "x")
    assert config.policy.tokens_change == 0.5
    assert config.constraints.max_tp == 4
    assert config.constraints.colocate == (("actor/train", "ref/infer"),)
    assert config.constraints.pin["ref/infer"] == "tp1pp1"
    assert config.timeouts.step_s == 10.0
    assert config.job["anything"]["reads"] == [1, 2]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"moed": "adapt"}, "moed: unknown key. Did you mean 'mode'?"),
        (
            {"policy": {"token_change": 1.0}},
            "policy.token_change: unknown key. Did you mean 'tokens_change'?",
        ),
        (
            {"timeouts": {"boundary": 1.0}},
            "timeouts.boundary: unknown key. Did you mean 'boundary_s'?",
        ),
        ({"zzz": 1}, "zzz: unknown key."),
    ],
)
def test_an_unknown_key_names_the_nearest(values, message):
    with pytest.raises(ConfigError) as caught:
        NereusConfig.of(values)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("values", "key", "shown"),
    [
        ({"mode": "fly"}, "mode", "'fly'"),
        ({"policy": {"memory_headroom": 1.0}}, "policy.memory_headroom", "1.0"),
        ({"policy": {"cooldown_steps": -1}}, "policy.cooldown_steps", "-1"),
        ({"timeouts": {"step_s": 0}}, "timeouts.step_s", "0"),
        ({"constraints": {"max_tp": "many"}}, "constraints.max_tp", "'many'"),
    ],
)
def test_a_value_that_does_not_fit_is_shown_with_its_key(values, key, shown):
    with pytest.raises(ConfigError) as caught:
        NereusConfig.of(values)
    assert caught.value.key == key
    assert f"got {shown}; " in str(caught.value)


def test_a_file_that_is_absent_or_not_toml_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        NereusConfig.load(tmp_path / "absent.toml")
    with pytest.raises(ConfigError, match=r"nereus\.toml: is not TOML"):
        NereusConfig.load(write(tmp_path, "mode = "))


def test_the_configuration_is_frozen():
    with pytest.raises(ValidationError):
        NereusConfig().mode = "observe"


class _Inner(BaseModel, extra="forbid"):
    hidden: int = 1


class _Job(BaseModel, extra="forbid"):
    model: _Inner = _Inner()
    steps: int = 1


def test_an_adapters_own_section_reads_alike():
    assert validated(_Job, {"steps": 3}, at="job").steps == 3
    with pytest.raises(ConfigError, match=r"job\.step: unknown key\. Did you mean 'steps'"):
        validated(_Job, {"step": 3}, at="job")
    with pytest.raises(ConfigError, match=r"job\.model\.hiden: unknown key\. Did you mean 'hidde"):
        validated(_Job, {"model": {"hiden": 3}}, at="job")
