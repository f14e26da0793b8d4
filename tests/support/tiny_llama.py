"""A tiny Llama in float32 whose weights can be changed, published, and asked for greedy tokens."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from nereus_adapters.rollout.segment import path, remove, reserve
from nereus_adapters.rollout.weights import Published, assign, cells_bytes, publish
from nereus_core.cluster import Device
from nereus_core.layout import Layout
from nereus_core.model import ModelSpec
from nereus_core.state import unit_shards

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "vocab_size": 301,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "dtype": "float32",
}
"""A vocabulary that nothing divides."""


class TinyLlama:
    """What a trainer holds."""

    def __init__(self, config=CONFIG):
        self.config, self.spec = config, ModelSpec.from_hf_config(config, name="actor")
        own = {k: v for k, v in config.items() if k not in ("model_type", "architectures")}
        self.model = LlamaForCausalLM(LlamaConfig(**own)).float().eval()
        self.version = 0
        self._segments: set[str] = set()
        self.train()

    def train(self):
        """Change all weights."""
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.model.parameters():
                fresh = torch.randn(parameter.shape, generator=generator)
                parameter.copy_(fresh * 0.1 + (1.0 if parameter.ndim == 1 else 0.0))

    @property
    def tensors(self):
        return dict(self.model.named_parameters())

    def greedy(self, tokens, count_):
        """Return the tokens that Hugging Face draws."""
        with torch.no_grad():
            found = self.model.generate(
                torch.tensor([tokens]),
                attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
                max_new_tokens=count_,
                min_new_tokens=count_,
                do_sample=False,
                pad_token_id=0,
            )
        return tuple(found[0, len(tokens) :].tolist())

    def drew(self, tokens, response, tolerance=1e-3):
        """Whether each token is the likeliest after those before it, as Hugging Face computes.

        For long responses: somewhere two tokens are as likely as float32 can tell, and an engine
        that computed keys in another order takes the other one. After a token that was lost or
        repeated, the next ones are not the likeliest.
        """
        with torch.no_grad():
            logits = self.model(torch.tensor([[*tokens, *response]])).logits[0]
        logits = logits[len(tokens) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(response)[:, None])[:, 0]
        return bool((logits.max(1).values - chosen < tolerance).all())

    def publish(self, layout=Layout(1, 1), max_devices=4):  # noqa: B008  (a value)
        """Publish all weights from a unit of a layout; returns them as `Published`."""
        shards = unit_shards(self.spec, layout)
        holders = [(Device("trainer", rank), shard) for rank, shard in enumerate(shards)]
        arrays = {name: t.detach().numpy() for name, t in self.tensors.items()}

        def read(name, box):
            return arrays[name][tuple(map(slice, box.offset, box.end))]

        pieces = []
        for cells in assign(self.spec, holders, max_devices).values():
            pieces += publish(reserve(cells_bytes(cells, "float32")), cells, read)
        found = Published(self.version, self.spec, "float32", tuple(pieces))
        self._segments |= found.segments
        return found

    def close(self):
        remove(self._segments)


def flip(piece):
    """Change a byte of what was published; once more, and it is as it was."""
    with path(piece.segment).open("r+b") as content:
        content.seek(piece.offset)
        byte = content.read(1)
        content.seek(piece.offset)
        content.write(bytes([byte[0] ^ 0x55]))
