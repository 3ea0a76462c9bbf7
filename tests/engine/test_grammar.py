"""Completions follow their grammars, and say what the grammars left to the model."""

import asyncio
import copy
import json
from collections.abc import AsyncIterator
from importlib.resources import files

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from leyden.engine.grammar import GrammarCompiler, GrammarError, GrammarMatcher
from leyden.engine.protocol import EngineError, EngineRequest, TokenChunk
from leyden.engine.torch.engine import TorchEngine
from leyden.records import MIN_ALLOWED_MASS, Sampling
from leyden.rendering.tokenizer import Tokenizer

SPARK = str(files("leyden") / "models" / "spark")
TOKENIZER = Tokenizer.load(SPARK)
CALL, END = TOKENIZER.control_tokens["<tool_call>"], TOKENIZER.control_tokens["<|im_end|>"]
STOPS = (END,)
VERDICT = 'start: %json {"type": "object", "properties": {"verdict": {"enum": ["yes", "no", "unknown"]}}, '
VERDICT += '"required": ["verdict"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}'


@pytest.fixture(scope="module")
def spark() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(SPARK, dtype=torch.float32)


@pytest.fixture(params=[False, True], ids=["in order", "overlapping"])
async def engine(spark: PreTrainedModel, request: pytest.FixtureRequest) -> AsyncIterator[TorchEngine]:
    made = TorchEngine(spark, slots=8, tokenizer=TOKENIZER.control_json, overlap=request.param)
    yield made
    made.close()


async def new_matcher(grammar: str) -> GrammarMatcher:
    return await GrammarCompiler(TOKENIZER.control_json, len(TOKENIZER)).new_matcher(grammar, STOPS)


def allowed(matcher: GrammarMatcher) -> set[int]:
    return set(
        np.flatnonzero(np.unpackbits(np.frombuffer(matcher.allowed_bitmask(), np.uint8), bitorder="little")).tolist()
    )


def make_request(grammar: str | None, seed: int = 0, tokens: int = 60, **sampling: float) -> EngineRequest:
    prompt = TOKENIZER.encode("<|im_start|>user\nIs it so?<|im_end|>\n<|im_start|>assistant\n")
    settings = Sampling(seed=seed, **sampling)
    return EngineRequest(tuple(prompt), settings, STOPS, tokens, f"s{seed}", grammar=grammar)


async def complete(engine: TorchEngine, request: EngineRequest) -> list[TokenChunk]:
    return [chunk async for chunk in engine.generate(request)]


async def test_a_matcher_allows_what_its_grammar_does_and_then_the_end() -> None:
    matcher = await new_matcher('start: "ab" | "ac"')
    for text in ("a", "c"):
        (id,) = TOKENIZER.encode(text)
        assert id in allowed(matcher) and END not in allowed(matcher)
        matcher.accept(id)
    assert allowed(matcher) == {END}
    matcher.accept(END)
    assert matcher.error is None


async def test_text_matches_no_special_token_and_a_special_token_is_named_by_its_id() -> None:
    assert CALL not in allowed(await new_matcher(r"start: /(.|\n)*/"))
    assert allowed(await new_matcher(rf"start: <[{CALL}]> /(.|\n)*/")) == {CALL}


async def test_a_token_that_was_not_allowed_is_an_error() -> None:
    matcher = await new_matcher('start: "ab"')
    matcher.accept(CALL)
    assert matcher.error is not None and not allowed(matcher)


@pytest.mark.parametrize("grammar", ["start: (", 'start: %json {"type": "nothing"}'])
async def test_an_invalid_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(GrammarError):
        await new_matcher(grammar)


async def test_an_invalid_tokenizer_is_refused() -> None:
    with pytest.raises(GrammarError, match="tokens"):
        await GrammarCompiler("{}", 10).new_matcher('start: "a"', STOPS)


async def test_the_error_is_one_line() -> None:
    with pytest.raises(GrammarError, match=r"^[^\n]*look-around[^\n]*$"):
        await new_matcher('start: %json {"type": "string", "pattern": "(?=a)b"}')


