"""Weights of a tiny model, and engines that only take note of them."""

from concurrent.futures import Future

import numpy as np

from nereus_adapters.rollout.ports import Completion, Finish
from nereus_adapters.rollout.store import publish_here
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import unit_shards

SPEC = ModelSpec.from_hf_config(
    {
        "model_type": "llama",
        "hidden_size": 8,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "vocab_size": 32,
        "tie_word_embeddings": True,
    },
    name="actor",
)
DEVICE, ONE = Device("here", 0), Layout(1, 1)


def published(version, read=None):
    def zeros(device, tensor, box):
        return np.zeros(box.shape, np.float32)

    holders = [(DEVICE, unit_shards(SPEC, ONE)[0])]
    return publish_here(
        SPEC, holders, read or zeros, version=version, dtype="float32", max_devices=1
    )


class Fake:
    """An engine that reads no weights and gives no token until it is interrupted."""

    def __init__(self, name, *, interrupting=None, updating=None):
        self.name, self.layout, self.devices = name, ONE, (DEVICE,)
        self.alive, self.version, self.closed = True, 1, 0
        self._interrupting, self._updating = interrupting, updating
        self.given, self._open = [], []

    def submit(self, prompt):
        future = Future()
        self._open.append((prompt, future))
        return future

    def interrupt(self):
        if self._interrupting is not None:
            raise self._interrupting
        self.end()

    def end(self):
        found, self._open = self._open, []
        for prompt, future in found:
            future.set_result(Completion(prompt.id, (), (), (), Finish.INTERRUPTED))

    def update_weights(self, version, manifest):
        self.given.append(manifest)
        if self._updating is not None:
            self._updating(manifest)
        self.version = version

    def close(self):
        self.closed += 1
        self.alive = False
        self.end()
