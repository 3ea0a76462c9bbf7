"""Questions that a few short documents answer, with a search tool; some need two searches, some two at once.

The teachers err, each decision by itself: they do not search, search for the wrong name or misspell it, read the wrong
fact off what they found, take the first hop's answer for the second's, or look up only one of two.
"""

import json
import re
from random import Random
from typing import Any

from families.asking import Offer, Style, called, chat_message, final
from families.problem import Message, Problem, Split, Tool, chance, problem_of_split
from families.words import CITIES, JOBS, PRODUCTS, company, person, title

DIRECT = 0.10
WRONG_NAME = 0.53
"""Where the question names somebody else too."""
SEARCHES_FACT = 0.10
MISSPELLS = 0.08
STOPS_EARLY = 0.45
ONE_OF_TWO = 0.22
READS = {
    "birthplace": {"birthplace": 0.43, "workplace": 0.47, "year": 0.06, "job": 0.04},
    "workplace": {"workplace": 0.44, "birthplace": 0.48, "job": 0.08},
    "job": {"job": 0.66, "workplace": 0.20, "birthplace": 0.14},
    "year": {"year": 0.62, "birthplace": 0.22, "workplace": 0.16},
    "author": {"author": 0.66, "year": 0.34},
    "published": {"year": 0.45, "author": 0.55},
    "founder": {"author": 0.42, "product": 0.46, "year": 0.12},
    "product": {"product": 0.56, "author": 0.26, "year": 0.18},
}
"""What a teacher reads who should read this; the fact's own name comes first."""
CLEARER = 0.5
"""How much of these errors is left in problems of two searches."""
_SEEN = {
    "birthplace": ("Where was {} born?", "In which city was {} born?"),
    "workplace": ("Where does {} work?", "In which city does {} work?"),
    "job": ("What is the job of {}?", "What does {} do for a living?"),
    "year": ("In which year was {} born?", "When was {} born?"),
    "author": ("Who wrote the book {}?", "Who is the author of {}?"),
    "published": ("When was the book {} written?", "In which year was {} written?"),
    "founder": ("Who founded {}?",),
    "product": ("What does {} make?",),
}
_UNSEEN = {
    "birthplace": ("Name the city in which {} was born.",),
    "workplace": ("Name the city in which {} works.",),
    "job": ("Tell me what {} works as.",),
    "year": ("Tell me the year in which {} was born.",),
    "author": ("Tell me who wrote {}.",),
    "published": ("Tell me the year of the book {}.",),
    "founder": ("Tell me by whom {} was founded.",),
    "product": ("Tell me what is made by {}.",),
}
_PERSON = ("birthplace", "workplace", "job", "year")
_ASIDE = ("{} wants to know: {}", "This is for {}. {}", "I met {} today. {}")


def problem(rng: Random, split: Split) -> Problem:
    """Return a question of a split, with its documents."""
    return problem_of_split(_random_problem, rng, split)


def _random_problem(rng: Random, split: Split) -> Problem:
    seen = rng.random() < 0.65 if split == "teach" else split != "unseen"
    asks = _SEEN if seen else _UNSEEN
    people = {name: _person(rng) for name in (person(rng) for _ in range(4))}
    works = {(title if at < 2 else company)(rng): at < 2 for at in range(4)}
    things = {name: _work(rng, rng.choice(tuple(people)), is_book) for name, is_book in works.items()}
    who, other = rng.sample(tuple(people), 2) if len(people) > 1 else (next(iter(people)), person(rng))
    thing = rng.choice(tuple(things))
    kind = rng.choices(("person", "thing", "hop", "pair"), (0.4, 0.2, 0.25, 0.15))[0]
    fact = rng.choice(_PERSON)
    facts: dict[str, Any] = {"kind": kind, "fact": fact, "other": None, "names": [who]}
    match kind:
        case "person":
            question, answer = rng.choice(asks[fact]).format(who), people[who][fact]
        case "thing":
            facts["fact"] = rng.choice(("author", "published") if works[thing] else ("founder", "product"))
            facts["names"] = [thing]
            question, answer = rng.choice(asks[facts["fact"]]).format(thing), things[thing][_own(facts["fact"])]
        case "hop":
            facts["names"] = [thing, things[thing]["author"]]
            role = f"the {'author' if works[thing] else 'founder'} of {thing}"
            question, answer = rng.choice(asks[fact]).format(role), people[things[thing]["author"]][fact]
        case "pair":
            facts["names"] = [who, other]
            question = f"{rng.choice(asks[fact]).format(who)} And {other}?"
            answer = f"{people[who][fact]} and {people[other][fact]}"
    key = "|".join(("lookup", question, *facts["names"]))
    if kind in ("person", "thing") and chance(rng, 0.35):
        facts["other"] = rng.choice([name for name in people if name not in question] or [person(rng)])
        question = rng.choice(_ASIDE).format(facts["other"], question)
    entries = {name: _tell(name, about) for name, about in people.items()}
    entries |= {name: _tell_work(name, about, works[name]) for name, about in things.items()}
    documents = list(entries.items())
    rng.shuffle(documents)
    facts |= {"documents": documents, "known": {**people, **things}}
    return Problem(key, question, answer, facts)


def _person(rng: Random) -> dict[str, str]:
    born, works = rng.sample(CITIES, 2)
    return {"birthplace": born, "workplace": works, "job": rng.choice(JOBS), "year": str(rng.randint(1850, 1999))}


def _work(rng: Random, author: str, is_book: bool) -> dict[str, str]:
    about = {"author": author, "year": str(rng.randint(1850, 1999))}
    return about if is_book else {**about, "product": rng.choice(PRODUCTS)}


