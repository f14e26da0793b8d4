"""The reinforcement-learning part of a job: tasks, rollouts, advantages."""
