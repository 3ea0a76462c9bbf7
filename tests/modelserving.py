"""A real server that serves a model whose words a test writes: spark's tokenizer, a scripted engine, real sockets."""

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path

from databases import empty_store
from scripted_engine import ScriptedEngine

from leyden.api.wire import GroupSpec, LeaseRequest, RunSpec
from leyden.engine.protocol import EngineRequest
from leyden.episodes import Episode
from leyden.records import Origin, Purpose, RunSettings, Task
from leyden.rendering.factory import renderer_for
from leyden.rendering.renderer import ChatRenderer
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.control.keys import KeyKind, Keyring
from leyden.server.gateway.calls.scheduler import Scheduler
from leyden.server.gateway.gateway import Gateway
from leyden.server.gateway.served_model import ServedModel
from leyden.server.options import RunningServer, ServeOptions
from leyden.server.serve import Server
from leyden.server.service import ServerContext
from leyden.store.read import queries
from leyden.store.store import Store

END = "<|im_end|>"
TEMPLATES = Path(__file__).parent / "data" / "templates"


def call(name: str, arguments: str) -> str:
    """A tool call as spark writes it."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


class ModelServer:
    """A server with one attempt at work. The model says `lines` in turn, or what `say` makes of a prompt's text."""

    def __init__(self, service: ServerContext, engine: ScriptedEngine, tokenizer: Tokenizer, url: str) -> None:
        self.service, self.engine, self.tokenizer, self.url = service, engine, tokenizer, url
        self.lines: list[str] = []
        self.say: Callable[[str], str] | None = None
        self.key = self.attempt = ""
        engine.script = self._script

    def _script(self, request: EngineRequest) -> Sequence[int]:
        text = self.say(self.tokenizer.decode(request.prompt_ids)) if self.say else self.lines.pop(0)
        return self.tokenizer.encode(text)

    async def new_attempt(
        self,
        name: str = "g",
        purpose: Purpose = Purpose.TRAIN,
        group: str | None = None,
        step: int | None = None,
        **settings: object,
    ) -> str:
        """Start an attempt in a new run; returns its key."""
        store = self.service.store
        await store.create_run(RunSpec(f"run-{name}", RunSettings(**settings)))
        await store.enqueue(f"run-{name}", GroupSpec(group or name, Task("t", {}), purpose=purpose, step=step))
        self.run = f"run-{name}"
        return await self.next_attempt()

    async def branch(self, name: str, origin: Origin, purpose: Purpose = Purpose.TRAIN) -> str:
        """Start an attempt in the same run that replays another; returns its key."""
        await self.service.store.enqueue(self.run, GroupSpec(name, Task("t", {}), purpose=purpose, origin=origin))
        return await self.next_attempt()

    async def next_attempt(self) -> str:
        """Start the next attempt in the run, which may have to wait for its retry; returns its key."""
        (grant,) = await self.service.store.lease(LeaseRequest("w", wait=30, run=self.run))
        self.attempt = grant.attempt.id
        scope = {"run": self.run, "rollout": grant.attempt.rollout, "attempt": self.attempt}
        self.key = self.service.keyring.create(KeyKind.ATTEMPT, 3600, started=grant.attempt.started, **scope)[0]
        return self.key

    async def episode(self) -> Episode:
        """What the attempt has left behind so far."""
        return await self.service.store.read(queries.get_episode, self.run, self.attempt)

    def serve(self, model: str, template: str) -> None:
        """Serve a model by the renderer of its template, a file in tests/data/templates, over spark's vocabulary."""
        config = {**self.tokenizer.config, "chat_template": (TEMPLATES / f"{template}.jinja").read_text()}
        tokenizer = Tokenizer(self.tokenizer._document, config, model)
        assert self.service.gateway is not None
        policy = ServedModel(model, self.engine, renderer_for(tokenizer), tokenizer, Scheduler())
        self.service.gateway.models = {model: policy}

    def forget_attempts(self) -> None:
        """Forget what the gateway has in memory about attempts, as a restart does."""
        assert self.service.gateway is not None
        self.service.gateway._attempts.clear()
        self.service.gateway._started.clear()

    async def check(self, calls: int) -> Episode:
        """Every call is in the record, and every continued prompt begins with its parent's prompt and completion."""
        episode = await self.episode()
        assert len(episode.calls) == calls
        by_id = {call.id: call for call in episode.calls}
        for made in episode.calls:
            if made.prompt_origin == "continued" and not made.choice:
                assert made.parent is not None
                parent = by_id[made.parent]
                before = episode.prompt_ids(parent) + parent.completion_ids
                assert episode.prompt_ids(made)[: len(before)] == before
        return episode


async def eventually(true: Callable[[], bool]) -> None:
    """Wait for a condition that no event announces."""
    async with asyncio.timeout(120):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


@cache
def spark() -> tuple[Tokenizer, ChatRenderer]:
    """The tokenizer and the renderer of the bundled model: loading them takes longer than most tests."""
    tokenizer = Tokenizer.load(str(files("leyden") / "models" / "spark"))
    return tokenizer, renderer_for(tokenizer)


@asynccontextmanager
async def model_server(home: Path, database: str | None = None) -> AsyncIterator[ModelServer]:
    """Start one; `database` is the URL of another one than a SQLite file in `home`."""
    tokenizer, renderer = spark()
    engine = ScriptedEngine(lambda _: ())
    store = await Store(database or empty_store(home / "leyden.db")).start()
    with socket.socket() as listener:
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # or an answer waits for an acknowledgement
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        service = await ServerContext.start(store, Keyring(b"secret", time.time), ServeOptions(home), url)
        model = ServedModel("spark", engine, renderer, tokenizer, Scheduler())
        service.gateway = Gateway(store, service.leases, {"spark": model})
        server = Server(service, RunningServer(url, url, "", "", ""))
        await server.listen(listener)
        try:
            yield ModelServer(service, engine, tokenizer, url)
        finally:
            server.stop()
            await server.stopped
            await service.close()
            await store.close()
