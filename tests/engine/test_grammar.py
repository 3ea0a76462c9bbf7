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

from leyden.engine.grammar import GrammarError, Grammars, Matcher
from leyden.engine.protocol import EngineError, EngineRequest, TokenChunk
from leyden.engine.torch.engine import TorchEngine
from leyden.records import FREE, Sampling
from leyden.rendering.tokenizer import Tokenizer

SPARK = str(files("leyden") / "models" / "spark")
TOKENIZER = Tokenizer.load(SPARK)
CALL, END = TOKENIZER.marks["<tool_call>"], TOKENIZER.marks["<|im_end|>"]
STOPS = (END,)
VERDICT = 'start: %json {"type": "object", "properties": {"verdict": {"enum": ["yes", "no", "unknown"]}}, '
VERDICT += '"required": ["verdict"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}'


@pytest.fixture(scope="module")
def spark() -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(SPARK, dtype=torch.float32)


@pytest.fixture
async def engine(spark: PreTrainedModel) -> AsyncIterator[TorchEngine]:
    made = TorchEngine(spark, slots=8, tokenizer=TOKENIZER.marked)
    yield made
    made.close()


async def matcher(grammar: str) -> Matcher:
    return await Grammars(TOKENIZER.marked, len(TOKENIZER)).begin(grammar, STOPS)


def allowed(at: Matcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(at.allowed(), np.uint8), bitorder="little")).tolist())


def ask(grammar: str | None, seed: int = 0, tokens: int = 60, **sampling: float) -> EngineRequest:
    prompt = TOKENIZER.encode("<|im_start|>user\nIs it so?<|im_end|>\n<|im_start|>assistant\n")
    drawn = Sampling(seed=seed, **sampling)  # type: ignore[arg-type]
    return EngineRequest(tuple(prompt), drawn, STOPS, tokens, f"s{seed}", grammar=grammar)


async def complete(engine: TorchEngine, request: EngineRequest) -> list[TokenChunk]:
    return [piece async for piece in engine.generate(request)]


async def test_a_matcher_allows_what_its_grammar_does_and_then_the_end() -> None:
    at = await matcher('start: "ab" | "ac"')
    for text in ("a", "c"):
        (id,) = TOKENIZER.encode(text)
        assert id in allowed(at) and END not in allowed(at)
        at.take(id)
    assert allowed(at) == {END}
    at.take(END)
    assert at.trouble is None


async def test_text_matches_no_mark_and_a_mark_is_named_by_its_id() -> None:
    assert CALL not in allowed(await matcher(r"start: /(.|\n)*/"))
    assert allowed(await matcher(rf"start: <[{CALL}]> /(.|\n)*/")) == {CALL}


async def test_a_token_that_was_not_allowed_is_trouble() -> None:
    at = await matcher('start: "ab"')
    at.take(CALL)
    assert at.trouble is not None and not allowed(at)


@pytest.mark.parametrize("grammar", ["start: (", 'start: %json {"type": "nothing"}'])
async def test_what_is_no_grammar_is_refused(grammar: str) -> None:
    with pytest.raises(GrammarError):
        await matcher(grammar)


async def test_what_is_no_tokenizer_is_refused() -> None:
    with pytest.raises(GrammarError, match="tokens"):
        await Grammars("{}", 10).begin('start: "a"', STOPS)


async def test_the_reason_is_told_in_one_line() -> None:
    with pytest.raises(GrammarError, match=r"^[^\n]*look-around[^\n]*$"):
        await matcher('start: %json {"type": "string", "pattern": "(?=a)b"}')


async def test_who_stops_waiting_for_a_grammar_takes_it_from_nobody() -> None:
    grammars = Grammars(TOKENIZER.marked, len(TOKENIZER))
    first, second = (asyncio.create_task(grammars.begin(VERDICT, STOPS)) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).trouble is None


