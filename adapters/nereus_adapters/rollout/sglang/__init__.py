"""SGLang as a rollout engine. Importing this package imports no sglang.

A `pool.StemPool` keeps one process that has imported sglang (`stem`) and forks engine processes
from it (`host`), whose rank processes are forked in turn: no engine pays for imports. `engine` is
the driver's end of one engine process, `loading` and `watching` run inside its rank processes.
"""
