"""The small pieces: schedules, estimators, preconditioners, proximal maps."""

import math
import warnings

import pytest
import torch

import fedda
from conftest import last, quadratic
from fedda.rules import schedules
from fedda.rules.estimators import Momentum, Mvr, Plain
from fedda.rules.preconditioners import Diagonal, Fixed, Scalar
from fedda.rules.prox import L1, Box, NonNegative, Prox, Unconstrained, prox
from fedda.rules.schedules import Constant, CubeRoot

T = torch.tensor(3.0, dtype=torch.float64)


class Recorded:
    """A client that gives g(x; batch) = batch + x and counts its batches."""

    def __init__(self):
        self.batches = 0

    def gradients(self, *points):
        self.batches += 1
        return tuple(self.batches + x for x in points)


def test_schedules():
    assert Constant(0.3)(T) == 0.3
    assert CubeRoot(0.3, 5.0)(T).item() == pytest.approx(0.3 / 8 ** (1 / 3), rel=1e-15)


def test_every_tuned_setting_of_the_paper_gives_its_table():
    """eta_0, a_0 and a_T that follow from the settings which the paper lists."""
    table = [(0.01, 1e5, 5e6, 2.154e-4, 0.232, 0.206), (1, 1e4, 200, 4.642e-2, 0.431, 0.207)]
    table += [(0.02, 1e4, 1e6, 9.283e-4, 0.862, 0.414), (1, 5e3, 100, 5.848e-2, 0.342, 0.117)]
    for lr, w, c, eta0, a0, aT in table:
        rate, estimator = CubeRoot(lr, w), Mvr(c)
        assert rate(0 * T).item() == pytest.approx(eta0, rel=5e-4)
        assert estimator.weight(rate(0 * T)).item() == pytest.approx(a0, abs=5e-4)
        assert estimator.weight(rate(0 * T + 20000)).item() == pytest.approx(aT, abs=5e-4)


def test_estimators_by_hand():
    nu, x, x_prev = (torch.tensor([v]) for v in (2.0, 5.0, 3.0))
    assert Plain()(nu, x, x_prev, 0.1, Recorded()) == 6
    assert Momentum(0.75)(nu, x, x_prev, 0.1, Recorded()).item() == 0.25 * 6 + 0.75 * 2
    assert Momentum(0.75, alpha_mode="weight")(nu, x, x_prev, 0.1, Recorded()).item() == 0.75 * 6 + 0.25 * 2
    client = Recorded()
    assert Mvr(4.0)(nu, x, x_prev, 0.25, client).item() == 6 + 0.75 * (2 - 4)
    assert client.batches == 1  # one batch for both points
    assert Mvr(400.0)(nu, x, x_prev, 0.25, client).item() == 7  # a clipped to 1: the plain gradient


@pytest.mark.parametrize(
    ("name", "words"), [("fedda-mvr", {"eps": 5.0}), ("stem", {}), ("mime-mvr", {}), ("mimelite-mvr", {})]
)
def test_clipping_is_warned_once(name, words):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        algorithm = fedda.make(name, lr=1.0, w=8.0, c=400.0, **words)
        last(algorithm, quadratic(), 3)
    assert [str(w.message) for w in seen] == [
        "Mvr: c eta_0^2 = 100 > 1 is clipped to 1 (a plain gradient step); a smaller c or lr avoids it"
    ]


S = torch.tensor([[3.0, -4.0]], dtype=torch.float64)


@pytest.mark.parametrize("matrix,expected_mu,expected_h", [
    (Diagonal(0.9, 0.1), [0.9, 1.6], [0.9**0.5 + 0.1, 1.6**0.5 + 0.1]),
    (Diagonal(0.9, 0.1, beta_mode="weight"), [8.1, 14.4], [8.1**0.5 + 0.1, 14.4**0.5 + 0.1]),
    (Diagonal(0.9, 0.1, mu0="nu0"), [9.0, 16.0], [3.1, 4.1]),
    (Diagonal(0.9, 0.1, bias_correction=True), [0.9, 1.6], [3.1, 4.1]),
    (Diagonal(0.9, eps_mode="relative", kappa=0.5, bias_correction=True), [0.9, 1.6], [3 + 1.75, 4 + 1.75]),
    (Scalar(0.9, mu0="zero", eps_mode="relative", kappa=0.5, bias_correction=True), [0.5], [5 + 2.5]),
    (Scalar(0.9, 0.1, mu0="zero"), [0.5], [0.6]),
    (Scalar(0.9, 0.1), [5.0], [5.1]),
    (Scalar(0.9, 0.1, mu0="zero", beta_mode="weight"), [4.5], [4.6]),
])  # fmt: skip
def test_preconditioners_by_hand(matrix, expected_mu, expected_h):
    mu = matrix.update(matrix.start(S), S)
    torch.testing.assert_close(mu, torch.tensor([expected_mu], dtype=torch.float64))
    h = matrix.diagonal(mu, torch.tensor(1.0, dtype=torch.float64))
    torch.testing.assert_close(h, torch.tensor([expected_h], dtype=torch.float64))


