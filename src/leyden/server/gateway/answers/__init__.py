"""Answers: generation, parsing, tool calls, structured output."""
