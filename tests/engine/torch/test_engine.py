"""The embedded engine as its callers see it: exact logprobs while requests join, leave and weights are updated."""

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, closing, suppress
from typing import Any

import pytest
import torch
import uvloop
from small_engines import CONTEXT, VOCABULARY, Answer, check, complete, expected, make, make_request, prompt, publish
from transformers import LlamaForCausalLM, PreTrainedModel

from leyden.engine.protocol import EngineError, EngineLost, EngineRequest
from leyden.engine.torch import batch
from leyden.engine.torch.engine import TorchEngine
from leyden.engine.torch.kv_cache import KVCache
from leyden.engine.torch.sampling import SampledBatch, SampledToken
from leyden.records import Sampling


@pytest.fixture(
    params=[
        pytest.param(("llama", False), id="llama-in order"),
        pytest.param(("llama", True), id="llama-overlapping"),
        pytest.param(("gpt-neox", True), id="gpt-neox-overlapping"),
        pytest.param(("gpt-neox", False), id="gpt-neox-in order", marks=pytest.mark.slow),
    ]
)
def kind(request: pytest.FixtureRequest) -> tuple[str, bool]:
    """The kind of the model, and whether a step is started before the tokens of the one before are read."""
    name, overlap = request.param
    return name, overlap


@pytest.fixture
def model(kind: tuple[str, bool]) -> PreTrainedModel:
    return make(kind[0])


@pytest.fixture
def llama() -> PreTrainedModel:
    return make("llama")


@pytest.fixture
async def engine(model: PreTrainedModel, kind: tuple[str, bool]) -> AsyncIterator[TorchEngine]:
    made = TorchEngine(model, slots=8, version=3, prefill_tokens=50, overlap=kind[1])
    yield made
    made.close()


async def test_logprobs_are_the_trainers(model: PreTrainedModel, engine: TorchEngine) -> None:
    answers = await asyncio.gather(
        *(
            complete(engine, make_request(prompt(i, 5 + 40 * i), 30, f"s{i}", seed=i, temperature=0.7))
            for i in range(12)
        )
    )
    for answer in answers:
        assert len(answer.ids) == 30
        check(model, answer, 0.7)
        assert set(answer.versions) == {3}


async def test_turns_of_a_session_reuse_all_earlier_turns(model: PreTrainedModel, engine: TorchEngine) -> None:
    ids = prompt(0, 120)
    for turn in range(4):
        before = engine.stats.prompt_computed
        answer = await complete(engine, make_request(ids, 20, "conversation", seed=turn))
        check(model, answer)
        if turn:  # the last sampled token was never computed
            assert engine.stats.prompt_computed - before == 15 + 1
        ids = (*answer.whole, *prompt(turn, 15))


async def test_a_continued_completion_is_penalised_for_its_earlier_tokens(llama: PreTrainedModel) -> None:
    with closing(TorchEngine(llama, slots=2)) as engine:
        penalised = make_request(prompt(0, 9), 30, temperature=0.0, presence_penalty=1.0, frequency_penalty=0.5)
        whole = (await complete(engine, penalised)).ids
        rest = (await complete(engine, penalised.after(tuple(whole[:12])))).ids
    assert whole[12:] == rest


async def test_siblings_compute_their_prompt_once(model: PreTrainedModel, engine: TorchEngine) -> None:
    answers = await asyncio.gather(
        *(complete(engine, make_request(prompt(0, 200), 20, f"s{i}", seed=i)) for i in range(8))
    )
    assert len({tuple(answer.ids) for answer in answers}) == 8
    for answer in answers:
        check(model, answer)
    assert engine.stats.prompt_computed == 200 + 7
    assert engine.stats.sampled_tokens == 8 * 20


async def test_without_prefix_caching_a_completion_does_not_depend_on_earlier_requests(llama: PreTrainedModel) -> None:
    requests = [make_request((*prompt(0, 90), *prompt(i, 30)), 20, f"s{i}") for i in range(3)]
    found = []
    for order in ((0, 1, 2), (2, 1, 0)):
        engine = TorchEngine(llama, slots=1, prefix_caching=False)
        try:
            answers = {i: await complete(engine, requests[i]) for i in order}
        finally:
            engine.close()
        assert engine.stats.prompt_computed == 3 * 120
        found.append([answers[i].logprobs for i in range(3)])
    assert found[0] == found[1]  # to the last bit


