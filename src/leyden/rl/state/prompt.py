"""A state is the whole history, token by token."""

from collections.abc import Hashable

from leyden.episodes import Episode
from leyden.records import Call
from leyden.rl.registry import state


@state()
def prompt(episode: Episode, call: Call) -> Hashable:
    """Return every token of the prompt."""
    return episode.prompt_ids(call)
