"""Random conversations over HTTP, and the graph that they leave in the record against a model of it."""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import hypothesis.strategies as st
import msgspec
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule
from modelserving import END, call, model_server
from randomness import examples

from leyden.records import PromptOrigin

T = TypeVar("T")

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), min_size=1, max_size=12)


ANY = "any"  # a history that continues none may keep its tokens with whichever call it shares a beginning with


@dataclass(frozen=True)
class History:
    """A conversation as its client holds it; `call` is the one that answered last."""

    messages: tuple[dict[str, Any], ...]
    call: str


def asked(messages: tuple[dict[str, Any], ...]) -> bytes:
    """What a request says, however its client writes the answers in it."""
    said = []
    for message in messages:
        calls = [call["function"] for call in message.get("tool_calls") or ()]
        content = message["content"] or ""
        content = content.strip() if message["role"] == "assistant" else content
        said.append([message["role"], content, [[c["name"], msgspec.json.decode(c["arguments"])] for c in calls]])
    return msgspec.json.encode(said)


class ConversationMachine(RuleBasedStateMachine):
    """Clients that branch, edit, trim, retry and ask at the same time, all in one attempt."""

    histories = Bundle("histories")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner, self.stack = asyncio.Runner(), AsyncExitStack()
        self.numbers = itertools.count()
        self.expected: dict[str, tuple[PromptOrigin, str | None, tuple[dict[str, Any], ...]]] = {}
        self.retries: dict[str, str] = {}
        self.latest: dict[bytes, str] = {}  # by what was asked, the call that asked it last
        self.run(self.begin())

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    async def begin(self) -> None:
        self.server = await self.stack.enter_async_context(model_server(self.folder))
        await self.server.new_attempt()
        self.server.say = self.say
        headers = {"authorization": f"Bearer {self.server.key}"}
        self.session = await self.stack.enter_async_context(aiohttp.ClientSession(headers=headers))

    def say(self, prompt: str) -> str:
        """Something different each time, so that every history has one place."""
        number = next(self.numbers)
        if number % 3 == 0:
            return call("look", f'{{"b": {number}, "a": [1,  2]}}') + END
        return f" Answer {number}: as asked. " + END

    def teardown(self) -> None:
        self.run(self.stack.aclose())
        self.runner.close()
        shutil.rmtree(self.folder)

    async def ask(self, messages: tuple[dict[str, Any], ...], n: int = 1, **headers: str) -> list[History]:
        body = {"model": "m", "messages": messages, "tools": TOOLS, "n": n}
        url = f"{self.server.url}/v1/chat/completions"
        async with self.session.post(url, json=body, headers=headers) as reply:
            answer = msgspec.json.decode(await reply.read())
            assert reply.status == 200, answer
        first = answer["id"].removeprefix("chatcmpl-")
        ids = [first, *(f"{first}-{choice}" for choice in range(1, n))]
        return [History((*messages, choice["message"]), id) for id, choice in zip(ids, answer["choices"], strict=True)]

    def expect(self, got: list[History], made: PromptOrigin, parent: str | None) -> list[History]:
        self.latest[asked(got[0].messages[:-1])] = got[0].call
        for index, history in enumerate(got):
            self.expected[history.call] = (made, got[0].call if index else parent, history.messages[:-1])
        return got

    def follow(self, history: History, text: str) -> tuple[dict[str, Any], ...]:
        """What an agent sends next: results for tool calls, or more words."""
        calls = history.messages[-1].get("tool_calls")
        if calls:
            return tuple({"role": "tool", "tool_call_id": c["id"], "content": text} for c in calls)
        return ({"role": "user", "content": text},)

    @rule(target=histories, system=st.booleans(), text=TEXTS)
    def start(self, system: bool, text: str) -> Any:
        messages = ({"role": "user", "content": f"{next(self.numbers)} {text}"},)
        if system:
            messages = ({"role": "system", "content": "You look things up."}, *messages)
        got = self.run(self.ask(messages))
        return multiple(*self.expect(got, PromptOrigin.FRESH, ANY))

    @rule(target=histories, history=histories, text=TEXTS, n=st.integers(1, 2))
    def go_on(self, history: History, text: str, n: int) -> Any:
        got = self.run(self.ask((*history.messages, *self.follow(history, text)), n))
        return multiple(*self.expect(got, PromptOrigin.CONTINUED, history.call))

    @rule(target=histories, history=histories, text=TEXTS)
    def go_on_in_other_words(self, history: History, text: str) -> Any:
        """The client writes the answer its own way: trimmed, other keys first, arguments written anew."""
        said = dict(reversed(history.messages[-1].items()))
        said["content"] = f"\n{(said['content'] or '').strip()}  "
        if said.get("tool_calls"):
            said["tool_calls"] = [
                {
                    "type": "function",
                    "function": {
                        "arguments": msgspec.json.format(c["function"]["arguments"], indent=3),
                        "name": c["function"]["name"],
                    },
                    "id": c["id"],
                }
                for c in said["tool_calls"]
            ]
        got = self.run(self.ask((*history.messages[:-1], said, *self.follow(history, text))))
        return multiple(*self.expect(got, PromptOrigin.CONTINUED, history.call))

    @rule(target=histories, history=histories, texts=st.lists(TEXTS, min_size=2, max_size=3))
    def branch_at_once(self, history: History, texts: list[str]) -> Any:
        async def both() -> list[list[History]]:
            return await asyncio.gather(*(self.ask((*history.messages, *self.follow(history, text))) for text in texts))

        got = [branch for branches in self.run(both()) for branch in branches]
        for branch in got:
            self.expect([branch], PromptOrigin.CONTINUED, history.call)
        for branch in got:  # of two that asked the same, either may have been the last
            if sum(asked(branch.messages[:-1]) == asked(other.messages[:-1]) for other in got) > 1:
                self.latest[asked(branch.messages[:-1])] = ANY
        return multiple(*got)

    @rule(target=histories, history=histories)
    def retry(self, history: History) -> Any:
        """The SDK asks for the same once more."""
        made, parent, messages = self.expected[history.call]
        before = self.latest[asked(messages)]
        if history.call.count("-") > 1:  # a further choice: the request was that of the first
            parent = self.expected[parent or ""][1]
        (again,) = got = self.run(self.ask(messages, **{"x-stainless-retry-count": "1"}))
        self.retries[again.call] = before
        return multiple(*self.expect(got, made, parent))

    @rule(target=histories, history=histories, text=TEXTS)
    def edit(self, history: History, text: str) -> Any:
        """A summary takes the place of what was said."""
        changed = {"role": "assistant", "content": f"In short ({next(self.numbers)}): {text}"}
        got = self.run(self.ask((*history.messages[:-1], changed, {"role": "user", "content": "Go on"})))
        return multiple(*self.expect(got, PromptOrigin.RERENDERED, ANY))

    @invariant()
    def the_record_is_the_graph(self) -> None:
        episode = self.run(self.server.check(calls=len(self.expected)))
        for made in episode.calls:
            how, parent, messages = self.expected[made.id]
            assert made.prompt_origin == how
            assert parent == ANY or made.parent == parent
            assert self.retries.get(made.id) == ANY or made.retry_of == self.retries.get(made.id)
            assert [m["content"] or "" for m in episode.messages(made) if m["role"] != "assistant"] == [
                m["content"] for m in messages if m["role"] != "assistant"
            ]
            assert self.server.tokenizer.decode(made.completion_ids).endswith(END)
            prompt = self.server.tokenizer.decode(episode.prompt_ids(made))
            for message in messages:
                if message["role"] != "assistant":
                    assert message["content"] in prompt


ConversationMachine.TestCase.settings = settings(
    max_examples=examples(25), stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck)
)
TestConversations = ConversationMachine.TestCase
