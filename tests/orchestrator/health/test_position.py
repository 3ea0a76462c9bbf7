"""A run says when the mean advantage depends on the position of calls, and does not say it by chance."""

import re
from random import Random

import pytest

from leyden.orchestrator.credit.samples import SituatedAdvantage
from leyden.orchestrator.health.position import PositionDetector
from leyden.rl.situation import Situation

DRAFT, FINAL = Situation(None, 0, 0), Situation("judge", 0, 1)


def step(random: Random, groups: int, shift: float, rollouts: int = 4) -> list[SituatedAdvantage]:
    """Drafts and final answers with advantages about 1 in size, whose groups have something in common."""
    found = []
    for group in range(groups):
        common = random.gauss(0, 0.3)
        for _ in range(rollouts):
            found.append(SituatedAdvantage(str(group), DRAFT, shift + common + random.gauss(0, 0.8)))
            found.append(SituatedAdvantage(str(group), FINAL, -shift - common + random.gauss(0, 0.8)))
    return found


def said(detector: PositionDetector, shift: float) -> list[str]:
    """What the detector says over six steps."""
    random = Random(0)
    return [message for _ in range(6) if (message := detector.add_step(step(random, 12, shift))) is not None]


def test_a_mean_that_depends_on_the_position_is_reported_once_and_says_what_to_set() -> None:
    (message,) = said(PositionDetector("compare by turn"), 0.9)
    assert re.search(r"\+0\.\d\d ± 0\.\d\d at turn 0, -0\.\d\d ± 0\.\d\d at judge, turn 1", message)
    assert message.endswith("This adds variance to the gradient (compare by turn)")


@pytest.mark.parametrize("groups", [2, 4, 12])
def test_chance_is_not_reported(groups: int) -> None:
    for seed in range(50):
        random, detector = Random(seed), PositionDetector("compare by turn")
        assert [detector.add_step(step(random, groups, 0.0, rollouts=2)) for _ in range(12)] == [None] * 12


def test_nothing_is_reported_of_small_or_rare_differences_nor_without_advice() -> None:
    assert PositionDetector("compare by turn").add_step(step(Random(0), 2000, 0.1)) is None
    rare = [SituatedAdvantage(str(group), FINAL, -1.0) for group in range(8)]
    balanced = [SituatedAdvantage(str(group), DRAFT, sign) for group in range(200) for sign in (1.0, -1.0)]
    assert PositionDetector("compare by turn").add_step([*rare, *balanced]) is None
    assert said(PositionDetector(None), 0.9) == []


def test_few_groups_suffice_if_they_agree() -> None:
    alike = [SituatedAdvantage(str(group), DRAFT, 0.7) for group in range(4)]
    alike += [SituatedAdvantage(str(group), FINAL, -0.7) for group in range(4)]
    assert PositionDetector("compare by turn").add_step(alike) is not None
    assert PositionDetector("compare by turn").add_step([one for one in alike if one.group != "3"]) is None
