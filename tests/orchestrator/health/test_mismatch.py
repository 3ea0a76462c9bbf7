"""A mismatch between engine and trainer is reported once, with its likely cause; rounding is not reported."""

from leyden.orchestrator.health.mismatch import MismatchDetector


def statistics(k3: float, *turns: float) -> dict[str, float]:
    return {"kl_sampler_k3": k3, **{f"kl_sampler_k3_turn_{turn}": value for turn, value in enumerate(turns)}}


def test_rounding_that_varies_is_no_mismatch() -> None:
    detector = MismatchDetector()
    assert [detector.add_step(statistics(k3)) for k3 in (1e-4, 3e-3, 2e-4, 9e-3, 1e-4)] == [None] * 5
    assert detector.add_step({}) is None


def test_a_jump_in_all_turns_points_at_the_weights() -> None:
    detector = MismatchDetector()
    assert not any(detector.add_step(statistics(2e-4, 1e-4, 3e-4)) for _ in range(5))
    said = detector.add_step(statistics(0.3, 0.25, 0.35))
    assert said is not None and "is 0.3 a token, and was 0.0002" in said and "older weights" in said
    assert detector.add_step(statistics(0.3, 0.25, 0.35)) is None


def test_a_jump_in_late_turns_points_at_the_prefix_cache() -> None:
    detector = MismatchDetector()
    assert not any(detector.add_step(statistics(2e-4, 1e-4, 3e-4)) for _ in range(5))
    said = detector.add_step(statistics(0.1, 2e-4, 0.2))
    assert said is not None and "0.0002 in the first, 0.2 in the last" in said and "prefix cache" in said


def test_a_mismatch_from_the_start_points_at_the_precision() -> None:
    said = MismatchDetector().add_step(statistics(0.2))
    assert said is not None and "`engine.dtype`" in said
