"""Figures of an update by hand, and the same however the update is divided into batches."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from leyden.config import Hyperparameters
from leyden.rl.loss import TokenBatch
from leyden.rl.loss.ppo_clip import ppo_clip
from leyden.rl.loss.reinforce import reinforce
from leyden.rl.situation import MAX_TURN
from leyden.rl.statistics import Statistics

LN2 = 0.6931472

Call = list[tuple[float, float, float]]
"""Current, proximal and sampler logprob of each token."""


def count(statistics: Statistics, calls: Sequence[tuple[int, Call]], loss: object = ppo_clip) -> None:
    """Add a batch of calls, each with its turn; advantages 1 and -1 in turn, entropies as the current logprob."""
    flat = [(number, turn, token) for number, (turn, call) in enumerate(calls) for token in call]
    table = torch.tensor([token for *_, token in flat], dtype=torch.float64).reshape(-1, 3)
    call = torch.tensor([number for number, *_ in flat], dtype=torch.int64)
    depth = torch.tensor([turn for _, turn, _ in flat], dtype=torch.int64)
    tokens = TokenBatch(table[:, 0], table[:, 1], 1.0 - 2.0 * (depth % 2), call)
    _, metrics = loss(tokens, Hyperparameters())
    statistics.add(tokens, table[:, 2], depth, metrics, -table[:, 0])


def finished(*batches: Sequence[tuple[int, Call]], loss: object = ppo_clip) -> dict[str, float]:
    statistics = Statistics()
    for batch in batches:
        count(statistics, batch, loss)
    return statistics.finish()


def test_metrics_by_hand() -> None:
    found = finished([(0, [(LN2, 0.0, 0.0), (0.0, 0.0, LN2)]), (1, [(-1.0, -1.0 + LN2, -1.0)])])
    assert found == pytest.approx(
        {
            "ratio_mean": (2 + 1 + 0.5) / 3,
            "ratio_max": 2.0,
            "ratio_min": 0.5,
            "clipped_low": 1 / 3,  # the third, whose advantage is -1
            "clipped_high": 1 / 3,  # the first, whose advantage is 1
            "entropy": (-LN2 + 0 + 1) / 3,
            "kl_sampler_k1": (0 + LN2 - LN2) / 3,
            "kl_sampler_k3": (0 + (0.5 - 1 + LN2) + (2 - 1 - LN2)) / 3,
            "kl_proximal_k3": ((2 - 1 - LN2) + 0 + (0.5 - 1 + LN2)) / 3,
            "ess_token": 3.5**2 / (3 * 5.25),  # weights 1, 0.5 and 2
            "ess_call": 2.5**2 / (2 * 4.25),  # weights 0.5 and 2
            "kl_sampler_k1_turn_0": LN2 / 2,
            "kl_sampler_k3_turn_0": (0.5 - 1 + LN2) / 2,
            "kl_sampler_k1_turn_1": -LN2,
            "kl_sampler_k3_turn_1": 2 - 1 - LN2,
        },
        abs=1e-6,
    )


def test_a_loss_without_its_own_ratio_reports_that_of_tokens() -> None:
    found = finished([(0, [(LN2, 0.0, 0.0)])], loss=reinforce)
    assert found["ratio_mean"] == pytest.approx(2.0)
    assert "clipped_low" not in found


def test_metrics_of_a_loss_do_not_change_those_that_every_update_has() -> None:
    """A user's loss may name its metrics as it likes."""

    def loss(tokens: TokenBatch, hyperparameters: Hyperparameters) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        names = ("calls", "weight", "call_weight^2", "entropy", "ess_token", "margin")
        return -tokens.current, {name: torch.full_like(tokens.current, 7.0) for name in names}

    calls = [(0, [(LN2, 0.0, 0.0), (0.0, 0.0, LN2)]), (1, [(-1.0, -1.0 + LN2, -1.0)])]
    found, plain = finished(calls, loss=loss), finished(calls, loss=reinforce)
    assert found["margin"] == pytest.approx(7.0)
    assert {name: found[name] for name in plain} == pytest.approx(plain)


def test_late_turns_are_reported_as_one_and_turns_without_tokens_not_at_all() -> None:
    found = finished([(MAX_TURN, [(0.0, 0.0, 1.0)]), (MAX_TURN + 9, [(0.0, 0.0, 3.0)])])
    assert [name for name in found if "turn" in name] == [
        f"kl_sampler_k1_turn_{MAX_TURN}",
        f"kl_sampler_k3_turn_{MAX_TURN}",
    ]
    assert found[f"kl_sampler_k1_turn_{MAX_TURN}"] == 2.0


def test_nothing_counted_is_nothing_reported() -> None:
    assert finished() == {}
    assert finished([]) == {}


def test_very_different_policies_have_finite_metrics() -> None:
    found = finished([(0, [(-0.1, -900.0, -0.1), (-900.0, -0.1, -900.0)])])
    assert all(torch.isfinite(torch.tensor(value)) for value in found.values())


LOGPROBS = st.floats(-5, 0)
CALLS = st.lists(
    st.tuples(st.integers(0, 3), st.lists(st.tuples(LOGPROBS, LOGPROBS, LOGPROBS), min_size=1, max_size=4)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(CALLS, st.data())
def test_an_update_divided_into_batches_has_the_same_metrics(
    calls: list[tuple[int, Call]], data: st.DataObject
) -> None:
    cuts = sorted({0, len(calls), *data.draw(st.lists(st.integers(0, len(calls)), max_size=4))})
    batches = [calls[start:end] for start, end in pairwise(cuts)]
    assert finished(*batches) == pytest.approx(finished(calls))