def test_first_matrix():
    zero = torch.tensor(0.0, dtype=torch.float64)
    for bias in (False, True):
        matrix = Diagonal(0.9, 0.1, bias_correction=bias)
        assert matrix.diagonal(matrix.start(S), zero).tolist() == [[0.1, 0.1]]  # h_0 = eps, as printed
    one = Diagonal(0.9, 0.1, h0="one")
    assert one.diagonal(one.start(S), zero).tolist() == [[1.0, 1.0]]
    assert one.diagonal(one.start(S), zero + 1).tolist() == [[0.1, 0.1]]
    relative = Diagonal(0.9, eps_mode="relative", bias_correction=True)
    assert relative.diagonal(relative.start(S), zero).tolist() == [[1.0, 1.0]]  # nobody moves in that round


def test_mu0_from_nu0_has_the_units_of_s():
    """z / eta sums I estimates, so mu_0 is (I nu_0)^2, or I |nu_0| (7.6); with mu_scale = mean it is nu_0^2."""
    problem = quadratic()
    nu0 = fedda.Run(fedda.make("fedda-2-1"), problem).server.nu
    for name, moment in (("fedda-2-1", (4 * nu0) ** 2), ("fedda-2-2", 4 * nu0.norm(dim=-1, keepdim=True))):
        start = fedda.Run(fedda.make(name, steps=4, mu0="nu0"), problem).server
        torch.testing.assert_close(start.mu, moment)
    start = fedda.Run(fedda.make("fedda-2-1", steps=4, mu0="nu0", mu_scale="mean"), problem).server
    torch.testing.assert_close(start.mu, nu0**2)


def test_mu_scale_and_v_input():
    """On one round with constant eta: s = z / eta is I times the mean of z / S."""
    problem, words = quadratic(noise=0.0), {"steps": 4, "lr": 0.1, "beta": 0.0, "eps": 1.0}
    by_sum = last(fedda.make("fedda-2-1", **words), problem, 1)
    by_mean = last(fedda.make("fedda-2-1", mu_scale="mean", **words), problem, 1)
    torch.testing.assert_close(by_sum.mu, 16 * by_mean.mu)
    by_nu = last(fedda.make("fedda-2-1", v_input="nu", **words), problem, 1)
    torch.testing.assert_close(by_nu.mu, (4 * by_nu.nu) ** 2)


def test_tiny_eps_never_gives_a_zero_h():
    assert Diagonal(eps=1e-300).diagonal(torch.zeros(1, 2), T).min() >= 1e-12


@pytest.mark.parametrize("bad,line", [
    (lambda: Mvr(-1.0), "Mvr: c must be >= 0, got -1.0"),
    (lambda: Momentum(1.0), r"Momentum: momentum must be in \[0, 1\), got 1.0"),
    (lambda: Diagonal(eps=0.0), "Diagonal: eps must be > 0, got 0.0"),
    (lambda: Diagonal(mu0="x"), "Diagonal: mu0 must be one of 'zero', 'nu0', got 'x'"),
    (lambda: Scalar(beta=1.5), r"Scalar: beta must be in \[0, 1\], got 1.5"),
    (lambda: Diagonal(mu0="nu0", bias_correction=True), "Diagonal: bias_correction must be False with mu0='nu0'"),
    (lambda: Diagonal(eps_mode="relative"), "Diagonal: bias_correction must be True with eps_mode='relative'"),
    (lambda: Diagonal(eps_mode="x"), "Diagonal: eps_mode must be one of 'absolute', 'relative', got 'x'"),
    (lambda: Diagonal(kappa=0.0), "Diagonal: kappa must be > 0, got 0.0"),
    (lambda: Fixed(torch.tensor([1.0, 0.0])), r"Fixed: h must be > 0, got \[1.0, 0.0\]"),
    (lambda: CubeRoot(0.1, 0.0), "CubeRoot: w must be > 0, got 0.0"),
    (lambda: L1(-1), "L1: gamma must be >= 0, got -1"),
    (lambda: Box(1.0, 0.0), "Box: lower must be <= upper, got 1.0 and 0.0"),
    (lambda: Box("a", 0.0), "Box: lower must be a number or a tensor, got 'a'"),
    (lambda: prox({"kind": "l11"}), "unknown prox 'l11'; did you mean 'l1'?"),
    (lambda: prox({"kind": "l1", "gama": 1}), "l1: no parameter 'gama'; did you mean 'gamma'?"),
    (lambda: prox({"kind": "l1"}), "l1: gamma is missing"),
    (lambda: prox(3), "prox must be a fedda.prox map, a table with 'kind', or None, got 3"),
])  # fmt: skip
def test_bad_pieces_are_refused(bad, line):
    with pytest.raises(ValueError, match=line):
        bad()


