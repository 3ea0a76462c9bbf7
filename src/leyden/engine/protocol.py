"""The engine protocol: token ids in, token ids out. An engine knows nothing of messages, agents or training.

Closing the stream of a request cancels it. The logprobs are those of the distribution that a token was sampled from,
with temperature and grammar applied; each chunk names the version of the weights that sampled it.
"""

import hashlib
from collections.abc import AsyncGenerator, Iterable
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Literal, NoReturn, Protocol

from msgspec import Struct
from msgspec.structs import replace

from leyden.records import Sampling

if TYPE_CHECKING:
    from asyncio import StreamReader, StreamWriter

    from torch import Tensor

FinishReason = Literal["stop", "length"]
RESTART_LIMIT_S = 900.0
"""How long a request waits for an engine that is started again."""


class EngineRequest(Struct, frozen=True):
    """One completion to sample."""

    prompt_ids: tuple[int, ...]
    sampling: Sampling
    stop_ids: tuple[int, ...]
    """Sampling one of these ends the completion; the stop token is part of it."""
    max_tokens: int
    """At least 1, or 0 with `prompt_logprobs`."""
    session: str
    """Requests of one session share prefixes: an engine may keep their KV cache."""
    top_logprobs: int = 0
    grammar: str | None = None
    """The grammar that the completion must follow; see `leyden.engine.grammar`."""
    prompt_logprobs: bool = False
    """Whether the first chunk has the logprobs of the prompt's tokens, with `top_logprobs` alternatives each."""

    sampled: int = 0
    """How many tokens at the end of the prompt belong to the completion: it continues one that was interrupted.

    The grammar has followed them, and presence and frequency penalties count them."""

    @property
    def sampled_ids(self) -> tuple[int, ...]:
        """The tokens that were sampled before."""
        return self.prompt_ids[len(self.prompt_ids) - self.sampled :]

    def after(self, sampled: tuple[int, ...]) -> "EngineRequest":
        """Return the request for the rest of a completion that begins with these tokens."""
        if not sampled:
            return self
        return replace(
            self,
            prompt_ids=self.prompt_ids + sampled,
            max_tokens=self.max_tokens - len(sampled),
            sampling=replace(self.sampling, seed=_later_seed(self.sampling.seed, len(sampled))),
            prompt_logprobs=False,
            sampled=self.sampled + len(sampled),
        )


def _later_seed(seed: int | None, position: int) -> int | None:
    """Derive the seed for the tokens after `position`: a continued completion does not repeat its random numbers."""
    if seed is None:
        return None
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class TokenChunk(Struct, frozen=True):
    """Some sampled tokens. The last chunk of a completion has a finish reason.

    One without tokens may say that the engine is being restarted, or answers again.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    version: int
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """For each token the most likely tokens with their logprobs, if the request has `top_logprobs`."""
    allowed: tuple[float, ...] = ()
    """For each token under a grammar: the probability of all tokens that the grammar allowed, 0 if it was one."""
    finish: FinishReason | None = None
    prompt_logprobs: tuple[float, ...] = ()
    """For each token of the prompt but the first: its logprob after those before it, at temperature 1."""
    prompt_top: tuple[tuple[tuple[int, float], ...], ...] = ()
    """As `top`, for the tokens of `prompt_logprobs`."""
    restarting: bool = False
    """Whether the request waits, until the next chunk, for an engine that is being restarted."""


class EngineError(Exception):
    """The engine failed; the message says how."""


class EngineLost(EngineError):
    """The engine ended or its connection broke, with all requests in flight."""


class Engine(Protocol):
    """Samples completions for the gateway."""

    @property
    def context_length(self) -> int:
        """The longest sequence, prompt and completion together."""

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""

    @property
    def reports_allowed_mass(self) -> bool:
        """Whether chunks of requests with a grammar have `allowed`; without it, such completions are not trained on."""

    def generate(self, request: EngineRequest) -> AsyncGenerator[TokenChunk, None]:
        """Sample a completion, chunk by chunk."""

    def end_session(self, session: str) -> None:
        """Free what is kept for a session: no more of its requests will come. Repeating it is harmless."""

    def hold(self) -> None:
        """Start no new request until `resume`: the weights are about to change."""

    def resume(self, version: int) -> None:
        """Start requests again: the weights have changed, and tokens sampled from now on are of this version."""


class LoraWeights(Struct, frozen=True):
    """A LoRA adapter: matrices whose products are added to the weights of some layers."""

    rank: int
    tensors: "dict[str, Tensor]"
    """By layer, as in `model.layers.0.mlp.up_proj.lora_A.weight`; `lora_B` includes the scale."""


class ModelWeights(Protocol):
    """The learner's current weights, as they are published to an engine."""

    def tensors(self) -> "Iterable[tuple[str, Tensor]]":
        """Return every tensor of the model to serve, by its Hugging Face name."""

    def adapter(self) -> LoraWeights | None:
        """Return the adapter if only a LoRA adapter is trained."""


