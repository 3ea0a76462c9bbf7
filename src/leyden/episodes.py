"""An episode: everything that one attempt left behind, and what is derived from it and never stored.

Whole prompts, messages and tools of a call that holds only what it adds; its role; what it earned; transitions.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct

from leyden.outcomes import MEANING
from leyden.records import Attempt, Call, Reward, RewardKind, Rollout, Span, Task


class Transition(Struct, frozen=True):
    """One step of the decision process: the input of a model call, its output, and its reward."""

    call: Call
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    reward: float
    """The weighted sum of the call's step and automatic rewards. The final reward is `Episode.final_reward`."""


def standing(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
    """The rewards in force: a later one replaces an earlier of the same kind, name and owner.

    The final reward has one source: where it was rescored, that of the last rescoring, whatever the names.
    """
    source = next((r.source for r in reversed(rewards) if r.kind is RewardKind.FINAL), None)
    kept = (r for r in rewards if r.kind is not RewardKind.FINAL or r.source == source)
    return tuple({(r.kind, r.name, r.call, r.span): r for r in kept}.values())


class Episode(Struct, frozen=True, dict=True):
    """Everything one attempt left behind, with the calls in the order in which they were recorded."""

    rollout: Rollout
    attempt: Attempt
    task: Task
    calls: tuple[Call, ...] = ()
    spans: tuple[Span, ...] = ()
    rewards: tuple[Reward, ...] = ()
    """In the order in which they were given, those included that a later one has replaced."""
    output: str = ""
    """What the agent printed, the middle left out where it is long."""

    @cached_property
    def _by_id(self) -> dict[str, Call]:
        return {call.id: call for call in self.calls}

    @cached_property
    def _prompts(self) -> dict[str, tuple[int, ...]]:
        prompts: dict[str, tuple[int, ...]] = {}
        for call in self.calls:  # a parent is recorded before its child, so one pass suffices
            kept: tuple[int, ...] = ()
            if call.parent is not None and call.kept_ids:
                kept = (prompts[call.parent] + self._by_id[call.parent].completion_ids)[: call.kept_ids]
            prompts[call.id] = kept + call.prompt_ids
        return prompts

    def prompt_ids(self, call: Call) -> tuple[int, ...]:
        """Every token that the model was given in this call."""
        return self._prompts[call.id]

    def messages(self, call: Call) -> tuple[Any, ...]:
        """Every message that the model was given in this call."""
        chain = [call]
        while (parent := chain[-1].parent) is not None and chain[-1].kept_messages:
            chain.append(self._by_id[parent])
        messages: tuple[Any, ...] = ()
        for link, child in zip(reversed(chain), [*reversed(chain[:-1]), None], strict=True):
            messages += link.messages
            if child is not None:
                messages = (*messages, link.response)[: child.kept_messages]
        return messages

    def tools(self, call: Call) -> tuple[Any, ...]:
        """The tools that the model was offered in this call."""
        while call.tools is None and call.parent is not None:
            call = self._by_id[call.parent]
        return call.tools or ()

    @cached_property
    def _spans(self) -> dict[str, Span]:
        return {span.span_id: span for span in self.spans}

    def role(self, call: Call) -> str | None:
        """In which role a call was made: as it said, or as the nearest span around it that names one."""
        if call.role is not None:
            return call.role
        return next((span.role for span in self._around(call) if span.role is not None), None)

    @cached_property
    def standing_rewards(self) -> tuple[Reward, ...]:
        """The rewards in force."""
        return standing(self.rewards)

    @cached_property
    def transitions(self) -> tuple[Transition, ...]:
        """The episode as (input, output, reward), one for each call. Which of them are trained on is not decided here.

        A reward on a span goes to the last call within it. One that belongs to no known call goes to the last call.
        """
        rewards = dict.fromkeys(self._by_id, 0.0)
        for reward in self.standing_rewards:
            if reward.kind is not RewardKind.FINAL and self.calls:
                rewards[reward.call or self._last_within(reward.span)] += reward.weight * reward.value
        return tuple(
            Transition(call, self._prompts[call.id], call.completion_ids, rewards[call.id]) for call in self.calls
        )

    def _last_within(self, span: str | None) -> str:
        within = [call for call in self.calls if any(around.span_id == span for around in self._around(call))]
        return (within or self.calls)[-1].id

    def _around(self, call: Call) -> Iterator[Span]:
        """The spans within which a call was made, the nearest first."""
        span, seen = self._spans.get(call.span or ""), set[str]()
        while span is not None and span.span_id not in seen:
            yield span
            seen.add(span.span_id)
            span = self._spans.get(span.parent_id or "")

    def final_reward(self, failure_reward: float) -> float | None:
        """The value of the whole attempt, by the outcome table; None where it has none and is left out."""
        if self.attempt.outcome is None:
            return None
        match MEANING[self.attempt.outcome.ending].scores:
            case "its reward":
                final = [r.weight * r.value for r in self.standing_rewards if r.kind is RewardKind.FINAL]
                return sum(final) if final else None  # none yet: its group is still to be scored
            case "failure_reward":
                return failure_reward
            case "nothing":
                return None

    def left_out(
        self,
        call: Call,
        roles: Collection[str] | None = None,
        allow_biased_sampling: bool = False,
        policy: str | None = None,
    ) -> str | None:
        """Why a call is not trained on where only these roles and this policy are (None: all); None where it is.

        Calls sampled greedily, with truncation or with penalties are left out unless `allow_biased_sampling`.
        """
        if policy is not None and call.policy != policy:
            return "another policy"
        why = call.unusable if allow_biased_sampling else call.untrainable
        if why is None and roles is not None and self.role(call) not in roles:
            return "role not selected"
        return why
