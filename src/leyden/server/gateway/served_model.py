"""A model that is served here."""

from functools import cached_property
from typing import Any

from msgspec import Struct

from leyden.engine.protocol import Engine
from leyden.rendering.chatml import keeping_reasoning
from leyden.rendering.tokenizer import Tokenizer
from leyden.server.gateway.scheduler import Scheduler
from leyden.server.gateway.structured_output import StructuredOutput


class ServedModel(Struct, frozen=True, dict=True):
    """Its engine, how messages become its tokens and back, and who may use it next."""

    name: str
    engine: Engine
    renderer: Any
    tokenizer: Tokenizer
    admission: Scheduler

    def hold(self) -> None:
        """Start no generation until `resume`: the weights are about to change."""
        self.admission.hold()
        self.engine.hold()

    def resume(self, version: int) -> None:
        """Go on, with the weights of this version."""
        self.engine.resume(version)
        self.admission.resume()

    @cached_property
    def exact_renderer(self) -> Any:
        """The renderer of runs that keep reasoning as it was sampled, whatever the model's template drops."""
        return keeping_reasoning(self.renderer, self.tokenizer)

    @cached_property
    def formats(self) -> StructuredOutput:
        """How its answers are held to a format."""
        return StructuredOutput(self.renderer, self.tokenizer, self.engine.vocab_size)
