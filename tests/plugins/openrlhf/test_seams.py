"""A name that Ray, DeepSpeed or vLLM no longer has is told by name, before Ray starts."""

import re
import sys

import pytest
import ray

from nereus_adapters.openrlhf.seams_below import SEAMS_BELOW
from nereus_core import seams
from nereus_core.errors import SeamBroken
from nereus_plugins.openrlhf import launch
from nereus_plugins.openrlhf.launch import launched, prepare
from nereus_plugins.settings import settings_of

pytestmark = pytest.mark.real


@pytest.fixture
def without(monkeypatch, tmp_path):
    """Let one module of the installed packages lack a name."""

    def lack(module, name):
        real, copy = seams.source_of, tmp_path / "copy.py"
        text, count = re.subn(rf"\b{name}\b", "elsewhere", real(module).read_text("utf-8"))
        assert count, f"{module} has no {name} to begin with"
        copy.write_text(text, "utf-8")
        monkeypatch.setattr(seams, "source_of", lambda m: copy if m == module else real(m))

    return lack


@pytest.mark.parametrize("seam", SEAMS_BELOW, ids=str)
def test_each_is_there_and_is_missed(seam, without):
    seams.check_seam(seam)
    without(seam.module, seam.qualname.rpartition(".")[2])
    with pytest.raises(SeamBroken, match=re.escape(f"seam {seam}")):
        seams.check_seam(seam)


@pytest.mark.parametrize(
    ("module", "qualname"),
    [
        ("ray._private.state", "available_resources_per_node"),
        ("ray.actor", "_modify_class.Class.__ray_call__"),
        ("deepspeed.runtime.zero.stage_1_and_2", "DeepSpeedZeroOptimizer.update_lp_params"),
        ("vllm.v1.engine.utils", "get_mp_context"),
    ],
)
def test_a_job_ends_before_ray_starts(module, qualname, without, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["train"])
    without(module, qualname.rpartition(".")[2])
    assert launched({"enable": True}, ["--no.flag", "of OpenRLHF is read before that"]) == 2
    assert f"SeamBroken: seam {module}:{qualname}" in "".join(capfd.readouterr())
    assert not ray.is_initialized()


def test_a_job_that_is_watched_does_without_what_only_a_change_needs(without, monkeypatch, capfd):
    monkeypatch.setattr(launch, "_travelling", lambda module, name: name)
    wrapped = []
    monkeypatch.setattr(launch, "_wrap", lambda owner, name, around: wrapped.append((owner, name)))
    without("vllm.v1.engine.utils", "get_mp_context")
    prepare(settings_of({"enable": True, "mode": "observe"}, adapter="openrlhf"))
    assert wrapped == [("PPOTrainer", "fit"), ("TrainingActor", "fit")]
    said = "".join(capfd.readouterr())
    assert "mode adapt is not to be had here: seam vllm.v1.engine.utils:get_mp_context" in said
    without("ray.actor", "_modify_class")
    with pytest.raises(SeamBroken):
        prepare(settings_of({"enable": True, "mode": "observe"}, adapter="openrlhf"))
