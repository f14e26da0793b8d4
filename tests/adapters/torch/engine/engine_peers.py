"""Peer processes on loopback, and what they run: one job per call, on the first N peers."""

import importlib.util
import inspect
import itertools
import multiprocessing
import os
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist

from nereus_adapters.torch.engine import (
    Batch,
    LossSpec,
    OptimizerSpec,
    PeerLost,
    UnitShard,
    make_unit_groups,
)
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import Slot
from nereus_core.workload import Stage

TIMEOUT_S = 60.0
STEPS = 3
CPU = torch.device("cpu")
FLOAT64 = torch.float64
# An uneven cut of layers, kv heads below tp=4, a vocabulary nothing divides, weights far from
# linear: what may go wrong across layouts does so visibly.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 5,
    "vocab_size": 101,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
}
UNTIED = LLAMA | {"tie_word_embeddings": False}
QWEN2 = UNTIED | {"model_type": "qwen2"}
QWEN3 = LLAMA | {"model_type": "qwen3"}
# One kv head, tied, scaled embeddings, norms around one, GELU.
GEMMA = LLAMA | {"model_type": "gemma", "num_key_value_heads": 1}
MISTRAL = UNTIED | {"model_type": "mistral", "sliding_window": 5}
SPEC = OptimizerSpec(
    lr=3e-3, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2, total_steps=10, schedule="cosine"
)
PROMPTS = [[5, 9, 2], [17], [3, 99, 100, 4, 8, 1], [40, 41], [7, 7, 7], [64, 2], [11], [1, 2, 3, 4]]


class Peers:
    """Processes that wait for jobs; a store in this process outlives them all."""

    def __init__(self, count):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._generation = itertools.count()
        context = multiprocessing.get_context("spawn")
        self._ends = []
        for rank in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, self.store.port), daemon=True
            )
            process.start()
            theirs.close()
            self._ends.append((process, ours))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for _, end in self._ends:
            end.close()
        for process, _ in self._ends:
            process.join(TIMEOUT_S)
            if process.is_alive():
                process.kill()

    def run(self, size, job, *args):
        """Call ``job(rank, store, prefix, *args)`` on the first peers; return their results."""
        prefix = f"g{next(self._generation)}"
        for _, end in self._ends[:size]:
            end.send((inspect.getfile(job), job.__name__, prefix, args))
        results = []
        for rank, (_, end) in enumerate(self._ends[:size]):
            assert end.poll(2 * TIMEOUT_S), f"peer {rank} did not answer {job.__name__}"
            results.append(end.recv())
        for failed, result in results:
            assert not failed, result
        return [result for _, result in results]