async def test_a_request_samples_the_same_alone_and_in_a_changing_batch(
    model: PreTrainedModel, engine: TorchEngine
) -> None:
    requests = [make_request(prompt(i, 10 + 37 * i % 90), 10 + 7 * i % 30, f"s{i}", temperature=0.0) for i in range(12)]
    together = await asyncio.gather(*(complete(engine, request) for request in requests))
    for answer, request in zip(together, requests, strict=True):
        assert answer.ids == (await complete(engine, request)).ids
        check(model, answer)


async def test_more_requests_than_slots_are_served_in_order(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama, slots=2)
    ended: list[int] = []

    async def one(number: int) -> None:
        check(llama, await complete(engine, make_request(prompt(number, 20), 15, f"s{number}", seed=number)))
        ended.append(number)

    await asyncio.gather(*map(one, range(9)))
    assert all(abs(number - at) <= 1 for at, number in enumerate(ended))
    engine.close()


async def test_seeds_reproduce(engine: TorchEngine) -> None:
    first, again, other = [
        (await complete(engine, make_request(prompt(0, 10), 30, seed=seed))).ids for seed in (5, 5, 6)
    ]
    assert first == again != other


async def test_stop_tokens_end_the_completion_and_are_part_of_it(engine: TorchEngine) -> None:
    free = await complete(engine, make_request(prompt(0, 10), 30))
    stopped = await complete(engine, make_request(prompt(0, 10), 30, stop=(free.ids[12],)))
    assert stopped.ids == free.ids[: free.ids.index(free.ids[12]) + 1]
    assert (free.chunks[-1].finish, stopped.chunks[-1].finish) == ("length", "stop")


async def test_top_logprobs(model: PreTrainedModel, engine: TorchEngine) -> None:
    request = EngineRequest(prompt(0, 10), Sampling(seed=1), (), 12, "s", top_logprobs=5)
    answer = await complete(engine, request)
    tops = [top for chunk in answer.chunks for top in chunk.top]
    assert [len(top) for top in tops] == [5] * 12
    with torch.no_grad():
        logprobs = torch.log_softmax(model(torch.tensor([answer.whole])).logits[0, 9:-1], -1)
    for top, row in zip(tops, logprobs, strict=True):
        assert [id for id, _ in top] == row.topk(5).indices.tolist()
        assert [value for _, value in top] == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)


async def test_penalised_and_plain_requests_sample_the_same_whether_steps_overlap_or_not(
    llama: PreTrainedModel,
) -> None:
    found = []
    for overlap in (False, True):
        engine = TorchEngine(llama, slots=6, overlap=overlap)
        requests = [make_request(prompt(i, 30), 25, f"s{i}", seed=i, repetition_penalty=1 + i % 2) for i in range(6)]
        answers = await asyncio.gather(*(complete(engine, request) for request in requests))
        found.append([answer.ids for answer in answers])
        engine.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("overlap", [False, True])
