"""Rewrites word problems of GSM8K with numbers that are too large for mental arithmetic.

GSM8K's answers mark every calculation: `<<48/2=24>>`. If each number of the calculations is, without doubt, one number
of the question, an earlier result or a known constant, the solution is a small program: numbers of the question are
replaced, and the program is executed again for the new answer. Other problems are left out, and so are those whose
solution may depend on which number is larger.
"""

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from functools import partial
from random import Random
from typing import NamedTuple

CALCULATION = re.compile(r"<<([\d.+\-*/() ]+)=([\d.]+)>>")
NUMBER = re.compile(r"\d+(?:\.\d+)?|\.\d+")
REPLACEABLE = re.compile(
    r"(?<![\w.,/:'-])\d+(?:,\d{3})*(?:\.\d+)?(?![\w%/:']|[.,]\d|\s*(?:%|percent|[ap]\.?m\b|inch|feet|foot|year|o'clock))"
)
"""A number of a question that may be another one: no percentage, fraction, time, age, height or ordinal."""
WORDS = {
    1: "one",
    2: "two half twice double doubled doubles couple pair pairs both parents back round",
    3: "three thrice triple tripled third thirds",
    4: "four quarter quarters fourth fourths legs",
    12: "twelve dozen dozens",
    5: "five fifth weekday weekdays weeknight weeknights",
    6: "six sixth",
    7: "seven",
    8: "eight",
    9: "nine",
    10: "ten tenth",
    20: "twenty",
    30: "thirty",
    100: "hundred",
}
"""Words that give a number."""
UNITS = {
    7: "week day",
    12: "month year feet",
    24: "hour day",
    30: "month",
    52: "week year",
    60: "hour minute second",
    100: "percent % cent $",
    365: "day year",
}
"""Numbers that calculations use without being told, if the question has one of the words."""
DIGITS = (3, 6)
"""How many digits a number gets, at least and at most."""
HARD, LARGEST = 10**6, 10**12
"""The range of a problem's largest result: below it is mental arithmetic, above it a calculator rounds."""
TRIES = 200
SMALL = 12
"""Numbers up to this are often said without being written: a way there and back, the legs of a dog, weekdays."""
ORDERING = re.compile(
    r"\b(?:most|least|more than|less than|fewer than|best|\w+est|cheaper|better|minimum|maximum|winner)\b"
)
"""The solution of such a question may depend on which number is larger."""
Operand = str | int | Fraction
"""A number of the question as it is written there, the index of an earlier result, or a constant."""


class Step(NamedTuple):
    """One calculation: `{0} * {1}` over operands, and what it gave with the numbers of the question."""

    formula: str
    operands: tuple[Operand, ...]
    result: Fraction


def rewrite(question: str, solution: str, rng: Random) -> tuple[str, int] | None:
    """Return the problem with large numbers, and its answer; None if it cannot be rewritten."""
    steps = trace(question, solution)
    if not steps:
        return None
    used = dict.fromkeys(operand for step in steps for operand in step.operands if isinstance(operand, str))
    for _ in range(TRIES):
        chosen = {
            number: str(rng.randrange(10 ** (digits - 1), 10**digits))
            for number in used
            if (digits := rng.randint(*DIGITS))
        }
        results = run(steps, chosen)
        if results and HARD <= max(results) <= LARGEST:
            return REPLACEABLE.sub(partial(_replace, chosen), question), int(results[-1])
    return None


def _replace(chosen: Mapping[str, str], match: re.Match[str]) -> str:
    return chosen.get(match[0], match[0])


def trace(question: str, solution: str) -> list[Step]:
    """Return the calculations of a solution; none if a number could come from two places, or from none."""
    written = [match[0] for match in REPLACEABLE.finditer(question)]
    numbers, constants = {parse(text): text for text in written}, constants_of(question)
    if len(numbers) < len(written) or numbers.keys() & constants:
        return []
    steps: list[Step] = []
    for expression, result in CALCULATION.findall(solution):
        known = [step.result for step in steps]
        operands = [operand(parse(text), numbers, known, constants) for text in NUMBER.findall(expression)]
        if None in operands:
            return []
        places = iter(range(len(operands)))
        formula = NUMBER.sub(lambda _, places=places: f"{{{next(places)}}}", expression)
        steps.append(Step(formula, tuple(operands), parse(result)))
    results = [step.result for step in steps]
    marked = solution.count("<<") == len(steps) and results[-1:] == [parse(solution.rpartition("####")[2].strip())]
    certain = marked and not ORDERING.search(question.lower()) and not any(map(doubtful, steps)) and used_once(steps)
    return steps if certain and run(steps, {text: text for text in written}) == results else []


def doubtful(step: Step) -> bool:
    """Whether a calculation computes nothing, or has a number of the question twice: one may be another of its size."""
    written = [one for one in step.operands if isinstance(one, str)]
    return len(step.operands) < 2 or len(written) > len(set(written))


def used_once(steps: Sequence[Step]) -> bool:
    """Whether no small number of the question is used twice."""
    uses = Counter(one for step in steps for one in step.operands if isinstance(one, str))
    return all(times == 1 or parse(number) > SMALL for number, times in uses.items())


def constants_of(question: str) -> set[Fraction]:
    """Return the numbers that a question gives as words, percentages and fractions, or by its units."""
    text = question.lower()
    said = set(re.findall(r"[a-z]+", text))
    words = [number for number, words in WORDS.items() if said.intersection(words.split())]
    units = [number for number, units in UNITS.items() if any(unit in text for unit in units.split())]
    kept = {parse(text) for text in NUMBER.findall(REPLACEABLE.sub("", question))}
    shares = {part for one in kept for part in (one / 100, 1 - one / 100, 1 + one / 100, 100 - one, 100 + one)}
    return {*map(Fraction, (1, *words, *units)), *kept, *shares}


def operand(
    number: Fraction, numbers: Mapping[Fraction, str], results: Sequence[Fraction], constants: Collection[Fraction]
) -> Operand | None:
    """Return where a number of a calculation comes from; None if that is not certain."""
    places: list[Operand] = [index for index, result in enumerate(results) if result == number]
    places += [numbers[number]] if number in numbers else []
    places += [number] if number in constants else []
    return places[0] if len(places) == 1 else None


def run(steps: Sequence[Step], chosen: Mapping[str, str]) -> list[Fraction]:
    """Return the results with other numbers; none if one is not whole or not positive that was."""
    results: list[Fraction] = []
    for step in steps:
        values = [
            parse(chosen[one]) if isinstance(one, str) else results[one] if isinstance(one, int) else one
            for one in step.operands
        ]
        names = {f"n{index}": value for index, value in enumerate(values)}
        try:
            result = eval(step.formula.format(*names), {"__builtins__": {}}, names)  # operators and operands alone
        except (ZeroDivisionError, SyntaxError):
            return []
        if result <= 0 or (step.result.denominator == 1 and result.denominator > 1):
            return []
        results.append(result)
    return results


def parse(text: str) -> Fraction:
    """Return the value of a number as it is written: `1,200.50`."""
    return Fraction(text.replace(",", ""))
