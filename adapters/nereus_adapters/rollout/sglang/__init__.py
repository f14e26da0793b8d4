"""SGLang as a rollout engine. Importing this package imports no sglang; the hooks do when called.

`factory.SglangEngines` makes engines. A `pool.StemPool` keeps one process that has imported sglang
(`stem`) and forks engine processes from it (`host`), whose rank processes are forked in turn: no
engine pays for imports. `engine` is the driver's end of one engine process, `loading` runs inside
its ranks, `groups` brings weights to them from process groups of trainers.
"""

from __future__ import annotations

from nereus_adapters.rollout.declared import EngineHooks
from nereus_adapters.rollout.sglang.seams import SEAMS

HOOKS = EngineHooks(
    "sglang",
    "SGLang",
    "rollout on SGLang engines that start in a second; tp, pp and replica count change",
    distributions=("sglang",),
    versions=">=0.5.23,<0.6",
    seams=SEAMS,
    harness="nereus_adapters.rollout.sglang.harness",
)
nereus_declare_adapter = HOOKS.nereus_declare_adapter
nereus_create_adapter = HOOKS.nereus_create_adapter
nereus_conformance_harness = HOOKS.nereus_conformance_harness
