"""Hosted: a vLLM engine in the process that leads it, one step after another."""

from __future__ import annotations

import gc
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from nereus_adapters.rollout.vllm.executor import LeasedExecutor
from nereus_adapters.rollout.vllm.meter import Meter
from nereus_adapters.rollout.vllm.transfer import BACKEND
from nereus_adapters.rollout.vllm.values import Drawn, Seen
from nereus_adapters.rollout.weights import Manifest


class Hosted:
    """An engine that is stepped by its owner, who takes calls between steps."""

    def __init__(self, args: Mapping[str, Any]) -> None:
        if "distributed_executor_backend" not in args:
            # The class, not its name: of a name vLLM does not see that it supports pipelines.
            args = {**args, "distributed_executor_backend": LeasedExecutor}
        self._meter = Meter()
        self._version = -1
        self._llm: LLMEngine | None = LLMEngine.from_engine_args(
            EngineArgs(**{"weight_transfer_config": {"backend": BACKEND}, **args}),
            stat_loggers=[self._meter],
        )
        self._rpc("init_weight_transfer_engine", {"init_info": {}})

    # --- Steps ------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether something is in flight."""
        return self._engine.has_unfinished_requests()

    def step(self) -> list[Drawn]:
        """Run one step; return the tokens it gave."""
        start_s = time.perf_counter()
        outputs = self._engine.step()
        self._meter.busy_s += time.perf_counter() - start_s
        return [drawn(output, self._version) for output in outputs]

    # --- Calls ------------------------------------------------------------------------------------

    def submit(self, id: str, tokens: Sequence[int], sampling: Mapping[str, Any]) -> None:
        """Begin a response; raises ValueError for a prompt that the engine does not take."""
        self._engine.add_request(id, *request(tokens, sampling))

    def interrupt(self, ids: Sequence[str]) -> None:
        """Drop requests, and let batches under way end where no others are in flight."""
        self._engine.abort_request(list(ids))
        if not self.busy:
            self._settle()

    def check(self, manifest: Manifest) -> None:
        """Raise GarbledWeights when a rank's cells are not what was published."""
        self._rpc("nereus_check", {"manifest": manifest})

    def update(self, manifest: Manifest) -> None:
        """Load weights; nothing is in flight. After an error the engine is not whole."""
        require_idle(self.busy, manifest.version)
        self._settle()
        self._rpc("start_weight_update")
        self._rpc("update_weights", {"update_info": update_infos(manifest)})
        self._rpc("finish_weight_update")
        self._engine.set_weight_version(str(manifest.version))
        require_reset(self._engine.reset_prefix_cache(), manifest.version)
        self._version = manifest.version

    def signals(self) -> Seen:
        """Return what was seen since the last call."""
        return self._meter.take(self._rpc("nereus_peak_bytes"))

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
        """Run batches that the pipeline still holds to their end: all were of dropped requests."""
        core = getattr(self._engine.engine_core, "engine_core", None)
        while core is not None and core.batch_queue:
            self._engine.step()

    def _rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> list[Any]:
        found: list[Any] = self._engine.collective_rpc(method, kwargs=kwargs)
        return found


def request(
    tokens: Sequence[int], sampling: Mapping[str, Any]
) -> tuple[dict[str, list[int]], SamplingParams]:
    """Return a prompt and its sampling as vLLM takes them; tokens come as they are drawn."""
    params = SamplingParams(
        **sampling, logprobs=0, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    return {"prompt_token_ids": list(tokens)}, params


def require_idle(busy: bool, version: int) -> None:
    """Raise RuntimeError where weights would change under a response."""
    if busy:
        raise RuntimeError(
            f"responses are in flight, where none should be as weights version {version} are "
            "loaded; the engine is to be rebuilt"
        )


def require_reset(done: bool, version: int) -> None:
    """Raise RuntimeError where vLLM has kept keys and values that older weights made."""
    if not done:
        raise RuntimeError(
            f"vLLM did not forget the keys and values of the weights before version {version}: "
            "requests hold some, where none should be in flight; the engine is to be rebuilt"
        )


def drawn(output: Any, version: int) -> Drawn:
    """Return what a request got in one step."""
    part = output.outputs[0]
    tokens = tuple(part.token_ids)
    logprobs = tuple(
        float(found[token].logprob)
        for token, found in zip(tokens, part.logprobs or (), strict=True)
    )
    reason = part.finish_reason if output.finished else None
    return Drawn(output.request_id, tokens, logprobs, version, reason)


def update_infos(manifest: Manifest) -> list[dict[str, Any]]:
    """Return what vLLM's weight transfer tells each rank."""
    return [
        {
            "version": manifest.version,
            "dtype": manifest.dtype,
            "shapes": {p.cell.tensor: manifest.shapes[p.cell.tensor] for p in pieces},
            "pieces": pieces,
        }
        for pieces in manifest.ranks
    ]
