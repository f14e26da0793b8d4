"""A stock vLLM engine in a process of its own: ``stock.py MODEL TP DESCRIPTOR``.

Writes ``ready`` to the descriptor after its first token; ends when its stdin does, as vLLM ends.
"""

import os
import sys


def main() -> None:
    model, tp, descriptor = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    from vllm import LLM, SamplingParams

    from nereus_adapters.rollout.prctl import end_with_parent

    end_with_parent(os.getppid())  # the benchmark may be killed

    llm = LLM(
        model,
        load_format="dummy",
        dtype="float32",
        max_model_len=64,
        max_num_seqs=16,
        kv_cache_memory_bytes=8 * 2**20,
        enforce_eager=True,
        tensor_parallel_size=tp,
        skip_tokenizer_init=True,
        distributed_executor_backend="mp" if tp > 1 else None,
    )
    llm.generate(
        {"prompt_token_ids": [1, 5, 9]},
        SamplingParams(max_tokens=1, detokenize=False),
        use_tqdm=False,
    )
    os.write(descriptor, b"ready\n")
    sys.stdin.read()
    llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
