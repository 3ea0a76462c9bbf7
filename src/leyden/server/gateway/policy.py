"""A model that is served here."""

from functools import cached_property
from typing import Any

from msgspec import Struct

from leyden.engine import Engine
from leyden.server.gateway.admission import Admission
from leyden.server.gateway.chatml import keeping_reasoning
from leyden.server.gateway.formats import Formats
from leyden.server.gateway.tokenizer import Tokenizer


class Policy(Struct, frozen=True, dict=True):
    """Its engine, how messages become its tokens and back, and who may use it next."""

    name: str
    engine: Engine
    renderer: Any
    tokenizer: Tokenizer
    admission: Admission

    @cached_property
    def exact_renderer(self) -> Any:
        """The renderer of runs that keep reasoning as it was sampled, whatever the model's template drops."""
        return keeping_reasoning(self.renderer, self.tokenizer)

    @cached_property
    def formats(self) -> Formats:
        """How its answers are held to a format."""
        return Formats(self.renderer, self.tokenizer, self.engine.vocabulary)
