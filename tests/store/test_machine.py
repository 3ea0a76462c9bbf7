"""Every order of events: the store against a model of it, through crashes.

A crash copies the files as they are, without warning and with the store still open, and goes on from the copy: what a
killed process leaves behind.
"""

import asyncio
import shutil
import tempfile
from collections.abc import Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, multiple, precondition, rule
from randomness import examples

from leyden.api.wire import (
    EventCursor,
    FinishRequest,
    GroupSpec,
    LeaseRequest,
    RolloutPage,
    RunSpec,
    Scores,
    ScoringHeartbeat,
)
from leyden.outcomes import MEANING, RETRY_BACKOFF, Ending, Outcome, Retry
from leyden.records import Call, Reward, RunSettings, State, Task
from leyden.store.errors import Conflict
from leyden.store.read import queries
from leyden.store.store import Store

T = TypeVar("T")

LEASE_S, MAX_ATTEMPTS = 60.0, 2
FINAL = Reward("final", 1.0)


@dataclass
class ModelAttempt:
    rollout: str
    worker: str
    expires: float
    ending: Ending | None = None
    calls: list[str] = field(default_factory=list)


@dataclass
class ModelScoring:
    """A group that waits to be scored; `rollouts` are those that do."""

    rollouts: set[str] = field(default_factory=set)
    number: int = 0
    lost: int = 0
    expires: float | None = None


