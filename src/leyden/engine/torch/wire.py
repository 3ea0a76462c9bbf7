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
    device_share: float | None = None
    """The part of its GPU's memory that it may take; None: it has no GPU."""
    beside_kv_cache: int = 0
    """The bytes of that for weights, logits and activations. The KV cache may have the rest."""
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
