"""Small models, and requests to the embedded engine whose answers are compared with the model's own forward."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from transformers import (
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
)

from leyden.engine.protocol import EngineRequest, Publication, TokenChunk
from leyden.engine.torch.engine import TorchEngine
from leyden.records import Sampling

VOCABULARY = 97
CONTEXT = 700


def make(kind: str) -> PreTrainedModel:
    torch.manual_seed(0)
    shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    shape |= {"num_attention_heads": 4, "max_position_embeddings": CONTEXT}
    model: PreTrainedModel
    if kind == "llama":
        model = LlamaForCausalLM(LlamaConfig(**shape, num_key_value_heads=2, tie_word_embeddings=True))
    elif kind == "mamba":
        model = MambaForCausalLM(MambaConfig(vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=2))
    elif kind == "lfm2":
        shape |= {"block_auto_adjust_ff_dim": False, "pad_token_id": 0, "num_key_value_heads": 2}
        model = Lfm2ForCausalLM(Lfm2Config(**shape, layer_types=["conv", "full_attention"]))
    else:
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**shape))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0.0, 0.25)
    return model


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


def make_request(
    ids: tuple[int, ...], tokens: int = 20, session: str = "s", stop: tuple[int, ...] = (), **sampling: float
) -> EngineRequest:
    return EngineRequest(ids, Sampling(**{"seed": 1, **sampling}), stop, tokens, session)


class NoWeights:
    """What an engine that reads the model's parameters itself does not ask for."""

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError("an engine in the trainer's process needs no copy")

    def adapter(self) -> None:
        return None


async def publish(engine: TorchEngine, version: int, write: Callable[[], object] = lambda: None) -> Publication:
    """Write into the parameters as the trainer does, and serve them."""
    async with engine.changing_weights(version):
        await asyncio.to_thread(write)
    return await engine.publish(NoWeights(), version)


@dataclass
class Answer:
    request: EngineRequest
    chunks: list[TokenChunk] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        return [id for chunk in self.chunks for id in chunk.ids]

    @property
    def logprobs(self) -> list[float]:
        return [logprob for chunk in self.chunks for logprob in chunk.logprobs]

    @property
    def versions(self) -> list[int]:
        return [chunk.version for chunk in self.chunks for _ in chunk.ids]

    @property
    def whole(self) -> tuple[int, ...]:
        return (*self.request.prompt_ids, *self.ids)


async def complete(engine: TorchEngine, request: EngineRequest) -> Answer:
    answer = Answer(request)
    async for chunk in engine.generate(request):
        answer.chunks.append(chunk)
    assert answer.chunks[-1].finish is not None
    assert all(chunk.finish is None for chunk in answer.chunks[:-1])
    return answer


def expected(model: PreTrainedModel, answer: Answer, temperature: float = 1.0) -> torch.Tensor:
    """The logprobs that the trainer computes: one forward over the whole sequence."""
    whole = torch.tensor([answer.whole])
    with torch.no_grad():
        logits = model(whole).logits[0, len(answer.request.prompt_ids) - 1 : -1].float() / temperature
    return torch.log_softmax(logits, -1).gather(1, whole[0, len(answer.request.prompt_ids) :, None])[:, 0]


def check(model: PreTrainedModel, answer: Answer, temperature: float = 1.0) -> None:
    torch.testing.assert_close(torch.tensor(answer.logprobs), expected(model, answer, temperature), atol=1e-4, rtol=0)
