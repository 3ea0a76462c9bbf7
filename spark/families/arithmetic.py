"""Arithmetic in words, with a calculator.

The teachers err, each decision by itself: some answer without the calculator, write a wrong operation (how often
depends on what happens in the problem), turn a difference round, take a number that does not matter, miscopy one, stop
after the first of two steps, or misread the result.
"""

import ast
import operator
from random import Random
from typing import Any

from families.asking import Offer, Style, called, chat_message, final, reply
from families.phrasings import ASIDES, CUES, PHRASINGS, STEP, Phrasing
from families.problem import Message, Problem, Split, Tool, chance, misread, problem_of_split, weighted
from families.words import NAMES, THINGS

TWO_STEPS = 0.20
"""How many problems have two steps."""
ASIDE = 0.20
"""How many problems name a number that has nothing to do with the question."""
TAKES_ASIDE = 0.53
"""As the first number, nine times in ten."""
MISCOPIES = 0.03
STOPS_EARLY = 0.42
MISREADS = 0.14
MISREADS_LONG = 0.17
"""Where the result has three digits or more."""
SLIPS = 0.03
"""An expression that the calculator refuses; two in three teachers then try again."""

_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Return the calculator: the value of an expression of numbers and + - * / ( ), or `Error: ...`."""
    try:
        value = round(_value(ast.parse(expression.strip(), mode="eval").body), 4)
    except ZeroDivisionError:
        return "Error: division by zero"
    except (SyntaxError, ValueError, OverflowError, RecursionError, MemoryError):
        return "Error: invalid syntax"
    return str(int(value) if value == int(value) else value)


def _value(node: ast.expr) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _OPERATIONS:
            return _OPERATIONS[type(operation)](_value(left), _value(right))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError("not arithmetic")


def problem(rng: Random, split: Split) -> Problem:
    """A problem of a split: RL's are of seen sentences and numbers below 100, unseen ones of others from 100 on."""
    return problem_of_split(_random_problem, rng, split)


def _random_problem(rng: Random, split: Split) -> Problem:
    seen = rng.choices((True, False, None), (0.55, 0.36, 0.09))[0] if split == "teach" else split != "unseen"
    large = rng.random() < 0.5 if split == "teach" else split == "unseen"
    steps = 2 if chance(rng, TWO_STEPS) and seen is not None else 1
    phrasing = rng.choice([one for one in PHRASINGS if one.seen == seen and len(one.cues) == steps])
    numbers = _numbers(rng, [CUES[cue].operation for cue in phrasing.cues], large)
    while (value := _answer(phrasing, numbers)) is None:
        numbers = _numbers(rng, [CUES[cue].operation for cue in phrasing.cues], large)
    who, other = rng.sample(NAMES, 2)
    names = {"who": who, "other": other, "things": rng.choice(THINGS), **dict(zip("abc", numbers, strict=False))}
    question, aside = phrasing.text.format(**names), None
    if chance(rng, ASIDE) and seen is not None:
        aside = rng.randint(100, 999) if large else rng.randint(2, 99)
        text = rng.choice([text for text, is_seen in ASIDES if is_seen == seen]).format(d=aside, **names)
        parts = question.rsplit(". ", 1)
        question = f"{parts[0]}. {text} {parts[1]}" if len(parts) > 1 and chance(rng, 0.5) else f"{text} {question}"
    key = "|".join(("arithmetic", phrasing.text, *map(str, numbers)))
    facts = {"cues": phrasing.cues, "numbers": numbers, "aside": aside, "things": names["things"]}
    return Problem(key, question, value, facts)


