"""Every proximal map against what defines it: section 8.5's properties, cvxpy, brute force, and each other."""

import dataclasses
import math
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedda
from fedda import registry
from fedda.core import bind_to_problem
from fedda.rules.prox import (
    L1,
    Box,
    ElasticNet,
    GroupLasso,
    HalfSpace,
    Hyperplane,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    NuclearNorm,
    Prox,
    Shifted,
    Simplex,
    SparseGroupLasso,
    SquaredL2,
    Sum,
    Unconstrained,
    newton,
    prox,
)
from fedda.rules.prox.segments import Segments

F64 = torch.float64


def normal(g, *shape):
    return torch.randn(shape, generator=g, dtype=F64)


def uniform(g, *shape):
    return torch.rand(shape, generator=g, dtype=F64)


def ids(g, d):
    """Group numbers of which some may be empty, and some coordinates in none."""
    found = torch.randint(-1, 1 + d // 2, (d,), generator=g)
    found[0] = found[0].clamp(min=0)
    return found


# A map for every entry of the catalogue from (generator, d); tensors [d] where a map takes them.
MAPS = {
    "none": lambda g, d: Unconstrained(),
    "l1": lambda g, d: L1(0.3),
    "l1 weighted": lambda g, d: L1(uniform(g, d)),
    "squared-l2": lambda g, d: SquaredL2(0.7),
    "squared-l2 weighted": lambda g, d: SquaredL2(uniform(g, d)),
    "elastic-net": lambda g, d: ElasticNet(0.2, 0.7),
    "elastic-net weighted": lambda g, d: ElasticNet(uniform(g, d), uniform(g, d)),
    "nonnegative": lambda g, d: NonNegative(),
    "box": lambda g, d: Box(-0.5, 0.8),
    "box of vectors": lambda g, d: Box(-uniform(g, d), uniform(g, d) + 0.1),
    "linf-ball": lambda g, d: LInfBall(0.6),
    "half-space": lambda g, d: HalfSpace(normal(g, d), -0.2),
    "half-space of a number": lambda g, d: HalfSpace(2.0, 0.5),
    "hyperplane": lambda g, d: Hyperplane(normal(g, d), 0.7),
    "l2-ball": lambda g, d: L2Ball(0.9),
    "l1-ball": lambda g, d: L1Ball(0.8),
    "l1-ball by sort": lambda g, d: L1Ball(0.8, method="sort"),
    "simplex": lambda g, d: Simplex(),
    "simplex of radius 3": lambda g, d: Simplex(3.0),
    "group-lasso": lambda g, d: GroupLasso(0.5, ids(g, d)),
    "group-lasso weighted": lambda g, d: GroupLasso(0.5, (i := ids(g, d)), uniform(g, int(i.max()) + 1)),
    "sparse-group-lasso": lambda g, d: SparseGroupLasso(0.2, 0.4, ids(g, d), 1.0),
    "nuclear-norm": lambda g, d: NuclearNorm(0.4, (2, d // 2) if d > 3 else (1, d)),
    "shifted": lambda g, d: Shifted(L2Ball(0.7), normal(g, d)),
    "shifted penalty": lambda g, d: Shifted(GroupLasso(0.5, ids(g, d)), 0.3),
    "sum of penalties": lambda g, d: Sum(L1(0.2), SquaredL2(uniform(g, d))),
    "sum with a sign": lambda g, d: Sum(L1(0.2), NonNegative()),
    "sum with a box": lambda g, d: Sum(Box(-0.3, uniform(g, d)), ElasticNet(0.2, 0.1), LInfBall(0.5)),
}  # fmt: skip
METRICS = ("number", "0-d", "by row", "diagonal", "diagonal by row", "shared by clients")


@dataclasses.dataclass
class Case:
    d: int
    g: torch.Generator
    u: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor | float
    s: float


@st.composite
def cases(draw, metrics=METRICS):
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    d = draw(st.integers(1, 12))
    lead = draw(st.sampled_from([(), (3,), (2, 3), (1, 4), (2, 1, 2)]))
    metric = draw(st.sampled_from(metrics))
    spread = draw(st.sampled_from([0.1, 1.0, 3.0]))  # q over 2 * spread orders of magnitude
    scale = draw(st.sampled_from([0.1, 1.0, 10.0]))
    u, v = (scale * normal(g, *lead, d) for _ in range(2))
    if draw(st.booleans()):
        u = u.round()  # ties and zeros
    shape = {
        "number": (), "0-d": (), "by row": (*lead, 1), "diagonal": (d,), "diagonal by row": (*lead, d),
        "shared by clients": (*lead[:-1], *((1,) if lead else ()), d),
    }[metric]  # fmt: skip
    q = 10 ** (spread * (2 * uniform(g, *shape) - 1))
    return Case(d, g, u, v, float(q) if metric == "number" else q, draw(st.sampled_from([0.0, 0.3, 2.0])))


def case_of(name, data, **how):
    """A case and the map on it; the nuclear norm takes scalar metrics alone."""
    case = data.draw(cases(METRICS[:3] if name == "nuclear-norm" else METRICS, **how))
    return case, MAPS[name](case.g, case.d)


def size(*tensors):
    return 1 + max(float(t.abs().max()) for t in tensors)


def close(a, b, tol):
    torch.testing.assert_close(a, b, rtol=0, atol=tol * size(a, b))


every_map = pytest.mark.parametrize("name", MAPS)
few = settings(max_examples=40, deadline=None, derandomize=True, database=None)


def test_every_registered_map_is_tested():
    kinds = {entry.name for entry in registry.proxes}
    assert kinds == {"none", "l1", "squared-l2", "elastic-net", "nonnegative", "box", "linf-ball", "half-space",
                     "hyperplane", "l2-ball", "l1-ball", "simplex", "group-lasso", "sparse-group-lasso", "nuclear-norm",
                     "shifted", "sum"}  # fmt: skip
    assert kinds <= {name.split(" ")[0] for name in MAPS}


@every_map
@few
@given(data=st.data())
def test_optimal_and_non_expansive(name, data):
    c, p = case_of(name, data)
    u, v, q, s = c.u, c.v, c.q, c.s
    x, y = p(u, q, s), p(v, q, s)
    assert x.shape == u.shape and x.dtype == u.dtype and p.feasible(x).all()
    near = x + 0.1 * normal(c.g, 25, *u.shape)
    other = p.project(torch.cat([near, 3 * normal(c.g, 25, *u.shape)]))
    assert p.feasible(other).all()
    left = (q * (u - x) * (other - x)).sum(-1)
    scale = 1 + (q * (u - x).abs() * (other - x).abs()).sum(-1)
    assert (left <= s * (p.value(other) - p.value(x)) + 1e-10 * scale).all()
    moved, apart = ((q * (a - b) ** 2).sum(-1) for a, b in ((x, y), (u, v)))
    assert (moved <= apart * (1 + 1e-9) + 1e-12).all()


@every_map
@few
@given(data=st.data())
def test_projections_and_identities(name, data):
    c, p = case_of(name, data)
    inside = p.project(c.u)
    assert p.feasible(inside).all()
    close(p.project(inside), inside, 1e-13)
    close(p(inside, c.q, 0.0), inside, 1e-13)  # s = 0 in C is the identity
    if p.feasible(100 * normal(c.g, 20, c.d)).all():
        close(p(c.u, c.q, 0.0), c.u, 1e-13)  # C = R^d
    assert p.value(c.u).shape == p.feasible(c.u).shape == c.u.shape[:-1]
    assert (p.value(c.u) >= 0).all()


def permuted(p, order, d):
    """The same map on another order of the coordinates: every [d] in it goes along."""
    if not dataclasses.is_dataclass(p):
        return p[order] if isinstance(p, torch.Tensor) and p.shape == (d,) and len(order) == d else p
    fields = {f.name: getattr(p, f.name) for f in dataclasses.fields(p) if f.init}
    return dataclasses.replace(p, **{k: v if k == "weights" else permuted(v, order, d) for k, v in fields.items()})


@every_map
@few
@given(data=st.data())
def test_scalar_metric_permutations_and_batches(name, data):
    c, p = case_of(name, data)
    x = p(c.u, c.q, c.s)
    q = torch.as_tensor(c.q, dtype=F64)
    if name == "nuclear-norm":
        rows = torch.arange(c.d).view(p.shape) if p.shape[0] * p.shape[1] == c.d else None
        order = torch.arange(c.d) if rows is None else rows.flip(0).reshape(-1)
    else:
        order = torch.randperm(c.d, generator=c.g)
        if q.dim() == 0 or q.shape[-1] == 1:
            equal = q.expand(*c.u.shape).contiguous()
            close(p(c.u, equal, c.s), x, 1e-11)
    along = q if q.dim() == 0 or q.shape[-1] == 1 else q[..., order]
    close(permuted(p, order, c.d)(c.u[..., order], along, c.s), x[..., order], 1e-11)
    by_row = q.expand(*c.u.shape[:-1], q.shape[-1] if q.dim() else 1).reshape(-1, q.shape[-1] if q.dim() else 1)
    each = [p(row, metric, c.s) for row, metric in zip(c.u.reshape(-1, c.d), by_row, strict=True)]
    close(torch.stack(each).view_as(x), x, 1e-13)


@every_map
@few
@given(data=st.data())
def test_float32_is_near_float64(name, data):
    c, p = case_of(name, data)
    u, q = c.u.float(), c.q.float() if isinstance(c.q, torch.Tensor) else c.q
    small = bind_to_problem(p, u, [("x", (c.d,))])
    s = torch.tensor(c.s, dtype=F64)  # as the step counter makes it
    x = small(u, q, s)
    assert x.dtype == torch.float32 and small.feasible(x).all()
    assert small.value(x).dtype == torch.float32
    wide = p(u.double(), q.double() if isinstance(q, torch.Tensor) else q, s)
    torch.testing.assert_close(x.double(), wide, rtol=0, atol=2e-6 * size(u, wide))
    close(p(u, q, s).double(), wide, 2e-6)  # parameters left in float64 do not change the dtype
    assert p(u, q, s).dtype == torch.float32


@pytest.mark.parametrize("dtype,tol", [(F64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("kind", [L1Ball, L2Ball, Simplex])
def test_a_ball_s_norm_is_its_radius(kind, dtype, tol):
    """The tolerances of 8.4, at a size where float32 sums would miss them, with a metric over six orders."""
    g = torch.Generator().manual_seed(0)
    u, q = normal(g, 3, 100_000).to(dtype), (10 ** (6 * uniform(g, 100_000) - 3)).to(dtype)
    for radius in (1e-3, 1.0, 50.0):
        x = kind(radius)(u, q, 1.0).double()
        norm = x.norm(dim=-1) if kind is L2Ball else x.abs().sum(-1)
        assert ((norm - radius).abs() <= tol * radius).all()


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(case=cases(), radius=st.sampled_from([1e-6, 0.1, 1.0, 30.0]))
def test_the_l1_ball_by_newton_is_that_by_sort(case, radius):
    newton, sort = (L1Ball(radius, method=m)(case.u, case.q, case.s) for m in ("newton", "sort"))
    close(newton, sort, 1e-14)
    inside = case.u.abs().sum(-1, keepdim=True) <= radius
    assert torch.equal(newton.where(inside, case.u), case.u)


def test_few_iterations_on_wild_metrics(monkeypatch):
    """At most 16 over four orders of magnitude; over twelve (h may be 1e-12) still well under CUDA's fixed count."""
    count = {}

    def counted(step, m, at_most, tol=0.0):
        def one(m):
            count["now"] += 1
            return step(m)

        count["now"] = 0
        m = newton.climb(one, m, at_most, tol)
        count["most"] = max(count.get("most", 0), count["now"])
        return m

    for module in (fedda.prox.balls, fedda.prox.groups):
        monkeypatch.setattr(module, "climb", counted)
    g = torch.Generator().manual_seed(1)
    for exponent in (1, 4, 12):
        q = 10 ** (-exponent * uniform(g, 1, 20_000))
        for u in (normal(g, 4, 20_000), normal(g, 4, 20_000) ** 5, 1 / uniform(g, 4, 20_000)):
            for radius in (1e-2, 1.0, 100.0):
                for p in (
                    L1Ball(radius),
                    Simplex(radius),
                    L2Ball(radius),
                    GroupLasso(radius, [i % 9 for i in range(20_000)]),
                ):
                    p(u, q, 1.0)
                    assert 1 <= count["now"] <= (16 if exponent < 12 else 24), (p, exponent, count)


def test_blocks_of_rows_are_the_whole(monkeypatch):
    g = torch.Generator().manual_seed(0)
    u, q, s = normal(g, 2, 5, 7), 0.2 + uniform(g, 2, 1, 7), uniform(g, 2, 1, 1)
    radius = torch.tensor([0.5, 2.0], dtype=F64).view(2, 1, 1)
    maps = [L1Ball(radius), L2Ball(radius), Simplex(radius), GroupLasso(radius, [0, 0, 1, 1, 2, -1, 2]),
            SparseGroupLasso(radius, radius, [0, 0, 1, 1, 2, -1, 2]), HalfSpace(normal(g, 7), 0.1)]  # fmt: skip
    whole = [p(u, q, s) for p in maps]
    for block in (1, 14, 30):
        monkeypatch.setitem(newton.BLOCK, "cpu", block)
        for p, x in zip(maps, whole, strict=True):
            close(p(u, q, s), x, 1e-14)
    for i in range(2):  # a replica with a radius of its own is that radius alone
        close(L1Ball(float(radius[i]))(u[i], q[i], s[i]), whole[0][i], 1e-14)


def test_a_guess_from_a_sample_changes_nothing(monkeypatch):
    """Whatever the sample says, also one of zeros alone or of the largest alone."""
    g = torch.Generator().manual_seed(0)
    u, q = normal(g, 3, 5000), 0.01 + uniform(g, 5000)
    u[1, ::32], u[2, ::32] = 0.0, 100.0
    exact = [kind(r)(u, q, 1.0) for kind in (L1Ball, Simplex) for r in (0.1, 30.0, 3e5)]
    monkeypatch.setattr(fedda.prox.balls, "SAMPLED", 100)
    for kind, x in zip(((k, r) for k in (L1Ball, Simplex) for r in (0.1, 30.0, 3e5)), exact, strict=True):
        close(kind[0](kind[1])(u, q, 1.0), x, 1e-13)


@pytest.mark.parametrize("name", ["l1-ball", "l2-ball", "simplex", "half-space", "group-lasso"])
def test_a_row_that_is_not_finite_does_not_touch_the_others(name):
    g = torch.Generator().manual_seed(0)
    p, u, q = MAPS[name](g, 6), normal(g, 3, 6), 0.1 + uniform(g, 6)
    x = p(u, q, 1.0)
    u[1, 2] = math.nan
    y = p(u, q, 1.0)
    close(y[[0, 2]], x[[0, 2]], 1e-14)
    assert not y[1].isfinite().all()


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(seed=st.integers(0, 10**6), d=st.integers(1, 3000), groups=st.sampled_from([1, 2, 40, 2000]))
def test_segment_sums_are_scattered_sums(seed, d, groups):
    g = torch.Generator().manual_seed(seed)
    ids = (torch.randint(0, groups, (d,), generator=g) * uniform(g, d) ** 3).long() - 1
    ids[0] = 0
    x, segments = uniform(g, 2, d), Segments(ids)
    expected = torch.zeros(2, segments.count + 1, dtype=F64).index_add(1, ids + 1, x)[:, 1:]
    torch.testing.assert_close(segments.sum(x), expected)
    most = torch.zeros(2, segments.count + 1, dtype=F64).index_reduce(1, ids + 1, x, "amax")[:, 1:]
    assert torch.equal(segments.amax(x), most)


# -- other solvers ------------------------------------------------------------------------------------------------
def convex(p, x):
    """psi and the constraints of a map, for cvxpy."""
    import cvxpy as cp

    def number(value):
        return value.numpy() if isinstance(value, torch.Tensor) else value

    def norms(p):
        sizes = [(p.groups == i).nonzero().flatten().tolist() for i in range(int(p.groups.max()) + 1)]
        weights = p.weights if isinstance(p.weights, torch.Tensor) else [p.weights] * len(sizes)
        return sum(
            (math.sqrt(len(own)) if w is None else float(w)) * cp.norm(x[own])
            for own, w in zip(sizes, weights, strict=True) if own
        )  # fmt: skip

    match p:
        case Shifted():
            return convex(p.prox, x - number(p.centre))
        case Sum():
            (a, one), (b, two) = convex(p.first, x), convex(p.second, x)
            return a + b, one + two
        case Unconstrained():
            return 0, []
        case L1():
            return cp.norm1(cp.multiply(number(p.gamma), x)), []
        case SquaredL2():
            return cp.sum(cp.multiply(number(p.gamma) / 2, x**2)), []
        case ElasticNet():
            penalty = cp.norm1(cp.multiply(number(p.gamma1), x))
            return penalty + cp.sum(cp.multiply(number(p.gamma2) / 2, x**2)), []
        case NonNegative():
            return 0, [x >= 0]
        case Box():
            return 0, [x >= number(p.lower), x <= number(p.upper)]
        case LInfBall():
            return 0, [cp.norm_inf(x) <= p.radius]
        case HalfSpace():
            return 0, [cp.sum(cp.multiply(number(p.a), x)) <= p.b]
        case Hyperplane():
            return 0, [cp.sum(cp.multiply(number(p.a), x)) == p.b]
        case L2Ball():
            return 0, [cp.norm(x) <= p.radius]
        case L1Ball():
            return 0, [cp.norm1(x) <= p.radius]
        case Simplex():
            return 0, [x >= 0, cp.sum(x) == p.radius]
        case GroupLasso():
            return p.gamma * norms(p), []
        case SparseGroupLasso():
            own = (p.groups >= 0).nonzero().flatten().tolist()
            return p.gamma1 * cp.norm1(x[own]) + p.gamma2 * norms(p), []
        case NuclearNorm():
            m, n = p.shape
            return p.gamma * cp.normNuc(cp.reshape(x[: m * n], (m, n), order="C")), []
    raise AssertionError(p)


@every_map
@pytest.mark.filterwarnings("ignore:Solution may be inaccurate")  # its tolerances are set below what it can reach
def test_cvxpy_agrees(name):
    cp = pytest.importorskip("cvxpy", reason="cvxpy is not installed")
    exact = {"tol_gap_abs": 1e-13, "tol_gap_rel": 1e-13, "tol_feas": 1e-13}
    for seed, (d, spread, s) in enumerate([(2, 0.3, 1.0), (5, 1.0, 0.5), (9, 1.0, 2.0)]):
        g = torch.Generator().manual_seed(seed)
        p, u = MAPS[name](g, d), normal(g, d)
        q = 10 ** (spread * (2 * uniform(g, 1 if name == "nuclear-norm" else d) - 1))
        x = cp.Variable(d)
        psi, constraints = convex(p, x)
        distance = cp.sum(cp.multiply(q.expand(d).numpy() / 2, (x - u.numpy()) ** 2))
        cp.Problem(cp.Minimize(s * psi + distance), constraints).solve(solver="CLARABEL", **exact)
        torch.testing.assert_close(p(u, q, s), torch.as_tensor(x.value, dtype=F64), rtol=0, atol=1e-6)
        close(p.value(u), torch.tensor(float(getattr(convex(p, u.numpy())[0], "value", 0.0)), dtype=F64), 1e-12)


@every_map
def test_brute_force_in_the_plane(name):
    g = torch.Generator().manual_seed(3)
    p, u, s = MAPS[name](g, 2), torch.tensor([1.3, -0.9], dtype=F64), 0.7
    q = torch.tensor([0.8], dtype=F64) if name == "nuclear-norm" else torch.tensor([0.5, 2.0], dtype=F64)
    line = torch.linspace(-4, 4, 641, dtype=F64)
    grid = p.project(torch.cartesian_prod(line, line))
    cost = s * p.value(grid) + (q * (grid - u) ** 2).sum(-1) / 2
    x = p(u, q, s)
    assert s * p.value(x) + (q * (x - u) ** 2).sum(-1) / 2 <= cost.min() + 1e-12
    assert (grid[cost.argmin()] - x).abs().max() <= 8 / 640


# -- models -------------------------------------------------------------------------------------------------------
LAYOUT = [("conv.weight", (2, 1, 1, 2)), ("conv.bias", (2,)), ("fc.weight", (3, 2)), ("fc.bias", (3,))]
D = 15


@pytest.mark.parametrize("on,chosen", [
    ("weights", [1] * 4 + [0] * 2 + [1] * 6 + [0] * 3),
    ("fc.*", [0] * 6 + [1] * 9),
    ("*.bias", [0] * 4 + [1] * 2 + [0] * 6 + [1] * 3),
    ("fc.weight", [0] * 6 + [1] * 6 + [0] * 3),
])  # fmt: skip
def test_on_is_a_mask_by_name(on, chosen):
    g, chosen = torch.Generator().manual_seed(0), torch.tensor(chosen, dtype=torch.bool)
    u, q = 2 * normal(g, 4, D), 0.3 + uniform(g, D)
    maps = [L1(0.3, on=on), L1(uniform(g, D), on=on, decoupled=True), SquaredL2(0.5, on=on),
            ElasticNet(0.2, 0.3, on=on), NonNegative(on=on), Box(-0.1, 0.2, on=on), LInfBall(0.3, on=on),
            Sum(L1(0.3, on=on), NonNegative(on=on)), Shifted(Box(-0.1, 0.2, on=on), 0.05)]  # fmt: skip
    for p in maps:
        bound = p.bind(LAYOUT)
        x, all_over = bound(u, q, 1.0), _everywhere(p)(u, q, 1.0)
        close(x, torch.where(chosen, all_over, u), 1e-15)
        assert bound.feasible(x, 1e-15).all()
        close(bound.value(u), _everywhere(p).value(torch.where(chosen, u, 0.0)), 1e-14)
        assert bound.bind(LAYOUT)(u, q, 1.0).equal(x)
        for use in (p.value, p.feasible, p.project, lambda x, p=p: p(x, q, 1.0)):
            if use != p.feasible or not isinstance(p, L1 | SquaredL2 | ElasticNet):
                with pytest.raises(ValueError, match=r"on=.* needs the names and shapes .* call bind"):
                    use(u)


def _everywhere(p):
    fields = {f.name: getattr(p, f.name) for f in dataclasses.fields(p)}
    new = {k: _everywhere(v) if isinstance(v, Prox) else None if k == "on" else v for k, v in fields.items()}
    return dataclasses.replace(p, **new)


@pytest.mark.parametrize("groups,expected", [
    ("layer", [0, 0, 0, 0, -1, -1, 1, 1, 1, 1, 1, 1, -1, -1, -1]),
    ("filter", [0, 0, 1, 1, -1, -1, 2, 2, 3, 3, 4, 4, -1, -1, -1]),
    ("feature", [0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1]),
])  # fmt: skip
def test_groups_by_the_parts_of_a_model(groups, expected):
    assert GroupLasso(0.1, groups).bind(LAYOUT).groups.tolist() == expected
    g = torch.Generator().manual_seed(0)
    u, q = normal(g, 2, D), 0.3 + uniform(g, D)
    for kind in (lambda i: GroupLasso(0.1, i), lambda i: SparseGroupLasso(0.1, 0.2, i)):
        assert torch.equal(kind(groups).bind(LAYOUT)(u, q, 1.0), kind(expected)(u, q, 1.0))
        assert torch.equal(kind(groups).bind(LAYOUT)(u, q, 1.0)[:, 4:6], u[:, 4:6])  # biases are not penalised
        for use in ("value", "project"):
            with pytest.raises(ValueError, match=f"groups='{groups}' needs the names and shapes"):
                getattr(kind(groups), use)(u)


def test_features_are_the_columns_of_the_first_matrix():
    layout = [("bias", (2,)), ("weight", (2, 3)), ("more", (2, 2))]
    assert GroupLasso(1.0, "feature").bind(layout).groups.tolist() == [-1, -1, 0, 1, 2, 0, 1, 2, -1, -1, -1, -1]


def test_the_nuclear_norm_of_a_parameter_by_name():
    g = torch.Generator().manual_seed(0)
    u = normal(g, 2, 3, D)
    x = NuclearNorm(0.4, on="fc.weight").bind(LAYOUT)(u, 0.5, 1.0)
    own = NuclearNorm(0.4, (3, 2))(u[..., 6:12], 0.5, 1.0)
    assert torch.equal(x[..., 6:12], own)
    assert torch.equal(x[..., :6], u[..., :6]) and torch.equal(x[..., 12:], u[..., 12:])
    assert NuclearNorm(0.4, on="conv.weight").bind(LAYOUT).shape == (2, 2)
    assert (torch.linalg.matrix_rank(NuclearNorm(3.0, (3, 2))(u[..., 6:12], 1.0, 1.0).unflatten(-1, (3, 2))) < 2).any()


def test_maps_that_need_no_layout_are_themselves():
    for name, make in MAPS.items():
        p = make(torch.Generator().manual_seed(0), D)
        if not isinstance(p, Sum | Shifted):
            assert p.bind(LAYOUT) is p, name


TABLES = {
    "l1-ball": {"radius": 50}, "l2-ball": {"radius": 2.0}, "simplex": {}, "box": {"lower": [0, 0.5], "upper": 1},
    "half-space": {"a": [1, 2.0], "b": 1}, "hyperplane": {"a": 1, "b": 0}, "linf-ball": {"radius": 1},
    "l1": {"gamma": 0.1, "on": "weights"}, "squared-l2": {"gamma": 0.1}, "elastic-net": {"gamma1": 1, "gamma2": 0},
    "group-lasso": {"gamma": 0.1, "groups": "filter"},
    "sparse-group-lasso": {"gamma1": 1, "gamma2": 1, "groups": [0, -1]},
    "nuclear-norm": {"gamma": 1, "shape": [1, 2]}, "nonnegative": {}, "none": {},
    "shifted": {"prox": {"kind": "l2-ball", "radius": 1}, "centre": [1, 2]},
    "sum": {"of": [{"kind": "l1", "gamma": 0.1}, {"kind": "squared-l2", "gamma": 0.1}, {"kind": "nonnegative"}]},
}  # fmt: skip


def test_maps_from_tables():
    assert set(TABLES) == {entry.name for entry in registry.proxes}
    u = torch.tensor([[2.0, -3.0]])
    for kind, words in TABLES.items():
        p = prox({"kind": kind, **words}).bind([("weight", (1, 2))])
        assert p(u, 1.0, 1.0).shape == (1, 2) and repr(p), kind
        assert all(getattr(fedda.prox, type(p).__name__) is type(p) for _ in (0,))


@pytest.mark.parametrize("bad,line", [
    (lambda: L1Ball(-1), "L1Ball: radius must be > 0, got -1"),
    (lambda: L2Ball(0), "L2Ball: radius must be > 0, got 0"),
    (lambda: Simplex(math.inf), "Simplex: radius must be > 0, got inf"),
    (lambda: LInfBall(torch.ones(3)), "LInfBall: radius must be a number or a tensor [replicas, 1, 1], got shape [3]"),
    (lambda: L1Ball(1, method="bisect"), "L1Ball: method must be one of 'newton', 'sort', got 'bisect'"),
    (lambda: ElasticNet(-1, 1), "ElasticNet: gamma1 must be >= 0, got -1"),
    (lambda: ElasticNet(1, "a"), "ElasticNet: gamma2 must be >= 0, got 'a'"),
    (lambda: SquaredL2(-1), "SquaredL2: gamma must be >= 0, got -1"),
    (lambda: HalfSpace([0.0, 0.0], 1), "HalfSpace: a must not be zero, got [0.0, 0.0]"),
    (lambda: Hyperplane("a", 1), "Hyperplane: a must be a number or a tensor, got 'a'"),
    (lambda: Hyperplane(1, math.nan), "Hyperplane: b must be finite, got nan"),
    (lambda: GroupLasso(1, "row"), "GroupLasso: groups must be one of 'layer', 'filter', 'feature', got 'row'"),
    (lambda: GroupLasso(1, [0, -2]), "GroupLasso: groups must be 'layer', 'filter', 'feature', or a group number"),
    (lambda: GroupLasso(1, [0.5, 1]), "GroupLasso: groups must be 'layer', 'filter', 'feature', or a group number"),
    (lambda: GroupLasso(1, [-1, -1]), "GroupLasso: groups must be 'layer', 'filter', 'feature', or a group number"),
    (lambda: GroupLasso(1, [0, 1], [1.0]), "GroupLasso: weights must be one for each of the 2 groups, got [1]"),
    (lambda: GroupLasso(1, [0, 1], -1), "GroupLasso: weights must be >= 0, got -1"),
    (lambda: GroupLasso(torch.ones(2), [0, 1]), "GroupLasso: gamma must be one number (weights has"),
    (lambda: GroupLasso(1, [0, 1])(torch.ones(3), 1.0, 1.0), "GroupLasso: groups has 2 entries, the model 3"),
    (lambda: GroupLasso(1, "filter").bind([("x", (4,))]), "2 or more dimensions; there are x [4]"),
    (lambda: L1(1, on="head.*").bind(LAYOUT), "on='head.*' fits no parameter; there are conv.weight [2, 1, 1, 2]"),
    (lambda: L1(1, on=3).bind(LAYOUT), "L1: on must be 'weights' or a pattern over the parameters' names, got 3"),
    (lambda: NuclearNorm(1), "NuclearNorm: give shape, or on"),
    (lambda: NuclearNorm(1, (2, 2), "fc"), "NuclearNorm: give shape, or on"),
    (lambda: NuclearNorm(1, (2, 0)), "NuclearNorm: shape must be two whole numbers >= 1, got (2, 0)"),
    (lambda: NuclearNorm(1, on="fc.*").bind(LAYOUT), "on='fc.*' must fit one parameter of 2 or more dimensions, got"),
    (lambda: NuclearNorm(1, on="fc.*").project(torch.ones(4)), "NuclearNorm: on='fc.*' needs the names and shapes"),
    (lambda: NuclearNorm(1, (2, 3))(torch.ones(4), 1.0, 1.0), "NuclearNorm: shape 2 x 3 from 0 on is more than 4"),
    (lambda: NuclearNorm(1, (2, 2))(torch.ones(4), torch.ones(4), 1.0), "NuclearNorm: the metric must be a scalar"),
    (lambda: Shifted(L1(1), "a"), "Shifted: centre must be a number or a tensor, got 'a'"),
    (lambda: Shifted(3, 0.0), "prox must be a fedda.prox map"),
    (lambda: Sum(L1(1), L2Ball(1)), "Sum: L2Ball is not separable"),
    (lambda: Sum(GroupLasso(1, [0]), NonNegative()), "Sum: GroupLasso is not separable"),
    (lambda: Sum(L1(1), Shifted(Box(0, 1), 1)), "Sum: Shifted is not separable"),
    (lambda: Sum(Box(0, 1), Box(2, 3)), "Sum: no point lies in both Box(lower=0, upper=1, on=None) and Box("),
    (lambda: prox({"kind": "sum", "of": [{"kind": "l1", "gamma": 1}]}), "Sum: of must be a list of two or more tables"),
    (lambda: prox({"kind": "sum"}), "sum: of is missing"),
    (lambda: prox({"kind": "l1-ball", "radius": -1}), "L1Ball: radius must be > 0, got -1"),
])  # fmt: skip
def test_mistakes_are_refused(bad, line):
    with pytest.raises(ValueError, match=re.escape(line)):
        bad()


@pytest.mark.parametrize(
    "name", ["l1-ball", "l2-ball", "simplex", "hyperplane", "shifted", "group-lasso", "sum with a box"]
)
def test_training_with_a_map(name):
    """Every map goes through FedDA, replicas and placement included, and the model stays feasible."""
    from conftest import quadratic, stable

    p, problem = MAPS[name](torch.Generator().manual_seed(0), 4), quadratic()
    x0 = p.project(torch.zeros(4, dtype=F64))
    result = fedda.train(stable("fedda-mvr", prox=p), problem, rounds=3, cohort=3, seed=[0, 1], x0=x0)
    assert result.x.isfinite().all() and p.feasible(result.x).all()
