"""Parts of rollout.py."""
