"""Which credit goes with which advantage."""

_PER_CALL = ("identical", "discounted", "stepwise", "last_call")

PAIRS: dict[str, tuple[str, ...]] = {
    "grpo": _PER_CALL,
    "dr_grpo": _PER_CALL,
    "rloo": _PER_CALL,
    "reinforce_pp": _PER_CALL,
    "reinforce_pp_baseline": _PER_CALL,
    "gigpo": ("discounted", "stepwise"),
    "ppo": ("gae",),
}
"""The credits that an advantage takes, the likeliest first.

`gigpo` compares what followed from a state, so credit for what came before it would be noise, and credit for the last
call alone leaves nothing to compare. `ppo` measures against a critic, whose lambda-returns `gae` computes; the others
have no critic for `gae` to ask.
"""

OF_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce_pp_baseline")
"""The advantages that are 0 for a rollout that is alone in its group."""


class IncompatibleChoice(Exception):
    """A credit and an advantage that do not go together; the message says what to write instead."""


def check_pair(credit: str, advantage: str) -> None:
    """Refuse a pair that makes no sense. A user's own function goes with all, but not as the credit of `ppo`."""
    fitting = PAIRS.get(advantage, ())
    takers = [name for name, credits in PAIRS.items() if credit in credits]
    if not fitting or credit in fitting or (not takers and advantage != "ppo"):
        return  # it fits, or one of the two is a user's own, or is there not, which `choose` says
    instead = f', or `algorithm.advantage = "{takers[0]}"` to keep that credit' if takers else ""
    raise IncompatibleChoice(
        f'`algorithm.advantage = "{advantage}"` does not go with `algorithm.credit = "{credit}"`: '
        f'write `algorithm.credit = "{fitting[0]}"`{instead}'
    )


def needs_critic(credit: str, advantage: str) -> bool:
    """Whether a pair asks for the values of a critic."""
    return credit == "gae" or advantage == "ppo"
