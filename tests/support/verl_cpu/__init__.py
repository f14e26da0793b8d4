"""What verl needs to run on a machine without accelerators: for tests, never for a user's job.

A CPU platform for verl's platform registry, a light Hugging Face rollout, a tiny model with its
data, and the command line of a small job.
"""
