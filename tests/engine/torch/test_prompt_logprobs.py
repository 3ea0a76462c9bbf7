"""The embedded engine returns the logprobs of a prompt's own tokens, exactly, while others sample beside it."""

import asyncio
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch
from small_engines import Answer, check, complete, make, make_request, prompt, publish
from transformers import PreTrainedModel

from leyden.engine.protocol import EngineError, EngineRequest, TokenChunk
from leyden.engine.torch import batch
from leyden.engine.torch.engine import TorchEngine
from leyden.engine.torch.forward import Segment


def of_prompt(ids: tuple[int, ...], tokens: int = 0, top: int = 2, session: str = "s") -> EngineRequest:
    request = make_request(ids, tokens, session, temperature=0.7)
    return EngineRequest(
        request.prompt_ids, request.sampling, (), tokens, session, top_logprobs=top, prompt_logprobs=True
    )


def check_prompt(model: PreTrainedModel, ids: tuple[int, ...], chunk: TokenChunk, top: int = 2) -> None:
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1].float(), -1)
    wanted = logprobs.gather(1, torch.tensor(ids)[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(chunk.prompt_logprobs), wanted, atol=1e-4, rtol=0)
    values = torch.tensor([[value for _, value in tokens] for tokens in chunk.prompt_top])
    torch.testing.assert_close(values, logprobs.topk(top)[0], atol=1e-4, rtol=0)
    assert [tokens[0][0] for tokens in chunk.prompt_top] == logprobs.argmax(-1).tolist()


@pytest.fixture(params=["llama", "gpt-neox", "mamba", "llama, copied", "llama, overlapping"])
def engine_and_model(request: pytest.FixtureRequest) -> Iterator[tuple[TorchEngine, PreTrainedModel]]:
    kind, _, how = request.param.partition(", ")
    model = make(kind)
    dtype = torch.float64 if how == "copied" else None
    engine = TorchEngine(model, slots=6, prefill_tokens=50, dtype=dtype, overlap=bool(how))
    yield engine, model
    engine.close()


async def test_they_are_the_models_whatever_runs_beside_them(
    engine_and_model: tuple[TorchEngine, PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "PROMPT_LOGITS", 30)  # so that a prompt takes several steps
    engine, model = engine_and_model
    shared = prompt(1, 80)
    prompts = [shared, (*shared[:60], *prompt(2, 15)), prompt(3, 2), shared]
    check(model, await complete(engine, make_request(shared, 5, "s")))  # now it is in the prefix cache
    answers = await asyncio.gather(
        complete(engine, make_request(prompt(4, 90), 30, "other")),
        *(complete(engine, of_prompt(ids, tokens)) for ids, tokens in zip(prompts, (0, 4, 0, 1), strict=True)),
    )
    check(model, answers[0])
    for ids, tokens, answer in zip(prompts, (0, 4, 0, 1), answers[1:], strict=True):
        first, *others = answer.chunks
        check_prompt(model, ids, first)
        assert not any(chunk.prompt_logprobs for chunk in others)
        assert len(answer.ids) == tokens and answer.chunks[-1].finish == "length"
        if tokens:
            check(model, answer, 0.7)  # sampled tokens have those of the distribution that they were sampled from
    check(model, await complete(engine, make_request(shared, 5, "s")))


async def test_a_prompt_of_one_token_has_none(llama_engine: TorchEngine) -> None:
    answer = await complete(llama_engine, of_prompt((5,)))
    assert [(chunk.ids, chunk.prompt_logprobs, chunk.finish) for chunk in answer.chunks] == [((), (), "length")]


async def test_a_prompt_may_fill_the_context_where_nothing_is_sampled(llama_engine: TorchEngine) -> None:
    ids = prompt(1, llama_engine.context_length)
    (chunk,) = (await complete(llama_engine, of_prompt(ids))).chunks
    check_prompt(make("llama"), ids, chunk)
    with pytest.raises(EngineError, match="1 to 699 tokens"):
        await complete(llama_engine, of_prompt(ids, 1))
    with pytest.raises(EngineError, match="at least 1"):
        await complete(llama_engine, make_request(prompt(1, 5), 0))


async def test_all_are_of_one_version_when_an_update_comes_in_the_middle_of_the_prompt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("llama")
    engine = TorchEngine(model, slots=2, prefill_tokens=4)

    def write() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)

    loop, forward, submitted = asyncio.get_running_loop(), engine._batch.forward, threading.Event()
    publications: list[asyncio.Task[object]] = []

    def start_publishing() -> None:
        publications.append(asyncio.create_task(publish(engine, 1, write)))
        loop.call_soon(submitted.set)  # runs after the first step of the task

    def compute(segments: Sequence[Segment], sampled: torch.Tensor | None = None) -> torch.Tensor:
        if engine.stats.steps == 2:
            loop.call_soon_threadsafe(start_publishing)
            submitted.wait()
        return forward(segments, sampled)

    compute.refresh = forward.refresh
    compute.shares_parameters = True
    monkeypatch.setattr(engine._batch, "forward", compute)
    ids = prompt(0, 60)
    answer: Answer = await complete(engine, of_prompt(ids, 3))
    assert publications[0].done() and answer.versions == [1] * 3
    check_prompt(model, ids, answer.chunks[0])
    engine.close()


async def test_weights_that_are_not_finite_fail_the_request() -> None:
    def break_weights() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)

    model = make("llama")
    engine = TorchEngine(model)
    await publish(engine, 1, break_weights)
    with pytest.raises(EngineError, match="not finite"):
        await complete(engine, of_prompt(prompt(0, 20)))
    engine.close()


@pytest.fixture
def llama_engine() -> Iterator[TorchEngine]:
    engine = TorchEngine(make("llama"), slots=2, prefill_tokens=50)
    yield engine
    engine.close()
