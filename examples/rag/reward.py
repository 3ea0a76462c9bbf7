"""The reward: 0.9 of the word-level F1 with the gold answer, 0.1 of the right format."""

import re
import string
from collections import Counter
from typing import Any

MARK = "####"
F1_SHARE = 0.9
ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans(dict.fromkeys(string.punctuation, " "))


def reward(task: dict[str, Any], result: str) -> float:
    """F1 with the best of the task's answers, and whether the message has the form that the agent is asked for."""
    answers = [task["answer"], *task.get("aliases", ())]
    said = result.rpartition(MARK)[2]
    return F1_SHARE * max(f1(said, answer) for answer in answers) + (1 - F1_SHARE) * has_format(result)


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
