"""How the methods relate to each other (identities E7-E13, E16, E18-E21, E24), and the mistakes that
public implementations made, each caught by a test."""

import math

import pytest
import torch

import fedda
from conftest import close, digits, last, path, quadratic, stable
from fedda.rules.estimators import Momentum, Mvr, Plain
from fedda.rules.preconditioners import Diagonal, Fixed, Identity
from fedda.rules.prox import L1
from fedda.rules.schedules import CubeRoot
from test_identities import D4, LR, Counted, Oracle, fedda_of

PROBLEMS = [pytest.param(quadratic, 3, id="quadratic"), pytest.param(digits, 4, id="digits")]


def same(a, b, problem, rounds=5, tol=1e-10, **how):
    """Two algorithms with the same models after every round."""
    close(path(a, problem, rounds, seed=3, **how), path(b, problem, rounds, seed=3, **how), tol)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_e7_one_client_one_step_is_a_delayed_rmsprop(momentum):
    problem, beta, eps, eta = quadratic(clients=1), 0.9, 0.3, 0.05
    g = Oracle(problem)
    x, xs = problem.start(0), []
    nu, mu = g.nu0(x), torch.zeros(4, dtype=torch.float64)
    for t in range(8):
        x = x - eta * nu / (mu.sqrt() + eps)  # the second moment is one step old
        mu = beta * mu + (1 - beta) * nu**2
        nu = (1 - momentum) * g(t, 0, 0, x)[0] + momentum * nu
        xs.append(x)
    words = {"lr": eta, "steps": 1, "beta": beta, "eps": eps, "momentum": momentum}
    close(path(fedda.make("fedda-2-1", **words), problem, 8), torch.stack(xs))


def test_e8_fedda_2_with_one_step_is_fedcm():
    base, eta = quadratic(), 0.1
    fedcm = fedda.make("fedcm", lr=eta, momentum=0.8, steps=1)
    ours = fedda_of(Momentum(0.8), Identity(), lr=lambda t: eta, steps=1)
    # FedCM's first step is a g(x_0) from Delta = 0; FedDA's begins at nu_0 = g(x_0), so its start is scaled by a.
    noiseless = fedda.Quadratic(base.A, base.b)
    run = fedda.Run(ours, noiseless)
    run.server = run.server._replace(nu=0.2 * run.server.nu)
    close(torch.stack([run.step().x[0] for _ in range(6)]), path(fedcm, noiseless, 6))
    three = [
        fedda_of(Momentum(0.8), Identity(), lr=lambda t: eta, steps=3),
        fedda.make("fedcm", lr=eta, momentum=0.8, steps=3),
    ]
    a, b = (path(algorithm, noiseless, 6) for algorithm in three)
    assert (a - b).abs().max() > 1e-3  # for more local steps they differ


@pytest.mark.parametrize("problem,cohort", PROBLEMS)
class TestFedAvgInDisguise:
    """E9, E10, E13, E19, E20, E21, E24: settings in which a method is FedAvg."""

    def avg(self, **words):
        return fedda.make("fedavg", **{"lr": 0.05, "steps": 3, **words})

    def test_e9_fedcm_without_history(self, problem, cohort):
        same(fedda.make("fedcm", lr=0.05, steps=3, momentum=0.0), self.avg(), problem(), cohort=cohort)

    def test_e10_first_round_of_scaffold(self, problem, cohort):
        same(fedda.make("scaffold", lr=0.05, steps=3), self.avg(), problem(), rounds=1, cohort=cohort)

    def test_e10_scaffold_with_one_step_and_all_clients(self, problem, cohort):
        same(fedda.make("scaffold", lr=0.05, steps=1), self.avg(steps=1), problem())

    def test_e13_fedadam_with_a_huge_epsilon(self, problem, cohort):
        adam = fedda.make("fedadam", lr=0.05, steps=3, beta1=0.0, server_lr=1e8, eps=1e8)
        same(adam, self.avg(), problem(), tol=1e-8, cohort=cohort)

    def test_e13_fedavgm_without_momentum(self, problem, cohort):
        same(fedda.make("fedavgm", lr=0.05, steps=3, momentum=0.0), self.avg(), problem(), cohort=cohort)

    def test_e13_fedprox_without_a_pull(self, problem, cohort):
        same(fedda.make("fedprox", lr=0.05, steps=3, mu=0.0), self.avg(), problem(), cohort=cohort)

    def test_e13_fedexp_with_one_client(self, problem, cohort):
        exp = list(fedda.rounds(fedda.make("fedexp", lr=0.05, steps=3), problem(), 5, cohort=1, seed=3))
        avg = path(self.avg(), problem(), 5, cohort=1, seed=3)
        close(torch.stack([server.y[0] for server in exp]), avg)
        # and the model that is evaluated is the mean of the last two iterates
        close(torch.stack([server.x[0] for server in exp[1:]]), (avg[1:] + avg[:-1]) / 2)

    def test_e19_mimelite_without_momentum(self, problem, cohort):
        same(fedda.make("mimelite", lr=0.05, steps=3, momentum=0.0), self.avg(), problem(), cohort=cohort)

    def test_e20_local_adapt_with_plain_optimisers(self, problem, cohort):
        for correction in ("none", "joint"):
            words = {"client": "sgd", "server": "sgd", "server_lr": 1.0, "correction": correction}
            same(fedda.make("local-adapt", lr=0.05, steps=3, **words), self.avg(), problem(), cohort=cohort)

    def test_e21_local_amsgrad_with_a_frozen_metric(self, problem, cohort):
        words = {"beta1": 0.0, "beta2": 1.0, "eps": 1e-300, "v0": 1.0}
        same(fedda.make("local-amsgrad", lr=0.05, steps=3, **words), self.avg(), problem(), cohort=cohort)

    def test_e24_fedglomo_without_either_momentum(self, problem, cohort):
        words = {"server_beta": 1.0, "local_momentum": 0.0}
        same(fedda.make("fedglomo", lr=0.05, steps=3, **words), self.avg(), problem(), cohort=cohort)

    def test_e24_first_round_of_fedglomo_is_fedlomo(self, problem, cohort):
        a, b = (fedda.make("fedglomo", lr=0.05, steps=3, server_beta=beta) for beta in (0.2, 1.0))
        same(a, b, problem(), rounds=1, cohort=cohort)


