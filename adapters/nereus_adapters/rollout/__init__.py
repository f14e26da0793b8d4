"""Rollout engines: replicas of a model that generate, whatever engine runs inside them.

`ports` says what an engine is, `fleet` routes prompts over several, `weights` carries a trainer's
shards to them, `job` and `adapter` make the four primitives of it. `vllm` is one engine. Nothing in
this package but the engines' own folders imports an engine.
"""
