"""Extension: what Nereus adds to a vLLM worker (`worker_extension_cls`)."""

from __future__ import annotations

import pickle

import torch

from nereus_adapters.rollout.resident import take_peak_bytes
from nereus_adapters.rollout.vllm import lease
from nereus_adapters.rollout.vllm.shared import unlink_mapped
from nereus_adapters.rollout.vllm.transfer import check_cells
from nereus_adapters.rollout.weights import Manifest


class Extension:
    """What Nereus adds to a vLLM worker (`worker_extension_cls`)."""

    rank: int

    def nereus_call(self, content: bytes) -> bytes:
        """Run a method of this worker: arguments and result cross vLLM's own messages as bytes."""
        method, kwargs = pickle.loads(content)
        return pickle.dumps(getattr(self, method)(**kwargs))

    def nereus_check(self, manifest: Manifest) -> None:
        """Check this rank's cells."""
        check_cells(manifest.ranks[self.rank], manifest.version)

    def nereus_unlink_shared(self) -> None:
        """Remove the names of the shared memory of this rank; all ranks have mapped theirs."""
        unlink_mapped()

    def nereus_peak_bytes(self) -> int:
        """Return the most memory used since the last call: on a CPU, beyond the process's own."""
        if torch.cuda.is_available():
            peak = int(torch.cuda.max_memory_allocated())
            torch.cuda.reset_peak_memory_stats()
            return peak
        return max(0, take_peak_bytes() - lease.base_bytes)
