"""The same job on CUDA devices, one seat each; what needs more than there are is skipped."""

import pytest
import torch

from nereus_adapters.torch.adapter import TorchAdapter
from nereus_adapters.torch.pool import LocalPool
from nereus_adapters.torch.setup import planned, start
from nereus_core.cluster import Device
from nereus_core.config import NereusConfig
from nereus_core.errors import DevicesMissing
from nereus_core.events import EventLog
from nereus_core.transition import compile_transition, execute

FOUND = torch.cuda.device_count()
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 101,
}


@pytest.mark.real
def test_more_seats_than_devices_are_refused_by_number():
    pool = LocalPool("cuda")
    try:
        with pytest.raises(DevicesMissing, match=f"needs {FOUND + 1} CUDA devices, .* has {FOUND}"):
            pool.start([Device("node0", FOUND)])
        assert not pool.alive
    finally:
        pool.close()


def job(tmp_path, seats, plan):
    section = {
        "model": LLAMA,
        "prompts_per_step": 4,
        "max_prompt_tokens": 8,
        "max_response_tokens": 8,
        "task_args": {"response_tokens": 8},
        "plan": {"actor/train": plan, "actor/generate": plan},
    }
    backend = {"device": "cuda", "seats": seats}
    return start(NereusConfig.of({"run_dir": tmp_path, "job": section, "backend": backend}))


@pytest.mark.gpu
@pytest.mark.skipif(FOUND < 1, reason="needs a CUDA device, this machine has none")
def test_a_job_steps_on_one_device(tmp_path):
    running = job(tmp_path, 1, "tp1pp1dp1")
    try:
        assert running.step()["actor/grad_norm"] > 0
    finally:
        running.close()


@pytest.mark.gpu
@pytest.mark.skipif(FOUND < 2, reason=f"needs two CUDA devices, this machine has {FOUND}")
def test_layouts_change_between_devices(tmp_path):
    running = job(tmp_path, 2, "tp2pp1dp1")
    try:
        adapter = TorchAdapter(running)
        before = running.step()
        target = planned(running.job, {"actor/train": "tp1pp2dp1", "actor/generate": "tp1pp1dp2"})
        graph = compile_transition(running.units, target, running.job, prefix="t")
        with adapter.boundary(graph.stages, timeout_s=60), EventLog(None, lambda: 0.0) as log:
            execute(graph, adapter, log=log, timeout_s=120, verify=True)
            adapter.relink(target)
        assert running.step().keys() == before.keys()
    finally:
        running.close()
