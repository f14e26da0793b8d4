"""A Hugging Face model to compare vLLM's tokens with, its weights published for engines."""

import copy
import json
from pathlib import Path

import torch
from rollout_job import ONE
from rollout_job import PP2 as PP2
from rollout_job import TP2 as TP2
from rollout_job import prompts as prompts
from transformers import AutoConfig, AutoModelForCausalLM

from nereus_adapters.rollout.segment import remove
from nereus_adapters.rollout.store import publish_here
from nereus_adapters.rollout.vllm.harness import TINY
from nereus_core.cluster import Device
from nereus_core.state import unit_shards

DEVICES = (Device("node0", 0), Device("node0", 1))
STEP_S = 0.05
"""Of an engine that is slowed down: a hundred tokens then take seconds, however late a driver on a
busy machine hears of the first."""


class Weights:
    """A model's weights: published for engines, and computed with by Hugging Face."""

    def __init__(self, folder, spec, seed):
        self.spec = spec
        torch.manual_seed(seed)
        self.model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        self.model = self.model.float().eval()
        self._published = []

    def change(self, seed):
        """Move every weight, as training does."""
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.05)

    def publish(self, version, layout=ONE):
        """Publish from a trainer in a layout: one segment for each of its devices."""
        values = {n: p.detach().numpy() for n, p in self.model.named_parameters()}
        devices = [Device("node0", i) for i in range(layout.num_devices)]
        held = list(zip(devices, unit_shards(self.spec, layout), strict=True))

        def read(device, tensor, box):
            place = tuple(slice(a, b) for a, b in zip(box.offset, box.end, strict=True))
            return values[tensor][place]

        found = publish_here(self.spec, held, read, version=version, dtype="float32", max_devices=2)
        self._published.append(found)
        return found

    def greedy(self, tokens, count):
        """Return the tokens that Hugging Face draws, and their log-probabilities."""
        ids = torch.tensor([tokens])
        with torch.no_grad():
            whole = self.model.generate(
                ids,
                do_sample=False,
                max_new_tokens=count,
                min_new_tokens=count,
                eos_token_id=None,
                pad_token_id=0,
            )
            logits = self.model(whole).logits[0, len(tokens) - 1 : -1]
        drawn = whole[0, len(tokens) :]
        logprobs = torch.log_softmax(logits, -1).gather(1, drawn[:, None])[:, 0]
        return tuple(drawn.tolist()), logprobs.numpy()

    def close(self):
        for published in self._published:
            remove(published.segments)


def respond(engine, asked, timeout_s=60):
    """Return an engine's completions, in order."""
    return [f.result(timeout_s) for f in [engine.submit(p) for p in asked]]


def model_folder(path: Path, **changes):
    """Write another model's config.json."""
    config = copy.deepcopy(TINY) | changes
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    return path
