"""Against a real vLLM server on the CPU: tokens, logprobs, weight changes and crashes."""

import asyncio
import itertools
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
import torch
from msgspec.structs import replace
from spark_vllm import (
    SPARK,
    changed,
    close,
    collect,
    ids,
    logprobs,
    needs_vllm,
    prompt,
    request,
    running,
    scored,
    spark,
    versions,
)
from transformers import PreTrainedModel

from leyden.engine.protocol import EngineError, TokenChunk, VllmAddress
from leyden.engine.vllm.engine import VllmEngine
from leyden.engine.vllm.extension.leyden_weights import checksum
from leyden.engine.vllm.http import call, control
from leyden.engine.vllm.process import VllmProcess
from leyden.engine.vllm.publisher import AdapterTransfer, FileTransfer, Sent, VllmPublisher
from leyden.engine.weight_files import NamedTensors, WeightFiles
from leyden.records import Sampling
from leyden.rendering.tokenizer import Tokenizer

NUMBERS = itertools.count(1)
"""Of publications."""
pytestmark = [pytest.mark.slow, needs_vllm, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(loop_scope="module")
async def publisher(vllm: VllmProcess, tmp_path: Path) -> AsyncIterator[VllmPublisher]:
    """A publisher; afterwards the model is as it was."""
    publisher = VllmPublisher(vllm.location, FileTransfer(WeightFiles()), AdapterTransfer(tmp_path))
    yield publisher
    await publish(publisher, spark())


async def publish(publisher: VllmPublisher, model: PreTrainedModel, engine: VllmEngine | None = None) -> None:
    if engine is not None:
        engine.hold()
    await publisher.pause()
    await publisher.send(model.named_parameters, next(NUMBERS))
    await publisher.resume()
    if engine is not None:
        engine.resume(engine.version + 1)


async def test_two_turns_have_the_logprobs_of_the_model(engine: VllmEngine) -> None:
    model = spark()
    first = prompt(1)
    turn = await collect(engine, request(first))
    assert close(logprobs(turn), scored(model, first, ids(turn)))
    second = [*first, *ids(turn), *prompt(2, 20)]
    turn = await collect(engine, request(second))
    assert close(logprobs(turn), scored(model, second, ids(turn)))
    assert versions(turn) == [0] * 24


@pytest.mark.parametrize("tokens", [0, 5])
async def test_the_logprobs_of_a_prompt_are_those_of_the_model(engine: VllmEngine, tokens: int) -> None:
    model, given = spark(), prompt(9, 40)
    wanted = replace(request(given, tokens), prompt_logprobs=True, top_logprobs=2)
    first, *others = await collect(engine, wanted)
    assert close(list(first.prompt_logprobs), scored(model, given[:1], given[1:]))
    with torch.no_grad():
        best = torch.log_softmax(model(torch.tensor([given])).logits[0, :-1].float(), -1).topk(2)[0]
    assert close([top[0][1] for top in first.prompt_top], best[:, 0].tolist())
    assert len(ids([first, *others])) == tokens
    assert [chunk.finish for chunk in (first, *others)][-1] == "length"


async def test_tokens_are_streamed_and_the_last_chunk_says_why_there_are_no_more(engine: VllmEngine) -> None:
    chunks = await collect(engine, request(prompt(3), 64))
    assert len(chunks) > 1
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert len(ids(chunks)) == len(logprobs(chunks)) == 64


async def test_a_stop_token_is_part_of_the_completion_with_its_logprob(engine: VllmEngine) -> None:
    greedy = Sampling(temperature=0.0)
    whole = ids(await collect(engine, request(prompt(4), 40, sampling=greedy)))
    stop = whole[20]
    chunks = await collect(engine, request(prompt(4), 40, stop=stop, sampling=greedy))
    assert ids(chunks) == whole[: whole.index(stop) + 1]
    assert chunks[-1].finish == "stop"
    assert len(logprobs(chunks)) == len(ids(chunks))


async def test_logprobs_are_those_of_the_distribution_that_was_sampled_from(engine: VllmEngine) -> None:
    model = spark()
    chunks = await collect(engine, request(prompt(5), sampling=Sampling(temperature=0.7), top_logprobs=3))
    assert close(logprobs(chunks), scored(model, prompt(5), ids(chunks), 0.7))
    tops = [top for chunk in chunks for top in chunk.top]
    assert all(len(top) == 3 and top == tuple(sorted(top, key=lambda one: -one[1])) for top in tops)
    with torch.inference_mode():
        logits = model(torch.tensor([prompt(5)])).logits[0, -1].float() / 0.7
    assert {id for id, _ in tops[0]} == set(logits.topk(3).indices.tolist())


async def test_only_a_seeded_engine_repeats_itself(vllm: VllmProcess, engine: VllmEngine) -> None:
    seeded = VllmEngine(VllmAddress(str(vllm.socket), 1024, 1024, 32, seeded=True))
    asked = request(prompt(6), 64, sampling=Sampling(seed=7, temperature=2.0))
    assert ids(await collect(seeded, asked)) == ids(await collect(seeded, asked))
    assert ids(await collect(engine, asked)) != ids(await collect(engine, asked))
    await seeded.close()


async def test_what_cannot_be_completed_is_refused_with_the_reason(engine: VllmEngine) -> None:
    for wrong, why in (
        (request([]), "1 to 1023 tokens"),
        (request([2000]), "token ids outside"),
        (request(prompt(7), top_logprobs=500), "logprobs"),
        (request(prompt(7), grammar="start: nothing_such"), "nothing_such"),
    ):
        with pytest.raises(EngineError, match=why):
            await collect(engine, wrong)


async def test_closing_the_generator_ends_the_request_in_vllm(vllm: VllmProcess, engine: VllmEngine) -> None:
    async with aclosing(engine.generate(request(prompt(8), 900))) as chunks:
        await anext(chunks)
        assert await running(str(vllm.socket)) == 1
    async with asyncio.timeout(5):
        while await running(str(vllm.socket)):
            pass


async def test_an_idle_connection_that_vllm_closed_is_no_error(engine: VllmEngine) -> None:
    await collect(engine, request(prompt(9), 2))
    await asyncio.sleep(3.5)
    await collect(engine, request(prompt(9), 2))


async def test_answers_follow_a_grammar(engine: VllmEngine) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "y"]}},
        "required": ["a", "b"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": r"( |\n[ \t]{0,20})?"},
    }
    tokenizer = Tokenizer.load(SPARK)
    grammar = f"start: json\njson: %json {json.dumps(schema)}"
    for seed in range(4):
        # 250 tokens are enough for the longest answer: white space at each of its 8 places
        chunks = await collect(engine, request(prompt(seed), 250, stop=2, grammar=grammar))
        answer = json.loads(tokenizer.decode(ids(chunks)[:-1]))
        assert set(answer) == {"a", "b"} and answer["b"] in ("x", "y")
        assert chunks[-1].finish == "stop" and ids(chunks)[-1] == 2
        assert not any(chunk.allowed for chunk in chunks)


