"""Nereus: adaptive parallelism for running RL post-training jobs."""

__version__ = "0.1.0"
