"""Lengths and advantages by role and turn, worked out by hand."""

from smallepisodes import call, episode

from leyden.records import CallCredit
from leyden.rl.statistics import MAX_TURN
from leyden.trainer.report.call_positions import CallPosition, CallPositions


def positions() -> CallPositions:
    """Two rollouts of a writer that drafts and finishes with a judge between, and one that only drafts."""
    found = CallPositions()
    draft, judged = call("d", 4, role="writer"), call("j", 9, policy="judge", role="judge")
    found.add(episode(0, 1.0, [draft, judged, call("f", 2, role="writer")]), "policy")
    found.add(episode(1, 0.0, [draft, judged, call("f", 4, role="checker")]), "policy")
    found.add(episode(2, 0.0, [call("d", 7)]), "policy")
    return found


CREDITS = [
    CallCredit("g.0.1", "d", 1.0, 0.5, 0.1, 4),
    CallCredit("g.0.1", "f", 1.0, 1.5, 0.1, 2),
    CallCredit("g.1.1", "d", 0.0, 0.0, 0.1, 0, "its advantage is 0"),
    CallCredit("g.1.1", "f", 0.0, -1.0, 0.1, 4),
    CallCredit("g.2.1", "d", excluded="no credit"),
]


def test_length_and_advantage_by_role_and_turn() -> None:
    assert positions().metrics(CREDITS) == {
        "length/role/writer": (4 + 2 + 4) / 3,
        "length/role/checker": 4,
        "length/turn/0": (4 + 4 + 7) / 3,
        "length/turn/2": (2 + 4) / 2,
        "advantage/role/writer": (0.5 + 1.5 + 0) / 3,
        "advantage/role/checker": -1.0,
        "advantage/turn/0": (0.5 + 0) / 2,
        "advantage/turn/2": (1.5 - 1.0) / 2,
    }


def test_advantages_by_position_leave_out_calls_without_one() -> None:
    assert positions().advantages(CREDITS) == {
        CallPosition("writer", 0): [0.5, 0.0],
        CallPosition("writer", 2): [1.5],
        CallPosition("checker", 2): [-1.0],
    }


def test_the_number_of_series_is_bounded() -> None:
    found = CallPositions()
    found.add(episode(0, 1.0, [call(str(turn), turn, role=f"role {turn}") for turn in range(100)]), "policy")
    metrics = found.metrics([])
    last = [MAX_TURN, 99]
    assert metrics[f"length/turn/{MAX_TURN}"] == sum(last) / 2
    assert [name for name in metrics if name.startswith("length/turn/")][-1] == f"length/turn/{MAX_TURN}"
    roles = [name for name in metrics if name.startswith("length/role/")]
    assert len(roles) == 32 and roles[-1] == "length/role/(others)"
