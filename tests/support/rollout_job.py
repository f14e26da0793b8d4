"""A job whose generate stage changes, for the tests of both engines."""

import itertools

import numpy as np
import pytest
import torch

from nereus_adapters.rollout.ports import Prompt, Sampling
from nereus_core.layout import Layout
from nereus_core.plan import Placement, Plan
from nereus_core.units import Unit, UnitId
from nereus_core.workload import ACTOR_GENERATE, ACTOR_TRAIN, REF_INFER

ONE, TP2, PP2 = Layout(1, 1), Layout(2, 1), Layout(1, 2)
_serials = itertools.count(100)


def prompts(count, max_tokens=24):
    """Greedy prompts that differ in length and content."""
    rng = np.random.default_rng(7)
    return [
        Prompt(
            f"p{i}",
            (1, *map(int, rng.integers(3, 300, 4 + i % 5))),
            Sampling(max_tokens, temperature=0.0),
        )
        for i in range(count)
    ]


@pytest.fixture
def harness(launcher):
    """What launches jobs (each suite has its `launcher`); engines end with the test."""
    yield launcher
    for engine in launcher.running_job.release():
        engine.close()


class Running:
    """A job launched with engines on the first two devices, training on the third."""

    def __init__(self, harness, layout=ONE):
        self.harness, job = harness, harness.job()
        self.devices = job.cluster.healthy
        plan = {
            ACTOR_GENERATE: Placement.packed(layout, self.devices[:2]),
            ACTOR_TRAIN: Placement(ONE, (self.devices[2:3],)),
            REF_INFER: Placement(ONE, (self.devices[3:],)),
        }
        self.adapter = harness.launch(job, Plan(plan))
        self.job = harness.running_job

    @property
    def own(self):
        return self.adapter.units().of(ACTOR_GENERATE)

    def unit(self, layout, *devices):
        return Unit(UnitId(ACTOR_GENERATE, next(_serials)), layout, devices)

    def perform(self, kind, *what):
        op = kind(f"op{next(_serials)}", *what)
        with self.adapter.boundary([ACTOR_GENERATE], timeout_s=60):
            receipt = getattr(self.adapter, kind.__name__.lower())(op)
            self.adapter.relink(Plan.of_units(self.adapter.units()))
        return receipt

    def require_right_tokens(self):
        """Ask for greedy tokens and compare them with the trainer's model's."""
        asked = prompts(4, 24)
        found = self.job.fleet.generate(asked)
        model = self.harness.trainer._models["actor"]
        for prompt, completion in zip(asked, found, strict=True):
            ids = torch.tensor([prompt.tokens])
            with torch.no_grad():
                whole = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=24,
                    min_new_tokens=24,
                    eos_token_id=None,
                    pad_token_id=0,
                )
            assert completion.tokens == tuple(whole[0, ids.shape[1] :].tolist())

    def require_signals(self):
        """Step, and require every signal of each replica to have reached `observe`."""
        self.harness.step()
        seen = self.adapter.observe()
        for unit in self.own:
            metrics = {
                name: seen.metrics[f"{unit.id}/{name}"]
                for name in (
                    "kv_cache_use",
                    "preemptions",
                    "running",
                    "waiting",
                    "tokens_per_s",
                    "first_token_s",
                    "peak_bytes",
                )
            }
            assert 0 < metrics["kv_cache_use"] <= 1
            assert metrics["running"] >= 1
            assert metrics["tokens_per_s"] > 0
            assert metrics["first_token_s"] > 0
            assert metrics["preemptions"] == 0  # room for all of them
            assert metrics["waiting"] >= 0  # a look may come before they are taken up
            assert metrics["peak_bytes"] > 2**20
            assert all(seen.peak_bytes[d] >= metrics["peak_bytes"] for d in unit.devices)
        assert not self.adapter.observe().metrics  # drained
