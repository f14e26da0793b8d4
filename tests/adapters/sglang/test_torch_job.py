"""The torch backend with SGLang rollouts: a job that trains on seats and generates on engines."""

import pytest
from vllm_torch_job import config, greedy

from nereus_adapters.rollout.ports import Prompt, Sampling
from nereus_adapters.torch.adapter import TorchAdapter
from nereus_adapters.torch.launch import TorchLaunched
from nereus_core.errors import ConfigError
from nereus_core.layout import Layout
from nereus_core.plan import Plan
from nereus_core.primitives import Merge, Split
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE

pytestmark = pytest.mark.real

SGLANG = {"rollout": "sglang", "vllm": {}, "sglang": {"cache_tokens": 1024, "max_running": 16}}
ASKED = [Prompt(f"p{i}", (1, 5 + i, 9), Sampling(16, temperature=0.0)) for i in range(3)]


def test_training_and_engines_hold_the_same_weights_through_transitions(tmp_path):
    launched = TorchLaunched.of(config(tmp_path, **SGLANG))
    running, adapter = launched.handle, TorchAdapter(launched.handle)
    folder = next((tmp_path / "models").iterdir())
    a, b = running.job.cluster.devices

    def require_right_tokens():
        found = running.engines.fleet.generate(ASKED)
        assert [c.tokens for c in found] == [greedy(running, folder, p.tokens) for p in ASKED]

    def perform(op):
        with adapter.boundary([ACTOR_GENERATE], timeout_s=60):
            getattr(adapter, type(op).__name__.lower())(op)
            adapter.relink(Plan.of_units(adapter.units()))

    def unit(serial, layout, *devices):
        return Unit(UnitId(ACTOR_GENERATE, serial), layout, devices)

    try:
        require_right_tokens()
        assert launched.step()["actor/grad_norm"] > 0
        require_right_tokens()
        own = tuple(u.id for u in adapter.units().of(ACTOR_GENERATE))
        both = unit(10, Layout(2, 1), a, b)
        perform(Merge("merge", own, both))
        require_right_tokens()
        launched.step()
        require_right_tokens()
        perform(Split("split", both.id, (unit(11, Layout(1, 1), a), unit(12, Layout(1, 1), b))))
        require_right_tokens()
        metrics = launched.step()
        assert set(running.served.values()) == {2}
        # The policy that drew is the one that is trained: importance ratios begin at one.
        assert metrics["actor/clip_fraction"] == 0
        assert launched.finished
    finally:
        launched.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pool": "ray"},
            r"backend\.rollout: 'sglang' forks its engines on the driver's own host: take pool = "
            r"'local', or 'vllm'",
        ),
        ({"reattach": True}, r"backend\.reattach: engines end with their driver: not with 'sgl"),
        ({"sglang": {"cache": 1}}, r"backend\.sglang\.cache"),
    ],
)
def test_what_engines_cannot_do_is_refused_with_its_key(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        TorchLaunched.of(config(tmp_path, **{**SGLANG, **changes}))