@cache
def _module(path):
    """Import a test file by its path: its name depends on where pytest was called from."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _serve(end, rank, port):
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    while True:
        try:
            path, name, prefix, args = end.recv()
        except EOFError:
            return
        try:
            end.send((False, getattr(_module(path), name)(rank, store, prefix, *args)))
        except Exception:
            end.send((True, traceback.format_exc()))


def spec_of(config, *, value=False):
    spec = ModelSpec.from_hf_config(config)
    return spec.as_critic("critic") if value else spec


def build(config, layout, local_rank, *, stage=Stage.TRAIN, dtype=FLOAT64, value=False):
    model = spec_of(config, value=value)
    return UnitShard(model, config, layout, local_rank, stage, dtype, CPU, SPEC)


def batch_of(step, dtype=FLOAT64):
    """Eight sequences of unequal length with made-up advantages and old log-probabilities."""
    draw = torch.Generator().manual_seed(step)
    lens = torch.randint(1, 9, (len(PROMPTS),), generator=draw).tolist()
    responses = [torch.randint(0, 101, (n,), generator=draw).tolist() for n in lens]
    batch = Batch.of(PROMPTS, responses)
    shape = batch.tokens.shape

    def noise(scale=1.0, shift=0.0):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) * scale + shift

    return replace(
        batch,
        advantages=noise(),
        old_logprobs=noise(1.0, -5.0),
        ref_logprobs=noise(1.0, -5.0),
        returns=noise(),
        old_values=noise(0.3),
    )


def loss_for(batch, *, value=False):
    tokens = float(batch.response_mask.sum())
    if value:
        return LossSpec("value", tokens)
    return LossSpec("policy", tokens, clip=0.3, kl_coef=0.1, entropy_coef=0.05)


def share(batch, unit, num_units):
    """This unit's sequences; shares differ by one where they must."""
    return batch.rows(unit * len(batch) // num_units, (unit + 1) * len(batch) // num_units)


def train_steps(shard, steps, unit, num_units, *, value=False, dtype=FLOAT64):
    metrics = []
    for step in range(steps):
        batch = batch_of(step, dtype)
        spec = loss_for(batch, value=value)
        metrics.append(shard.train(share(batch, unit, num_units), spec, micro_batch=2))
    return metrics


def tensors_of(shard):
    """(slot, name) -> box and values."""
    return {
        (slot, name): (shard.box(name), shard.tensor(slot, name).numpy().copy())
        for slot in shard.slots
        for name in shard.names
    }


def linked(rank, store, prefix, config, layout, num_units, **how):
    unit, local_rank = divmod(rank, layout.num_devices)
    shard = build(config, layout, local_rank, **how)
    groups = _groups(store, prefix, shard, unit, num_units)
    shard.link(groups)
    shard.init(seed=3)
    return shard, groups, unit


def _groups(store, prefix, shard, unit, num_units):
    return make_unit_groups(
        store,
        prefix,
        shard.model,
        shard.layout,
        shard.local_rank,
        unit=unit,
        num_units=num_units,
        device=CPU,
        timeout_s=TIMEOUT_S,
    )


def train_job(rank, store, prefix, config, layout, num_units, steps, value):
    shard, groups, unit = linked(rank, store, prefix, config, layout, num_units, value=value)
    metrics = train_steps(shard, steps, unit, num_units, value=value)
    result = metrics, tensors_of(shard), shard.digests(), dict(shard.counters)
    groups.close()
    return result


def dtype_job(rank, store, prefix, layout, dtype):
    shard, groups, _ = linked(rank, store, prefix, LLAMA, layout, 1, dtype=dtype)
    metrics = train_steps(shard, STEPS, 0, 1, dtype=torch.float32)
    tokens = shard.generate(PROMPTS, max_new_tokens=3, seeds=list(range(len(PROMPTS))))
    groups.close()
    return [m.loss for m in metrics], tokens


def lost_job(rank, store, prefix):
    """Two units; after a step one of them is gone, and the other goes on alone."""
    shard, groups, unit = linked(rank, store, prefix, LLAMA, Layout(1, 2), 2)
    train_steps(shard, 1, unit, 2)
    if unit == 1:
        groups.close()
        return None
    before, counters = shard.digests(), dict(shard.counters)
    try:
        train_steps(shard, 1, unit, 2)
    except PeerLost:
        groups.close()
    else:
        raise AssertionError("the lost unit went unnoticed")
    unchanged = (shard.digests(), shard.counters) == (before, counters)
    groups = _groups(store, f"{prefix}/next", shard, 0, 1)
    shard.link(groups)
    batch = batch_of(1)
    metrics = shard.train(batch, loss_for(batch), micro_batch=2)
    groups.close()
    return unchanged, metrics


def empty_job(rank, store, prefix):
    """Two units, one of which has no sequences."""
    shard, groups, unit = linked(rank, store, prefix, LLAMA, Layout(1, 1), 2)
    batch = batch_of(0)
    metrics = shard.train(batch.rows(0, 8 * unit), loss_for(batch), micro_batch=2)
    groups.close()
    return metrics, shard.digests()


def generate_job(rank, store, prefix, config, layout, calls):
    shard, groups, _ = linked(rank, store, prefix, config, layout, 1, stage=Stage.GENERATE)
    result = [shard.generate(PROMPTS, **call) for call in calls]
    groups.close()
    return result


def infer_job(rank, store, prefix, config, layout, value):
    how = {"stage": Stage.INFER, "value": value}
    shard, groups, _ = linked(rank, store, prefix, config, layout, 1, **how)
    batch = batch_of(0)
    found = (shard.values if value else shard.logprobs)(batch, 3)
    groups.close()
    return None if found is None else found.numpy()


def digest_job(rank, store, prefix, config, layout, spoiled):
    """Digests of a unit, after adding one unit in the last place of one element on one rank."""
    shard, groups, _ = linked(rank, store, prefix, config, layout, 1)
    if spoiled is not None and spoiled[0] == rank:
        values = shard.tensor(Slot.PARAM, spoiled[1]).view(torch.int64)
        values.view(-1)[-1] += 1
    groups.close()
    return shard.digests()
