"""Which baseline has the least variance if the values of calls depend on their position, on made-up rollouts.

The gradient of a call is (V - b) times something that does not depend on b, and any b from other rollouts and from what
was known before the call leaves its mean as it is. So the mean of (V - b)^2 is what distinguishes baselines. Here
`rloo` estimates b in five ways, on 14 groups of n rollouts a time, with tasks of different difficulty:

    group   the mean of the group's other rollouts
    same    that of their calls in the same situation; a call that is alone there is compared with the guess
    guess   the level of the group plus what the situation adds to it in other groups
    k=1..4  the mean of `same`, in which the guess counts as k rollouts; Leyden takes 2

    python benchmarks/baselines.py

`push` is the mean square of the mean advantage of a group's calls in one situation, with `grpo`: how much of the
advantages says where a call is and not what it did. The last line is one JSON object: for each case and n the
`variance`, relative to `group`, and `push`; `ratio` is the mean variance of what Leyden takes.
"""

import argparse
from collections.abc import Callable, Hashable
from random import Random
from typing import Any

import numpy as np
from msgspec.structs import replace
from reporting import add_out, report_result

from leyden.config import Hyperparameters
from leyden.rl import advantage
from leyden.rl.advantage import CallBatch, Floats, joined, weights
from leyden.rl.advantage.grpo import grpo
from leyden.rl.advantage.rloo import rloo
from leyden.rl.credit import Credit, RolloutRewards
from leyden.rl.credit.discounted import discounted
from leyden.rl.credit.identical import identical
from leyden.rl.credit.stepwise import stepwise

BASELINES: dict[str, float | None] = {"group": None, "same": 1e-9, "guess": 1e9, "k=1": 1.0, "k=2": 2.0, "k=4": 4.0}
"""How many rollouts the guess counts as; None: situations are not compared."""
GROUPS = 14
Rollout = tuple[list[Hashable], list[float], float]
"""The situation and the step reward of each call, and the final reward."""


def draft(random: Random, difficulty: float) -> Rollout:
    """Write a draft, most of which pass a test that is rewarded, and an answer, which is right on easy tasks."""
    passes = random.random() < 0.9
    return ["draft", "answer"], [0.3 * passes, 0.0], float(random.random() < 1 - difficulty)


def mend(random: Random, difficulty: float) -> Rollout:
    """Write an answer; mend it up to two times if a check finds a fault, which it does not always see."""
    right, calls = random.random() > difficulty, ["write"]
    while len(calls) < 3 and random.random() > (0.85 if right else 0.3):
        calls.append(f"mend {len(calls)}")
        right = random.random() < (0.9 if right else 0.5 - 0.4 * difficulty)
    return list(calls), [0.0] * len(calls), float(right)


def ledger(random: Random, difficulty: float) -> Rollout:
    """Fill in four entries with up to three tries each; a tool that accepts a try is rewarded."""
    calls: list[Hashable] = []
    steps, filled = [], 0
    for entry in range(4):
        for turn in range(3):
            calls.append((entry, turn))
            accepted = random.random() > difficulty
            steps.append(0.3 * accepted)
            if accepted:
                filled += 1
                break
    return calls, steps, float(filled == 4)


def wander(random: Random, difficulty: float) -> Rollout:
    """Take up to thirty turns, each at a cost, that bring the answer nearer; easy tasks end earlier."""
    steps, progress = [], 0
    while len(steps) < 30 and (not steps or random.random() > 0.2 - 0.15 * difficulty):
        steps.append(-0.02 * (random.random() < 0.5))
        progress += random.random() < 0.7 - 0.4 * difficulty
    return list(range(len(steps))), steps, float(random.random() < min(1, 0.1 + (1 - difficulty) * progress / 5))


CASES: dict[str, tuple[Callable[[Random, float], Rollout], Credit, Hyperparameters]] = {
    "draft, stepwise to the last": (draft, stepwise, Hyperparameters(spread="last")),
    "mend, discounted by 0.8": (mend, discounted, Hyperparameters(gamma=0.8)),
    "mend, identical": (mend, identical, Hyperparameters()),
    "ledger, stepwise": (ledger, stepwise, Hyperparameters()),
    "ledger, to go": (ledger, discounted, Hyperparameters()),
    "wander, to go": (wander, discounted, Hyperparameters()),
    "wander, identical": (wander, identical, Hyperparameters()),
}


def draw(case: str, size: int, random: Random) -> CallBatch:
    """Draw the calls of an update."""
    make, credit, hyperparameters = CASES[case]
    values, rollouts, situations = [], [], []
    numbers: dict[Hashable, int] = {}
    for group in range(GROUPS):
        difficulty = random.random()
        for member in range(size):
            calls, steps, final = make(random, difficulty)
            values += credit(RolloutRewards(tuple(steps), final, (True,) * len(steps)), hyperparameters)
            rollouts += [group * size + member] * len(calls)
            situations += [numbers.setdefault(call, len(numbers)) for call in calls]
    rollout = np.array(rollouts)
    zeros = np.zeros(len(rollout))
    return CallBatch(
        value=np.array(values, dtype=np.float64),
        weight=weights(rollout, "rollout"),
        group=rollout // size,
        rollout=rollout,
        kind=zeros.astype(np.int64),
        returns=zeros,
        baseline=zeros,
        state=np.arange(len(rollout)),
        situation=np.array(situations),
    )


def measure(calls: CallBatch, prior: float | None) -> tuple[float, float]:
    """Return the mean square of the advantages of `rloo`, and the push of `grpo`."""
    cell = joined(calls.group, calls.situation) if calls.situation is not None else calls.group
    if prior is None:
        calls = replace(calls, situation=None)
    else:
        advantage._PRIOR = prior
    standardised: Floats = grpo(calls, Hyperparameters())
    pushed = replace(calls, weight=np.ones(len(cell))).mean(standardised, cell)
    return float((rloo(calls, Hyperparameters()) ** 2).mean()), float((pushed**2).mean())


def main() -> None:
    """Measure every case with groups of 8 and of 4."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=100)
    add_out(parser)
    options = parser.parse_args()
    result: dict[str, Any] = {}
    print(" " * 38 + "".join(f"{name:>14}" for name in BASELINES))
    for case in CASES:
        for size in (8, 4):
            random = Random(0)
            updates = [draw(case, size, random) for _ in range(options.updates)]
            found = {
                name: np.mean([measure(calls, prior) for calls in updates], axis=0) for name, prior in BASELINES.items()
            }
            variance = {name: round(float(one[0] / found["group"][0]), 3) for name, one in found.items()}
            push = {name: round(float(one[1]), 3) for name, one in found.items()}
            shown = "".join(f"{variance[name]:>8.3f} {push[name]:.3f}" for name in BASELINES)
            print(f"{case:28} groups of {size} {shown}")
            result[f"{case}, groups of {size}"] = {"variance": variance, "push": push}
    chosen = float(np.mean([found["variance"]["k=2"] for found in result.values()]))
    report_result({"ratio": round(chosen, 3), **result}, options.out)


if __name__ == "__main__":
    main()
