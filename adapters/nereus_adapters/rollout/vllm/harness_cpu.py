"""What the conformance harness needs in vLLM's workers on a CPU; no job with accelerators uses it.

vLLM 0.32 allocates the buffer in which a pipeline stage receives in a profiling run, which it
leaves out on a CPU without compilation: pipelines then fail at the first batch.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.parallel_state import get_pp_group

from nereus_adapters.rollout.vllm.hosting import Extension


class CpuExtension(Extension):
    """The extension of every worker, and the harness's looks behind it."""

    model_runner: Any

    def nereus_receive_buffer(self) -> None:
        """Allocate the buffer in which this pipeline stage receives."""
        runner = self.model_runner
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens,
                dtype=runner.model_config.dtype,
                device=torch.device("cpu"),
            )
