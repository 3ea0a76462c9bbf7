"""One request on its way: drawn on the engine's thread, read on the event loop of whoever asked."""

import asyncio
from collections import deque
from collections.abc import Iterable

from leyden.engine.grammar import Matcher
from leyden.engine.protocol import EngineError, EngineRequest, FinishReason, TokenChunk
from leyden.engine.torch.sampling import SampledToken, TokenSampler, Top


class ActiveRequest:
    """What is drawn for one request; `take` and `piece` are the engine's, `put` and `next` the asker's."""

    def __init__(
        self,
        request: EngineRequest,
        context: int,
        vocabulary: int,
        loop: asyncio.AbstractEventLoop,
        matcher: Matcher | None = None,
    ) -> None:
        self.request, self.loop = request, loop
        self.tokens = list(request.prompt_ids)
        """The prompt, and what was drawn."""
        self.chance = TokenSampler(request.sampling, request.top_logprobs, request.prompt_ids, vocabulary, matcher)
        self.cancelled = False
        """Set by the asker, seen by the engine between two steps."""
        self.finish: FinishReason | None = None
        self._end = min(len(self.tokens) + request.max_tokens, context)
        self._stops = frozenset(request.stop_ids)
        self._fresh: list[SampledToken] = []
        self._inbox: deque[TokenChunk | EngineError] = deque()
        self._arrival: asyncio.Future[None] | None = None

    def take(self, drawn: SampledToken) -> None:
        """Go on with a token that was drawn."""
        self.tokens.append(drawn.id)
        self._fresh.append(drawn)
        if drawn.id in self._stops:
            self.finish = "stop"
        elif len(self.tokens) >= self._end:
            self.finish = "length"

    @property
    def due(self) -> bool:
        """Whether the asker should hear of it now: the first token, or the end."""
        return self.finish is not None or len(self.tokens) == len(self.request.prompt_ids) + 1

    def piece(self, version: int) -> TokenChunk | None:
        """What was drawn since the last piece, all of it by one version."""
        if not self._fresh:
            return None
        ids, logprobs, tops, allowed = zip(*self._fresh, strict=True)
        self._fresh.clear()
        shown: tuple[Top, ...] = tops if self.chance.top_logprobs else ()
        return TokenChunk(
            ids, logprobs, version, shown, allowed if self.chance.matcher is not None else (), self.finish
        )

    async def next(self) -> TokenChunk:
        """The next piece, or what went wrong."""
        if not self._inbox:
            self._arrival = self.loop.create_future()
            await self._arrival
        item = self._inbox.popleft()
        if isinstance(item, EngineError):
            raise item
        return item

    def put(self, item: TokenChunk | EngineError) -> None:
        """Give the asker something to read; on its event loop."""
        self._inbox.append(item)
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)


Post = list[tuple[ActiveRequest, TokenChunk | EngineError]]


def deliver(post: Post) -> None:
    """Hand over to every asker with one wake-up of each event loop."""
    loops = {completion.loop for completion, _ in post}
    for loop in loops:
        try:
            loop.call_soon_threadsafe(_put, [one for one in post if one[0].loop is loop])
        except RuntimeError:  # that loop is closed, and nobody is left to read
            for completion, _ in post:
                completion.cancelled |= completion.loop is loop


def _put(post: Iterable[tuple[ActiveRequest, TokenChunk | EngineError]]) -> None:
    for completion, item in post:
        completion.put(item)
