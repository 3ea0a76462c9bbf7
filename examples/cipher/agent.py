"""A game of two players, each a policy of its own: the speaker says a digit in a cipher, the listener deciphers it.

The speaker must say the digit after the one it sees, the listener the digit before the one it hears; 1 follows 3. Both
are asked in the same words, so one policy for both cannot know which of them it is. The agent knows nothing of Leyden.
"""

from typing import Any

from openai import OpenAI

NEXT = {"1": "2", "2": "3", "3": "1"}

client = OpenAI()


def say(player: str, digit: str) -> str:
    """Return what a player says, in one token, when it sees or hears a digit."""
    messages: list[Any] = [{"role": "user", "content": f"The digit is {digit}."}]
    answer = client.chat.completions.create(model=player, messages=messages, max_tokens=1)
    return answer.choices[0].message.content or ""


def play(digit: str, speaker: str, listener: str) -> dict[str, str]:
    """Play a round with two players. Who says no digit is not heard."""
    said = say(speaker, digit)
    return {"said": said, "heard": say(listener, said) if said in NEXT else ""}


def solve(task: dict[str, Any]) -> dict[str, str]:
    """Play a round."""
    return play(task["digit"], "speaker", "listener")


def solve_swapped(task: dict[str, Any]) -> dict[str, str]:
    """Play a round with each player in the other's place."""
    return play(task["digit"], "listener", "speaker")


def reward(task: dict[str, Any], result: dict[str, str]) -> dict[str, float]:
    """Half of the reward is for the right digit in the cipher, half for deciphering what was said."""
    said, heard = result["said"], result["heard"]
    return {"said": 0.5 * (said == NEXT[task["digit"]]), "heard": 0.5 * (said == NEXT.get(heard))}
