"""A request in flight: the engine's thread adds its tokens, an event loop reads them as chunks."""

import asyncio
from array import array
from collections.abc import Iterable

from leyden.engine.grammar import GrammarMatcher
from leyden.engine.protocol import EngineError, EngineRequest, FinishReason, TokenChunk
from leyden.engine.torch.sampling import SampledToken, TokenSampler, TopLogprobs


class ActiveRequest:
    """The state of one request.

    The engine's thread calls `append` and `flush`; `receive` runs on the event loop of the caller.
    """

    def __init__(
        self,
        request: EngineRequest,
        context_length: int,
        vocabulary: int,
        loop: asyncio.AbstractEventLoop,
        matcher: GrammarMatcher | None = None,
    ) -> None:
        self.request, self.loop = request, loop
        self.tokens = array("i", request.prompt_ids)
        """The prompt and the tokens sampled so far."""
        self.sampler = TokenSampler(request.sampling, request.top_logprobs, request.prompt_ids, vocabulary, matcher)
        for id in request.sampled_ids:
            self.sampler.accept(id)
        self.cancelled = False
        """Set by the caller; the engine reads it between two steps."""
        self.finish: FinishReason | None = None
        self.max_length = min(len(self.tokens) + request.max_tokens, context_length)
        self._stop_ids = frozenset(request.stop_ids)
        self.prompt_computed = False
        self._prompt_logprobs: list[float] = []
        self._prompt_top: list[TopLogprobs] = []
        self._pending: list[SampledToken] = []
        self.received: asyncio.Queue[TokenChunk | EngineError] = asyncio.Queue()
        """What `receive` returns or raises, on the event loop of the caller."""

    def append(self, token: SampledToken) -> None:
        """Add a sampled token; may finish the request."""
        self.tokens.append(token.id)
        self._pending.append(token)
        if token.id in self._stop_ids:
            self.finish = "stop"
        elif len(self.tokens) >= self.max_length:
            self.finish = "length"

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the logits after every token of the prompt are still needed."""
        return self.request.prompt_logprobs and not self.prompt_computed

    def add_prompt_logprobs(self, start: int, tokens: Iterable[tuple[float, TopLogprobs]]) -> None:
        """Add the logprobs of the prompt's tokens after the one at `start`; drops what was known of them.

        After a weight update they are computed again from the first.
        """
        del self._prompt_logprobs[start:], self._prompt_top[start:]
        for logprob, top in tokens:
            self._prompt_logprobs.append(logprob)
            self._prompt_top.append(top)

    def end_prompt(self) -> None:
        """The prompt is computed; a request that samples nothing is finished."""
        self.prompt_computed = True
        if not self.request.max_tokens:
            self.finish = "length"

    @property
    def urgent(self) -> bool:
        """Whether to flush at once: after the first token and at the end."""
        return self.finish is not None or len(self.tokens) == len(self.request.prompt_ids) + 1

    def flush(self, version: int) -> TokenChunk | None:
        """Return the tokens since the last flush as one chunk; all were sampled by weights of this version."""
        if not self._pending and self.finish is None:
            return None
        prompt, prompt_top = tuple(self._prompt_logprobs), tuple(self._prompt_top)
        self._prompt_logprobs.clear()
        self._prompt_top.clear()
        sampled, self._pending = self._pending, []
        ids, logprobs = tuple([one.id for one in sampled]), tuple([one.logprob for one in sampled])
        tops = tuple([one.top or () for one in sampled]) if self.sampler.top_logprobs else ()
        allowed = tuple([one.allowed for one in sampled]) if self.sampler.matcher is not None else ()
        return TokenChunk(ids, logprobs, version, tops, allowed, self.finish, prompt, prompt_top)

    async def receive(self) -> TokenChunk:
        """Wait for the next chunk. Raises the error that ended the request."""
        output = await self.received.get()
        if isinstance(output, EngineError):
            raise output
        return output


Outputs = list[tuple[ActiveRequest, TokenChunk | EngineError]]


def deliver_outputs(outputs: Outputs) -> None:
    """Deliver outputs from the engine's thread, waking each event loop once."""
    for loop in {request.loop for request, _ in outputs}:
        try:
            loop.call_soon_threadsafe(_deliver, [output for output in outputs if output[0].loop is loop])
        except RuntimeError:  # the loop is closed: its requests have no reader
            for request, _ in outputs:
                request.cancelled |= request.loop is loop


def _deliver(outputs: Outputs) -> None:
    for request, output in outputs:
        request.received.put_nowait(output)