async def test_cancelling_one_matcher_does_not_cancel_others_of_the_same_grammar() -> None:
    grammars = GrammarCompiler(TOKENIZER.control_json, len(TOKENIZER))
    first, second = (asyncio.create_task(grammars.new_matcher(VERDICT, STOPS)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).error is None


async def test_an_object_may_have_thousands_of_properties() -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2000)}}
    matcher = await new_matcher(f"start: %json {json.dumps(schema)}")
    for id in TOKENIZER.encode('{"p1": 1, "p77": 2}'):
        assert id in allowed(matcher)
        matcher.accept(id)
    assert END in allowed(matcher)


async def test_completions_follow_their_grammars_side_by_side_with_others(engine: TorchEngine) -> None:
    requests = [make_request(VERDICT if seed % 2 else None, seed) for seed in range(12)]
    answers = await asyncio.gather(*(complete(engine, request) for request in requests))
    for request, chunks in zip(requests, answers, strict=True):
        ids = [id for chunk in chunks for id in chunk.ids]
        assert sum(len(chunk.allowed) for chunk in chunks) == (len(ids) if request.grammar else 0)
        if request.grammar:
            assert ids[-1] == END and chunks[-1].finish == "stop"
            assert json.loads(TOKENIZER.decode(ids[:-1]))["verdict"] in ("yes", "no", "unknown")
    plain = [TOKENIZER.decode([id for chunk in chunks for id in chunk.ids]) for chunks in answers[::2]]
    assert not any("verdict" in text for text in plain)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_logprobs_are_of_the_allowed_tokens_and_their_mass_is_reported(
    engine: TorchEngine, spark: PreTrainedModel, temperature: float
) -> None:
    grammar = r'start: %json {"enum": ["yes", "no", "unknown"]} /[a-z ]{4}/'
    request = make_request(grammar, 3, temperature=temperature)
    chunks = await complete(engine, request)
    ids = [id for chunk in chunks for id in chunk.ids]
    logits = spark(input_ids=torch.tensor([[*request.prompt_ids, *ids]])).logits[0].detach().double() / temperature
    matcher, forced = await new_matcher(grammar), 0
    reported = [(lp, share) for chunk in chunks for lp, share in zip(chunk.logprobs, chunk.allowed, strict=True)]
    for id, (logprob, share), row in zip(ids, reported, logits[len(request.prompt_ids) - 1 :], strict=False):
        choices = sorted(allowed(matcher))
        logprobs = row.log_softmax(-1)
        mass = logprobs[choices].logsumexp(-1)
        assert logprob == pytest.approx((logprobs[id] - mass).item(), abs=1e-4)
        assert share == pytest.approx(mass.exp().item() if len(choices) > 1 else 0.0, abs=1e-4)
        forced += len(choices) == 1
        matcher.accept(id)
    assert forced and any(0 < share < MIN_ALLOWED_MASS for _, share in reported)


async def test_greedy_sampling_follows_the_grammar_too(engine: TorchEngine) -> None:
    request = make_request(VERDICT, temperature=0.0)
    first, second = [
        [id for chunk in await complete(engine, request) for id in chunk.ids] for request in (request, request)
    ]
    assert first == second and json.loads(TOKENIZER.decode(first[:-1]))


async def test_an_engine_refuses_a_grammar_that_it_cannot_follow_and_continues(
    engine: TorchEngine, spark: PreTrainedModel
) -> None:
    with pytest.raises(EngineError):
        await complete(engine, make_request("start: ("))
    bare = TorchEngine(spark, slots=1)
    try:
        with pytest.raises(EngineError, match="without a tokenizer"):
            await complete(bare, make_request(VERDICT))
        assert (await complete(bare, make_request(None)))[-1].finish is not None
    finally:
        bare.close()
    assert (await complete(engine, make_request(VERDICT)))[-1].finish == "stop"


async def test_logits_that_are_not_finite_are_detected_behind_a_grammar(spark: PreTrainedModel) -> None:
    broken = copy.deepcopy(spark)
    with torch.no_grad():
        broken.lm_head.weight[CALL] = torch.nan  # which the grammar never lets through
    engine = TorchEngine(broken, slots=1, tokenizer=TOKENIZER.control_json)
    try:
        with pytest.raises(EngineError, match="not finite"):
            await complete(engine, make_request(r"start: /[a-z ]+/"))
    finally:
        engine.close()