async def test_new_weights_are_seen_in_the_next_logprobs(engine: VllmEngine, publisher: VllmPublisher) -> None:
    before = await collect(engine, request(prompt(10)))  # which fills the prefix cache with what must not be used
    model = changed(1)
    await publish(publisher, model, engine)
    after = await collect(engine, request(prompt(10)))
    assert close(logprobs(before), scored(spark(), prompt(10), ids(before)))
    assert close(logprobs(after), scored(model, prompt(10), ids(after)))
    assert not close(logprobs(after), scored(spark(), prompt(10), ids(after)))
    assert versions(after) == [1] * 24


async def test_running_generations_continue_with_the_new_weights(engine: VllmEngine, publisher: VllmPublisher) -> None:
    old, new = spark(), changed(2)
    started = asyncio.Semaphore(0)

    async def generate(seed: int) -> list[TokenChunk]:
        chunks = []
        async for chunk in engine.generate(request(prompt(seed), 300)):
            chunks.append(chunk)
            started.release()
        return chunks

    generations = [asyncio.create_task(generate(seed)) for seed in range(12)]
    for _ in range(60):
        await started.acquire()
    await publish(publisher, new, engine)
    for seed, chunks in enumerate(await asyncio.gather(*generations)):
        sampled, of = ids(chunks), versions(chunks)
        assert len(sampled) == 300 and of == sorted(of) and set(of) == {0, 1}
        cut = of.index(1)
        assert close(logprobs(chunks)[:cut], scored(old, prompt(seed), sampled)[:cut])
        assert close(logprobs(chunks)[cut:], scored(new, prompt(seed), sampled)[cut:])
        assert chunks[-1].finish == "length"


