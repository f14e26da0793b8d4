"""A cluster in memory: for scale and the contract tier, never evidence that a primitive works."""
