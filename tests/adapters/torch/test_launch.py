"""A configuration becomes a job, or is refused with the key; `nereus run` drives it."""

import json
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")
from nereus_adapters.torch.config import BackendSection, sections
from nereus_adapters.torch.harness import TINY_CONFIG
from nereus_adapters.torch.launch import TorchLaunched
from nereus_adapters.torch.pools import open_pool
from nereus_adapters.torch.setup import cluster, planned, simplest
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.errors import BackendMissing, ConfigError, ModelConfigError, PlanError, UnitLost
from nereus_core.layout import Layout
from nereus_core.workload import ACTOR_TRAIN, REF_INFER

pytestmark = pytest.mark.real

TASK = """
class Low:
    def __init__(self, tokenizer, bound):
        self.tokenizer, self.bound = tokenizer, bound
    def prompts(self, step):
        return [(4 * step + i, [1, 2 + i]) for i in range(4)]
    def max_response_tokens(self, step):
        return 6
    def score(self, prompt_id, tokens):
        return sum(token < self.bound for token in tokens) / len(tokens)
"""


def config(tmp_path, *, job=(), backend=()):
    return NereusConfig.of(
        {
            "run_dir": tmp_path,
            "job": {
                "model": dict(TINY_CONFIG),
                "prompts_per_step": 4,
                "responses_per_prompt": 4,
                "max_prompt_tokens": 8,
                "max_response_tokens": 8,
                "steps": 3,
                **dict(job),
            },
            "backend": {"seats": 2, **dict(backend)},
        }
    )


def test_a_configured_job_runs_learns_and_meets_its_device_events(tmp_path, monkeypatch):
    """One run, since seats take seconds to start: a task of the user's, a kill, a return."""
    (tmp_path / "low_tokens.py").write_text(TASK, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    launched = TorchLaunched.of(
        config(
            tmp_path,
            job={
                "task": "low_tokens:Low",
                "task_args": {"bound": 50},
                "learning_rate": 5e-3,
                "kl_coef": 0.0,
                "steps": 24,
                "plan": {
                    "actor/train": "tp2pp1dp1",
                    "ref/infer": {
                        "layout": "tp1pp1",
                        "devices": ["node0:1"],
                    },
                },
            },
            backend={"events": [{"step": 22, "kill": ["node0:1"], "give": ["node0:1"]}]},
        )
    )
    try:
        units = launched.handle.units
        assert units.of(ACTOR_TRAIN)[0].layout == Layout(2, 1)
        assert units.of(REF_INFER)[0].devices == (Device("node0", 1),)
        rewards = [launched.step()["reward"] for _ in range(23)]
        assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.1
        assert launched.handle.job.cluster.failed == frozenset()
        with pytest.raises(UnitLost, match="actor/train#0"):
            launched.step()
        assert not launched.finished
    finally:
        launched.close()
        launched.close()


@pytest.mark.parametrize(
    ("section", "values", "message"),
    [
        ("job", {"learning_rat": 1.0}, r"job\.learning_rat: unknown key.* 'learning_rate'"),
        ("job", {"steps": 0}, r"job\.steps: got 0"),
        ("job", {"model": "/no/such/folder"}, r"job\.model: /no/such/folder does not exist"),
        ("job", {"model": "no_package:file.gguf"}, r"job\.model: no package 'no_package'"),
        ("job", {"plan": {"actor/trian": "tp1pp1"}}, r"job\.plan\.actor/trian: is not one of"),
        ("job", {"plan": {"actor/train": "tp8pp1"}}, r"takes 8 seats, there are 2"),
        ("job", {"plan": {"actor/train": "big"}}, r"got 'big'; expected e\.g\. 'tp2pp1dp2'"),
        ("job", {"task": "no_such:task"}, r"job\.task: 'no_such:task' cannot be imported"),
        ("backend", {"seats": 3, "nodes": 2}, r"backend\.nodes: 2 does not divide 3"),
        ("backend", {"device_spec": "abacus"}, r"backend\.device_spec: 'abacus' is unknown"),
        ("backend", {"events": [{"step": 1, "kill": ["x"]}]}, r"backend\.events: not a device"),
    ],
)
def test_what_cannot_be_is_refused_with_its_key(tmp_path, section, values, message):
    with pytest.raises(ConfigError, match=message):
        TorchLaunched.of(config(tmp_path, **{section: values}))


def test_a_model_config_that_lacks_a_field_is_refused_with_the_field(tmp_path):
    model = {k: v for k, v in TINY_CONFIG.items() if k != "num_hidden_layers"}
    with pytest.raises(ModelConfigError, match="num_hidden_layers"):
        TorchLaunched.of(config(tmp_path, job={"model": model}))


def test_a_plan_that_breaks_rules_starts_no_seat(tmp_path):
    wanted = {"actor/train": "tp1pp1dp2"}
    with pytest.raises(PlanError, match="dp=2 does not divide batch 3"):
        TorchLaunched.of(
            config(
                tmp_path,
                job={"plan": wanted, "prompts_per_step": 3, "responses_per_prompt": 1},
            )
        )


def test_a_folder_is_a_model(tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        TorchLaunched.of(config(tmp_path, job={"model": str(folder)}))
    (folder / "config.json").write_text(json.dumps(TINY_CONFIG | {"vocab_size": "many"}))
    with pytest.raises(ModelConfigError, match="vocab_size"):
        TorchLaunched.of(config(tmp_path, job={"model": str(folder)}))


def test_seats_may_be_spread_over_names_of_nodes():
    spread = cluster(BackendSection(seats=4, nodes=2, memory_bytes=5))
    assert [str(d) for d in spread.devices] == ["node0:0", "node0:1", "node1:0", "node1:1"]
    assert spread.device_spec.memory_bytes == 5


def test_the_ray_pool_without_ray_says_what_installs_it(monkeypatch):
    for name in [n for n in sys.modules if n == "ray" or n.startswith("ray.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ray", None)
    backend = BackendSection(pool="ray")
    with pytest.raises(BackendMissing, match=r"needs ray>=2.41.*nereus\[torch,ray\]"):
        open_pool(backend, cluster(backend))


def test_the_simplest_plan_uses_as_many_seats_as_divide_the_batch(harness):
    job = replace(harness.job(), global_batch=6)
    assert simplest(job)[ACTOR_TRAIN].dp == 3
    assert planned(job, {})[ACTOR_TRAIN].dp == 1


def test_sections_name_the_nearest_key(tmp_path):
    with pytest.raises(ConfigError, match="seats"):
        sections(config(tmp_path, backend={"seat": 2}))
