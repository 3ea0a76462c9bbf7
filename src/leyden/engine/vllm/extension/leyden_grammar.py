"""Lets constrained generations go on after a weight change: a grammar that has followed the tokens so far.

vLLM keeps the state of a grammar by request, and a weight change begins a new request. Its grammar ends with a comment
that names the tokens that were sampled before; vLLM's engine process, which loads `follow_sampled` as a plugin, lets
the grammar follow them. The file imports nothing of Leyden.
"""

from collections.abc import Sequence
from typing import Any

_SAMPLED = "\n// sampled:"


def with_sampled(grammar: str, sampled: Sequence[int]) -> str:
    """Return a grammar that begins after some tokens."""
    return f"{grammar}{_SAMPLED}{''.join(f' {id}' for id in sampled)}"


def follow_sampled() -> None:
    """Change how vLLM compiles grammars. It may be called again, since vLLM loads plugins more than once."""
    # only vLLM's environment has it
    from vllm.v1.structured_output.backend_guidance import GuidanceBackend  # type: ignore[import-not-found]

    compile_grammar = GuidanceBackend.compile_grammar
    if compile_grammar.__module__ == __name__:
        return

    def compile_and_follow(self: Any, request_type: Any, grammar_spec: Any, *more: Any, **named: Any) -> Any:
        compiled = compile_grammar(self, request_type, grammar_spec, *more, **named)
        _, comment, sampled = str(grammar_spec).rpartition(_SAMPLED)
        if comment and sampled:
            compiled.accept_tokens("", [*map(int, sampled.split())])
        return compiled

    GuidanceBackend.compile_grammar = compile_and_follow