class StoreMachine(RuleBasedStateMachine):
    """The model: which rollouts are queued, what became of every attempt, and which groups wait to be scored."""

    groups = Bundle("groups")
    attempts = Bundle("attempts")
    scorings = Bundle("scorings")

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.runner = asyncio.Runner()
        self.now, self.generation = 1000.0, 0
        self.sizes: dict[str, int] = {}
        self.queued: dict[str, float] = {}
        """Since when each may be leased."""
        self.parked: set[str] = set()
        self.may_try: dict[str, int] = {}
        self.alone: set[str] = set()
        self.finished: dict[str, Ending] = {}
        self.tried: dict[str, int] = {}
        self.known: dict[str, ModelAttempt] = {}
        self.late = 0
        self.scoring: dict[str, ModelScoring] = {}
        self.open()
        self.run(self.store.create_run(RunSpec("r", RunSettings(lease_s=LEASE_S, max_attempts=MAX_ATTEMPTS))))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.runner.run(work)

    def open(self) -> None:
        async def opening() -> Store:
            return await Store(self.folder / str(self.generation) / "leyden.db", lambda: self.now).start()

        self.store = self.run(opening())

    def teardown(self) -> None:
        self.run(self.store.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    @initialize(target=groups)
    def begin(self) -> Any:
        return multiple(*(self.create(size, 0) for size in (1, 2, 2)))

    @rule(target=groups, size=st.integers(1, 2), priority=st.integers(-1, 1))
    def create(self, size: int, priority: int) -> str:
        name = f"g{len(self.sizes)}"
        self.run(self.store.enqueue("r", GroupSpec(name, Task("t", {}), size, priority=priority)))
        self.sizes[name] = size
        self.queued |= {f"{name}.{index}": self.now for index in range(size)}
        return name

    @rule(name=groups, wrong=st.booleans())
    def create_again(self, name: str, wrong: bool) -> None:
        group = self.run(self.store.read(queries.get_group, "r", name))
        spec = GroupSpec(name, Task("t", {}), group.size + wrong, priority=group.priority)
        try:
            self.run(self.store.enqueue("r", spec))
            assert not wrong
            self.parked -= {f"{name}.{index}" for index in range(group.size)}
        except Conflict:
            assert wrong

    @rule()
    def park(self) -> None:
        self.run(self.store.park("r"))
        self.parked |= {f"{name}.{index}" for name, size in self.sizes.items() for index in range(size)}

    @rule(target=attempts, worker=st.sampled_from(["w1", "w2"]), count=st.integers(1, 4))
    def lease(self, worker: str, count: int) -> Any:
        grants = self.run(self.store.lease(LeaseRequest(worker, count)))
        leasable = [id for id, moment in self.queued.items() if moment <= self.now and id not in self.parked]
        assert len(grants) == min(count, len(leasable))
        for grant in grants:
            attempt = grant.attempt
            assert attempt.rollout in leasable
            del self.queued[attempt.rollout]
            assert grant.alone == (attempt.rollout in self.alone)
            self.tried[attempt.rollout] = self.tried.get(attempt.rollout, 0) + 1
            assert attempt.number == self.tried[attempt.rollout]
            self.known[attempt.id] = ModelAttempt(attempt.rollout, worker, self.now + LEASE_S)
        return multiple(*(grant.attempt.id for grant in grants))

    @rule(seconds=st.sampled_from([0.6, 1.0, 40.0, 61.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def expire(self) -> None:
        overdue = [a for a in self.known.values() if a.ending is None and a.expires <= self.now]
        abandoned = [name for name, s in self.scoring.items() if s.expires is not None and s.expires <= self.now]
        assert self.run(self.store.expire_leases()) == len(overdue) + len(abandoned)
        for attempt in overdue:
            self.end(attempt, Ending.LOST)
        for name in abandoned:
            scoring = self.scoring[name]
            scoring.expires, scoring.lost = None, scoring.lost + 1
            if scoring.lost == MAX_ATTEMPTS:
                self.withhold(name)

    @rule()
    def lose_all_workers(self) -> None:
        self.now += LEASE_S + 1
        self.expire()

    @rule(id=attempts, worker=st.sampled_from(["w1", "w2"]))
    def heartbeat(self, id: str, worker: str) -> None:
        attempt = self.known[id]
        reply = self.run(self.store.heartbeat(worker, [id]))
        if attempt.worker == worker and attempt.ending is None:
            attempt.expires = self.now + LEASE_S
            assert reply.expires == {id: attempt.expires}
        else:
            (ended,) = reply.ended
            assert (ended.outcome and ended.outcome.ending) == (attempt.ending if attempt.worker == worker else None)

    @rule(id=attempts, fork=st.booleans())
    def call(self, id: str, fork: bool) -> None:
        attempt = self.known[id]
        parent = attempt.calls[0 if fork else -1] if attempt.calls else None
        name = f"c{len(attempt.calls)}"
        call = Call(name, parent=parent, kept_ids=2 if parent else 0, prompt_ids=(1,), completion_ids=(2,))
        try:
            self.run(self.store.record_calls("r", id, [call]))
            assert attempt.ending is None
            attempt.calls.append(name)
        except Conflict:
            assert attempt.ending is not None

    @rule(id=attempts)
    def complete_for_later(self, id: str) -> None:
        """A success that is scored with its group."""
        attempt = self.known[id]
        report = FinishRequest(Outcome(Ending.SUCCEEDED), awaits_group=True)
        assert self.run(self.store.finish("r", id, report)).counted == (attempt.ending is None)
        if attempt.ending is not None:
            self.late += 1
            return
        self.end(attempt, Ending.SUCCEEDED)
        name = attempt.rollout.partition(".")[0]
        self.scoring.setdefault(name, ModelScoring()).rollouts.add(attempt.rollout)

    @precondition(lambda self: self.queued)
    @rule(together=st.booleans())
    def work_off(self, together: bool) -> None:
        """A worker does whatever is to be done."""
        for id in self.lease("w1", 1000).values:
            if together:
                self.complete_for_later(id)
            else:
                self.complete(id, Ending.SUCCEEDED, True, Retry.CHARGED)

    @precondition(lambda self: self.scoring)
    @rule(target=scorings)
    def lease_scoring(self) -> Any:
        ready = [name for name, s in self.scoring.items() if self.ended(name) and s.expires is None]
        found = self.run(self.store.lease_scoring("w1", "r"))
        if found is None:
            assert not ready
            return multiple()
        assert found.group.id in ready
        scoring = self.scoring[found.group.id]
        scoring.number, scoring.expires = scoring.number + 1, self.now + LEASE_S
        assert found.number == scoring.number
        return found.group.id, found.number

    @rule(leased=scorings, how=st.sampled_from(["beat", "give back", "score", "fail"]))
    def score(self, leased: tuple[str, int], how: str) -> None:
        name, number = leased
        scoring = self.scoring.get(name)
        held = scoring is not None and scoring.expires is not None and scoring.number == number
        if how == "beat":
            assert self.run(self.store.heartbeat_scoring("r", name, ScoringHeartbeat(number))).counted == held
            if scoring is not None and held:
                scoring.expires = self.now + LEASE_S
            return
        rewards = dict.fromkeys(scoring.rollouts, 1.0) if scoring is not None and how == "score" else {}
        scores = Scores(number, rewards, given_back=how == "give back")
        assert self.run(self.store.score("r", name, scores)).counted == held
        if scoring is None or not held:
            return
        if how == "give back":
            scoring.expires = None
        elif how == "score":
            del self.scoring[name]
        else:
            self.withhold(name)

    @rule(
        id=attempts,
        ending=st.sampled_from([*Ending, Ending.LOST, Ending.ENGINE_ERROR]),
        rewarded=st.booleans(),
        retry=st.sampled_from(Retry),
    )
    def complete(self, id: str, ending: Ending, rewarded: bool, retry: Retry) -> None:
        attempt = self.known[id]
        report = FinishRequest(Outcome(ending), rewards=(FINAL,) if rewarded else (), retry=retry)
        reply = self.run(self.store.finish("r", id, report))
        assert reply.counted == (attempt.ending is None)
        if attempt.ending is not None:
            self.late += 1
            assert reply.outcome.ending is attempt.ending
            return
        no_reward = ending is Ending.SUCCEEDED and not rewarded
        self.end(attempt, Ending.NO_REWARD if no_reward else ending, retry)
        assert reply.outcome.ending is attempt.ending

    @rule(name=groups, done=st.booleans())
    def cancel(self, name: str, done: bool) -> None:
        if self.ended(name) != done:  # seldom enough for groups to live a while
            return
        unfinished = {f"{name}.{index}" for index in range(self.sizes[name])} - set(self.finished)
        assert self.run(self.store.cancel_group("r", name)) == len(unfinished)
        for attempt in self.known.values():
            if attempt.rollout in unfinished and attempt.ending is None:
                attempt.ending = Ending.CANCELLED
        for rollout in unfinished:
            self.queued.pop(rollout, None)
        self.finished |= dict.fromkeys(unfinished, Ending.CANCELLED)
        if name in self.scoring:
            self.withhold(name)

    @rule()
    def crash(self) -> None:
        source = self.folder / str(self.generation)
        self.generation += 1
        target = self.folder / str(self.generation)
        target.mkdir()
        for file in source.glob("leyden.db*"):
            if not file.name.endswith((".lock", "-shm")):
                shutil.copy(file, target / file.name)
        self.run(self.store.close())
        self.open()
        self.give_grace()

    @rule()
    def reopen(self) -> None:
        self.run(self.store.close())
        self.open()
        self.give_grace()

    def give_grace(self) -> None:
        for attempt in self.known.values():
            attempt.expires = self.now + LEASE_S
        for scoring in self.scoring.values():
            if scoring.expires is not None:
                scoring.expires = self.now + LEASE_S

    def ended(self, name: str) -> bool:
        """Whether all rollouts of a group are over."""
        return all(f"{name}.{index}" in self.finished for index in range(self.sizes[name]))

    def withhold(self, name: str) -> None:
        """A group is not scored after all."""
        rollouts = self.scoring.pop(name).rollouts
        self.finished |= dict.fromkeys(rollouts, Ending.NO_REWARD)
        for attempt in self.known.values():
            if attempt.rollout in rollouts and attempt.ending is Ending.SUCCEEDED:
                attempt.ending = Ending.NO_REWARD

    def end(self, attempt: ModelAttempt, ending: Ending, retry: Retry = Retry.CHARGED) -> None:
        rollout, tried = attempt.rollout, self.tried[attempt.rollout]
        if retry is Retry.FREE_ONCE:
            others = (other.ending for other in self.known.values() if other.rollout == rollout)
            retry = Retry.CHARGED if Ending.ENGINE_ERROR in others else Retry.FREE
        attempt.ending = ending
        free = retry is Retry.FREE or (retry is Retry.ALONE and rollout not in self.alone)
        if not MEANING[ending].retried or (tried == self.may_try.get(rollout, MAX_ATTEMPTS) and not free):
            self.finished[rollout] = ending
            return
        self.may_try[rollout] = self.may_try.get(rollout, MAX_ATTEMPTS) + free
        self.alone |= {rollout} if retry is Retry.ALONE else set()
        self.queued[rollout] = self.now + (0.0 if retry is Retry.FREE else RETRY_BACKOFF.limit_s(tried))

    @invariant()
    def accounts_add_up(self) -> None:
        listed = self.run(self.store.read(queries.list_rollouts, "r", RolloutPage(limit=1000)))
        assert {r.id for r in listed if r.state is State.QUEUED} == self.queued.keys()
        assert {r.id: r.outcome.ending for r in listed if r.outcome} == self.finished
        alive = {live.id for live in self.run(self.store.read(queries.active_attempts))}
        assert alive == {id for id, attempt in self.known.items() if attempt.ending is None}
        assert {r.id for r in listed if r.state is State.RUNNING} == {self.known[id].rollout for id in alive}
        for name in self.sizes:
            whole = self.ended(name) and name not in self.scoring
            assert (self.run(self.store.read(queries.get_group, "r", name)).finished is not None) == whole

    @invariant()
    def the_log_tells_each_ending_once(self) -> None:
        log = self.run(self.store.events("r", EventCursor())).events
        assert [event.seq for event in log] == list(range(1, len(log) + 1))
        ended = [event.subject for event in log if event.kind == "attempt.ended"]
        assert sorted(ended) == sorted(id for id, attempt in self.known.items() if attempt.ending is not None)
        finished = [event.subject for event in log if event.kind == "rollout.finished"]
        assert sorted(finished) == sorted(self.finished)
        assert sum(event.kind == "attempt.late" for event in log) == self.late
        whole = [event.subject for event in log if event.kind == "group.finished"]
        assert sorted(whole) == sorted(name for name in self.sizes if self.ended(name) and name not in self.scoring)

    @invariant()
    def every_call_is_there(self) -> None:
        for id, attempt in self.known.items():
            episode = self.run(self.store.read(queries.get_episode, "r", id))
            assert [call.id for call in episode.calls] == attempt.calls


StoreMachine.TestCase.settings = settings(
    max_examples=examples(50, share=8), stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreMachine = StoreMachine.TestCase
