"""Samples are divided over ranks by the tokens that each rank computes."""

from itertools import combinations
from random import Random

from smallpolicy import some_samples

from leyden.learner.ranks.division import divide
from leyden.learner.sample import Sample
from leyden.rl.tree import build_tree


def sample(prompt: tuple[int, ...], completion: tuple[int, ...]) -> Sample:
    return Sample(
        call="",
        rollout=0,
        call_index=0,
        prompt_ids=prompt,
        completion_ids=completion,
        token_indices=range(len(completion)),
        sampler_logprobs=(0.0,) * len(completion),
        temperature=1.0,
    )


def tokens(samples: list[Sample], part: list[int]) -> int:
    return len(build_tree([(*samples[index].prompt_ids, *samples[index].completion_ids) for index in part]).ids)


def test_every_sample_is_on_one_rank_and_the_largest_part_is_the_smallest_possible() -> None:
    samples = some_samples(9, seed=3)
    order = sorted(range(9), key=lambda index: (*samples[index].prompt_ids, *samples[index].completion_ids))
    parts = divide(samples, 3)
    assert sorted(index for part in parts for index in part) == list(range(9))
    possible = [(order[:a], order[a:b], order[b:]) for a, b in combinations(range(10), 2)]
    best = min(max(tokens(samples, part) for part in cut if part) for cut in possible)
    assert max(tokens(samples, part) for part in parts) == best


def test_what_samples_share_counts_once() -> None:
    rng = Random(0)
    long = tuple(rng.randrange(64) for _ in range(1000))
    shared = [sample(long, (index,)) for index in range(20)]  # 1,020 distinct tokens, 20,020 in all
    other = [sample((63 - index,), long[:500]) for index in range(2)]
    parts = divide([*shared, *other], 2)
    assert sorted(map(sorted, parts)) == [list(range(20)), [20, 21]]
    alone = divide([*shared, *other], 2, trees=False)
    assert max(map(len, alone)) < 20


def test_there_may_be_fewer_samples_than_ranks() -> None:
    assert divide([], 2) == [[], []]
    assert sorted(map(len, divide(some_samples(1), 3))) == [0, 0, 1]
