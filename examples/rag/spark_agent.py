"""The agent of `agent.py` with short instructions, for the bundled model of two million parameters."""

from agent import agent, solve

agent.instructions = "Search, then answer after ####."

__all__ = ["solve"]
