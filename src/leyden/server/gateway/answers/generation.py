"""Generates the answers to one request with the engine. They are durable before `AnswerFinished` is sent."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from msgspec.structs import replace

from leyden.engine.protocol import EngineError, EngineLost, EngineRequest, TokenChunk
from leyden.records import WaitInterval
from leyden.server.gateway.answers.stream_parser import StreamParser
from leyden.server.gateway.calls.recorder import CallRecording, PreparedCall, RecordedAnswer, Recorder
from leyden.server.gateway.calls.replay import replayed_chunks
from leyden.server.gateway.calls.waiting import WaitTimer
from leyden.server.gateway.dialects.types import AnswerEvent, AnswerFinished, FinishReason, PromptTokens
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prompts.prompt_tokens import describe_prompt
from leyden.server.gateway.prompts.text_index import joined
from leyden.server.gateway.prompts.text_prompt import TextParser
from leyden.server.gateway.served_model import ServedModel


class Generation:
    """Generates the `n` answers to one request at the same time."""

    def __init__(self, recorder: Recorder, call: PreparedCall, model: ServedModel, grammar: str | None) -> None:
        request, prompt, replayed = call.request, call.prompt, call.replayed
        self._recorder, self._model, self._grammar = recorder, model, grammar
        self._attempt, self._caller, self._times = call.attempt, call.caller, call.attempt.times
        self._request, self._prompt, self._sampling, self._replayed = request, prompt, call.sampling, replayed
        self._started = time.time()
        self._recording = CallRecording(recorder, call, self._answers)
        self._tasks: list[asyncio.Task[None]] = []
        self._cut: GatewayError | None = None
        self._budget: int | None = None
        before_answer = prompt.ids[: len(prompt.ids) - len(prompt.forced)]
        self._parsers = [
            StreamParser(
                choice,
                model.renderer if request.prompt is None else TextParser(model),
                model.tokenizer,
                before_answer,
                reasoning_end=model.reasoning_end if request.prompt is None else None,
                forced=prompt.forced,
                tools=request.callable_tools,
                may_call=request.may_call,
                parallel_calls=request.parallel_tool_calls,
                unmarked=call.attempt.settings.tool_calls == "any",
                stop=call.sampling.stop,
                logprobs=request.top_logprobs is not None,
                streamed=request.stream,
                replayed=replayed[choice] if replayed else None,
            )
            for choice in range(request.n)
        ]
        self._timers = [WaitTimer() for _ in self._parsers]

    @property
    def id(self) -> str:
        """The id of the first call in the record."""
        return self._recording.ids[0]

    def waits(self) -> list[WaitInterval]:
        """Return the intervals in which it waited for a slot, new weights or a restart of the engine."""
        return [interval for timer in self._timers for interval in timer.intervals()]

    async def cut(self, reason: GatewayError) -> None:
        """Stop sampling, record what was sampled, and answer with an error; the rollout's limit is reached.

        An answer that is complete is delivered as it is. It does not wait for the client to read anything.
        """
        self._cut = reason
        for task in self._tasks:
            task.cancel()
        await self._recording.cut()

    async def run(self, max_tokens: int, budget: int | None = None) -> AsyncGenerator[AnswerEvent, None]:
        """Generate and record the answers; yield their events. `budget` is what the rollout has left for each."""
        if budget is not None and budget < max_tokens:
            self._budget = max_tokens = budget
        try:
            async with self._recording, aclosing(self._generate_all(max_tokens)) as events:
                async for event in events:
                    yield event
        except EngineError as error:
            raise GatewayError(ErrorKind.FAILED, _failure(error)) from error
        if self._grammar is None and not self._replayed:
            calls = [call for parser in self._parsers for call in parser.calls]
            self._recorder.count_strict(self._request, calls, self._caller.attempt.id)
        for parser, id in zip(self._parsers, self._recording.ids, strict=True):
            yield AnswerFinished(
                choice=parser.choice,
                id=id,
                finish=_finish_reason(parser),
                stop=parser.stopped_by,
                prompt_tokens=len(self._prompt.ids),
                completion_tokens=len(parser.ids),
                cached_tokens=self._prompt.kept,
                reasoning_tokens=parser.reasoning_tokens,
            )

    async def _generate_all(self, max_tokens: int) -> AsyncGenerator[AnswerEvent, None]:
        """Generate all answers concurrently; yield events as they come."""
        queue: asyncio.Queue[AnswerEvent | asyncio.Task[None]] = asyncio.Queue()

        async def generate(parser: StreamParser, timer: WaitTimer) -> None:
            async for event in self._generate(parser, timer, max_tokens):
                queue.put_nowait(event)

        if self._cut is not None:
            raise self._cut
        pairs = zip(self._parsers, self._timers, strict=True)
        tasks = self._tasks = [asyncio.create_task(generate(parser, timer)) for parser, timer in pairs]
        for task in tasks:
            task.add_done_callback(queue.put_nowait)
        try:
            unfinished = len(tasks)
            while unfinished:
                item = await queue.get()
                if isinstance(item, asyncio.Task):
                    unfinished -= 1
                    if item.cancelled() and self._cut is not None:
                        raise self._cut
                    item.result()
                else:
                    yield item
        except GatewayError:
            if not any(parser.ids for parser in self._parsers):  # no choice got a slot of the engine
                self._recording.discard()
            raise
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _generate(
        self, parser: StreamParser, timer: WaitTimer, max_tokens: int
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Generate one answer in its own slot of the scheduler, or take it from the record."""
        if self._replayed:
            for chunk in replayed_chunks(self._replayed[parser.choice], self._model.renderer.get_stop_token_ids()):
                for event in parser.feed(chunk) if not parser.done else ():
                    yield event
            return
        wants_prompt = self._request.prompt_logprobs
        if not max_tokens and not wants_prompt:  # nothing to compute
            for event in parser.feed(TokenChunk((), (), 0, finish="length")):
                yield event
            return
        request = EngineRequest(
            prompt_ids=tuple(self._prompt.ids),
            sampling=replace(self._sampling, seed=_seed(self._sampling.seed, parser.choice)),
            stop_ids=tuple(self._model.renderer.get_stop_token_ids()),
            max_tokens=max_tokens,
            session=self._caller.attempt.id,
            top_logprobs=self._request.top_logprobs or 0,
            grammar=self._grammar,
            prompt_logprobs=wants_prompt,
        )
        load, times = self._model.load, self._times
        share = 1 / self._request.n  # answers that are generated at the same time count as one
        queued = time.perf_counter()
        async with self._model.scheduler.slot(self._caller.attempt.rollout, timer):
            started, first = time.perf_counter(), None
            times.queued_s += (started - queued) * share
            try:
                with load.call(EngineError):
                    async with aclosing(self._model.engine.generate(request)) as chunks:
                        async for chunk in chunks:
                            if chunk.restarting:
                                timer.begin("engine")
                                continue
                            timer.end("engine")
                            if not (chunk.ids or chunk.finish or chunk.prompt_logprobs):  # it answers again
                                continue
                            if wants_prompt and first is None:
                                yield await self._prompt_tokens(parser.choice, chunk)
                            first = first or time.perf_counter()
                            load.add_tokens(len(chunk.ids))
                            for event in parser.feed(chunk):
                                yield event
                            if parser.done:
                                return
            except EngineLost as error:  # known before the call is recorded, which may take long
                self._attempt.lose_engine(_failure(error), self._started)
                raise
            except EngineError as error:
                self._attempt.fail(_failure(error))
                raise
            finally:
                timer.end("engine")
                ended = time.perf_counter()
                times.prompt_s += ((first or ended) - started) * share
                times.decoding_s += (ended - (first or ended)) * share

    async def _prompt_tokens(self, choice: int, chunk: TokenChunk) -> PromptTokens:
        ids, text = self._prompt.ids, joined(self._prompt.history.messages)
        return await asyncio.to_thread(describe_prompt, self._model.tokenizer, choice, ids, text, chunk)

    def _answers(self) -> list[RecordedAnswer]:
        """Return the answers as far as they were generated."""
        return [self._answer(parser, timer) for parser, timer in zip(self._parsers, self._timers, strict=True)]

    def _answer(self, parser: StreamParser, timer: WaitTimer) -> RecordedAnswer:
        if not parser.done:
            parser.parse_partial()
        by_budget = self._budget is not None and _finish_reason(parser) == "length"
        return RecordedAnswer(
            response=parser.message,
            finish=_finish_reason(parser),
            completion_ids=tuple(parser.ids),
            logprobs=tuple(parser.logprobs) if len(parser.logprobs) == len(parser.ids) else None,
            allowed=self._allowed(parser),
            versions=parser.versions,
            context_tail=parser.context_tail,
            waits=timer.intervals(),
            complete=parser.done and not by_budget,
        )

    def _allowed(self, parser: StreamParser) -> tuple[float, ...] | None:
        """Return the probability mass that the grammar allowed for each token; 0 if the engine does not say."""
        if self._grammar is None:
            return None
        return tuple(parser.allowed) if len(parser.allowed) == len(parser.ids) else (0.0,) * len(parser.ids)


def _failure(error: EngineError) -> str:
    return f"the engine failed: {error}"


def _seed(seed: int | None, choice: int) -> int | None:
    return seed if seed is None or not choice else (seed + choice) % 2**31


def _finish_reason(parser: StreamParser) -> FinishReason:
    if parser.finish == "length" and parser.stopped_by is None:
        return "length"  # even after complete tool calls: there may have been more
    return "tool_calls" if parser.calls else "stop"