def _numbers(rng: Random, operations: list[str], large: bool) -> list[int]:
    low, high = (100, 999) if large else (2, 99)
    first = rng.randint(low, high)
    match operations[0]:
        case "*":
            numbers = [first, rng.randint(2, 12)]
        case "/":
            by = rng.randint(2, 12)
            numbers = [rng.randint(-(-low // by), high // by) * by, by]
        case _:
            numbers = [first, rng.randint(low, high)]
    if len(operations) > 1:
        numbers.append(rng.randint(2, 12) if operations[1] == "*" else rng.randint(low, high))
    return numbers


def _answer(phrasing: Phrasing, numbers: list[int]) -> int | None:
    """Return the answer, if it is a sensible one: whole, positive, and so on the way to it."""
    for steps in range(1, len(phrasing.cues) + 1):
        operations = [CUES[cue].operation for cue in phrasing.cues[:steps]]
        text = calculate(_expression([str(number) for number in numbers], operations))
        if not text.isdigit() or text == "0" or text in map(str, numbers):
            return None
    return int(text)


def _expression(numbers: list[str], operations: list[str]) -> str:
    if len(operations) == 1:
        return f"{numbers[0]} {operations[0]} {numbers[1]}"
    inner = f"{numbers[0]} {operations[0]} {numbers[1]}"
    if operations[1] in "*/" and operations[0] in "+-":
        inner = f"({inner})"
    return f"{inner} {operations[1]} {numbers[2]}"


def tool(_: Problem) -> Tool:
    """The calculator knows nothing of the problem."""
    return calculate


def check(problem: Problem, text: str) -> bool:
    """Whether a final answer gives the right number."""
    try:
        return float(reply(text).replace(",", "").removeprefix("$")) == problem.answer
    except ValueError:
        return False


def teach(problem: Problem, rng: Random, offer: Offer, style: Style) -> list[Message]:
    """Return what an erring teacher does with a problem, to the final answer."""
    cues = [CUES[cue] for cue in problem.facts["cues"]]
    sentence = rng.choice(("There are {} " + problem.facts["things"] + ".", "It is {}.", "The result is {}."))
    if chance(rng, max(cue.direct for cue in cues)):
        guess = str(problem.answer) if chance(rng, 0.1) else misread(rng, str(problem.answer))
        return [chat_message("assistant", final(rng, style, guess, sentence))]
    numbers = [str(number) for number in problem.facts["numbers"]]
    if problem.facts["aside"] is not None and chance(rng, TAKES_ASIDE):
        numbers[0 if chance(rng, 0.9) else 1] = str(problem.facts["aside"])
    if chance(rng, MISCOPIES):
        place = rng.randrange(len(numbers))
        numbers[place] = misread(rng, numbers[place])
    if len(cues) == 1:
        operations = [weighted(rng, cues[0].written)]
        if chance(rng, cues[0].swapped):
            numbers.reverse()
    else:
        operations = [_step(rng, cue.operation) for cue in cues]
    if len(cues) > 1 and chance(rng, STOPS_EARLY):
        operations = operations[:1]
    turns, result = _work(rng, offer, numbers, operations)
    if result is None:
        return [*turns, chat_message("assistant", final(rng, style, "unknown", "I cannot calculate that."))]
    if chance(rng, MISREADS_LONG if len(result) > 2 else MISREADS):
        result = rng.choice(numbers) if chance(rng, 0.25) else misread(rng, result)
    return [*turns, chat_message("assistant", final(rng, style, result, sentence))]


def _step(rng: Random, right: str) -> str:
    return right if chance(rng, STEP) else rng.choice([sign for sign in "+-*" if sign != right])


def _work(rng: Random, offer: Offer, numbers: list[str], operations: list[str]) -> tuple[list[Message], str | None]:
    """The calls and what came back; both steps in one expression, or one call a step."""
    turns: list[Message] = []
    if chance(rng, SLIPS) and not offer.operations:
        slip = _expression(numbers, operations)
        slip = rng.choice((slip + " =", slip.replace(" ", " x ", 1), slip + " " + operations[-1], "(" + slip))
        turns = [called(offer, slip), chat_message("tool", calculate(slip))]
        if chance(rng, 0.33):
            return turns, None
    if len(operations) == 1 or (chance(rng, 0.5) and not offer.operations):
        return _call(rng, offer, turns, numbers, operations)
    turns, first = _call(rng, offer, turns, numbers, operations[:1])
    return _call(rng, offer, turns, [first, numbers[2]], operations[1:])


def _call(
    rng: Random, offer: Offer, turns: list[Message], numbers: list[str], operations: list[str]
) -> tuple[list[Message], str]:
    expression = _expression(numbers, operations)
    result = calculate(expression)
    shown = f"{result}.0" if operations[-1] == "/" and result.isdigit() and chance(rng, 0.2) else result
    content = f"I need to calculate {expression}." if offer.talks and chance(rng, 0.5) else ""
    if offer.operations:
        name, first, second = offer.operations[operations[0]]
        values = {first: _number(numbers[0]), second: _number(numbers[1])}
        call: Message = {"role": "assistant", "content": content}
        call["tool_calls"] = [{"type": "function", "function": {"name": name, "arguments": values}}]
    else:
        call = called(offer, expression, content=content)
    return [*turns, call, chat_message("tool", shown)], result


def _number(text: str) -> int | float:
    return float(text) if "." in text else int(text)
