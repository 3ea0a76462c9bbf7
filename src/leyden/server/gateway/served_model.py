"""A model that this server serves: its engine, its renderer and its scheduler."""

import asyncio
from functools import cached_property

from msgspec import Struct
from msgspec.structs import replace

from leyden.engine.protocol import Engine
from leyden.rendering.factory import keep_reasoning, switch_reasoning
from leyden.rendering.renderer import ChatRenderer, find_reasoning_end
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.answers.structured_output import StructuredOutput
from leyden.server.gateway.calls.engine_load import EngineLoad
from leyden.server.gateway.calls.scheduler import Scheduler


class ServedModel(Struct, frozen=True, dict=True):
    """A policy under its name, with all that the gateway needs to generate with it."""

    name: str
    engine: Engine
    renderer: ChatRenderer
    tokenizer: Tokenizer
    scheduler: Scheduler
    location: str = "embedded"
    """Where the engine runs, for people: `embedded`, or where its vLLM is."""

    @cached_property
    def load(self) -> EngineLoad:
        """Counts the engine's calls and tokens."""
        return EngineLoad()

    def hold(self) -> None:
        """Start no generation until `resume`: the weights are about to change."""
        self.scheduler.hold()
        self.engine.hold()

    def resume(self, version: int) -> None:
        """Generate again, with the weights of this version."""
        self.engine.resume(version)
        self.scheduler.resume()

    @cached_property
    def large_prompts(self) -> asyncio.Semaphore:
        """Bounds how many large prompts are tokenised at the same time, and so their memory."""
        return asyncio.Semaphore(2)

    def with_reasoning(self, on: bool | None) -> "ServedModel":
        """Return the model with its reasoning switched on or off; itself if its template has no switch."""
        if on is None:
            return self
        if on not in self._switched:
            renderer = switch_reasoning(self.renderer, self.tokenizer, on)
            switched = self if renderer is self.renderer else replace(self, renderer=renderer)
            shared = ("load", "large_prompts", "structured_output")
            vars(switched).update({name: getattr(self, name) for name in shared})
            self._switched[on] = switched
        return self._switched[on]

    @cached_property
    def _switched(self) -> dict[bool, "ServedModel"]:
        return {}

    @cached_property
    def exact_renderer(self) -> ChatRenderer:
        """The renderer for runs that keep reasoning as it was sampled, even if the model's template drops it."""
        return keep_reasoning(self.renderer, self.tokenizer)

    @cached_property
    def reasoning_end(self) -> int | None:
        """The token that ends the reasoning of an answer, if there is one."""
        return find_reasoning_end(self.renderer)

    @cached_property
    def structured_output(self) -> StructuredOutput:
        """Builds the grammars of answers in a given format."""
        return StructuredOutput(self.renderer, self.tokenizer, self.engine.vocab_size)
