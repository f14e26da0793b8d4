"""The conformance suite: whether an adapter keeps the contract of `nereus_core.adapter`."""