def _tell(name: str, about: dict[str, str]) -> str:
    return (
        f"{name} was born in {about['birthplace']} in {about['year']} "
        f"and works as a {about['job']} in {about['workplace']}."
    )


def _tell_work(name: str, about: dict[str, str], is_book: bool) -> str:
    if is_book:
        return f"The book {name} was written by {about['author']} in {about['year']}."
    return f"{name} was founded by {about['author']} in {about['year']} and makes {about['product']}."


def _own(fact: str) -> str:
    return next(iter(READS[fact]))


def tool(problem: Problem) -> Tool:
    """Search by words: the document that has most of them, those in its title twice; the earliest of equals."""
    documents = problem.facts["documents"]

    def search(query: str) -> str:
        words = _words(query) - {"the", "a", "in", "of", "and", "was", "by", "as", "is"}
        scores = [len(words & _words(text)) + len(words & _words(about)) for about, text in documents]
        return documents[scores.index(max(scores))][1] if max(scores) else "No results found."

    return search


def _words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


def check(problem: Problem, text: str) -> bool:
    """Whether a final answer names what is right, in order, and nothing else that the documents say."""
    text = text.rsplit("####", 1)[-1]
    facts = [fact for about in problem.facts["known"].values() for fact in about.values()]
    choices = "|".join(sorted(map(re.escape, set(facts)), key=len, reverse=True))
    found = re.findall(rf"\b(?:{choices})\b", text)
    return found == str(problem.answer).split(" and ")


def teach(problem: Problem, rng: Random, offer: Offer, style: Style) -> list[Message]:
    """Return what an erring teacher does with a question, to the final answer."""
    facts, search = problem.facts, tool(problem)
    sentence = rng.choice(("It is {}.", "I found {}.", "The documents say {}."))
    if chance(rng, DIRECT):
        return [chat_message("assistant", final(rng, style, _guess(rng, facts), sentence))]
    names = list(facts["names"])
    if facts["other"] and chance(rng, WRONG_NAME):
        names = [facts["other"]]
    if facts["kind"] == "pair":
        return _both(problem, rng, offer, style, sentence)
    turns: list[Message] = []
    for at, name in enumerate(names):
        query = _searched(rng, facts, name)
        found = search(query)
        if query != name and found == "No results found.":
            turns += _search(rng, offer, {query: found})
            if chance(rng, 0.4):
                return [*turns, chat_message("assistant", final(rng, style, "unknown", "I do not know."))]
            query, found = name, search(name)
        turns += _search(rng, offer, {query: found})
        if at == 0 and len(names) > 1 and chance(rng, STOPS_EARLY):
            names = names[:1]
            break
    value = _read(rng, facts, found, clear=len(facts["names"]) > 1)
    return [*turns, chat_message("assistant", final(rng, style, value, sentence))]


def _both(problem: Problem, rng: Random, offer: Offer, style: Style, sentence: str) -> list[Message]:
    """Two at once, or one after the other, or only one of them."""
    facts, search = problem.facts, tool(problem)
    names = facts["names"][:1] if chance(rng, ONE_OF_TWO) else facts["names"]
    found = {name: search(name) for name in names}
    if chance(rng, 0.75):
        turns = _search(rng, offer, found)
    else:
        turns = [turn for name, text in found.items() for turn in _search(rng, offer, {name: text})]
    slip = chance(rng, 0.30)
    own = facts["fact"]
    wrong = rng.choice([fact for fact in READS[own] if fact != own])
    values = [facts["known"][name][wrong if slip else own] for name in names]
    if len(values) > 1 and chance(rng, 0.2):
        values.reverse()
    return [*turns, chat_message("assistant", final(rng, style, " and ".join(values), sentence))]


def _guess(rng: Random, facts: dict[str, Any]) -> str:
    kinds = {"birthplace": CITIES, "workplace": CITIES, "job": JOBS, "product": PRODUCTS}
    if facts["fact"] in kinds:
        return rng.choice(kinds[facts["fact"]])
    return person(rng) if facts["fact"] in ("author", "founder") else str(rng.randint(1850, 1999))


def _searched(rng: Random, facts: dict[str, Any], name: str) -> str:
    if chance(rng, SEARCHES_FACT):
        return {"year": "born year", "job": "works as", "author": "book author"}.get(facts["fact"], facts["fact"])
    if chance(rng, MISSPELLS):
        return " ".join(word[:2] + word[3:] for word in name.split())
    return f"{name} {facts['fact']}" if chance(rng, 0.15) else name


def _read(rng: Random, facts: dict[str, Any], found: str, clear: bool) -> str:
    """One fact off the document found, rightly or not; a document about something else gives what it has."""
    name = next((name for name in facts["known"] if found.startswith((name, f"The book {name} "))), None)
    if name is None:
        return "unknown"
    about = facts["known"][name]
    weights = {fact: weight for fact, weight in READS[facts["fact"]].items() if fact in about}
    if clear:
        own = _own(facts["fact"])
        weights = {fact: weight * (CLEARER if fact != own else 1) for fact, weight in weights.items()}
    if not weights:
        return about.get("author") or rng.choice(tuple(about.values()))
    return about[rng.choices(tuple(weights), tuple(weights.values()))[0]]


def _search(rng: Random, offer: Offer, found: dict[str, str]) -> list[Message]:
    """One call or several at once, and what each found, as various tools write it."""
    content = "I will search for it." if offer.talks and chance(rng, 0.5) else ""
    form = rng.random()
    texts = [
        text if form < 0.7 else json.dumps({"results": [text]}) if form < 0.85 else f"1. {text}"
        for text in found.values()
    ]
    return [called(offer, *found, content=content), *(chat_message("tool", text) for text in texts)]
