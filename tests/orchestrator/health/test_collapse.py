"""A run that collapses is reported once, and noise is not a collapse."""

from leyden.orchestrator.health.collapse import CollapseDetector


def test_an_entropy_far_below_that_of_the_start_is_reported_once() -> None:
    detector = CollapseDetector()
    assert [detector.add_entropy(value) for value in (1.0, 0.8, 1.2, 1.0, 1.1, None, 0.5, 0.11)] == [None] * 8
    said = detector.add_entropy(0.05)
    assert said is not None and "it is 0.05, and was 1 at the start" in said
    assert detector.add_entropy(0.01) is None


def test_a_held_out_reward_that_falls_by_more_than_noise_is_reported_once() -> None:
    detector = CollapseDetector()
    assert detector.add_held_out(0, 0.3, 0.05) is None
    assert detector.add_held_out(10, 0.8, 0.04) is None
    assert detector.add_held_out(20, 0.65, 0.05) is None  # 2.3 standard errors of the difference
    said = detector.add_held_out(30, 0.2, 0.04)
    assert said is not None and "it is 0.200, and was 0.800 at step 10" in said
    assert detector.add_held_out(40, 0.1, 0.04) is None


def test_a_fall_that_is_certain_and_small_is_no_collapse() -> None:
    detector = CollapseDetector()
    assert [detector.add_held_out(step, reward, 0.0) for step, reward in ((0, 0.95), (1, 0.9))] == [None, None]


def test_a_resumed_run_remembers_where_it_began_and_what_it_has_reported() -> None:
    lines = [{"step": 0, "held_out/reward": 0.9, "held_out/error": 0.01}]
    lines += [{"step": step, "training/entropy": 2.0} for step in range(1, 7)]
    assert CollapseDetector.of(lines).add_entropy(0.1) is not None
    assert CollapseDetector.of(lines).add_held_out(8, 0.1, 0.01) is not None
    assert CollapseDetector.of([*lines, {"step": 7, "training/entropy": 0.1}]).add_entropy(0.1) is None
