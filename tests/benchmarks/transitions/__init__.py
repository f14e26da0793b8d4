"""The parts of the transition benchmark."""
