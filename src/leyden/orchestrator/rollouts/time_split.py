"""Splits the time of a step's sampling phase: what its rollouts waited for, in proportion to their seconds.

Hundreds of rollouts run at the same time, so wall-clock time has no other exact owner: if the rollouts spent half of
their seconds decoding, half of the phase is counted as decoding.
"""

from collections.abc import Iterable

from leyden.api.wire import CallTimes
from leyden.episodes import Episode

WAITING, AGENTS, GATEWAY, STORE, PROMPT, DECODING = "waiting", "agents", "gateway", "store", "prompt", "decoding"


def split_sampling(sampling_s: float, episodes: Iterable[Episode], calls: CallTimes, since: float) -> dict[str, float]:
    """Split the seconds of a sampling phase that began at `since`; rollouts of an earlier process do not count.

    `calls` are the seconds of the model calls of these rollouts. Waiting is for a worker and for a slot of the engine;
    agents have what is left of an attempt without its model calls: the agent's own code, its tools, and the network.
    """
    queued = working = 0.0
    for episode in episodes:
        attempt = episode.attempt
        if attempt.ended is not None and attempt.started >= since:
            queued += max(0.0, attempt.started - episode.rollout.created) if attempt.number == 1 else 0.0
            working += attempt.ended - attempt.started
    engine = calls.queued_s + calls.prompt_s + calls.decoding_s
    seconds = {
        WAITING: queued + calls.queued_s,
        AGENTS: max(0.0, working - calls.total_s),
        GATEWAY: max(0.0, calls.total_s - engine - calls.store_s),
        STORE: calls.store_s,
        PROMPT: calls.prompt_s,
        DECODING: calls.decoding_s,
    }
    total = sum(seconds.values())
    return {name: sampling_s * spent / total for name, spent in seconds.items()} if total > 0 else {WAITING: sampling_s}
