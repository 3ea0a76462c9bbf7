"""The reward: an answer counts if it is in what the agent found.

0.7 of the word-level F1 with the gold answer, 0.2 for having found it, and 0.1 of the right format after a search. An
answer without a search earns nothing, and one that is not in what was found hardly anything.
"""

import re
import string
from collections import Counter
from collections.abc import Collection
from typing import Any

MARK = "####"
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


def reward(task: dict[str, Any], result: str, episode: Any) -> float:
    """Score an answer against those of the task's answers that the results of the agent's searches state."""
    messages = [message for call in episode.calls[-1:] for message in episode.messages(call)]
    found = [str(message["content"]) for message in messages if message["role"] == "tool"]
    if not found:
        return 0.0
    stated = [answer for answer in answers(task) if any(holds(text, answer) for text in found)]
    return (7 * best_f1(result, stated) + 2 * bool(stated) + has_format(result)) / 10


def answer_f1(task: dict[str, Any], result: str) -> float:
    """Return the F1 with the best of the task's answers, wherever the agent has it from."""
    return best_f1(result, answers(task))


def answers(task: dict[str, Any]) -> list[str]:
    """Return the answers that are right."""
    return [task["answer"], *task.get("aliases", ())]


def holds(text: str, answer: str) -> bool:
    """Whether a text has the words of an answer, one after another."""
    return f" {' '.join(words(answer))} " in f" {' '.join(words(text))} "


def best_f1(result: str, right: Collection[str]) -> float:
    """Return the F1 of what follows the last #### with the best of some answers; 0 without any."""
    said = result.rpartition(MARK)[2]
    return max((f1(said, answer) for answer in right), default=0.0)


def f1(said: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over words, without case, articles and punctuation."""
    said_words, gold_words = words(said), words(gold)
    common = sum((Counter(said_words) & Counter(gold_words)).values())
    return 2 * common / (len(said_words) + len(gold_words)) if common else 0.0


def words(text: str) -> list[str]:
    """Return the words of an answer, normalised as SQuAD's evaluation does, except that a hyphen separates words."""
    return ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split()


def has_format(text: str) -> bool:
    """Whether the message ends with #### and an answer on the same line, once."""
    _, mark, answer = text.strip().partition(MARK)
    return bool(mark and answer.strip()) and MARK not in answer and "\n" not in answer.strip()