@pytest.mark.parametrize("name", ["feddualavg", "fedmid"])
@pytest.mark.parametrize("problem,cohort", PROBLEMS)
def test_e11_without_a_penalty_the_composite_methods_are_fedavg(name, problem, cohort):
    same(fedda.make(name, lr=0.05, steps=3), fedda.make("fedavg", lr=0.05, steps=3), problem(), cohort=cohort)
    zero = fedda.make("fedavg-subgradient", lr=0.05, steps=3, gamma=0.0)
    same(zero, fedda.make("fedavg", lr=0.05, steps=3), problem(), cohort=cohort)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_e12_within_a_round_fedda_is_feddualavg_one_step_later(steps):
    """a = 1, h = 1, L1: X_{i+1} = W_i when FedDualAvg begins at y = x_0 - eta nu_0 with elapsed step size eta."""
    problem, eta, penalty = quadratic(clients=1), 0.1, L1(0.3)
    ours = fedda.Run(fedda_of(Plain(), Identity(), lr=lambda t: eta, steps=steps + 1, prox=penalty), problem, seed=2)
    theirs = fedda.Run(fedda.make("feddualavg", lr=eta, steps=steps, prox=penalty), problem, seed=2)
    start = ours.server
    theirs.server = theirs.server._replace(y=start.x - eta * start.nu, s=torch.full_like(theirs.server.s, eta))
    close(ours.step().x, theirs.step().x)


def test_composite_baselines_by_hand():
    """Two rounds of both on one client with L1, server rate 0.5, in plain floats."""
    A, b, eta, rate, gamma = 2.0, 3.0, 0.05, 0.5, 0.4

    def soft(u, threshold):
        return math.copysign(max(abs(u) - threshold, 0.0), u)

    for osp in (False, True):
        y, s = 1.0, 0.0
        for _ in range(2):
            Y, elapsed = y, s
            for _ in range(3):
                W = Y if osp else soft(Y, elapsed * gamma)
                Y, elapsed = Y - eta * A * (W - b), elapsed + eta
            y, s = y + rate * (Y - y), s + rate * 3 * eta
        x = 1.0
        for _ in range(2):
            X = x
            for _ in range(3):
                X = X - eta * A * (X - b)
                X = X if osp else soft(X, eta * gamma)
            x = soft(x + rate * (X - x), rate * 3 * eta * gamma)
        problem, x0 = fedda.Quadratic([[A]], [[b]]), torch.tensor([1.0], dtype=torch.float64)
        words = {"lr": eta, "steps": 3, "server_lr": rate, "prox": L1(gamma), "osp": osp}
        for name, expected in (("feddualavg", soft(y, s * gamma)), ("fedmid", x)):
            assert last(fedda.make(name, **words), problem, 2, x0=x0).x.item() == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("old_point", ["own", "server"])
def test_e3_stem_is_fedda_mvr_without_a_metric(old_point):
    for problem, cohort in ((quadratic(), 3), (quadratic(), 5), (digits(), 4)):
        stem = fedda.make("stem", lr=0.3, w=8.0, c=2.0, steps=3, old_point=old_point)
        ours = fedda_of(Mvr(2.0), Identity(), steps=3, old_point=old_point)
        same(stem, ours, problem, cohort=cohort)
        other = fedda.make("stem", lr=0.3, w=8.0, c=2.0, steps=3, old_point={"own": "server"}.get(old_point, "own"))
        a, b = (path(algorithm, problem, 5, seed=3, cohort=cohort) for algorithm in (stem, other))
        assert (a - b).abs().max() > 1e-4  # the two readings are two methods


