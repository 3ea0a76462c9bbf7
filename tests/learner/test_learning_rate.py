"""The default learning rate by the size of a model."""

import pytest

from leyden.learner.learning_rate import default_learning_rate


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        (1_967_808, 8e-4),  # spark
        (134_515_008, 1e-5),  # SmolLM2-135M
        (500_000_000, 3e-6),
        (2_000_000_000, 1.7e-6),  # halfway between 0.5 and 8 billion: 3e-6 / sqrt(3)
        (8_000_000_000, 1e-6),
        (70_000_000_000, 1e-6),
    ],
)
def test_the_learning_rate_of_a_size(parameters: int, expected: float) -> None:
    assert default_learning_rate(parameters, lora=False) == expected


def test_a_larger_model_never_has_a_larger_rate() -> None:
    rates = [default_learning_rate(int(1e5 * 1.3**n), lora=False) for n in range(60)]
    assert rates == sorted(rates, reverse=True)


def test_adapters_take_ten_times_as_much() -> None:
    assert default_learning_rate(134_515_008, lora=True) == 1e-4
    assert default_learning_rate(8_000_000_000, lora=True) == 1e-5
    assert default_learning_rate(1_967_808, lora=True) == 8e-3
