"""A model that is served here."""

from typing import Any

from msgspec import Struct

from leyden.engine import Engine
from leyden.server.gateway.admission import Admission
from leyden.server.gateway.writing import Tokenizer


class Policy(Struct, frozen=True):
    """Its engine, how messages become its tokens and back, and who may use it next."""

    name: str
    engine: Engine
    renderer: Any
    tokenizer: Tokenizer
    admission: Admission
