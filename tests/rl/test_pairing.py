"""Each advantage takes some credits; other pairs are refused with what to write instead."""

from itertools import product

import pytest

from leyden.rl.choosing import names
from leyden.rl.pairing import PAIRS, IncompatibleChoice, check_pair, needs_critic


def test_the_table_knows_every_credit_and_every_advantage() -> None:
    assert sorted(PAIRS) == names("advantage")
    assert sorted({credit for credits in PAIRS.values() for credit in credits}) == names("credit")


@pytest.mark.parametrize(("credit", "advantage"), list(product(names("credit"), names("advantage"))))
def test_a_pair_is_in_the_table_or_refused(credit: str, advantage: str) -> None:
    if credit in PAIRS[advantage]:
        check_pair(credit, advantage)
    else:
        with pytest.raises(IncompatibleChoice, match=f'write `algorithm.credit = "{PAIRS[advantage][0]}"`'):
            check_pair(credit, advantage)


def test_a_refusal_names_both_ways_out() -> None:
    with pytest.raises(IncompatibleChoice) as refused:
        check_pair("identical", "ppo")
    assert str(refused.value) == (
        '`algorithm.advantage = "ppo"` does not go with `algorithm.credit = "identical"`: write '
        '`algorithm.credit = "gae"`, or `algorithm.advantage = "grpo"` to keep that credit'
    )


def test_a_users_own_goes_with_anything_but_as_the_credit_of_ppo() -> None:
    check_pair("mine:credit", "grpo")
    check_pair("mine:credit", "mine:advantage")
    check_pair("gae", "mine:advantage")
    with pytest.raises(IncompatibleChoice, match=r'write `algorithm.credit = "gae"`$'):
        check_pair("mine:credit", "ppo")


def test_names_that_there_are_not_are_for_choose_to_refuse() -> None:
    check_pair("identical", "grpoo")
    check_pair("identicle", "grpo")


def test_a_critic_is_needed_where_its_values_are_read() -> None:
    assert needs_critic("gae", "ppo")
    assert needs_critic("gae", "mine:advantage")
    assert not needs_critic("identical", "grpo")