async def test_with_overlap_a_step_starts_before_the_tokens_of_the_one_before_are_read(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    engine = TorchEngine(llama, overlap=overlap)
    forward, read, events = engine._batch.forward, SampledBatch.read, []

    class Recorded:
        def __call__(self, *args: Any) -> torch.Tensor:
            events.append("step")
            return forward(*args)

    def recorded_read(sampled: SampledBatch) -> list[SampledToken]:
        events.append("read")
        return read(sampled)

    monkeypatch.setattr(engine._batch, "forward", Recorded())
    monkeypatch.setattr(SampledBatch, "read", recorded_read)
    await complete(engine, make_request(prompt(0, 10), 4))
    engine.close()
    in_order = ["step", "read"] * 4
    assert events == (["step", *["step", "read"] * 3, "read"] if overlap else in_order)


async def test_a_request_that_stops_leaves_its_slot_usable_while_the_next_step_runs(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama, slots=1, overlap=True)
    free = await complete(engine, make_request(prompt(0, 10), 30))
    stop = free.ids[12]
    stopped, after = await asyncio.gather(
        complete(engine, make_request(prompt(0, 10), 30, stop=(stop,))),
        complete(engine, make_request(prompt(1, 40), 30, "other", seed=3)),
    )
    assert stopped.ids == free.ids[: free.ids.index(stop) + 1]
    check(llama, after)
    check(llama, await complete(engine, make_request((*stopped.whole, 1, 2), 10)))
    engine.close()


async def test_the_context_is_the_limit(model: PreTrainedModel, engine: TorchEngine) -> None:
    answer = await complete(engine, make_request(prompt(0, CONTEXT - 10), 100))
    assert len(answer.whole) == CONTEXT
    assert answer.chunks[-1].finish == "length"
    check(model, answer)


@pytest.mark.parametrize(
    "request_",
    [
        make_request(()),
        make_request((1, VOCABULARY)),
        make_request((-1,)),
        make_request(prompt(0, CONTEXT)),
        make_request((1,), tokens=0),
        make_request((1,), temperature=-1.0),
        make_request((1,), repetition_penalty=0.0),
    ],
)
async def test_an_invalid_request_is_refused_and_others_continue(
    llama: PreTrainedModel, request_: EngineRequest
) -> None:
    engine = TorchEngine(llama)
    other = asyncio.create_task(complete(engine, make_request(prompt(0, 10), 50)))
    with pytest.raises(EngineError):
        await complete(engine, request_)
    assert len((await other).ids) == 50
    engine.close()


async def test_closing_the_stream_frees_the_slot_and_keeps_what_was_computed(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama, slots=1)
    async with aclosing(engine.generate(make_request(prompt(0, 40), 600, "first"))) as chunks:
        begun = await anext(chunks)
    computed = engine.stats.prompt_computed
    answer = await complete(engine, make_request((*prompt(0, 40), *begun.ids, 5, 6), 10, "first"))
    check(llama, answer)
    assert engine.stats.prompt_computed - computed <= 3
    assert engine.stats.sampled_tokens < 600
    engine.close()


async def test_a_waiting_request_can_be_cancelled(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama, slots=1)
    first = asyncio.create_task(complete(engine, make_request(prompt(0, 10), 200, "a")))
    second = asyncio.create_task(complete(engine, make_request(prompt(1, 10), 200, "b")))
    third = asyncio.create_task(complete(engine, make_request(prompt(2, 10), 5, "c")))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.gather(first, third)
    assert second.cancelled()
    assert engine.stats.sampled_tokens == 205
    engine.close()


async def test_tokens_are_streamed(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama)
    answer = await complete(engine, make_request(prompt(0, 10), 600))
    assert len(answer.chunks[0].ids) == 1
    assert len(answer.chunks) > 3
    engine.close()


async def sample_across_an_update(
    model: PreTrainedModel, old: PreTrainedModel, engine: TorchEngine, tokens: int
) -> None:
    """Sample requests whose first tokens are of the old weights and the rest of the new."""

    def write() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)

    requests = [make_request(prompt(i // 2, 60), tokens, f"s{i}", seed=i) for i in range(6)]
    answers = [Answer(request) for request in requests]
    begun = asyncio.Event()

    async def read(answer: Answer) -> None:
        async for chunk in engine.generate(answer.request):
            answer.chunks.append(chunk)
            if all(len(one.chunks) > 1 for one in answers):
                begun.set()

    readers = [asyncio.create_task(read(answer)) for answer in answers]
    await asyncio.wait([asyncio.create_task(begun.wait()), *readers], return_when=asyncio.FIRST_COMPLETED)
    await publish(engine, 4, write)
    assert engine.version == 4
    await asyncio.gather(*readers)
    for answer in answers:
        versions, count = answer.versions, answer.versions.count(3)
        assert versions == [3] * count + [4] * (tokens - count)
        assert 0 < count < tokens
        got = torch.tensor(answer.logprobs)
        torch.testing.assert_close(got[:count], expected(old, answer)[:count], atol=1e-4, rtol=0)
        torch.testing.assert_close(got[count:], expected(model, answer)[count:], atol=1e-4, rtol=0)
    check(model, await complete(engine, make_request(prompt(0, 60), 20, "s0")))


async def test_between_two_deliveries_tokens_are_collected(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch, "flush_interval", lambda requests: 3600.0 * requests)
    engine = TorchEngine(llama)
    requests = [make_request(prompt(seed, 5), 20 + 10 * seed, f"s{seed}", seed=seed) for seed in range(3)]
    answers = await asyncio.gather(*(complete(engine, request) for request in requests))
    engine.close()
    # the first and the last token at once, the last with all between
    assert [[len(chunk.ids) for chunk in answer.chunks] for answer in answers] == [[1, 19], [1, 29], [1, 39]]


def test_the_interval_between_deliveries_bounds_their_number() -> None:
    assert [batch.flush_interval(requests) for requests in (0, 1, 100, 10_000)] == [0.01, 0.01, 0.04, 0.2]


async def test_tokens_after_an_update_are_of_the_new_weights(model: PreTrainedModel, engine: TorchEngine) -> None:
    old = make("llama" if isinstance(model, LlamaForCausalLM) else "gpt-neox")
    await sample_across_an_update(model, old, engine, 120)


@pytest.mark.parametrize("kind", ["llama", "gpt-neox"])
async def test_an_engine_in_another_precision_samples_from_its_own_copy_which_updates_write_in_place(kind: str) -> None:
    model, engine = make(kind), None
    try:
        engine = TorchEngine(model, slots=8, version=3, prefill_tokens=50, overlap=True, dtype=torch.float64)
        await sample_across_an_update(model, make(kind), engine, 60)
    finally:
        if engine is not None:
            engine.close()


async def test_a_change_that_is_not_published_is_not_sampled_from_where_the_engine_has_a_copy(
    llama: PreTrainedModel,
) -> None:
    engine = TorchEngine(llama, dtype=torch.float64)
    with torch.no_grad():
        for parameter in llama.parameters():
            parameter.mul_(0.9)
    check(make("llama"), await complete(engine, make_request(prompt(0, 30))))
    await publish(engine, 1)
    check(llama, await complete(engine, make_request(prompt(0, 30))))
    engine.close()


async def test_the_kv_cache_limits_the_longest_sequence(
    llama: PreTrainedModel, caplog: pytest.LogCaptureFixture
) -> None:
    token = 2 * 2 * 2 * 8 * 4  # keys and values, layers, heads, size, float32
    engine = TorchEngine(llama, slots=3, kv_cache_bytes=4 * 100 * token)
    assert engine.context_length == 100 < CONTEXT
    assert "100 tokens" in caplog.text and "engine.slots" in caplog.text
    assert len((await complete(engine, make_request(prompt(0, 90), 50))).whole) == 100
    with pytest.raises(EngineError, match="1 to 99 tokens"):
        await complete(engine, make_request(prompt(0, 100), 50))
    engine.close()


@pytest.mark.parametrize("kind", ["mamba", "lfm2"])
async def test_models_whose_layers_are_not_all_attention_have_exact_logprobs_too(kind: str) -> None:
    model = make(kind)
    engine = TorchEngine(model, slots=8, version=3, prefill_tokens=50)
    await sample_across_an_update(model, make(kind), engine, 40)
    assert engine.stats.prompt_reused == 0
    engine.close()


async def test_they_share_no_prefix_when_an_update_comes_in_the_middle_of_a_prompt() -> None:
    model = make("lfm2")
    engine = TorchEngine(model, slots=2, prefill_tokens=4)
    first, second = (engine.generate(make_request(prompt(0, 300), 3, f"s{i}", seed=i)) for i in range(2))
    answers = Answer(make_request(prompt(0, 300))), Answer(make_request(prompt(0, 300)))
    waiting = asyncio.create_task(anext(second))
    answers[0].chunks.append(await anext(first))
    await publish(engine, 1)
    answers[1].chunks.append(await waiting)
    for answer, generator in zip(answers, (first, second), strict=True):
        answer.chunks.extend([chunk async for chunk in generator])
        check(model, answer)
    engine.close()


async def test_an_update_that_fails_raises_and_the_engine_continues(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama)
    going = asyncio.create_task(complete(engine, make_request(prompt(0, 10), 100)))

    def fail() -> None:
        raise ZeroDivisionError("no step")

    with pytest.raises(ZeroDivisionError):
        await publish(engine, 1, fail)
    assert engine.version == 0
    check(llama, await going)
    engine.close()


async def test_the_error_of_a_failed_update_is_reported_once(llama: PreTrainedModel) -> None:
    engine, unhandled = TorchEngine(llama), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unhandled.append(context))
    with suppress(ZeroDivisionError):  # `pytest.raises` keeps the frames, and with them futures
        async with engine.changing_weights(1):
            raise ZeroDivisionError("no step")
    engine.close()
    gc.collect()
    assert not unhandled


async def test_the_trainer_computes_gradients_while_the_engine_samples(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama)
    llama.train()
    going = [asyncio.create_task(complete(engine, make_request(prompt(i, 30), 200, f"s{i}", seed=i))) for i in range(4)]

    def learn() -> torch.Tensor:
        ids = torch.tensor([prompt(9, 50)])
        llama(ids, labels=ids).loss.backward()
        return torch.cat([parameter.grad.flatten() for parameter in llama.parameters() if parameter.grad is not None])

    beside = await asyncio.to_thread(learn)
    answers = await asyncio.gather(*going)
    llama.zero_grad()
    torch.testing.assert_close(beside, learn())
    for answer in answers:
        check(llama, answer)
    engine.close()


async def test_a_step_that_fails_fails_its_requests_and_no_others(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(llama)
    real = engine._batch.forward

    class Broken:
        def __call__(self, *args: object) -> torch.Tensor:
            raise MemoryError("no room")

    monkeypatch.setattr(engine._batch, "forward", Broken())
    with pytest.raises(EngineError, match="MemoryError: no room"):
        await complete(engine, make_request(prompt(0, 10)))
    monkeypatch.setattr(engine._batch, "forward", real)
    check(llama, await complete(engine, make_request(prompt(0, 10))))
    engine.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_long_requests_are_served_after_the_kv_cache_could_not_grow(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    engine = TorchEngine(llama, slots=2, dtype=dtype)
    await complete(engine, make_request(prompt(0, 10)))
    real, allocations = KVCache._zeros, []

    def fail_second(cache: KVCache, *shape: int) -> torch.Tensor:
        allocations.append(shape)
        if len(allocations) == 2:
            raise MemoryError("no room")
        return real(cache, *shape)

    monkeypatch.setattr(KVCache, "_zeros", fail_second)
    with pytest.raises(EngineError, match="no room"):
        await complete(engine, make_request(prompt(1, 300)))
    answer = await complete(engine, make_request(prompt(1, 300)))
    assert len(answer.ids) == 20
    if dtype is torch.float32:
        check(llama, answer)
    engine.close()


async def test_an_engine_whose_thread_dies_is_lost_and_fails_its_run(
    llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = TorchEngine(llama)
    failing = asyncio.create_task(engine.wait_failed())

    def die() -> None:
        raise SystemExit("no kernel")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(engine._batch, "step", die)
    for _ in range(2):
        with pytest.raises(EngineLost, match="ended: SystemExit: no kernel"):
            await complete(engine, make_request(prompt(0, 10)))
    for waiting in (failing, engine.wait_failed()):
        with pytest.raises(EngineLost, match="ended: SystemExit: no kernel"):
            await asyncio.wait_for(waiting, 10)
    engine.close()


@pytest.mark.parametrize("lost", [True, False])
async def test_an_engine_ends_when_its_device_fails_and_goes_on_after_another_failure(
    lost: bool, llama: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stream:
        def synchronize(self) -> None:
            if lost:
                raise RuntimeError("the device is lost")

    def fail() -> None:
        monkeypatch.setattr(engine._batch, "step", step)
        raise torch.OutOfMemoryError("no memory")

    engine = TorchEngine(llama)
    step = engine._batch.step
    await complete(engine, make_request(prompt(0, 10)))
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(engine, "_stream", Stream())
    monkeypatch.setattr(engine._batch, "step", fail)
    with pytest.raises(EngineError, match=r"OutOfMemoryError: no memory \(lower `engine.slots`"):
        await complete(engine, make_request(prompt(0, 10)))
    if lost:
        with pytest.raises(EngineLost, match="ended: RuntimeError: the device is lost"):
            await asyncio.wait_for(engine.wait_failed(), 10)
    else:
        check(llama, await complete(engine, make_request(prompt(0, 10))))
    engine.close()


async def test_weights_that_are_not_finite_fail_requests_until_they_are_replaced(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama, slots=1)
    weights = {name: parameter.clone() for name, parameter in llama.state_dict().items()}

    def ruin() -> None:
        with torch.no_grad():
            next(iter(llama.parameters())).fill_(torch.nan)

    await publish(engine, 1, ruin)
    with pytest.raises(EngineError, match="diverged"):
        await complete(engine, make_request(prompt(0, 100)))
    await publish(engine, 2, lambda: llama.load_state_dict(weights))
    check(llama, await complete(engine, make_request(prompt(0, 10))))
    engine.close()


async def test_closing_fails_requests_in_flight(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama, slots=1)
    going = [asyncio.create_task(complete(engine, make_request(prompt(i, 10), 600, f"s{i}"))) for i in range(3)]
    await asyncio.sleep(0)
    await asyncio.to_thread(engine.close)
    for failed in await asyncio.gather(*going, return_exceptions=True):
        assert isinstance(failed, EngineLost)
    with pytest.raises(EngineLost, match="ended"):
        await complete(engine, make_request(prompt(0, 10)))
    with pytest.raises(EngineLost, match="ended"):
        await publish(engine, 1)
    engine.close()


async def test_closing_does_not_wait_for_a_weight_change_and_fails_it(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama)
    with pytest.raises(EngineLost, match="ended"):
        async with engine.changing_weights(1):
            closing = threading.Thread(target=engine.close, daemon=True)  # daemon: so that a test that fails ends
            closing.start()
            await asyncio.to_thread(closing.join, 20)
            assert not closing.is_alive()
    assert engine.version == 0


async def test_an_ended_session_is_evicted_before_others(llama: PreTrainedModel) -> None:
    engine = TorchEngine(llama, slots=2)
    await complete(engine, make_request(prompt(0, 100), 5, "kept"))
    await complete(engine, make_request(prompt(1, 100), 5, "over"))
    engine.end_session("over")
    await complete(engine, make_request(prompt(2, 100), 5, "new"))
    before = engine.stats.prompt_reused
    await complete(engine, make_request(prompt(0, 100), 5, "kept"))
    assert engine.stats.prompt_reused - before == 99
    engine.close()


@pytest.fixture
def idle(llama: PreTrainedModel) -> Iterator[TorchEngine]:
    engine = TorchEngine(llama)
    engine.start()
    yield engine
    engine.close()


def test_several_event_loops_share_one_engine(idle: TorchEngine, llama: PreTrainedModel) -> None:
    answers: dict[int, Answer] = {}

    def request_alone(number: int) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop if number % 2 else None) as runner:
            answers[number] = runner.run(
                complete(idle, make_request(prompt(number, 20), 50, f"s{number}", seed=number))
            )

    threads = [threading.Thread(target=request_alone, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(4):
        check(llama, answers[number])


def test_other_threads_keep_their_number_of_torch_threads(llama: PreTrainedModel) -> None:
    def seen() -> int:
        numbers: list[int] = []
        thread = threading.Thread(target=lambda: numbers.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return numbers[0]

    before, here = seen(), torch.get_num_threads()
    engine = TorchEngine(llama, threads=before + 1)
    asyncio.run(complete(engine, make_request((1, 2, 3), 2)))
    assert (seen(), torch.get_num_threads()) == (before, here)
    engine.close()
