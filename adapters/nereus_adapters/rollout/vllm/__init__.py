"""vLLM as a rollout engine. Importing this package imports no vLLM; the hooks do when called."""
