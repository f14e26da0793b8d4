"""A cluster in memory: for scale, for the contract tier, never as evidence that a primitive works."""
