"""The agent of `agent.py` with short prompts, for the bundled model of two million parameters."""

import agent as rag

rag.agent.instructions = "Search, then answer after ####."
rag.REMINDER = ""

solve = rag.solve
