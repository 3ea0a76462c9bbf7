"""Lengths and advantages by role and turn, worked out by hand."""

from smallepisodes import call, episode

from leyden.orchestrator.report.call_positions import CallPositions
from leyden.records import CallCredit
from leyden.rl.situation import MAX_TURN, Situation


def positions() -> CallPositions:
    """A writer that continues its draft after a judge's call, a checker in its place, and a draft alone."""
    found = CallPositions()
    draft, judged = call("d", 4, role="writer"), call("j", 9, policy="judge", role="judge")
    final = call("f", 2, role="writer", parent="d", kept_messages=1)
    found.add(episode(0, 1.0, [draft, judged, final]), "policy")
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
        "length/turn/0": (4 + 4 + 4 + 7) / 4,
        "length/turn/1": 2,
        "advantage/role/writer": (0.5 + 1.5 + 0) / 3,
        "advantage/role/checker": -1.0,
        "advantage/turn/0": (0.5 + 0 - 1.0) / 3,
        "advantage/turn/1": 1.5,
    }


def test_advantages_by_situation_leave_out_calls_without_one() -> None:
    assert positions().advantages(CREDITS) == {
        Situation("writer", 0, 0): [0.5, 0.0],
        Situation("writer", 0, 1): [1.5],
        Situation("checker", 0, 0): [-1.0],
    }


def test_the_number_of_series_is_bounded() -> None:
    found = CallPositions()
    calls = [
        call(str(turn), turn, role=f"role {turn}", parent=str(turn - 1), kept_messages=turn) for turn in range(100)
    ]
    found.add(episode(0, 1.0, calls), "policy")
    metrics = found.metrics([])
    last = [MAX_TURN, 99]
    assert metrics[f"length/turn/{MAX_TURN}"] == sum(last) / 2
    assert [name for name in metrics if name.startswith("length/turn/")][-1] == f"length/turn/{MAX_TURN}"
    roles = [name for name in metrics if name.startswith("length/role/")]
    assert len(roles) == 32 and roles[-1] == "length/role/(others)"
