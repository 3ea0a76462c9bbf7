"""Algorithms are chosen by name."""

import pytest

from leyden.rl.advantage.grpo import grpo
from leyden.rl.choosing import Room, UnknownName, choose, names


def test_an_algorithm_is_chosen_by_its_name() -> None:
    assert choose("advantage", "grpo") is grpo


@pytest.mark.parametrize("room", ["credit", "advantage", "loss", "aggregation", "correction"])
def test_every_file_of_a_room_holds_the_function_of_its_name(room: Room) -> None:
    for name in names(room):
        assert choose(room, name).__name__ == name


def test_what_is_not_there_is_answered_with_what_is() -> None:
    with pytest.raises(
        UnknownName,
        match=r"`algorithm.loss`: there is no 'ppo'; there are cispo, gspo, ppo_clip, reinforce, or module:func",
    ):
        choose("loss", "ppo")
    with pytest.raises(UnknownName, match="there are masked, truncated, none, or module:function"):
        choose("correction", "clipped")