@pytest.mark.parametrize("name", ["fedavg", "stem", "fedda"])
def test_e16_on_a_common_hessian_local_steps_do_not_matter(name):
    base = quadratic(common=True)
    ends = []
    for steps in (1, 2, 4):
        algorithm = {
            "fedavg": lambda s: fedda.make("fedavg", lr=LR, steps=s),
            "stem": lambda s: fedda.make("stem", lr=LR, c=2.0, steps=s),
            "fedda": lambda s: fedda_of(Mvr(2.0), Fixed(D4), steps=s),
        }[name](steps)
        ends.append(last(algorithm, Counted(base.A, base.b, noise=0.3), 8 // steps).x)
    close(ends[1], ends[0])
    close(ends[2], ends[0])
    # ... and the path is that of the central method with the averaged noise
    centre = Counted(base.A[:1], base.b.mean(0, keepdim=True), noise=0.0)
    if name == "fedavg":
        quiet = Counted(base.A, base.b, noise=0.0)
        close(
            last(fedda.make("fedavg", lr=LR, steps=4), quiet, 2).x,
            last(fedda.make("fedavg", lr=LR, steps=4), centre, 2).x,
        )


def test_e18_fedavg_s_bias_in_closed_form_and_scaffold_s_exactness():
    problem, eta, steps = quadratic(noise=0.0, seed=5), 0.2, 5
    M = 1 - (1 - eta * problem.A) ** steps
    biased = (M * problem.b).sum(0) / M.sum(0)
    close(last(fedda.make("fedavg", lr=eta, steps=steps), problem, 400).x[0], biased, 1e-8)
    assert (biased - problem.minimum).abs().max() > 1e-2
    for option in (1, 2):
        scaffold = fedda.make("scaffold", lr=eta, steps=steps, option=option)
        close(last(scaffold, problem, 400).x[0], problem.minimum, 1e-8)
    # MVR without correction does not remove drift (E18)
    mvr = last(fedda.make("stem", lr=lambda t: eta, c=1.0, steps=steps, old_point="server"), problem, 400).x[0]
    assert 0.3 < (mvr - problem.minimum).norm() / (biased - problem.minimum).norm() < 3


def test_feddyn_ends_at_the_true_minimum():
    problem = quadratic(noise=0.0, seed=5)
    close(last(fedda.make("feddyn", lr=0.3, alpha=0.5, steps=60), problem, 300).x[0], problem.minimum, 1e-8)


def test_e19_mime_with_one_step_is_gradient_descent():
    problem, x, xs = quadratic(noise=0.3), quadratic().start(0), []
    for _ in range(6):
        x = x - 0.1 * (problem.A * (x - problem.b)).mean(0)
        xs.append(x)
    close(path(fedda.make("mime", lr=0.1, steps=1, momentum=0.0), problem, 6), torch.stack(xs))


@pytest.mark.parametrize("name", ["mime-mvr", "mimelite-mvr"])
def test_e19_mime_mvr_with_one_step_is_distributed_storm(name):
    problem, c = quadratic(), 2.0
    g = Oracle(problem)
    x, xs, m, x_prev, a = problem.start(0), [], 0.0, problem.start(0), 1.0
    for tau in range(6):
        eta = float(LR(torch.tensor(tau, dtype=torch.float64)))
        # Mime draws its statistics first, MimeLite last; with one step, whose own draw cancels in Mime but not
        # in the lite form.
        pairs = [g(tau, k, 0 if name == "mime-mvr" else 1, x, x_prev) for k in range(5)]
        new, old = (torch.stack(v).mean(0) for v in zip(*pairs, strict=True))
        if name == "mime-mvr":
            m = new + (1 - a) * (m - old)
            step = m
        else:
            local = [g(tau, k, 0, x, x_prev) for k in range(5)]
            first, second = (torch.stack(v).mean(0) for v in zip(*local, strict=True))
            step = first + (1 - a) * (m - second)
            m = new + (1 - a) * (m - old)
        x, x_prev, a = x - eta * step, x, min(1.0, c * eta**2)
        xs.append(x)
    close(path(fedda.make(name, lr=0.3, w=8.0, c=c, steps=1), problem, 6), torch.stack(xs))


def test_e19_mime_mvr_with_one_step_is_fedda_without_noise():
    problem = quadratic(noise=0.0)
    mime = fedda.make("mime-mvr", lr=0.3, w=8.0, c=2.0, steps=1)
    close(path(mime, problem, 6), path(fedda_of(Mvr(2.0), Identity(), steps=1), problem, 6))


def test_e21_fafed_with_one_client_and_no_metric_is_storm():
    problem, alpha, eta = quadratic(clients=1), 0.3, 0.1
    g = Oracle(problem)
    x, xs = problem.start(0), []
    m = g.nu0(x)
    for tau in range(4):
        for i in range(3):
            x, old = x - eta * m, x
            new, before = g(tau, 0, i, x, old)
            m = new + (1 - alpha) * (m - before)
        xs.append(x)
    fafed = fedda.make("fafed", lr=eta, alpha=alpha, steps=3, beta2=1.0, v0=0.0, eps=1.0)
    close(path(fafed, problem, 4), torch.stack(xs))


def test_fafed_by_hand():
    """Two clients, two steps: the first step without h, v from squared gradients, everything averaged."""
    A, b, x, lr, alpha, beta, eps = (2.0, 0.5), (1.0, -3.0), 0.0, 0.1, 0.4, 0.9, 0.2
    grads = [A[k] * (x - b[k]) for k in range(2)]
    m, v = sum(grads) / 2, sum(g**2 for g in grads) / 2
    for tau in range(2):
        h, ends = math.sqrt(v) + eps, []
        for k in range(2):
            X, M, V = x, m, v
            for i in range(2):
                X, old = X - lr * M / (1.0 if tau == i == 0 else h), X
                g, before = A[k] * (X - b[k]), A[k] * (old - b[k])
                M, V = g + (1 - alpha) * (M - before), beta * V + (1 - beta) * g**2
            ends.append((X, M, V))
        x, m, v = (sum(column) / 2 for column in zip(*ends, strict=True))
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    words = {"lr": lr, "alpha": alpha, "beta2": beta, "eps": eps, "steps": 2}
    server = last(fedda.make("fafed", old_point="server", **words), problem, 2)
    assert [server.x.item(), server.m.item(), server.v.item()] == pytest.approx([x, m, v], rel=1e-14)


@pytest.mark.parametrize("ext", [1.0, 0.95])
def test_fafed_as_in_the_authors_loop(ext):
    """Every client steps, the points (and v, for a new h) are averaged each second step, then every client estimates at
    the new point and at its own point from before the step; the estimates are averaged with the points."""
    A, b, lr, alpha, beta, eps = (2.0, 0.5), (1.0, -3.0), 0.1, 0.4, 0.9, 0.2
    X = [0.0, 0.0]
    grads = [A[k] * (X[k] - b[k]) for k in range(2)]
    M, V = [sum(grads) / 2] * 2, [sum(g**2 for g in grads) / 2] * 2
    h, ends = 1.0, []
    for step in range(7):
        old, X = X, [X[k] - lr * M[k] / h for k in range(2)]
        if step % 2 == 0:
            if step:
                X, M, V = ([sum(column) / 2] * 2 for column in (X, M, V))
            h = math.sqrt(V[0]) + eps
        for k in range(2):
            g, before = A[k] * (X[k] - b[k]), A[k] * (old[k] - b[k])
            before *= ext if step % 2 == 0 and step else 1.0  # after an average
            M[k], V[k] = g + (1 - alpha) * (M[k] - before), beta * V[k] + (1 - beta) * g**2
        ends.append(sum(X) / 2)
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    algorithm = fedda.make("fafed", lr=lr, alpha=alpha, beta2=beta, eps=eps, steps=2, ext=ext)
    assert path(algorithm, problem, 3).flatten().tolist() == pytest.approx(ends[1::2], rel=1e-13)


@pytest.mark.parametrize("name", ["fedadam", "fedyogi", "fedadagrad", "fedams"])
@pytest.mark.parametrize("bias", [False, True])
def test_server_optimisers_by_hand(name, bias):
    A, b, x = (2.0, 0.5), (1.0, -3.0), 0.5
    v0 = 0.0 if bias else 0.01
    words = {"lr": 0.1, "server_lr": 0.3, "beta1": 0.8, "beta2": 0.6, "eps": 0.05, "v0": v0, "bias_correction": bias}
    words |= {"option": 2} if name == "fedams" else {}
    m, v, top = 0.0, v0, v0
    for n in range(1, 5):
        ends = []
        for k in range(2):
            X = x
            for _ in range(2):
                X -= 0.1 * A[k] * (X - b[k])
            ends.append(X)
        D = sum(ends) / 2 - x
        m = 0.8 * m + 0.2 * D
        if name == "fedyogi":
            v = v - 0.4 * D * D * math.copysign(1, v - D * D)
        elif name == "fedadagrad":
            v = v + D * D
        else:
            v = 0.6 * v + 0.4 * D * D
        top = max(top, v)
        first, second = m, top if name == "fedams" else v
        if bias:
            first = first / (1 - 0.8**n)
            second = second if name == "fedadagrad" else second / (1 - 0.6**n)
        x += 0.3 * first / (math.sqrt(second) + 0.05)
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    x0 = torch.tensor([0.5], dtype=torch.float64)
    assert last(fedda.make(name, steps=2, **words), problem, 4, x0=x0).x.item() == pytest.approx(x, rel=1e-13)


@pytest.mark.parametrize(("name", "bias"), [("fedadam", "keras"), ("fedams", False), ("fedams", True)])
def test_keras_correction_and_max_stabilisation_by_hand(name, bias):
    A, b, x, m, v, top = (2.0, 0.5), (1.0, -3.0), 0.5, 0.0, 0.0, 0.0
    for n in range(1, 5):
        D = sum((1 - 0.1 * A[k]) ** 2 * (x - b[k]) + b[k] - x for k in range(2)) / 2  # two steps of gradient descent
        m, v = 0.8 * m + 0.2 * D, 0.6 * v + 0.4 * D * D
        top = max(top, v)
        if name == "fedadam":
            x += 0.3 * math.sqrt(1 - 0.6**n) / (1 - 0.8**n) * m / (math.sqrt(v) + 0.05)
        else:
            first, second = (m / (1 - 0.8**n), top / (1 - 0.6**n)) if bias else (m, top)
            x += 0.3 * first / math.sqrt(max(second, 0.05))
    words = {"lr": 0.1, "server_lr": 0.3, "beta1": 0.8, "beta2": 0.6, "eps": 0.05, "steps": 2, "bias_correction": bias}
    words |= {"v0": 0.0}
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    x0 = torch.tensor([0.5], dtype=torch.float64)
    assert last(fedda.make(name, **words), problem, 4, x0=x0).x.item() == pytest.approx(x, rel=1e-12)


def test_a_start_without_a_number_is_eps_squared():
    problem = quadratic()
    start = fedda.make("fedadam", eps=0.2, v0=None).init(problem.start(0)[None], None)
    assert start.v.unique().tolist() == pytest.approx([0.04])
    with pytest.raises(ValueError, match="FedAMS: bias_correction must be one of True, False, got 'keras'"):
        fedda.make("fedams", bias_correction="keras")


def test_bias_correction_wants_a_start_at_zero():
    with pytest.raises(ValueError, match="FedYogi: v0 must be 0 with bias_correction"):
        fedda.make("fedyogi", bias_correction=True)


A2, B2, X0 = (2.0, 0.5), (1.0, -3.0), 0.5  # two clients in one coordinate


def grad(k, x):
    return A2[k] * (x - B2[k])


def eta(t):
    return 0.2 / (8 + t) ** (1 / 3)


def descend(k, x, t, extra=lambda x: 0.0, weight=1.0):
    """Two local steps with the decaying rate."""
    for i in range(2):
        x -= eta(t + i) * (weight * grad(k, x) + extra(x))
    return x


def hand_fedavgm(x, t, s):
    mean = sum(descend(k, x, t) for k in range(2)) / 2
    s["m"] = 0.7 * s.get("m", 0.0) + (mean - x)
    return x + 0.5 * s["m"]


def hand_nesterov(x, t, s):
    mean = sum(descend(k, x, t) for k in range(2)) / 2
    s["m"] = 0.7 * s.get("m", 0.0) + (mean - x)
    return x + 0.5 * (mean - x + 0.7 * s["m"])


def hand_fedcm(x, t, s):
    d, total = s.get("d", 0.0), eta(t) + eta(t + 1)
    mean = sum(descend(k, x, t, lambda _: 0.7 * d, 0.3) for k in range(2)) / 2
    s["d"] = (x - mean) / total
    return x - 0.5 * total * s["d"]


def hand_scaffold(option):
    def step(x, t, s):
        c, own, total = s.get("c", 0.0), s.get("own", [0.0, 0.0]), eta(t) + eta(t + 1)
        ys = [descend(k, x, t, lambda _, k=k: c - own[k]) for k in range(2)]
        new = [grad(k, x) if option == 1 else own[k] - c + (x - ys[k]) / total for k in range(2)]
        s["c"], s["own"] = c + sum(n - o for n, o in zip(new, own, strict=True)) / 2, new
        return x + 0.5 * (sum(ys) / 2 - x)

    return step


def hand_feddyn(x, t, s):
    h, own = s.get("h", 0.0), s.get("own", [0.0, 0.0])
    ys = [descend(k, x, t, lambda y, k=k: -own[k] + 0.4 * (y - x)) for k in range(2)]
    s["own"] = [own[k] - 0.4 * (ys[k] - x) for k in range(2)]
    s["h"] = h - 0.4 * sum(y - x for y in ys) / 2
    return x + 0.5 * (sum(ys) / 2 - s["h"] / 0.4 - x)


def hand_feddyn_mean(x, t, s):
    """The clients start from the cloud point; the model is their mean."""
    own, cloud = s.get("own", [0.0, 0.0]), s.get("cloud", x)
    s["cloud"] = hand_feddyn(cloud, t, s)
    return sum(descend(k, cloud, t, lambda y, k=k: -own[k] + 0.4 * (y - cloud)) for k in range(2)) / 2


def hand_subgradient(x, t, s):
    mean = sum(descend(k, x, t, lambda y: 0.3 * math.copysign(1, y)) for k in range(2)) / 2
    return x + 0.5 * (mean - x)


def hand_subgradient_after(x, t, s):
    ends = []
    for k in range(2):
        X = x
        for i in range(2):
            X -= eta(t + i) * grad(k, X)
            X -= eta(t + i) * 0.3 * math.copysign(1, X)
        ends.append(X)
    return x + 0.5 * (sum(ends) / 2 - x)


def hand_mime(x, t, s):
    m, c = s.get("m", 0.0), sum(grad(k, x) for k in range(2)) / 2
    ys = [descend(k, x, t, lambda y, k=k: 0.3 * (c - grad(k, x)) + 0.7 * m, 0.3) for k in range(2)]
    s["m"] = 0.3 * c + 0.7 * m
    return x + 0.5 * (sum(ys) / 2 - x)


def hand_local_adapt(x, t, s):
    n, dx = t // 2 + 1, []
    for k in range(2):
        X, m, v = x, 0.0, 0.0
        for i in range(2):
            m, v = 0.7 * m + 0.3 * grad(k, X), 0.6 * v + 0.4 * grad(k, X) ** 2
            X -= eta(t + i) * m / (1 - 0.7 ** (i + 1)) / (math.sqrt(v / (1 - 0.6 ** (i + 1))) + 0.1)
        dx.append(X - x)
    D = sum(dx) / 2
    s["m"], s["v"] = 0.7 * s.get("m", 0.0) + 0.3 * D, 0.6 * s.get("v", 0.0) + 0.4 * D * D
    return x + 0.5 * s["m"] / (1 - 0.7**n) / (math.sqrt(s["v"] / (1 - 0.6**n)) + 0.2)


def hand_local_adagrad(x, t, s):
    """Clients take Adagrad's steps from v = 0.25, the server takes their mean as it is."""
    ends = []
    for k in range(2):
        X, v = x, 0.25
        for i in range(2):
            v += grad(k, X) ** 2
            X -= eta(t + i) * grad(k, X) / (math.sqrt(v) + 0.1)
        ends.append(X)
    return x + 0.5 * (sum(ends) / 2 - x)


def hand_amsgrad(x, t, s):
    ms, vs = s.setdefault("m", [0.0, 0.0]), s.setdefault("v", [0.0, 0.0])
    hat, xs = s.setdefault("hat", 2.0), []
    for k in range(2):
        X = x
        for i in range(2):
            ms[k], vs[k] = 0.7 * ms[k] + 0.3 * grad(k, X), 0.6 * vs[k] + 0.4 * grad(k, X) ** 2
            X -= eta(t + i) * ms[k] / (math.sqrt(hat) + 0.1)
        xs.append(X)
    s["hat"] = max(hat, sum(vs) / 2)
    return sum(xs) / 2


ADAPT = {"beta1": 0.7, "beta2": 0.6, "eps": 0.1, "server_eps": 0.2, "server_lr": 0.5}
HALF = {"server_lr": 0.5}


@pytest.mark.parametrize("name,words,step", [
    ("fedavgm", {"momentum": 0.7, **HALF}, hand_fedavgm),
    ("fedavgm", {"momentum": 0.7, "nesterov": True, **HALF}, hand_nesterov),
    ("fedcm", {"momentum": 0.7, **HALF}, hand_fedcm),
    ("scaffold", {"option": 1, **HALF}, hand_scaffold(1)),
    ("scaffold", {"option": 2, **HALF}, hand_scaffold(2)),
    ("feddyn", {"alpha": 0.4, "evaluate": "cloud", **HALF}, hand_feddyn),
    ("feddyn", {"alpha": 0.4, **HALF}, hand_feddyn_mean),
    ("fedavg-subgradient", {"gamma": 0.3, **HALF}, hand_subgradient),
    ("fedavg-subgradient", {"gamma": 0.3, "sign": "after", **HALF}, hand_subgradient_after),
    ("mime", {"momentum": 0.7, **HALF}, hand_mime),
    ("local-adapt", ADAPT, hand_local_adapt),
    ("local-adapt", {"client": "adagrad", "client_v0": 0.25, "eps": 0.1, "server": "sgd", **HALF}, hand_local_adagrad),
    ("local-amsgrad", {"beta1": 0.7, "beta2": 0.6, "eps": 0.1, "v0": 2.0}, hand_amsgrad),
])  # fmt: skip
def test_three_rounds_by_hand_with_a_decaying_rate_and_half_a_server_step(name, words, step):
    x, state = X0, {}
    for tau in range(3):
        x = step(x, 2 * tau, state)
    problem = fedda.Quadratic([[A2[0]], [A2[1]]], [[B2[0]], [B2[1]]])
    algorithm = fedda.make(name, lr=CubeRoot(0.2, 8.0), steps=2, **words)
    got = last(algorithm, problem, 3, x0=torch.tensor([X0], dtype=torch.float64)).x.item()
    assert got == pytest.approx(x, rel=1e-12)


@pytest.mark.parametrize("mu0", ["zero", "nu0"])
def test_fedda_with_mu_updated_before_the_step_by_hand(mu0):
    """One client without noise, one step per round: v <- beta v + (1 - beta) nu^2, divided by 1 - beta^t, then a step."""
    A, b, x, lr, beta, momentum, eps = 2.0, 1.0, 0.0, 0.1, 0.7, 0.6, 0.05
    nu = A * (x - b)
    v = nu**2 if mu0 == "nu0" else 0.0
    for n in range(1, 5):
        v = beta * v + (1 - beta) * nu**2
        x -= lr * nu / (math.sqrt(v / (1 - beta**n)) + eps)
        nu = momentum * nu + (1 - momentum) * A * (x - b)
    words = {"lr": lr, "beta": beta, "momentum": momentum, "eps": eps, "mu0": mu0, "steps": 1, "bias_correction": True}
    algorithm = fedda.make("fedda-2-1", v_input="nu", mu_update="before", **words)
    assert last(algorithm, fedda.Quadratic([[A]], [[b]]), 4).x.item() == pytest.approx(x, rel=1e-13)
    with pytest.raises(ValueError, match="v_input must be 'nu' with mu_update='before'"):
        fedda.make("fedda-2-1", mu_update="before")


def test_fedadam_on_plain_gradients_is_torch_adam():
    """With one client, one step and bias correction, the server is torch's own Adam on g."""
    problem = quadratic(clients=1, noise=0.0)
    parameter = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([parameter], lr=0.05, betas=(0.9, 0.99), eps=1e-8)
    xs = []
    for _ in range(10):
        parameter.grad = (problem.A * (parameter.detach() - problem.b))[0]
        adam.step()
        xs.append(parameter.detach().clone())
    words = {"lr": 1.0, "steps": 1, "server_lr": 0.05, "eps": 1e-8, "v0": 0.0, "bias_correction": True}
    close(path(fedda.make("fedadam", **words), problem, 10), torch.stack(xs))


@pytest.mark.parametrize("client", ["adam", "adagrad"])
def test_local_adapt_s_clients_are_torch_optimisers(client):
    """One client, server averaging: a round of local steps is `steps` steps of a fresh torch optimiser."""
    problem = quadratic(clients=1, noise=0.0)
    x, xs = torch.zeros(4, dtype=torch.float64), []
    for _ in range(3):
        parameter = x.clone().requires_grad_()
        kind = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[client]
        optimiser = kind([parameter], lr=0.05, eps=1e-8)
        for _ in range(4):
            parameter.grad = (problem.A * (parameter.detach() - problem.b))[0]
            optimiser.step()
        x = parameter.detach()
        xs.append(x)
    words = {"lr": 0.05, "client": client, "server": "sgd", "server_lr": 1.0, "steps": 4, "beta2": 0.999}
    close(path(fedda.make("local-adapt", **words), problem, 3), torch.stack(xs))


def test_local_adapt_s_corrections_by_hand():
    A, b, eps = (2.0, 0.5), (1.0, -3.0), 0.1
    for correction in ("none", "local", "joint"):
        x = 0.5
        dx, C = [], []
        for k in range(2):
            X, m, v, a, total = x, 0.0, 0.0, 0.0, 0.0
            for i in range(1, 4):
                g = A[k] * (X - b[k])
                m, v = 0.8 * m + 0.2 * g, 0.6 * v + 0.4 * g * g
                P = 1 / (math.sqrt(v / (1 - 0.6**i)) + eps)
                X -= 0.1 * m / (1 - 0.8**i) * P
                a = 0.8 * a + 0.2 * P
                total += a / (1 - 0.8**i)
            dx.append(X - x)
            C.append(total)
        if correction == "none":
            x += sum(dx) / 2
        elif correction == "local":
            x += (dx[0] / C[0] + dx[1] / C[1]) / 2
        else:
            x += (dx[0] / C[0] + dx[1] / C[1]) / (1 / C[0] + 1 / C[1])
        words = {"lr": 0.1, "server": "sgd", "server_lr": 1.0, "steps": 3, "beta1": 0.8, "beta2": 0.6, "eps": eps}
        problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
        x0 = torch.tensor([0.5], dtype=torch.float64)
        algorithm = fedda.make("local-adapt", correction=correction, **words)
        assert last(algorithm, problem, 1, x0=x0).x.item() == pytest.approx(x, rel=1e-13)


def test_local_adapt_with_raw_statistics_by_hand():
    """The steps are corrected for their bias, the correction C of the mean is not."""
    x, b1, b2, eps = X0, 0.7, 0.6, 0.1
    parts = []
    for k in range(2):
        X, m, v, a, c = x, 0.0, 0.0, 0.0, 0.0
        for i in range(2):
            m, v = b1 * m + (1 - b1) * grad(k, X), b2 * v + (1 - b2) * grad(k, X) ** 2
            X -= 0.2 * m / (1 - b1 ** (i + 1)) / (math.sqrt(v / (1 - b2 ** (i + 1))) + eps)
            a = b1 * a + (1 - b1) / (math.sqrt(v) + eps)
            c += a
        parts.append(((X - x) / c, 1 / c))
    D, inverse = (sum(column) / 2 for column in zip(*parts, strict=True))
    algorithm = fedda.make(
        "local-adapt", lr=0.2, steps=2, beta1=b1, beta2=b2, eps=eps, server="sgd", server_lr=1.0, correction="joint",
        raw_statistics=True,
    )  # fmt: skip
    problem = fedda.Quadratic([[A2[0]], [A2[1]]], [[B2[0]], [B2[1]]])
    got = last(algorithm, problem, 1, x0=torch.tensor([X0], dtype=torch.float64)).x.item()
    assert got == pytest.approx(x + D / inverse, rel=1e-12)


@pytest.mark.parametrize("v0", ["own", "gradient"])
@pytest.mark.parametrize("state", ["local", "averaged", "naive"])
def test_local_amsgrad_by_hand(state, v0):
    A, b, x, b1, b2, eps = (2.0, 0.5), (1.0, -3.0), 0.5, 0.8, 0.6, 0.1
    if v0 == "own":
        ms, vs, hat = [1e-8, 1e-8], [1e-8, 1e-8], 1e-8
    else:
        ms, vs, hat = [0.0, 0.0], [0.0, 0.0], sum((A[k] * (x - b[k])) ** 2 for k in range(2)) / 2 + 1e-8
    hats = [hat, hat]
    for tau in range(3):
        xs = []
        for k in range(2):
            X = x
            for _ in range(2):
                g = A[k] * (X - b[k])
                ms[k], vs[k] = b1 * ms[k] + (1 - b1) * g, b2 * vs[k] + (1 - b2) * g * g
                hats[k] = max(hats[k], vs[k])
                metric = vs[k] if tau == 0 and v0 == "own" else hats[k] if state == "naive" else hat
                X -= 0.1 * ms[k] / (math.sqrt(metric) + eps)
            xs.append(X)
        x, hat = sum(xs) / 2, max(hat, sum(vs) / 2)
        if state == "averaged":
            ms, vs = [sum(ms) / 2] * 2, [sum(vs) / 2] * 2
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    x0 = torch.tensor([0.5], dtype=torch.float64)
    algorithm = fedda.make("local-amsgrad", lr=0.1, beta1=b1, beta2=b2, eps=eps, steps=2, state=state, v0=v0)
    assert last(algorithm, problem, 3, x0=x0).x.item() == pytest.approx(x, rel=1e-12)
    with pytest.raises(ValueError, match="LocalAmsgrad: v0 must be one of 'own', 'gradient', got 'zero'"):
        fedda.make("local-amsgrad", v0="zero")


def test_naive_local_amsgrad_ends_elsewhere():
    """With a metric of its own each client pulls with its own strength: the mean stays away from the stationary
    point."""
    A = torch.tensor([[1.0], [1.0], [1.0]], dtype=torch.float64)
    b = torch.tensor([[0.0], [0.0], [30.0]], dtype=torch.float64)
    problem = fedda.Quadratic(A, b)
    end = {
        naive: last(
            fedda.make("local-amsgrad", lr=0.02, beta1=0.0, state="naive" if naive else "local", v0=1e-4, beta2=0.9),
            problem,
            1200,
        ).x.item()
        for naive in (True, False)
    }
    assert abs(end[False] - 10.0) < 0.1 and abs(end[True] - 10.0) > 2.0


@pytest.mark.parametrize("lite", [False, True])
@pytest.mark.parametrize("second", ["round", "step", "frozen"])
def test_mime_adam_by_hand(second, lite):
    A, b, x, eta, mom, b2, eps = (2.0, 0.5), (1.0, -3.0), 0.5, 0.05, 0.8, 0.6, 0.1
    words = {"lr": eta, "steps": 2, "base": "adam", "momentum": mom, "beta2": b2, "eps": eps, "second_moment": second}
    if lite and second == "round":
        with pytest.raises(ValueError, match="MimeLite: second_moment must be one of 'step', 'frozen', got 'round'"):
            fedda.make("mimelite", **words)
        return
    m, v = 0.0, (sum(A[k] * (x - b[k]) for k in range(2)) / 2) ** 2 if second == "frozen" else 0.0
    for n in range(1, 4):
        c = sum(A[k] * (x - b[k]) for k in range(2)) / 2
        ys = []
        for k in range(2):
            y = x
            for _ in range(2):
                g = A[k] * (y - b[k]) - (0 if lite else A[k] * (x - b[k]) - c)
                step = (1 - mom) * g + mom * m
                if second == "frozen":
                    y -= eta * step / (math.sqrt(v) + eps)
                else:
                    w = (1 - b2) * (c if second == "round" else g) ** 2 + b2 * v
                    y -= eta * step / (1 - mom**n) / (math.sqrt(w / (1 - b2**n)) + eps)
            ys.append(y)
        m, v, x = (1 - mom) * c + mom * m, (1 - b2) * c * c + b2 * v, sum(ys) / 2
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    x0 = torch.tensor([0.5], dtype=torch.float64)
    algorithm = fedda.make("mimelite" if lite else "mime", **words)
    assert last(algorithm, problem, 3, x0=x0).x.item() == pytest.approx(x, rel=1e-12)


def test_the_first_step_of_mime_with_adam_is_as_long_as_its_rate():
    problem = fedda.Quadratic(A=[[1.0], [3.0]], b=[[0.0], [4.0]])
    x = last(
        fedda.make("mime", base="adam", lr=0.1, steps=1), problem, 1, x0=torch.tensor([5.0], dtype=torch.float64)
    ).x
    assert x.item() == pytest.approx(4.9, abs=1e-4)


def test_mime_mvr_form_b_by_hand():
    A, b, x, c = (2.0, 0.5), (1.0, -3.0), 0.5, 3.0
    x_prev, m, a = x, 0.0, 1.0
    for tau in range(3):
        eta = 0.1 / (8 + 2 * tau) ** (1 / 3)
        now, then = (sum(A[k] * (p - b[k]) for k in range(2)) / 2 for p in (x, x_prev))
        ys = []
        for k in range(2):
            y = x
            for _ in range(2):
                y -= eta * (A[k] * (y - b[k]) - A[k] * (x - b[k]) + a * now + (1 - a) * m)
            ys.append(y)
        m = now + (1 - a) * (m - then)
        x, x_prev, a = sum(ys) / 2, x, min(1.0, c * eta**2)
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    x0 = torch.tensor([0.5], dtype=torch.float64)
    algorithm = fedda.make("mime-mvr", lr=0.1, w=8.0, c=c, steps=2, form="B")
    assert last(algorithm, problem, 3, x0=x0).x.item() == pytest.approx(x, rel=1e-13)


@pytest.mark.parametrize("statistics", ["batch", "full"])
def test_mime_mvr_form_c_is_storm_inside_mime(statistics):
    A, b, x, c = (2.0, 0.5), (1.0, -3.0), 0.5, 3.0
    x_prev, m, a = x, 0.0, 1.0
    for tau in range(3):
        eta = 0.1 / (8 + 2 * tau) ** (1 / 3)
        now, then = (sum(A[k] * (p - b[k]) for k in range(2)) / 2 for p in (x, x_prev))
        ys = []
        for k in range(2):
            y = x
            for _ in range(2):
                g, g_x, g_prev = (A[k] * (p - b[k]) for p in (y, x, x_prev))
                y -= eta * (g + (1 - a) * (m - g_prev) + a * (now - g_x))
            ys.append(y)
        m = now + (1 - a) * (m - then)
        x, x_prev, a = sum(ys) / 2, x, min(1.0, c * eta**2)
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    x0 = torch.tensor([0.5], dtype=torch.float64)
    algorithm = fedda.make("mime-mvr", lr=0.1, w=8.0, c=c, steps=2, form="C", statistics=statistics)
    run = fedda.Run(algorithm, problem, x0=x0)
    for _ in range(3):
        server = run.step()
    assert server.x.item() == pytest.approx(x, rel=1e-13)
    assert (run.counts.full_gradients > 0) == (statistics == "full")


def test_mimelite_mvr_has_one_form():
    with pytest.raises(ValueError, match="MimeLiteMvr: form must be one of 'A', got 'B'"):
        fedda.make("mimelite-mvr", form="B")


def test_fedglomo_by_hand():
    A, b, x, eta, bl, bs = (2.0, 0.5), (1.0, -3.0), 0.5, 0.05, 0.8, 0.3
    x_prev, u = x, 0.0

    def run(k, start):
        W = start
        V, old = A[k] * (W - b[k]), W
        W = W - eta * V
        for _ in range(2):
            V, old, W = (n := A[k] * (W - b[k]) + bl * (V - A[k] * (old - b[k]))), W, W - eta * n
        return start - W

    for tau in range(3):
        D, D_ = (sum(run(k, p) for k in range(2)) / 2 for p in (x, x_prev))
        u = D if tau == 0 else bs * D + (1 - bs) * u + (1 - bs) * (D - D_)
        x, x_prev = x - u, x
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    x0 = torch.tensor([0.5], dtype=torch.float64)
    algorithm = fedda.make("fedglomo", lr=eta, steps=3, local_momentum=bl, server_beta=bs)
    assert last(algorithm, problem, 3, x0=x0).x.item() == pytest.approx(x, rel=1e-13)


def test_fedexp_by_hand():
    A, b, y, eps = (1.0, 1.0), (1.0, -3.0), 0.5, 0.01
    for _ in range(3):
        D = [-(1 - 0.9**2) * (y - b[k]) for k in range(2)]
        mean = sum(D) / 2
        step = max(1.0, (D[0] ** 2 + D[1] ** 2) / 2 / (2 * (mean**2 + eps)))
        y, before = y + step * mean, y
    problem = fedda.Quadratic([[A[0]], [A[1]]], [[b[0]], [b[1]]])
    x0 = torch.tensor([0.5], dtype=torch.float64)
    server = last(fedda.make("fedexp", lr=0.1, steps=2, eps=eps), problem, 3, x0=x0)
    assert step > 1
    assert server.y.item() == pytest.approx(y, rel=1e-13)
    assert server.x.item() == pytest.approx((y + before) / 2, rel=1e-13)


# -- known mistakes of public implementations, each with the test that catches it
# ----------------------------------------
def test_mistake_fedcm_that_broadcasts_only_part_of_delta():
    """A public FedCM sent only the last tensor of Delta. On a model of several tensors, ours moves all of them."""
    problem, words = digits(), {"lr": 0.05, "steps": 3, "momentum": 0.9}
    server = last(fedda.make("fedcm", **words), problem, 2)
    # Ours must follow the equation in every coordinate: one more round by hand from the same state.
    g = Oracle(problem)
    ends = []
    for k in range(problem.clients):
        x = server.x[0]
        for i in range(3):
            x = x - 0.05 * (0.1 * g(2, k, i, x)[0] + 0.9 * server.delta[0])
        ends.append(x)
    expected = torch.stack(ends).mean(0)
    got = last(fedda.make("fedcm", **words), problem, 3).x[0]
    close(got, expected)
    sizes = [p.numel() for p in problem.model.parameters()]
    truncated = server.delta[0].clone()
    truncated[: -sizes[-1]] = 0  # the mistake
    assert all((part - wrong).abs().max() > 0 for part, wrong in
               zip(server.delta[0].split(sizes)[:-1], truncated.split(sizes)[:-1], strict=True))  # fmt: skip


@pytest.mark.parametrize("option", [1, 2])
def test_mistake_scaffold_that_adds_the_sum_of_the_changes(option):
    """c must stay the mean of all c_k (with c_k = 0 for clients not yet seen): adding the SUM makes it K times too
    large."""
    problem = quadratic(clients=8)
    run = fedda.Run(fedda.make("scaffold", lr=0.05, steps=3, option=option), problem, cohort=3)
    for _ in range(6):
        server = run.step()
        close(server.c[0], run.simulation.memory["c"].mean(0))
    assert server.c.abs().max() > 0.01


def test_mistake_fedprox_with_an_unsquared_norm():
    """The gradient of (mu/2) ||X - x||^2 is mu (X - x), which vanishes at x; that of an unsquared norm does not
    shrink."""
    problem, eta, mu = quadratic(clients=1, noise=0.0), 0.1, 2.0
    start = problem.start(0)
    x = start
    for _ in range(3):
        x = x - eta * ((problem.A * (x - problem.b))[0] + mu * (x - start))
    close(last(fedda.make("fedprox", lr=eta, mu=mu, steps=3), problem, 1).x[0], x)
    first = fedda.make("fedprox", lr=eta, mu=mu, steps=1)
    same(first, fedda.make("fedavg", lr=eta, steps=1), problem, rounds=1)  # no pull at x itself


def test_plain_preconditioned_fedda_with_l1_uses_the_accumulated_weight():
    """E12's cousin within one round: the first iterate of a = 1, h = 1 with L1 is soft(x_0 - eta nu_0, eta gamma)."""
    problem = quadratic(clients=1, noise=0.0)
    x0 = problem.start(0)
    nu0 = (problem.A * (x0 - problem.b))[0]
    got = last(fedda_of(Plain(), Identity(), lr=lambda t: 0.1, steps=1, prox=L1(0.5)), problem, 1).x[0]
    u = x0 - 0.1 * nu0
    close(got, u.sign() * (u.abs() - 0.05).clamp(min=0))


def test_diagonal_metric_is_shared_by_all_clients():
    """H goes down as one vector: every client steps in the same metric (the paper's reason for averaging dual
    states)."""
    assert fedda.Run(stable("fedda-mvr"), quadratic()).server.mu.shape == (1, 4)
    assert isinstance(stable("fedda-mvr").preconditioner, Diagonal)
