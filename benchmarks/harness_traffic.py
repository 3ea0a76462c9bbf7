"""Records what an agent sends and receives, with a proxy in front of the gateway, and finds the turns that it repeats.

`extendable` decides from the raw bodies alone which calls repeat an earlier request and its answer and add to them, so
that the gateway could have kept every token. It shares no code with the gateway's prefix index.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

Turn = tuple[str, str, list[Any]]
"""Who speaks, the text, and the tool calls as name and arguments."""
DIALECTS = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/messages": "messages",
    "/responses": "responses",
    ":generateContent": "google",
    ":streamGenerateContent": "google",
}


LAST_EVENTS = (
    b"data: [DONE]",
    b"event: message_stop",
    b"event: response.completed",
    b"event: response.incomplete",
    b'"finishReason"',
)
"""What ends a stream: an agent may close the connection when it has read this."""


@dataclass
class Exchange:
    """One model call as the agent saw it."""

    dialect: str
    request: dict[str, Any]
    status: int = 0
    call: str | None = None
    """The call's id in the record, from the response's header."""
    body: bytes = b""
    complete: bool = False
    path: str = ""

    @property
    def streams(self) -> bool:
        """Whether the answer is streamed."""
        return bool(self.request.get("stream")) or ":streamGenerateContent" in self.path

    @property
    def failed(self) -> bool:
        """Whether the server failed, before the answer or in the middle of it."""
        if self.status >= 500:
            return True
        return self.streams and any(
            event.get("error") or event.get("type") == "response.failed" for event in self.events
        )

    @property
    def events(self) -> list[dict[str, Any]]:
        """The events of a streamed answer."""
        lines = self.body.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@dataclass
class Traffic:
    """The model calls of one agent, in the order in which they were made."""

    url: str = ""
    exchanges: list[Exchange] = field(default_factory=list)
    others: list[str] = field(default_factory=list)
    """Requests that are no model calls, with their status."""
    stalled: int | None = None
    """The model call, counted from 1, whose response is withheld until the agent closes the connection."""

    @property
    def made(self) -> list[Exchange]:
        """The calls that were answered in full, refusals included: all but those that the agent aborted."""
        return [exchange for exchange in self.exchanges if exchange.complete]


@asynccontextmanager
async def watched(target: str) -> AsyncIterator[Traffic]:
    """Run a proxy in front of a server; yield what passes through it."""
    traffic = Traffic()
    async with aiohttp.ClientSession(auto_decompress=False, read_bufsize=1 << 20) as session:

        async def handle(request: web.Request) -> web.StreamResponse:
            data = await request.read()
            path = request.path.rstrip("/")
            dialect = next((name for end, name in DIALECTS.items() if path.endswith(end)), None)
            exchange = None
            if dialect is not None and request.method == "POST":
                exchange = Exchange(dialect, json.loads(data), path=str(request.rel_url))
                traffic.exchanges.append(exchange)
            number = len(traffic.exchanges)
            hop = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
            headers = {name: value for name, value in request.headers.items() if name.lower() not in hop}
            url = f"{target}{request.rel_url}"
            async with session.request(request.method, url, data=data, headers=headers) as answer:
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in hop}
                if exchange is not None and number == traffic.stalled:
                    await asyncio.get_running_loop().create_future()
                reply = web.StreamResponse(status=answer.status, headers=kept)
                await reply.prepare(request)
                if exchange is None:
                    traffic.others.append(f"{request.method} {request.path} {answer.status}")
                else:
                    exchange.status, exchange.call = answer.status, answer.headers.get("x-leyden-call")
                try:
                    async for chunk in answer.content.iter_any():
                        if exchange is not None:
                            exchange.body += chunk
                        await reply.write(chunk)
                    if exchange is not None:
                        exchange.complete = True
                    await reply.write_eof()
                except (ConnectionResetError, asyncio.CancelledError):  # the agent closed the connection
                    if exchange is not None:
                        exchange.complete |= any(end in exchange.body for end in LAST_EVENTS)
                return reply

        app = web.Application(client_max_size=1 << 26)
        app.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        traffic.url = f"http://127.0.0.1:{port}"
        try:
            yield traffic
        finally:
            await runner.cleanup()


def extendable(made: list[Exchange]) -> dict[str, list[str]]:
    """Return, for each call that could keep all tokens of an earlier one, the calls that it may continue."""
    known: list[tuple[str, Any, list[Turn], Turn]] = []
    by_response: dict[str, list[Turn]] = {}
    found: dict[str, list[str]] = {}
    for exchange in made:
        if exchange.status != 200 or exchange.failed:
            continue
        asked = _turns(exchange, by_response)
        answer, response = _answer(exchange)
        # A prompt does not show deferred tools, which are offered in addition once they have been looked up.
        tools = [tool for tool in exchange.request.get("tools") or [] if not tool.get("defer_loading")]
        for call, other_tools, before, said in known:
            if tools == other_tools and _continues(asked, before, said):
                found.setdefault(exchange.call or "", []).append(call)
        if exchange.call is not None:
            known.append((exchange.call, tools, asked, answer))
        if response is not None:
            by_response[response] = [*asked, answer]
    # Only the longest: to continue an earlier one would drop what was said since.
    longest = {call: len(before) for call, _, before, _ in known}
    return {
        call: [p for p in parents if longest[p] == max(map(longest.get, parents))] for call, parents in found.items()
    }


def _continues(asked: list[Turn], before: list[Turn], said: Turn) -> bool:
    if before and before[0][0] == "text":
        start = before[0][1] + said[1]
        kind, text, _ = asked[0]
        return kind == "text" and bool(said[1]) and text.startswith(start) and text != start
    rest = asked[len(before) :]
    if asked[: len(before)] != before or not rest or rest[0][0] != "assistant":
        return False
    same_text = rest[0][1] == said[1] or (not rest[0][1] and bool(said[2]))
    new = rest[1:]
    return same_text and rest[0][2] == said[2] and bool(new) and all(turn[0] != "assistant" for turn in new)


def _turns(exchange: Exchange, by_response: dict[str, list[Turn]]) -> list[Turn]:
    body = exchange.request
    turns: list[Turn] = []
    if exchange.dialect == "completions":
        turns.append(("text", body["prompt"] if isinstance(body["prompt"], str) else json.dumps(body["prompt"]), []))
    elif exchange.dialect == "chat":
        for message in body["messages"]:
            calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
            turns.append((_role(message["role"]), _text(message.get("content")), calls))
    elif exchange.dialect == "messages":
        if body.get("system"):
            turns.append(("system", _text(body["system"]), []))
        for message in body["messages"]:
            turns += _blocks(message)
    elif exchange.dialect == "google":
        if body.get("systemInstruction"):
            turns.append(("system", _text(body["systemInstruction"]["parts"]), []))
        for content in body["contents"]:
            turns += _google_turns(content, turns)
        turns = [(role, text.strip(), calls) for role, text, calls in turns]
    else:
        turns += by_response.get(body.get("previous_response_id") or "", [])
        if body.get("instructions") and not turns:
            turns.append(("system", body["instructions"].strip(), []))
        given = body["input"]
        for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
            _add_item(turns, item)
    return turns


def _blocks(message: dict[str, Any]) -> list[Turn]:
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text = "".join(block["text"] for block in blocks if block["type"] == "text").strip()
    calls = [[block["name"], block["input"]] for block in blocks if block["type"] == "tool_use"]
    results: list[Turn] = [
        ("tool", _text(block.get("content")), []) for block in blocks if block["type"] == "tool_result"
    ]
    return [*results, (message["role"], text, calls)] if text or calls or not results else results


def _google_turns(content: dict[str, Any], before: list[Turn]) -> list[Turn]:
    """Return the turns of a content; chunks of a streamed answer, which come back one by one, are one turn.

    A result that is written twice counts once: gemini-cli repeats those of a session that it resumes.
    """
    parts = content.get("parts") or []
    responses = [part["functionResponse"] for part in parts if "functionResponse" in part]
    once = [
        response
        for index, response in enumerate(responses)
        if "id" not in response or response not in responses[:index]
    ]
    results: list[Turn] = [("tool", json.dumps(response["response"]), []) for response in once]
    text = "".join(part.get("text", "") for part in parts if not part.get("thought"))
    calls = [[part["functionCall"]["name"], part["functionCall"]["args"]] for part in parts if "functionCall" in part]
    role = "assistant" if content.get("role") == "model" else "user"
    if role == "assistant" and before and before[-1][0] == "assistant":
        _, said, made = before.pop()
        text, calls = said + text, made + calls
    return results or [(role, text, calls)]


def _add_item(turns: list[Turn], item: dict[str, Any]) -> None:
    kind = item.get("type") or "message"
    if kind == "reasoning":
        return
    if kind.endswith("_output"):
        turns.append(("tool", _text(item["output"]), []))
        return
    role = _role(item["role"]) if kind == "message" else "assistant"
    text = _text(item.get("content")) if kind == "message" else ""
    calls = [] if kind == "message" else [_item_call(item)]
    if role == "assistant" and turns and turns[-1][0] == "assistant" and not (text and turns[-1][2]):
        turns[-1] = ("assistant", turns[-1][1] + text, turns[-1][2] + calls)
    else:
        turns.append((role, text, calls))


def _item_call(item: dict[str, Any]) -> list[Any]:
    return [item["name"], item["input"]] if "input" in item else _call(item)


def _answer(exchange: Exchange) -> tuple[Turn, str | None]:
    """Return the answer, and the id of a stored response."""
    whole = _assembled(exchange.dialect, exchange.events) if exchange.streams else json.loads(exchange.body)
    if exchange.dialect == "completions":
        text = whole["choices"][0]["text"]
        return ("text", "" if exchange.request.get("echo") else text, []), None
    if exchange.dialect == "chat":
        message = whole["choices"][0]["message"]
        calls = [_call(call["function"]) for call in message.get("tool_calls") or ()]
        return ("assistant", _text(message.get("content")), calls), None
    if exchange.dialect == "messages":
        return _blocks({"role": "assistant", "content": whole["content"]})[0], None
    turns: list[Turn] = []
    if exchange.dialect == "google":
        for chunk in whole if isinstance(whole, list) else [whole]:
            turns += _google_turns(chunk["candidates"][0]["content"], turns)
        role, text, calls = turns[0]
        return (role, text.strip(), calls), None
    for item in whole["output"]:
        _add_item(turns, item)
    return turns[0], whole["id"]


def _assembled(dialect: str, events: list[Any]) -> Any:
    if dialect == "google":
        return events
    if dialect == "responses":
        return events[-1]["response"]
    if dialect == "messages":
        blocks: list[Any] = []
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "json": ""})
            elif event["type"] == "content_block_delta":
                delta = event["delta"]
                blocks[event["index"]]["text"] = blocks[event["index"]].get("text", "") + delta.get("text", "")
                blocks[event["index"]]["json"] += delta.get("partial_json", "")
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["json"] or "{}")
        return {"content": blocks}
    if dialect == "completions":
        return {"choices": [{"text": "".join(choice["text"] for event in events for choice in event["choices"])}]}
    text, calls = "", list[Any]()
    for event in events:
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            for delta in choice["delta"].get("tool_calls") or ():
                if delta["index"] == len(calls):
                    calls.append({"function": {"name": delta["function"]["name"], "arguments": ""}})
                calls[delta["index"]]["function"]["arguments"] += delta["function"].get("arguments") or ""
    return {"choices": [{"message": {"content": text, "tool_calls": calls}}]}


def _call(function: dict[str, Any]) -> list[Any]:
    arguments = function.get("arguments") or "{}"
    return [function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return (content or "").strip()
    return "".join(part if isinstance(part, str) else part.get("text") or "" for part in content).strip()


def _role(role: str) -> str:
    return "system" if role == "developer" else role
