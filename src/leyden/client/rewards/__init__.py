"""Reward functions, called by the worker: for one attempt, for a whole group, and again later.

The final reward of an attempt reaches the server in one of three ways. Without a reward function it is what the agent
returned (`attempt.outcome` reads it), and `worker.reporter` sends it with the end. With one,
`worker.reporter` calls it first. With one that takes `group`, `GroupScorer` scores the whole group later.
"""
