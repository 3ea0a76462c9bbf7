"""Episodes: everything recorded for one attempt, with views that are derived and never stored.

The views are the whole prompt, messages, tools and role of a call, the effective rewards, and the transitions.
"""

from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct

from leyden.outcomes import MEANING
from leyden.records import Attempt, Call, CallStatus, Reward, RewardKind, Rollout, Span, Task, rollout_of

REPLAYED = "replayed"
"""Why a call is not trained on that would be, had the rollout made it itself."""


class Transition(Struct, frozen=True):
    """One step of the decision process: the input of a model call, its output, and its reward."""

    call: Call
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    reward: float
    """The weighted sum of the call's step and automatic rewards. The final reward is `Episode.final_reward`."""


def effective(rewards: Sequence[Reward]) -> tuple[Reward, ...]:
    """Return the rewards in effect: a later one replaces an earlier one of the same kind, name, call and span.

    Final rewards come from one source, the latest: a rescoring replaces all of them, whatever their names.
    """
    source = next((r.source for r in reversed(rewards) if r.kind is RewardKind.FINAL), None)
    kept = (r for r in rewards if r.kind is not RewardKind.FINAL or r.source == source)
    return tuple({(r.kind, r.name, r.call, r.span): r for r in kept}.values())


def chain_messages(chain: Sequence[Call]) -> tuple[Any, ...]:
    """Return all messages of the prompt of a chain's last call. Each call of a chain is the parent of the next."""
    messages: list[Any] = []
    for call in chain:
        del messages[call.kept_messages :]
        messages += (*call.messages, call.response)
    return tuple(messages[:-1])


class Episode(Struct, frozen=True, dict=True):
    """Everything recorded for one attempt. Calls are in recorded order, so a parent precedes its children."""

    rollout: Rollout
    attempt: Attempt
    task: Task
    calls: tuple[Call, ...] = ()
    spans: tuple[Span, ...] = ()
    rewards: tuple[Reward, ...] = ()
    """In the order in which they were given, including those that were replaced."""
    output: str = ""
    """What the agent printed; a long output has its middle cut out."""

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
        """Return the whole prompt of a call, as tokens."""
        return self._prompts[call.id]

    def messages(self, call: Call) -> tuple[Any, ...]:
        """Return all messages of a call's prompt."""
        chain = [call]
        while (parent := chain[-1].parent) is not None and chain[-1].kept_messages:
            chain.append(self._by_id[parent])
        return chain_messages(chain[::-1])

    def tools(self, call: Call) -> tuple[Any, ...]:
        """Return the tools offered in a call."""
        while call.tools is None and call.parent is not None:
            call = self._by_id[call.parent]
        return call.tools or ()

    @cached_property
    def _spans(self) -> dict[str, Span]:
        return {span.span_id: span for span in self.spans}

    def role(self, call: Call) -> str | None:
        """Return the role of a call: its own, or that of the nearest enclosing span that names one."""
        if call.role is not None:
            return call.role
        return next((span.role for span in self._enclosing_spans(call) if span.role is not None), None)

    @cached_property
    def effective_rewards(self) -> tuple[Reward, ...]:
        """The rewards in effect."""
        return effective(self.rewards)

    @property
    def reward_parts(self) -> dict[str, float]:
        """The parts of the final reward by name, without their weights; empty if it is a single number."""
        parts = {r.name: r.value for r in self.effective_rewards if r.kind is RewardKind.FINAL}
        return {} if parts.keys() <= {"reward"} else parts

    @cached_property
    def transitions(self) -> tuple[Transition, ...]:
        """The episode as (input, output, reward), one for each call. Which of them are trained on is not decided here.

        A reward that belongs to no known call goes to the last call.
        """
        rewards = dict.fromkeys(self._by_id, 0.0)
        for reward in self.effective_rewards:
            if reward.kind is not RewardKind.FINAL and self.calls:
                rewards[self.owner(reward) or self.calls[-1].id] += reward.weight * reward.value
        return tuple(
            Transition(call, self._prompts[call.id], call.completion_ids, rewards[call.id]) for call in self.calls
        )

    def owner(self, reward: Reward) -> str | None:
        """Return the call that a reward belongs to: its own, or the last one within its span; None: there is none."""
        if reward.call is not None or reward.span is None:
            return reward.call
        within = [call for call in self.calls if any(one.span_id == reward.span for one in self._enclosing_spans(call))]
        return within[-1].id if within else None

    def _enclosing_spans(self, call: Call) -> Iterator[Span]:
        """Yield the spans that enclose a call, the innermost first."""
        span, seen = self._spans.get(call.span or ""), set[str]()
        while span is not None and span.span_id not in seen:
            yield span
            seen.add(span.span_id)
            span = self._spans.get(span.parent_id or "")

    @property
    def replayable(self) -> int:
        """After how many of its calls another rollout can go on, at the most: those before one that does not stand."""
        return next((number for number, call in enumerate(self.calls) if not self.stands(call)), len(self.calls))

    @property
    def left_origin(self) -> bool:
        """Whether it does not begin as its rollout should: it has not replayed all the calls that it begins with."""
        origin = self.rollout.origin
        return origin is not None and sum(self.inherits(one) and self.stands(one) for one in self.calls) < origin.calls

    def stands(self, call: Call) -> bool:
        """Whether a call has a whole answer, and the client has not requested another in its place."""
        return call.status is CallStatus.OK and not self._discarded(call)

    def inherits(self, call: Call) -> bool:
        """Whether a call was replayed from another rollout: it is context, and none of this rollout's choices."""
        return call.origin is not None and rollout_of(call.origin) != self.rollout.id

    def final_reward(self, failure_reward: float) -> float | None:
        """Return the final reward according to the outcome table; None if the attempt has none and is excluded."""
        if self.attempt.outcome is None:
            return None
        match MEANING[self.attempt.outcome.ending].reward:
            case "given":
                final = [r.weight * r.value for r in self.effective_rewards if r.kind is RewardKind.FINAL]
                return sum(final) if final else None  # its group is not scored yet
            case "failure_reward":
                return failure_reward
            case "none":
                return None

    @cached_property
    def _retried(self) -> frozenset[str | None]:
        return frozenset(call.retry_of for call in self.calls) - {None}

    def _discarded(self, call: Call) -> bool:
        """Whether the client requested this answer again, and no later call continues it."""
        if (call.parent if call.choice else call.id) not in self._retried:
            return False
        return not any(
            other.parent == call.id and not other.choice and other.kept_messages > len(self.messages(call))
            for other in self.calls
        )

    def exclusion_reason(
        self,
        call: Call,
        roles: Collection[str] | None = None,
        allow_biased_sampling: bool = False,
        policy: str | None = None,
    ) -> str | None:
        """Return why a call is not trained on, or None if it is. `roles` and `policy` of None select all.

        Calls sampled greedily, with truncation or with penalties are excluded unless `allow_biased_sampling`; those of
        another rollout, from which this one was continued, always.
        """
        if policy is not None and call.policy != policy:
            return "another policy"
        why = call.unusable if allow_biased_sampling else call.untrainable
        if why is None and self._discarded(call):
            return "requested again"
        if why is None and roles is not None and self.role(call) not in roles:
            return "role not selected"
        if why is None and self.inherits(call):
            return REPLAYED
        return why
