"""Models that are served elsewhere, by anything that speaks the OpenAI chat API: for frozen roles and evaluation.

What comes from there has no tokens of ours, so it is recorded and never trained on.
"""

from typing import Any

import aiohttp
import msgspec

from leyden.records import Sampling
from leyden.server.gateway.ask import Ask, Message
from leyden.server.gateway.errors import GatewayError, Trouble

_UNTOUCHED = Sampling()


class Upstream:
    """One such service."""

    def __init__(self, url: str, key: str | None = None, timeout_s: float = 600.0) -> None:
        self.url = url.rstrip("/")
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def complete(self, ask: Ask) -> dict[str, Any]:
        """Its answer to an ask, as a chat completion."""
        try:
            async with (
                aiohttp.ClientSession(headers=self._headers, timeout=self._timeout) as session,
                session.post(f"{self.url}/chat/completions", json=_body(ask)) as reply,
            ):
                data = await reply.read()
        except (TimeoutError, aiohttp.ClientError, OSError) as error:
            raise GatewayError(Trouble.FAILED, f"the upstream at {self.url} cannot be reached: {error}") from error
        if reply.status >= 400:
            raise _refusal(self.url, reply.status, data)
        try:
            answer = msgspec.json.decode(data, type=dict[str, Any])
            assert answer["choices"][0]["message"]
        except (msgspec.DecodeError, KeyError, IndexError, TypeError, AssertionError) as error:
            raise GatewayError(
                Trouble.FAILED, f"the upstream at {self.url} did not answer with a completion"
            ) from error
        return answer


def _body(ask: Ask) -> dict[str, Any]:
    """An ask in the upstream's words; what the caller left open stays open."""
    body: dict[str, Any] = {"model": ask.model, "messages": [_plain(message) for message in ask.messages], "n": ask.n}
    if ask.tools:
        named = ask.tool_choice.name
        choice: Any = {"type": "function", "function": {"name": named}} if named else ask.tool_choice.mode
        body |= {"tools": ask.tools, "tool_choice": choice}
    if ask.top_logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": ask.top_logprobs}
    changed = {
        name: value
        for name in Sampling.__struct_fields__
        if (value := getattr(ask.sampling, name)) != getattr(_UNTOUCHED, name)
    }
    return body | changed


def _plain(message: Message) -> Message:
    """A message without what the OpenAI API does not know."""
    return {name: value for name, value in message.items() if name not in ("is_error", "reasoning_content")}


def _refusal(url: str, status: int, data: bytes) -> GatewayError:
    try:
        message = msgspec.json.decode(data)["error"]["message"]
    except (msgspec.DecodeError, KeyError, TypeError):
        message = data[:200].decode(errors="replace")
    trouble = {401: Trouble.FAILED, 403: Trouble.FAILED, 404: Trouble.NO_MODEL, 429: Trouble.BUSY}.get(
        status, Trouble.INVALID if status < 500 else Trouble.FAILED
    )
    return GatewayError(
        trouble, f"the upstream at {url} refused: {message}", retry_after=1.0 if status == 429 else None
    )
