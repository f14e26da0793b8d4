"""The torch backend with vLLM rollouts: a job that trains on seats and generates on engines."""

import itertools
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm_cases import ONE, TP2, prompts
from vllm_torch_job import config, greedy

from nereus_adapters.torch.adapter import TorchAdapter
from nereus_adapters.torch.launch import TorchLaunched
from nereus_core.cli import app
from nereus_core.errors import ConfigError
from nereus_core.plan import Plan
from nereus_core.primitives import Merge, Split
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE

pytestmark = pytest.mark.real

EXAMPLE = Path(__file__).parents[3] / "examples" / "vllm_rollout" / "nereus.toml"


def require_peaks_of_engines(seen, units):
    """Require peaks of devices to hold those of engines, beside the state of training."""
    for unit in units:
        engine = seen.metrics[f"{unit.id}/peak_bytes"]
        assert engine > 2**20
        assert max(seen.peak_bytes[d] for d in unit.devices) > engine
    assert all(seen.peak_bytes[d] > 2**20 for unit in units for d in unit.devices)


def test_training_and_engines_hold_the_same_weights_through_transitions(tmp_path):
    launched = TorchLaunched.of(config(tmp_path))
    running = launched.handle
    folder = next((tmp_path / "models").iterdir())
    adapter = TorchAdapter(running)
    asked, numbers = prompts(3, 16), itertools.count()

    def require_right_tokens():
        found = running.engines.fleet.generate(asked)
        assert [c.tokens for c in found] == [greedy(running, folder, p.tokens) for p in asked]

    try:
        require_right_tokens()
        for layout, kind in ((TP2, Merge), (ONE, Split)):
            metrics = launched.step()
            assert metrics["actor/grad_norm"] > 0
            require_right_tokens()
            own = adapter.units().of(ACTOR_GENERATE)
            require_peaks_of_engines(adapter.observe(), own)
            a, b = running.job.cluster.devices

            def unit(*devices, layout=layout):
                return Unit(UnitId(ACTOR_GENERATE, 10 + next(numbers)), layout, devices)

            op = (
                Merge(f"op{layout}", tuple(u.id for u in own), unit(a, b))
                if kind is Merge
                else Split(f"op{layout}", own[0].id, (unit(a), unit(b)))
            )
            with adapter.boundary([ACTOR_GENERATE], timeout_s=60):
                getattr(adapter, kind.__name__.lower())(op)
                adapter.relink(Plan.of_units(adapter.units()))
            require_right_tokens()
        metrics = launched.step()
        assert set(running.served) == {u.id for u in adapter.units().of(ACTOR_GENERATE)}
        assert set(running.served.values()) == {2}
        # The policy that drew is the one that is trained: importance ratios begin at one.
        assert metrics["actor/clip_fraction"] == 0
        assert launched.finished
    finally:
        launched.close()


def test_the_example_adapts_while_it_runs(tmp_path):
    """A seat dies with an engine of two ranks; generation goes on, and the run ends well."""
    ran = CliRunner().invoke(app, ["run", str(EXAMPLE), "--run-dir", str(tmp_path / "run")])
    assert ran.exit_code == 0, ran.output
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    lost = [e["lost_units"] for e in events if e["event"] == "DevicesChanged"]
    assert ["actor/generate#0"] in lost
    ended = [e for e in events if e["event"] == "TransitionFinished"]
    assert ended
    assert {e["outcome"] for e in ended} == {"done"}
    done = [e["text"] for e in events if e["event"] == "PrimitiveFinished"]
    assert any(text.startswith("extend actor/generate#") for text in done)
    assert sum(e["event"] == "StepObserved" for e in events) == 6
    assert events[-1]["event"] == "RunFinished"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pool": "ray", "device": "cuda"},
            r"backend\.rollout: 'vllm' on the Ray pool is for C",
        ),
        ({"reattach": True}, r"backend\.reattach: engines end with their driver"),
        ({"rollout": "vlm"}, r"backend\.rollout"),
        ({"vllm": {"executor": "ray"}}, r"executor: 'ray': vLLM knows no Ray resource of a CPU"),
        ({"vllm": {"front": "async", "executor": "mp"}}, r"front: 'async' is for seats"),
    ],
)
def test_what_engines_cannot_do_is_refused_with_its_key(tmp_path, changes, message):
    with pytest.raises(ConfigError, match=message):
        TorchLaunched.of(config(tmp_path, **changes))
