"""Hosted: a vLLM engine in the process that leads it, one step after another."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.metrics.loggers import StatLoggerBase

from nereus_adapters.rollout.resident import take_peak_bytes
from nereus_adapters.rollout.vllm import lease
from nereus_adapters.rollout.vllm.executor import LeasedExecutor
from nereus_adapters.rollout.vllm.shared import unlink_mapped
from nereus_adapters.rollout.vllm.transfer import BACKEND, check_cells
from nereus_adapters.rollout.vllm.values import Drawn, Seen
from nereus_adapters.rollout.weights import Manifest


class Meter(StatLoggerBase):
    """Keeps what an engine's scheduler reports until somebody asks."""

    def __init__(self, vllm_config: object, engine_index: int = 0) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget."""
        self.kv_cache_use, self.running, self.waiting = 0.0, 0, 0
        self.preemptions, self.tokens = 0, 0
        self.first_tokens_s: list[float] = []

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: object = None,
        engine_idx: int = 0,
    ) -> None:
        """Take one step's figures in."""
        if scheduler_stats is not None:
            self.kv_cache_use = max(self.kv_cache_use, scheduler_stats.kv_cache_usage)
            self.running = max(self.running, scheduler_stats.num_running_reqs)
            self.waiting = max(self.waiting, scheduler_stats.num_waiting_reqs)
        if iteration_stats is not None:
            self.preemptions += iteration_stats.num_preempted_reqs
            self.tokens += iteration_stats.num_generation_tokens
            self.first_tokens_s += iteration_stats.time_to_first_tokens_iter

    def log_engine_initialized(self) -> None:
        """Say nothing."""


class Hosted:
    """An engine that is stepped by its owner, who takes calls between steps."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        if "distributed_executor_backend" not in args:
            # The class, not its name: of a name vLLM does not see that it supports pipelines.
            args = {**args, "distributed_executor_backend": LeasedExecutor}
        self._meter: Meter | None = None
        self._busy_s = 0.0
        self._version = -1
        self._llm: LLMEngine | None = LLMEngine.from_engine_args(
            EngineArgs(**{"weight_transfer_config": {"backend": BACKEND}, **args}),
            stat_loggers=[self._metered],
        )
        self._rpc("init_weight_transfer_engine", {"init_info": {}})

    def _metered(self, vllm_config: object, engine_index: int = 0) -> Meter:
        self._meter = Meter(vllm_config, engine_index)
        return self._meter

    # --- Steps ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is in flight."""
        return self._engine.has_unfinished_requests()

    def step(self) -> list[Drawn]:
        """Run one step; return the tokens it gave."""
        start_s = time.perf_counter()
        outputs = self._engine.step()
        self._busy_s += time.perf_counter() - start_s
        return [self._drawn(output) for output in outputs]

    def _drawn(self, output: Any) -> Drawn:
        part = output.outputs[0]
        tokens = tuple(part.token_ids)
        logprobs = tuple(
            float(found[token].logprob)
            for token, found in zip(tokens, part.logprobs or (), strict=True)
        )
        reason = part.finish_reason if output.finished else None
        return Drawn(output.request_id, tokens, logprobs, self._version, reason)

    # --- Calls ------------------------------------------------------------------------------------

    def submit(self, id: str, tokens: Sequence[int], sampling: Mapping[str, Any]) -> None:
        """Begin a response; raises ValueError for a prompt that the engine does not take."""
        self._engine.add_request(
            id,
            {"prompt_token_ids": list(tokens)},
            SamplingParams(
                **sampling, logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
            ),
        )

    def interrupt(self, ids: Sequence[str]) -> None:
        """Drop requests, and let batches under way end."""
        self._engine.abort_request(list(ids))
        self._settle()

    def check(self, manifest: Manifest) -> None:
        """Raise GarbledWeights when a rank's cells are not what was published."""
        self._rpc("nereus_check", {"manifest": manifest})

    def update(self, manifest: Manifest) -> None:
        """Load weights; nothing is in flight. After an error the engine is not whole."""
        self._settle()
        self._rpc("start_weight_update")
        infos = [
            {
                "version": manifest.version,
                "dtype": manifest.dtype,
                "shapes": {p.cell.tensor: manifest.shapes[p.cell.tensor] for p in pieces},
                "pieces": pieces,
            }
            for pieces in manifest.ranks
        ]
        self._rpc("update_weights", {"update_info": infos})
        self._rpc("finish_weight_update")
        self._engine.set_weight_version(str(manifest.version))
        self._engine.reset_prefix_cache()
        self._version = manifest.version

    def signals(self) -> Seen:
        """Return what was seen since the last call."""
        meter = self._meter
        assert meter is not None
        first = meter.first_tokens_s
        seen = Seen(
            kv_cache_use=meter.kv_cache_use,
            preemptions=meter.preemptions,
            running=meter.running,
            waiting=meter.waiting,
            generated_tokens=meter.tokens,
            busy_s=self._busy_s,
            first_token_s=sum(first) / len(first) if first else None,
            peak_bytes=tuple(self._rpc("nereus_peak_bytes")),
        )
        meter.reset()
        self._busy_s = 0.0
        return seen

    def rpc(self, method: str, kwargs: Mapping[str, Any]) -> list[Any]:
        """Run a method of the worker extension on all ranks."""
        return self._rpc(method, dict(kwargs))

    def close(self) -> None:
        """End the engine; memory is free on all its seats when this returns."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        llm.engine_core.shutdown()
        del llm
        gc.collect()

    @property
    def _engine(self) -> LLMEngine:
        assert self._llm is not None
        return self._llm

    def _settle(self) -> None:
        """Run batches that the pipeline still holds to their end."""
        core = getattr(self._engine.engine_core, "engine_core", None)
        while self.busy or (core is not None and core.batch_queue):
            self._engine.step()

    def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        found: list[Any] = self._engine.collective_rpc(method, kwargs=kwargs)
        return found


class Extension:
    """What Nereus adds to a vLLM worker (`worker_extension_cls`)."""

    rank: int

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
