"""Adapters: each translates the four primitives into one framework's calls."""
