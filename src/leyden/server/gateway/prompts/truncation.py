"""Drops the oldest messages of a request whose prompt does not fit into the model's context."""

from collections.abc import Awaitable, Callable

from msgspec.structs import replace

from leyden.records import PromptOrigin
from leyden.server.gateway.dialects.types import GenerationRequest
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prompts.prompt import Prompt

_ANSWER_SHARE = 8


async def build_fitting_prompt(
    request: GenerationRequest, context_length: int, build: Callable[[GenerationRequest], Awaitable[Prompt]]
) -> tuple[GenerationRequest, Prompt]:
    """Build the prompt of a request with as few of its oldest messages dropped as possible.

    An eighth of the context, or the requested length if that is less, is left for the answer. System messages at the
    beginning stay, tool results are dropped together with their calls, and the last turn is never dropped.
    """
    answer = min(request.sampling.max_tokens or context_length, context_length // _ANSWER_SHARE)
    messages = request.messages
    head = next((at for at, message in enumerate(messages) if message["role"] != "system"), len(messages))
    starts = [at for at in range(head, len(messages)) if messages[at]["role"] != "tool"] or [head]

    async def fitting(start: int) -> tuple[GenerationRequest, Prompt] | None:
        shorter = replace(request, messages=(*messages[:head], *messages[start:]))
        try:
            prompt = await build(shorter)
        except GatewayError as error:
            if error.kind is not ErrorKind.TOO_LONG or start == starts[-1]:
                raise
            return None
        fits = len(prompt.ids) + answer <= context_length or start == starts[-1]
        return (shorter, prompt) if fits else None

    first, last = 0, len(starts) - 1
    found = await fitting(starts[first])
    while found is None:  # starts[first] is too long, and starts[last] is taken in any case
        middle = (first + 1 + last) // 2
        attempt = await fitting(starts[middle])
        if attempt is None:
            first = middle
        elif middle > first + 1:
            last = middle
        else:
            found = attempt
    shorter, prompt = found
    if dropped := len(messages) - len(shorter.messages):
        origin = PromptOrigin.RERENDERED if prompt.origin is PromptOrigin.FRESH else prompt.origin
        why = f"the oldest {dropped} messages did not fit into the context and were dropped"
        prompt = replace(prompt, origin=origin, reason=why)
    return shorter, prompt