MAPS = [
    Unconstrained(), L1(0.7), L1(torch.tensor([0.1, 0.0, 2.0], dtype=torch.float64)), Box(-0.5, 0.8), NonNegative(),
    Box(torch.tensor([-1.0, 0.0, 0.2], dtype=torch.float64), 0.6),
]  # fmt: skip


@pytest.mark.parametrize("p", MAPS, ids=str)
@pytest.mark.parametrize("scalar", [True, False])
def test_prox_properties(p, scalar):
    """Optimality against random feasible points, non-expansive in q, idempotent, batched = row by row."""
    g = torch.Generator().manual_seed(0)
    u, v = torch.randn(2, 6, 3, generator=g, dtype=torch.float64) * 2
    q = 0.3 + torch.rand(3, generator=g, dtype=torch.float64)
    q, s = (q[0] if scalar else q), 0.9
    x, y = p(u, q, s), p(v, q, s)
    assert p.feasible(x).all()
    other = p.project(torch.randn(50, 1, 3, generator=g, dtype=torch.float64) * 2)
    left = (q * (u - x) * (other - x)).sum(-1)
    assert (left <= s * (p.value(other) - p.value(x)) + 1e-12).all()
    assert ((q * (x - y) ** 2).sum(-1) <= (q * (u - v) ** 2).sum(-1) + 1e-12).all()
    assert torch.equal(x, torch.stack([p(row, q, s) for row in u]))
    assert torch.equal(p(u, q.expand(3), s), x)  # scalar metric = equal entries
    assert torch.equal(p.project(p.project(u)), p.project(u))
    if isinstance(p, Unconstrained):
        assert torch.equal(x, u)


def test_decoupled_l1_forgets_the_metric():
    u, q = torch.tensor([1.0, 1.0]), torch.tensor([0.5, 2.0])
    torch.testing.assert_close(L1(0.1)(u, q, 2.0), torch.tensor([0.6, 0.9]))
    torch.testing.assert_close(L1(0.1, decoupled=True)(u, q, 2.0), torch.tensor([0.8, 0.8]))


def test_soft_threshold_gives_exact_zeros():
    x = L1(1.0)(torch.linspace(-2, 2, 41), 1.0, 1.0)
    assert (x == 0).sum() == 21


def test_custom_maps_take_part():
    class Halve(Prox):
        def __call__(self, u, q, s):
            return u / 2

    assert last(fedda.make("fedda-2-1", prox=Halve()), quadratic(), 2).x.isfinite().all()


def test_value():
    assert L1(0.5).value(torch.tensor([[1.0, -3.0]])).tolist() == [2.0]
    assert math.isclose(float(Box(0, 1).value(torch.ones(3))), 0)


@pytest.mark.parametrize("name", ["fedavg", "fedda-2-1", "fedcm", "stem"])
def test_a_schedule_gets_the_length_of_the_run(name):
    """Rates by hand: a cosine over all local steps is the same as a function of t."""
    problem = fedda.Quadratic([[1.0, 0.5], [0.3, 2.0]], [[1.0, -1.0], [2.0, 0.5]], noise=0.1)
    ends = [
        fedda.train(fedda.make(name, lr=lr, steps=3), problem, rounds=4, every=4).x
        for lr in (fedda.schedules.cosine(0.1), lambda t: 0.05 * (1 + torch.cos(torch.pi * (t / 12).clamp(0, 1))))
    ]
    torch.testing.assert_close(*ends, rtol=1e-13, atol=0)
    with pytest.raises(ValueError, match="cosine: the length of the run is not known"):
        fedda.Run(fedda.make(name, lr=fedda.schedules.cosine(0.1)), problem).step()


def test_schedules_rise_and_fall_as_they_say():
    t = torch.arange(0.0, 101.0, 10)
    warm = schedules.linear(1.0, warmup=0.2, horizon=100)(t)
    assert warm.tolist()[:3] == pytest.approx([1e-9, 0.5, 1.0]) and bool((warm[2:].diff() < 0).all())
    assert float(warm[-1]) == pytest.approx(1e-9)  # methods divide by rates: they are never 0
    assert schedules.steps(1.0, at=(0.3,), by=0.5, horizon=100)(t).tolist() == [1.0] * 3 + [0.5] * 8
    assert schedules.cosine(1.0, end=0.1, horizon=100)(t)[-1] == pytest.approx(0.1)
    for bad in (lambda: schedules.cosine(0.0), lambda: schedules.cosine(1.0, warmup=1.0)):
        with pytest.raises(ValueError, match="cosine: "):
            bad()
