"""A random Qwen2 of a few hundred thousand parameters, its tokenizer, and sums to ask it."""

import random
from pathlib import Path

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_assets(folder: Path, *, hidden: int = 128, layers: int = 2) -> Path:
    """Write ``model/``, ``train.parquet`` and ``test.parquet`` into a folder, once."""
    import pandas as pd
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    if (folder / "done").exists():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    torch.manual_seed(0)
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    sums = [f"user what is {a} plus {b} ? assistant {a + b}" for a in range(60) for b in range(60)]
    raw.train_from_iterator(sums, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>", bos_token=None
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder / "model")
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
    Qwen2ForCausalLM(config).save_pretrained(folder / "model")
    for split, count in (("train", 256), ("test", 16)):
        rows = []
        for index in range(count):
            a, b = draw.randrange(60), draw.randrange(60)
            rows.append(
                {
                    "data_source": "toy/add",
                    "prompt": [{"role": "user", "content": f"what is {a} plus {b} ?"}],
                    "ability": "math",
                    "reward_model": {"style": "rule", "ground_truth": str(a + b)},
                    "extra_info": {"index": index, "split": split},
                }
            )
        pd.DataFrame(rows).to_parquet(folder / f"{split}.parquet")
    (folder / "done").touch()
    return folder