class Publication(Struct, frozen=True):
    """The cost of publishing new weights."""

    seconds: float
    """Without the optimiser step."""
    transferred_bytes: int
    """0 if engine and learner share their parameters."""


class SocketAddress(Struct, frozen=True, tag="socket"):
    """The engine answers over a socket pair that it shares with the server, or over a socket that it listens on."""

    context_length: int
    vocab_size: int
    concurrency: int
    """Requests that the engine computes concurrently."""
    location: str | None = None
    """The path of the Unix socket that it listens on."""


class VllmAddress(Struct, frozen=True, tag="vllm"):
    """The engine is a vLLM server."""

    location: str
    """The path of its Unix socket, or its http:// URL."""
    context_length: int
    vocab_size: int
    concurrency: int
    """Requests that the engine computes concurrently."""
    version: int = 0
    """Of the weights that it serves when a server process starts."""
    seeded: bool = False
    """Whether seeds of requests are honoured: vLLM samples seeded requests one by one."""
    adapter: str | None = None
    """The policy whose versions are LoRA adapters beside weights that do not change; None: they are those weights."""


class ReplicasAddress(Struct, frozen=True, tag="replicas"):
    """Several engines serve the same weights."""

    replicas: tuple[SocketAddress | VllmAddress, ...]

    @property
    def concurrency(self) -> int:
        """Requests that all of them compute concurrently."""
        return sum(replica.concurrency for replica in self.replicas)


EngineAddress = SocketAddress | VllmAddress | ReplicasAddress
"""How a server process reaches the engine."""


class ServedEngine(Protocol):
    """A running engine that serves server processes."""

    @property
    def address(self) -> EngineAddress:
        """How a server process reaches it."""

    async def serve(self, reader: "StreamReader", writer: "StreamWriter") -> None:
        """Serve the server process at the other end of a socket until that process is gone."""

    async def wait_failed(self) -> NoReturn:
        """Wait until it has failed for good, and raise the reason."""


class EngineBackend(ServedEngine, Protocol):
    """A running engine, as the training process uses it: it serves server processes and receives new weights."""

    @property
    def sleeps_while_training(self) -> bool:
        """Whether the trainer must call `sleep` before it computes: they do not fit on the device side by side."""

    async def sleep(self) -> None:
        """Free memory until the next publication. The server must hold its calls; repeating it is harmless."""

    @property
    def shares_parameters(self) -> bool:
        """Whether it samples from the learner's own parameters, not from a copy that `publish` writes."""

    def changing_weights(self, version: int) -> AbstractAsyncContextManager[None]:
        """Return a context in which the learner may write its parameters; afterwards they are version `version`.

        An engine that shares them pauses between two decoding steps; its running requests go on with the new weights.
        Any other goes on sampling from its copy.
        """

    async def publish(self, weights: ModelWeights, version: int) -> Publication:
        """Serve the learner's weights. No token is sampled from a mixture of old and new ones."""
