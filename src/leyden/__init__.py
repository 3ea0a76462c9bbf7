"""Leyden trains the language model behind any agent with reinforcement learning, without changing the agent."""

__version__ = "0.1.0"
