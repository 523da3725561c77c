"""Randomness: a pure function of its counters, uniform, without replacement where it must be."""

import pytest
import torch

from fedda import rng
from fedda.engines.participation import CounterDraws

MASK = (1 << 64) - 1


def splitmix(key, counter):
    """The same hash in Python's own integers."""
    z = (key + (counter + 1) * 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def test_fold_equals_python_integers():
    for key in (0, 1, -1, 2**62, -(2**63)):
        counters = torch.tensor([0, 1, 5, 10**12, 2**40])
        got = rng.fold(torch.tensor(key), counters).tolist()
        assert got == [splitmix(key & MASK, c) for c in counters.tolist()]
        assert [rng.fold(torch.tensor(key), c).item() for c in counters.tolist()] == got


def test_known_value_of_splitmix64():
    # The first output of SplitMix64 seeded with 0, as published with the generator.
    assert rng.fold(torch.tensor(0), 0).item() & MASK == 0xE220A8397B1DCDAF


def test_integers_are_uniform_and_in_range():
    key = rng.fold(rng.key(3, rng.BATCH), torch.arange(200_000))
    draws = rng.integers(key, 7)
    counts = torch.bincount(draws, minlength=7).double()
    assert len(counts) == 7
    chi2 = ((counts - 200_000 / 7) ** 2 / (200_000 / 7)).sum()
    assert chi2 < 22.5  # 99.9 % of a chi-square with 6 degrees of freedom
    assert rng.integers(key, 2**31 - 1).max() < 2**31 - 1


def test_normal_has_the_moments_of_a_normal():
    x = rng.normal(rng.fold(rng.key(1, rng.BATCH), torch.arange(400_000)))
    for power, moment, spread in ((1, 0, 1), (2, 1, 2**0.5), (3, 0, 15**0.5), (4, 3, 96**0.5)):
        assert abs((x**power).mean() - moment) < 4 * spread / 400_000**0.5


def test_cohorts_are_without_replacement_and_fair():
    key = rng.fold(rng.key(0, rng.COHORT), torch.arange(20_000))[:, None]
    cohorts = rng.choose(key, 10, 3)
    assert (cohorts[:, 1:] > cohorts[:, :-1]).all()  # ascending, so distinct
    pairs = torch.zeros(10, 10)
    for a, b in ((0, 1), (0, 2), (1, 2)):
        pairs += torch.histogramdd(cohorts[:, [a, b]].double(), bins=[10, 10], range=[0.0, 10.0, 0.0, 10.0]).hist
    expected = 20_000 * 3 / 45
    upper = pairs[torch.triu(torch.ones(10, 10), diagonal=1) > 0]
    assert ((upper - expected) ** 2 / expected).sum() < 87  # 44 degrees of freedom, 99.99 %


def test_streams_differ():
    keys = {
        rng.fold(rng.key(seed, purpose), counter).item()
        for seed in range(20)
        for purpose in range(5)
        for counter in range(20)
    }
    assert len(keys) == 20 * 5 * 20


def test_permutation():
    p = rng.permutation(rng.key(0, rng.SPLIT), 1000)
    assert p.sort().values.equal(torch.arange(1000)) and not p.equal(torch.arange(1000))


@pytest.mark.parametrize("n,r", [(5, 5), (5, 1), (1, 1)])
def test_choose_edges(n, r):
    assert rng.choose(rng.key(torch.tensor([0]), rng.COHORT), n, r).shape == (r,)


# -- a few of many clients ----------------------------------------------------------------------------------------------
def first_different(key, n, r):
    """The definition, in Python's own integers."""
    draws = [((splitmix(key & MASK, j) & MASK) >> 33) * n >> 31 for j in range(2 * r + 64)]
    return sorted(list(dict.fromkeys([*draws, *range(r)]))[:r])


@pytest.mark.parametrize("n,r", [(5000, 1), (5000, 100), (5000, 1250), (100_000, 100), (2**31 - 1, 7)])
def test_a_few_of_many_are_the_first_different_draws(n, r):
    keys = rng.fold(rng.key(torch.tensor([[0], [1], [2]]), rng.COHORT), 5)
    together = rng.choose(keys, n, r)
    assert together.shape == (3, r) and together.dtype == torch.int64
    assert (together[:, 1:] > together[:, :-1]).all() and together.min() >= 0 and together.max() < n
    for key, row in zip(keys, together, strict=True):
        assert row.tolist() == first_different(key.item(), n, r)
        assert rng.choose(key, n, r).equal(row) and rng.choose(key, n, r).equal(row)


@pytest.mark.parametrize("n,r", [(5000, 1250), (100_000, 100), (10**9, 1)])
def test_what_a_gpu_does_gives_the_same_bits(n, r):
    """Its operations, run here."""
    draws = rng.fold(rng.key(torch.tensor([[3], [4]]), rng.COHORT), torch.arange(2 * r + 64))
    assert rng._first(draws, n, r).equal(rng._first_on_cpu(draws, n, r))


@pytest.mark.parametrize("first", [rng._first, rng._first_on_cpu])
def test_too_few_different_draws_are_filled_up(first):
    draws = torch.tensor([[5, 90, 5, 2] * 21]) << 33  # with n = 2^31 the numbers themselves
    assert first(draws, 2**31, 10).tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 90]]


def test_a_few_of_many_are_fair():
    """Every client, and every pair of neighbours in a cohort of two, equally often."""
    key = rng.fold(rng.key(7, rng.COHORT), torch.arange(4000))[:, None]
    n = 5000
    for r in (50, 1250):
        counts = torch.bincount(rng.choose(key, n, r).flatten(), minlength=n).double()
        expected = 4000 * r / n
        chi2 = ((counts - expected) ** 2 / (expected * (1 - r / n))).sum()  # a client is drawn at most once a round
        assert abs(chi2 - n) < 4 * (2 * n) ** 0.5
    pairs = rng.choose(rng.fold(rng.key(8, rng.COHORT), torch.arange(50_000))[:, None], n, 2) // 500
    counts = torch.bincount(pairs[:, 0] * 10 + pairs[:, 1], minlength=100).view(10, 10).double()
    same, other = 50_000 * 499 * 500 / (n * (n - 1)), 50_000 * 2 * 500 * 500 / (n * (n - 1))
    expected = torch.triu(torch.full((10, 10), other), diagonal=1).double() + same * torch.eye(10)
    seen = expected > 0
    assert counts[~seen].sum() == 0
    assert ((counts - expected)[seen] ** 2 / expected[seen]).sum() < 106  # 54 degrees of freedom, 99.999 %


def test_a_cohort_of_few_or_of_most_is_drawn_as_ever():
    key = rng.fold(rng.key(torch.tensor([0]), rng.COHORT), 3)
    for n, r in ((4096, 100), (5000, 1251)):
        smallest = rng.fold(key, torch.arange(n)).argsort()[:r].sort().values
        assert rng.choose(key, n, r).equal(smallest)


def test_a_client_s_key_is_its_own_whatever_its_place_in_the_cohort():
    """Its batches depend on the seed, the round and its number, and not on who else takes part."""
    draws = CounterDraws(torch.tensor([3]))
    everyone, keys = draws.cohort(4, 9, 9)
    some, own = draws.cohort(4, 9, 4)
    assert everyone.tolist() == list(range(9)) and len(set(keys.tolist())) == 9
    assert some.tolist() != [0, 1, 2, 3]
    assert own.tolist() == keys[some].tolist()
