"""The answers to one ask, from the engine into the record: each is durable before it is said to be done."""

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from msgspec.structs import replace

from leyden.engine.protocol import EngineError, EngineRequest
from leyden.records import Call, CallStatus, Sampling
from leyden.server.gateway.caller import Caller
from leyden.server.gateway.dialects.types import AnswerEvent, AnswerFinished, FinishReason, GenerationRequest
from leyden.server.gateway.errors import ErrorKind, GatewayError
from leyden.server.gateway.prompt import Prompt, offered
from leyden.server.gateway.recorder import AttemptCalls, Recorder
from leyden.server.gateway.served_model import ServedModel
from leyden.server.gateway.stream_parser import StreamParser


class Generation:
    """The answers to one ask (`n` of them) until they are in the record."""

    def __init__(
        self,
        recorder: Recorder,
        ledger: AttemptCalls,
        caller: Caller,
        policy: ServedModel,
        ask: GenerationRequest,
        prompt: Prompt,
        sampling: Sampling,
        grammar: str | None,
        first: str,
    ) -> None:
        self._recorder, self._ledger, self._caller = recorder, ledger, caller
        self._policy, self._ask, self._prompt = policy, ask, prompt
        self._sampling, self._grammar = sampling, grammar
        self._ids = [first, *(f"{first}-{choice}" for choice in range(1, ask.n))]
        self._began = time.time()
        self._saving: asyncio.Task[None] | None = None
        self._writings = [
            StreamParser(
                choice,
                policy.renderer,
                policy.tokenizer,
                prompt.ids[: len(prompt.ids) - len(prompt.forced)],
                forced=prompt.forced,
                tools=offered(ask),
                stop=sampling.stop,
                logprobs=ask.top_logprobs is not None,
                watched=ask.stream,
            )
            for choice in range(ask.n)
        ]

    async def write(self, max_tokens: int) -> AsyncGenerator[AnswerEvent, None]:
        """Have the engine write the answers; each is recorded before it is said to be done."""
        try:
            async with aclosing(self._write_all(max_tokens)) as events:
                async for event in events:
                    yield event
            self._saving = asyncio.create_task(self._record(CallStatus.OK))
            await asyncio.shield(self._saving)
        except (GeneratorExit, asyncio.CancelledError):
            if self._saving is None:  # it went away while the answer was being written
                with suppress(GatewayError):  # its attempt may be over, too
                    await asyncio.shield(asyncio.create_task(self._record(CallStatus.ABANDONED)))
            raise
        except EngineError as error:
            await self._record(CallStatus.FAILED)
            raise GatewayError(ErrorKind.FAILED, f"the engine failed: {error}") from error
        except GatewayError:
            if self._saving is None and any(writing.ids for writing in self._writings):  # not all had their turn
                await self._record(CallStatus.FAILED)
            raise
        for choice, writing in enumerate(self._writings):
            yield AnswerFinished(
                choice=choice,
                id=self._ids[choice],
                finish=_finish(writing),
                stop=writing.stopped_by,
                prompt_tokens=len(self._prompt.ids),
                completion_tokens=len(writing.ids),
                cached_tokens=self._prompt.kept,
            )

    async def _write_all(self, max_tokens: int) -> AsyncGenerator[AnswerEvent, None]:
        """Write all the answers at the same time; events come as they happen."""
        happening: asyncio.Queue[AnswerEvent | asyncio.Task[None]] = asyncio.Queue()

        async def write(choice: int, writing: StreamParser) -> None:
            async for event in self._write_one(choice, writing, max_tokens):
                happening.put_nowait(event)

        tasks = [asyncio.create_task(write(choice, writing)) for choice, writing in enumerate(self._writings)]
        for task in tasks:
            task.add_done_callback(happening.put_nowait)
        try:
            unfinished = len(tasks)
            while unfinished:
                happened = await happening.get()
                if isinstance(happened, asyncio.Task):
                    unfinished -= 1
                    happened.result()
                else:
                    yield happened
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _write_one(
        self, choice: int, writing: StreamParser, max_tokens: int
    ) -> AsyncGenerator[AnswerEvent, None]:
        """Write one of the answers, in a turn of its own."""
        request = EngineRequest(
            prompt_ids=tuple(self._prompt.ids),
            sampling=replace(self._sampling, seed=_seed(self._sampling.seed, choice)),
            stop_ids=tuple(self._policy.renderer.get_stop_token_ids()),
            max_tokens=max_tokens,
            session=self._caller.live.attempt,
            top_logprobs=self._ask.top_logprobs or 0,
            grammar=self._grammar,
        )
        admitted = self._policy.admission.admit(self._caller.live.rollout)
        async with admitted, aclosing(self._policy.engine.generate(request)) as pieces:
            async for piece in pieces:
                for event in writing.take(piece):
                    yield event
                if writing.done:
                    return

    async def _record(self, status: CallStatus) -> None:
        """Write every answer into the record, the first with the prompt, the others as its further choices."""
        if status is not CallStatus.OK:
            for writing in self._writings:
                writing.give_up()
        calls = [self._call(choice, writing, status) for choice, writing in enumerate(self._writings)]
        await self._recorder.record(self._ledger, calls, self._prompt.history)

    def _call(self, choice: int, writing: StreamParser, status: CallStatus) -> Call:
        prompt, ask, turn = self._prompt, self._ask, self._prompt.place.turn
        complete = len(writing.logprobs) == len(writing.ids)
        shared = prompt.place.shared if turn is not None else 0
        retry = self._caller.retry and self._ledger.conversation.retried(prompt.history)
        own: dict[str, Any] = {
            "parent": turn.call if turn is not None else None,
            "kept_ids": prompt.kept,
            "kept_messages": shared,
            "prompt_ids": tuple(prompt.ids[prompt.kept :]),
            "messages": ask.messages[shared:],
            "tools": offered(ask) if turn is None else None,  # whose history it shares, it shares the tools of
            "retry_of": retry or None,
            "request": ask.request,
        }
        if choice:
            own = {"parent": self._ids[0], "kept_ids": len(prompt.ids), "kept_messages": len(ask.messages)}
        return Call(
            id=self._ids[choice],
            choice=choice,
            policy=self._policy.name,
            role=self._caller.role,
            span=self._caller.span,
            made=prompt.made,
            made_why=prompt.why,
            status=status,
            finish=_finish(writing) if status is CallStatus.OK else str(status),
            completion_ids=tuple(writing.ids),
            logprobs=tuple(writing.logprobs) if complete else None,
            allowed=self._allowed(writing),
            versions=writing.versions,
            sampling=self._sampling,
            response=writing.message,
            started=self._began,
            ended=time.time(),
            **own,
        )

    def _allowed(self, writing: StreamParser) -> tuple[float, ...] | None:
        """What the grammar left to the model; nothing, as far as is known, where the engine does not say."""
        if self._grammar is None:
            return None
        return tuple(writing.allowed) if len(writing.allowed) == len(writing.ids) else (0.0,) * len(writing.ids)


def _seed(seed: int | None, choice: int) -> int | None:
    return seed if seed is None or not choice else (seed + choice) % 2**31


def _finish(writing: StreamParser) -> FinishReason:
    if writing.finish == "length" and writing.stopped_by is None:
        return "length"  # whatever tool calls were whole by then: there may have been more
    return "tool_calls" if writing.calls else "stop"