async def test_a_constrained_generation_continues_after_what_it_has(
    engine: VllmEngine, publisher: VllmPublisher
) -> None:
    asked = request(prompt(11), 800, stop=2, grammar=r"start: /([a-z][0-9]){350}/")
    async with aclosing(engine.generate(asked)) as generation:
        chunks = [await anext(generation), await anext(generation)]
        await publish(publisher, changed(3), engine)
        chunks += await _rest(generation)
    of = versions(chunks)
    assert of == sorted(of) and set(of) == {0, 1}
    text = Tokenizer.load(SPARK).decode(ids(chunks)[:-1])
    assert re.fullmatch(r"([a-z][0-9]){350}", text) and chunks[-1].finish == "stop"


async def test_a_continued_generation_is_penalised_for_its_tokens(engine: VllmEngine, publisher: VllmPublisher) -> None:
    greedy = Sampling(temperature=0.0, frequency_penalty=2.0)
    asked = request(prompt(15), 200, sampling=greedy)
    whole = ids(await collect(engine, asked))
    async with aclosing(engine.generate(asked)) as generation:
        chunks = [await anext(generation), await anext(generation)]
        await publish(publisher, spark(), engine)  # the same weights
        chunks += await _rest(generation)
    assert set(versions(chunks)) == {engine.version - 1, engine.version} and ids(chunks) == whole


async def test_calls_wait_while_weights_change(engine: VllmEngine) -> None:
    engine.hold()
    waiting = asyncio.create_task(collect(engine, request(prompt(12))))
    await asyncio.sleep(0.5)
    assert not waiting.done()
    engine.resume(5)
    assert set(versions(await waiting)) == {5}


async def test_an_abort_that_comes_before_the_hold_is_continued(engine: VllmEngine, publisher: VllmPublisher) -> None:
    chunks: list[TokenChunk] = []
    async with aclosing(engine.generate(request(prompt(13), 300))) as generation:
        chunks.append(await anext(generation))
        rest = asyncio.create_task(_rest(generation))
        await publisher.pause()
        await asyncio.sleep(0.2)
        engine.hold()
        await publisher.send(changed(4).named_parameters, next(NUMBERS))
        await publisher.resume()
        assert not rest.done()
        engine.resume(1)
        chunks += await rest
    of = versions(chunks)
    assert len(of) == 300 and of == sorted(of) and set(of) == {0, 1}
    assert close(logprobs(chunks)[of.index(1) :], scored(changed(4), prompt(13), ids(chunks))[of.index(1) :])


async def _rest(generation: AsyncIterator[TokenChunk]) -> list[TokenChunk]:
    return [chunk async for chunk in generation]


async def test_an_abort_without_a_weight_change_is_an_error(
    engine: VllmEngine, publisher: VllmPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("leyden.engine.vllm.engine._HOLD_TIMEOUT_S", 0.1)
    async with aclosing(engine.generate(request(prompt(14), 900))) as generation:
        await anext(generation)
        await publisher.pause()
        with pytest.raises(EngineError, match="aborted"):
            await _rest(generation)


async def test_the_routes_for_ipc_take_what_is_sent_to_them(vllm: VllmProcess, engine: VllmEngine) -> None:
    """Without a GPU there is nothing to transfer to, and vLLM says so rather than that a request is malformed."""
    async with control(str(vllm.socket)) as client:
        for path, body in (
            ("/init_weight_transfer_engine", {"init_info": {}}),
            ("/start_weight_update", None),
            ("/update_weights", {"update_info": {"names": [], "dtype_names": [], "shapes": []}}),
            ("/finish_weight_update", None),
        ):
            with pytest.raises(EngineError, match=r"(?i)weight.transfer"):
                await call(client, path, body)
    assert len(ids(await collect(engine, request(prompt(15))))) == 24


class SkippedTransfer:
    """Sends nothing."""

    async def send(self, client: aiohttp.ClientSession, weights: Callable[[], NamedTensors], version: int) -> Sent:
        return Sent({name: checksum(tensor) for name, tensor in weights()}, 0)


async def test_a_publication_that_did_not_arrive_is_found(vllm: VllmProcess, publisher: VllmPublisher) -> None:
    model = spark()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[3, 5] += 1e-4
    skipping = VllmPublisher(vllm.location, SkippedTransfer(), AdapterTransfer(Path()))
    await skipping.pause()
    with pytest.raises(EngineError, match=r"1 of \d+ tensors.*layers\.2\.mlp\.up_proj"):
        await skipping.send(model.named_parameters, 1)
    await publisher.send(model.named_parameters, next(NUMBERS))