async def test_an_object_may_have_thousands_of_properties() -> None:
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(2000)}}
    at = await matcher(f"start: %json {json.dumps(schema)}")
    for id in TOKENIZER.encode('{"p1": 1, "p77": 2}'):
        assert id in allowed(at)
        at.take(id)
    assert END in allowed(at)


async def test_completions_follow_their_grammars_side_by_side_with_others(engine: TorchEngine) -> None:
    asked = [ask(VERDICT if seed % 2 else None, seed) for seed in range(12)]
    answers = await asyncio.gather(*(complete(engine, request) for request in asked))
    for request, pieces in zip(asked, answers, strict=True):
        ids = [id for piece in pieces for id in piece.ids]
        assert sum(len(piece.allowed) for piece in pieces) == (len(ids) if request.grammar else 0)
        if request.grammar:
            assert ids[-1] == END and pieces[-1].finish == "stop"
            assert json.loads(TOKENIZER.decode(ids[:-1]))["verdict"] in ("yes", "no", "unknown")
    plain = [TOKENIZER.decode([id for piece in pieces for id in piece.ids]) for pieces in answers[::2]]
    assert not any("verdict" in text for text in plain)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
async def test_logprobs_are_of_what_was_allowed_and_the_rest_is_told(
    engine: TorchEngine, spark: PreTrainedModel, temperature: float
) -> None:
    grammar = r'start: %json {"enum": ["yes", "no", "unknown"]} /[a-z ]{4}/'
    request = ask(grammar, 3, temperature=temperature)
    pieces = await complete(engine, request)
    ids = [id for piece in pieces for id in piece.ids]
    logits = spark(input_ids=torch.tensor([[*request.prompt_ids, *ids]])).logits[0].detach().double() / temperature
    at, forced = await matcher(grammar), 0
    told = [(lp, share) for piece in pieces for lp, share in zip(piece.logprobs, piece.allowed, strict=True)]
    for id, (logprob, share), row in zip(ids, told, logits[len(request.prompt_ids) - 1 :], strict=False):
        choices = sorted(allowed(at))
        logprobs = row.log_softmax(-1)
        mass = logprobs[choices].logsumexp(-1)
        assert logprob == pytest.approx((logprobs[id] - mass).item(), abs=1e-4)
        assert share == pytest.approx(mass.exp().item() if len(choices) > 1 else 0.0, abs=1e-4)
        forced += len(choices) == 1
        at.take(id)
    assert forced and any(0 < share < FREE for _, share in told)


async def test_the_likeliest_follows_the_grammar_too(engine: TorchEngine) -> None:
    request = ask(VERDICT, temperature=0.0)
    first, second = [
        [id for piece in await complete(engine, request) for id in piece.ids] for request in (request, request)
    ]
    assert first == second and json.loads(TOKENIZER.decode(first[:-1]))


async def test_an_engine_says_what_it_cannot_follow_and_goes_on(engine: TorchEngine, spark: PreTrainedModel) -> None:
    with pytest.raises(EngineError):
        await complete(engine, ask("start: ("))
    bare = TorchEngine(spark, slots=1)
    try:
        with pytest.raises(EngineError, match="no tokenizer"):
            await complete(bare, ask(VERDICT))
        assert (await complete(bare, ask(None)))[-1].finish is not None
    finally:
        bare.close()
    assert (await complete(engine, ask(VERDICT)))[-1].finish == "stop"


async def test_a_model_whose_logits_are_not_numbers_is_found_out_behind_a_grammar(spark: PreTrainedModel) -> None:
    broken = copy.deepcopy(spark)
    with torch.no_grad():
        broken.lm_head.weight[CALL] = torch.nan  # which the grammar never lets through
    engine = TorchEngine(broken, slots=1, tokenizer=TOKENIZER.marked)
    try:
        with pytest.raises(EngineError, match="not numbers"):
            await complete(engine, ask(r"start: /[a-z ]+/"))
    finally:
        engine.close()
