"""What the plugin does where Nereus's own engine is asked for."""

import pytest
from omegaconf import OmegaConf

from nereus_adapters.verl.pipeline import stages_at_start
from nereus_core.errors import ConfigError, WrongHandle
from nereus_plugins.verl_trainer import built

pytestmark = pytest.mark.real


def config(engine, **more):
    """What the plugin reads of a job that is to be watched alone."""
    backend = {"engine": engine, **more}
    return OmegaConf.create(
        {
            "nereus": {"enable": True, "mode": "observe", "backend": backend},
            "actor_rollout_ref": {"actor": {"strategy": "fsdp2"}},
            "trainer": {"v1": {"trainer_mode": "sync"}},
        }
    )


def test_another_vendor_of_engines_is_not_overridden(monkeypatch):
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    assert get_ppo_ray_runtime_env(config("tp"))["env_vars"]["VERL_ENGINE_VENDOR"] == "nereus"
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "mindspeed")
    with pytest.raises(ConfigError, match="VERL_ENGINE_VENDOR='mindspeed' asks for another"):
        get_ppo_ray_runtime_env(config("tp"))
    assert "nereus" not in get_ppo_ray_runtime_env(config("verl"))["env_vars"].values()


def test_the_jobs_processes_are_told_how_many_stages_units_start_with(monkeypatch):
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    for keys, actor, ref in (
        ({}, 1, 1),
        ({"pipeline_stages": 2}, 2, 2),
        ({"pipeline_stages": {"actor": 4}}, 4, 1),
    ):
        told = get_ppo_ray_runtime_env(config("tp", **keys))["env_vars"]["NEREUS_PIPELINE_STAGES"]
        assert (stages_at_start(told, "actor"), stages_at_start(told, "ref")) == (actor, ref)
    assert "NEREUS_PIPELINE_STAGES" not in get_ppo_ray_runtime_env(config("verl"))["env_vars"]
    assert stages_at_start(None, "actor") == 1


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"pipeline_stages": "two"}, "pipeline_stages"),
        ({"pipeline_stages": {"actor": 0}}, "pipeline_stages"),
        ({"pipeline_stages": 4, "max_pipeline_stages": 2}, "is less than"),
    ],
)
def test_stages_that_make_no_sense_are_refused_before_anything_starts(monkeypatch, keys, said):
    from verl.trainer.constants_ppo import get_ppo_ray_runtime_env

    monkeypatch.delenv("VERL_ENGINE_VENDOR", raising=False)
    with pytest.raises(ConfigError, match=said):
        get_ppo_ray_runtime_env(config("tp", **keys))


def test_what_refuses_nereus_ends_a_job_of_its_own_engine_in_every_mode(capsys):
    class Trainer:
        """No trainer that the adapter knows."""

        def __init__(self, config):
            self.trained = False

        def fit(self):
            self.trained = True

    watched = built(Trainer, config("verl"))
    watched.fit()
    assert watched.trained
    assert "OFF for this verl job" in capsys.readouterr().err
    refused = built(Trainer, config("tp"))
    with pytest.raises(WrongHandle):
        refused.fit()
    assert not refused.trained
