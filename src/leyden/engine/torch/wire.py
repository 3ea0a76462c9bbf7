"""What the training process and the process of an embedded engine tell each other, in lines of JSON."""

from msgspec import Struct


class EngineProcessOptions(Struct, frozen=True):
    """How an engine process is started."""

    model: str
    """The folder with the model's configuration. Its weights come with the first order."""
    dtype: str
    slots: int
    replicas: int = 1
    """How many engine processes share the machine's cores."""
    tokenizer: str | None = None
    kv_cache_bytes: int | None = None
    """The most for the KV cache; None: a part of the free memory of its GPU."""
    device_share: float = 1.0
    """The part of its GPU's memory that it may take."""
    socket: str = ""
    """The Unix socket to listen on."""


class LoadWeights(Struct, frozen=True):
    """Serve the weights in a folder."""

    folder: str
    version: int


class EngineState(Struct, frozen=True):
    """What an engine serves, after it has loaded weights."""

    context_length: int
    vocab_size: int
    checksums: dict[str, int]
