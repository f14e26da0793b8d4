"""A checkpoint engine of verl's for machines without accelerators: weights through a TCP store.

``checkpoint_engine.backend=cpu_store checkpoint_engine.custom_backend_module=verl_cpu.weights``.
Rank 0 of the trainers keeps the store of one synchronization; every rollout worker reads it.
"""

import asyncio
import pickle
from datetime import timedelta

import ray
import torch
from torch.distributed import TCPStore
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

LIMIT = timedelta(seconds=120)


@CheckpointEngineRegistry.register("cpu_store")
class StoreEngine(CheckpointEngine):
    def __init__(self, bucket_size, is_master=False, **_):
        self.is_master, self.store = is_master, None

    def prepare(self):
        if not self.is_master:
            return None
        host = ray.util.get_node_ip_address().strip("[]")
        self.store = TCPStore(host, 0, None, True, LIMIT, wait_for_workers=False)
        return host, self.store.port

    @classmethod
    def build_topology(cls, actor_wg_world_size, rollout_world_size, metadata):
        place = metadata[0]
        return {"place": [place] * actor_wg_world_size}, {"place": [place] * rollout_world_size}

    def init_process_group(self, place):
        self.place = place

    def finalize(self):
        self.store = None

    async def send_weights(self, weights, global_steps=None):
        number = 0
        for number, (name, tensor) in enumerate(weights, 1):  # a collective: every rank walks it
            if self.is_master:
                data = pickle.dumps((name, tensor.detach().to("cpu", copy=True)))
                self.store.set(str(number), data)
        if self.is_master:
            self.store.set(str(number + 1), pickle.dumps(None))

    async def receive_weights(self, global_steps=None):
        store, number = TCPStore(*self.place, None, False, LIMIT), 0
        while True:
            number += 1
            found = pickle.loads(await asyncio.to_thread(store.get, str(number)))
            if found is None:
                return
            yield found[0], torch.as_tensor(found[1])
