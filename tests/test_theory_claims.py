"""Claims C26 to C30: what is measured for them, how it is judged, the command, and the advice for a task."""

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import fedda
from commands import inside, is_one_line, write
from fedda import claims
from fedda.experiments import find
from fedda.rules.estimators import Mvr, Plain
from fedda.rules.preconditioners import Diagonal
from fedda.rules.schedules import Constant
from fedda.theory import Practical, Theorem1, advise
from fedda.theory.advice import analysed, trial
from fedda.theory.estimates import curvature_in
from fedda.theory.findings import Ablation, Findings
from fedda.theory.lemmas import Consensus, consensus
from fedda.theory.pictures import PICTURES, draw
from fedda.theory.rates import Complexity, Decay
from fedda.theory.remarks import SETS, Averaging, Moments, Smoothness, ablation, averaging, moments, smoothness
from fedda.theory.synthetic import Synthetic, centred, spectrum
from fedda.theory.verdicts import at, less, verdicts

DOCS = Path(__file__).parents[1] / "docs" / "theory"
S, P, N, I = "SUPPORTED", "PARTIAL", "NOT SUPPORTED", "INCONCLUSIVE"

# ------------------------------------------------------------------------------------------------ what is measured


@pytest.mark.parametrize("name", SETS)
def test_dual_and_primal_averaging(name):
    """E4: the same without a constraint, another path with one; both stay in the set."""
    found = averaging(SETS[name], rounds=40)
    if name == "no constraint":
        assert found.difference.max() < 1e-12
    else:
        assert found.difference.max(axis=0).min() > 1e-2
        for path in found.path.values():
            assert bool(SETS[name].feasible(path, 1e-9).all())
    assert (found.distance("dual")[-1] < 0.5 * found.distance("dual")[0] + 0.2).all()


def test_the_constrained_minimum_is_one():
    """Against projected gradient descent on the mean of the clients' losses."""
    for name in ("box", "L1 ball"):
        found = averaging(SETS[name], rounds=1)
        g = torch.Generator().manual_seed(0)
        A = 0.1 + 1.4 * torch.rand(10, 8, generator=g, dtype=torch.float64)
        b = torch.randn(10, 8, generator=g, dtype=torch.float64)
        x = torch.zeros(1, 8, dtype=torch.float64)
        for _ in range(600):
            x = SETS[name].project(x - 0.5 * (A * (x - b)).mean(dim=0))
        assert float((x[0] - found.minimum).abs().max()) < 1e-9


def test_primal_averaging_destroys_exact_zeros():
    experiment = find("breast-cancer").completed()
    algorithm = experiment.build("fedda-mvr-l1")
    found = ablation(algorithm, experiment.problem.build(), 60, [0, 1, 2])
    assert max(found["dual"]["nonzero"]) < min(found["primal"]["nonzero"])
    assert np.mean(found["dual"]["objective"]) == pytest.approx(np.mean(found["primal"]["objective"]), rel=0.05)


def test_second_moments_by_formula():
    """At a point that stands still everything is Gaussian: mean and variance of both estimates are known."""
    K, d, steps, v = (2, 8), 20, 5, 1.0
    found = moments(K=K, replicas=1000, d=d, steps=steps)
    noise = np.zeros((steps, steps))  # of nu_0, ..., nu_4 in terms of the batches' noise; alpha = 0.1
    noise[0, 0] = 1
    for i in range(1, steps):
        noise[i] = 0.9 * noise[i - 1]
        noise[i, i] += 0.1
    q = v * (noise.mean(axis=0) ** 2).sum()  # the variance of the mean estimate of one client
    for j, k in enumerate(K):
        b = centred(k, d, seed=k)
        problem = Synthetic(spectrum(d), b / b.std(dim=0, correction=0), noise=1.0)
        each = problem.full_gradients(torch.ones(1, d, dtype=torch.float64)).numpy()
        g = each.mean(axis=0)
        assert found.bias["FedDA"].mean(axis=0)[j] == pytest.approx((q / k) ** 2, rel=0.15, abs=2e-3)
        assert found.variance["FedDA"].mean(axis=0)[j] == pytest.approx(
            (4 * g**2 * q / k + 2 * (q / k) ** 2).mean(), rel=0.1
        )
        assert found.bias["FAFED"].mean(axis=0)[j] == pytest.approx(
            ((each**2).mean(axis=0) + v - g**2).dot((each**2).mean(axis=0) + v - g**2) / d, rel=0.05
        )
        spread = (4 * each**2 * v + 2 * v**2).mean(axis=0) / (k * steps)  # of a mean of k times 5 squares
        assert found.variance["FAFED"].mean(axis=0)[j] == pytest.approx(spread.mean(), rel=0.1)


def test_averaged_squares_keep_their_bias_but_lose_their_variance():
    found = moments(replicas=200)
    power = {name: found.exponents(found.variance[name]).mean() for name in found.variance}
    with pytest.raises(ValueError, match="moments: K must be at least 2"):
        moments(K=(1, 2))
    assert power["FedDA"] < -0.95 and power["FAFED"] < -0.85  # both fall like 1/K: the remark is not about variance
    assert (
        found.exponents(found.error("FedDA")).mean() < -1 and abs(found.exponents(found.error("FAFED")).mean()) < 0.15
    )


def test_z_smooths_where_the_last_gradient_is_noisy_and_not_zero_in_the_mean():
    problem = Synthetic(spectrum(20), centred(10, 20, seed=0), noise=1.0)
    made = fedda.algorithms.fedda.FedDA(Constant(1e-10), Plain(), Diagonal(beta=0.9, eps=1e-6))
    one = torch.ones(20, dtype=torch.float64)
    far, near = (smoothness(made, problem, 200, [0, 1, 2], x0=x0) for x0 in (one, 0 * one))
    # s is the gradient and noise of variance 1/I: its relative noise is sqrt(5) times smaller, but in small coordinates.
    assert 1.3 < float((far.change("nu") / far.change("z")).mean()) < 5**0.5
    # Noise alone: log of a square does not know its scale.
    assert float((near.change("nu") / near.change("z")).mean()) == pytest.approx(1, abs=0.06)


def test_consensus_is_within_the_lemmas():
    found = consensus(rounds=10, steps=6)
    assert (found.duals <= found.duals_bound + 1e-15).all() and (found.estimates[1:] <= found.estimates_bound).all()
    assert found.estimates[0] == found.duals[0] == found.duals[1] == 0 and (np.diff(found.duals[1:]) > 0).all()


# ------------------------------------------------------------------------------------------------------ how it is judged


def curve(power=-2 / 3, speed=-2 / 3, K=(1, 4, 16), T=1e5):
    t = np.geomspace(10, T, 80)
    return Decay(K, t, np.stack([np.stack([k**speed * t**power * s for s in (1, 1.01, 0.99)]) for k in K]))


def fabricated(**changes):
    """Findings with the paper in the right."""
    path = {way: torch.zeros(5, 3, 2, dtype=torch.float64) for way in ("dual", "primal")}
    apart = path | {"primal": path["primal"] + 0.1}
    point = torch.zeros(2, dtype=torch.float64)
    noise = torch.randn(41, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    K = np.array([1, 2, 4, 8.0])
    falls, stays = np.stack([s / K for s in (1, 1.1, 0.9)]), np.full((3, 4), 2.0)
    values = {way: {"nonzero": [low, low + 0.01, low + 0.02]} for way, low in (("dual", 0.3), ("primal", 0.9))}
    found = Findings(
        decay=curve(), plain=curve(0.0, -1.0), different=curve(), adaptive=curve(-0.7),
        complexity=Complexity(1.5, 1.25, 1.45),
        consensus=Consensus(*(np.arange(1.0, 5.0 - short) for short in (0, 0, 1, 0))),
        averaging={"no constraint": Averaging(path, point), "box": Averaging(apart, point), "L1 ball": Averaging(apart, point)},
        ablation=Ablation("colon-small", "colon", values),
        smoothness={"digits": Smoothness({"z": 0.1 * noise, "nu": noise})},
        moments=Moments((1, 2, 4, 8), {"FedDA": falls, "FAFED": falls}, {"FedDA": falls / 9, "FAFED": stays}, 40),
    )  # fmt: skip
    return replace(found, **changes)


def reasons(**changes):
    return {claim: own["reason"] for claim, own in verdicts(fabricated(**changes)).items()}


def words(**changes):
    return {claim: own["verdict"] for claim, own in verdicts(fabricated(**changes)).items()}


def test_verdicts_follow_the_numbers():
    right = fabricated()
    assert words() == {"C26": S, "C27": S, "C28": S, "C29": S, "C30": P}
    same = right.averaging["no constraint"]
    assert words(averaging=right.averaging | {"box": same})["C26"] == P  # a box that changes nothing
    assert words(averaging=right.averaging | {"no constraint": right.averaging["box"]})["C26"] == P
    backwards = {way: right.ablation.values[other] for way, other in (("dual", "primal"), ("primal", "dual"))}
    assert words(ablation=Ablation("x", "x", backwards))["C26"] == P and words(ablation=None)["C26"] == S
    rough = right.smoothness["digits"].path
    assert words(smoothness={"digits": Smoothness({"z": rough["nu"], "nu": rough["z"]})})["C27"] == N
    assert words(smoothness={"digits": Smoothness({"z": rough["z"], "nu": rough["z"]})})["C27"] == I
    own = right.moments
    flat = {"FedDA": own.variance["FedDA"], "FAFED": own.bias["FAFED"]}
    assert words(moments=replace(own, variance=flat))["C28"] == S  # the variance decides nothing
    assert words(moments=replace(own, bias={name: own.bias["FedDA"] for name in own.bias}))["C28"] == P
    for slope, speed, verdict in ((-0.5, -2 / 3, P), (-1.0, -2 / 3, P), (-2 / 3, 0.0, P), (-0.3, 0.0, N)):
        assert words(decay=curve(slope, speed))["C29"] == verdict
    assert words(complexity=Complexity(1.5, 1.0, 1.5))["C30"] == S
    assert words(complexity=Complexity(2.0, 1.25, 2.0))["C30"] == N


def test_reasons_follow_the_verdicts():
    right = fabricated()
    says, own, rough = reasons(), right.moments, right.smoothness["digits"].path
    assert says["C28"].startswith("K = 1 to 8, 40 runs each") and "FedDA K^-1.00 (linear)" in says["C28"]
    assert says["C28"].endswith("of which the paper says nothing: FedDA K^-1.00, FAFED K^-1.00")
    gone = reasons(moments=replace(own, bias={name: own.bias["FedDA"] for name in own.bias}))["C28"]
    assert gone.startswith("1 won, 0 undecided, 1 lost: ")
    assert "with the adaptive H of FedDA-1-1" in says["C29"] and says["C29"].count("-0.70") == 3  # K = 1, 4, 16
    assert says["C27"].count("SUPPORTED") == 2 and "NOT" not in says["C27"] and "(40 rounds, 5 seeds)" in says["C27"]
    back = reasons(smoothness={"digits": Smoothness({"z": rough["nu"], "nu": rough["z"]})})["C27"]
    assert back.startswith("0 won, 0 undecided, 2 lost: ") and back.count(" NOT SUPPORTED") == 2
    assert "2 won, 0 undecided, 1 lost: steps and rounds are computed" in says["C30"] and "not eps^-1" in says["C30"]
    assert "not eps^-1" not in reasons(complexity=Complexity(1.5, 1.0, 1.5))["C30"]
    small = reasons(quick=True)
    assert all(reason.startswith("quick: ") for reason in small.values())
    assert small["C28"] == "quick: " + says["C28"]


def test_a_short_curve_decides_nothing():
    for T, verdict in ((199.0, I), (200.0, S)):  # from t = 10: 1.3 decades are 19.95
        found = verdicts(fabricated(decay=curve(T=T)))
        assert found["C29"]["verdict"] == verdict and found["C30"]["details"][1]["verdict"] == verdict
        assert ("fewer than 1.3 decades" in found["C29"]["reason"]) == (verdict == I)


def test_comparisons_are_made_seed_by_seed():
    """Two that differ by the same in every seed, and by less than the seeds do among themselves."""
    ours, theirs = [1.0, 2.0, 3.0], [1.5, 2.5, 3.5]
    found = less("a", "b", ours, theirs)
    assert (found.verdict, found.difference, found.interval) == (S, pytest.approx(0.5), pytest.approx(0.0))
    found = less("a", "b", ours, [3.5, 1.5, 2.5])
    assert (found.verdict, found.difference) == (I, pytest.approx(0.5))
    # The differences are 2.5, -0.5, -0.5: a deviation of 1.732, and t = 4.303 for three seeds.
    assert found.interval == pytest.approx(4.303 * 3**0.5 / 3**0.5, rel=1e-3)


def test_verdicts_have_their_numbers():
    says = verdicts(fabricated())
    assert "-0.667, -0.667, -0.667" in says["C29"]["reason"] and "1 to 4: 2.52" in says["C29"]["reason"]
    assert "nonzero 0.310 vs 0.910" in says["C26"]["reason"] and "colon-small" in says["C26"]["reason"]
    assert "eps^-1.25 rounds" in says["C30"]["reason"] and "paper says nothing: FedDA" in says["C28"]["reason"]
    assert at(curve(), 1000)[0] == pytest.approx(1000 ** (-2 / 3), rel=1e-2)


def test_the_claims_are_judged_from_the_file(tmp_path, capsys, monkeypatch):
    (tmp_path / "theory.json").write_text(json.dumps(verdicts(fabricated())))
    (group,) = claims.verdicts([tmp_path])
    found = {v.claim.id: v for v in group.verdicts}
    assert [found[f"C{i}"].verdict for i in range(26, 31)] == [S, S, S, S, P]
    assert len(found["C29"].details) == 5 and found["C29"].details[0].a == pytest.approx(-2 / 3)
    assert "later version contradicts the second half" in found["C30"].reason
    code, out, _ = inside(capsys, monkeypatch, "claims", tmp_path, "--details")
    assert code == 0 and "power of T" in out and "C30: PARTIAL" in out


@pytest.mark.parametrize(
    "details", ['"x"', '[{"comparison": "a"}]', '[{"comparison": "a", "metric": "b", "verdict": "TRUE"}]',
                '[{"comparison": "a", "metric": "b", "verdict": "PARTIAL", "a": "1"}]', '[{"comparison": "a", "metric": "b", "verdict": "PARTIAL", "z": 1}]'],
)  # fmt: skip
def test_details_that_are_none_are_refused_in_one_line(tmp_path, details):
    (tmp_path / "theory.json").write_text(f'{{"C26": {{"verdict": "PARTIAL", "details": {details}}}}}')
    with pytest.raises(
        ValueError, match=r"theory.json: C26: details must be tables of way, comparison, metric"
    ) as error:
        claims.verdicts([tmp_path])
    assert "\n" not in str(error.value)


def test_the_recorded_verdicts():
    """What docs/theory.md shows: every claim has a verdict, and the gates hold."""
    (group,) = claims.verdicts([DOCS])
    found = {v.claim.id: v for v in group.verdicts}
    assert [found[f"C{i}"].verdict for i in range(26, 31)] == [S, I, S, S, P]
    for d in found["C29"].details:
        low, high = (-0.95, -0.55) if d.metric == "power of T" else (1.8, 3.6)
        assert low <= d.a <= high and d.difference >= 0


def test_pictures_are_drawn_and_the_same_each_time(tmp_path, monkeypatch):
    written = draw(fabricated(), tmp_path)
    assert {p.name for p in written} == {f"{n}.{kind}" for n in PICTURES for kind in ("png", "svg")}
    for path in written:
        assert path.read_bytes()[:5] in (b"\x89PNG\r", b"<?xml")
    before = {kind: (tmp_path / f"moments.{kind}").read_bytes() for kind in ("png", "svg")}
    monkeypatch.setattr("fedda.theory.pictures.PICTURES", {"moments": PICTURES["moments"]})
    assert {path.suffix[1:]: path.read_bytes() for path in draw(fabricated(), tmp_path)} == before


# ------------------------------------------------------------------------------------------------------ advice


def test_the_advice_for_a_quadratic_by_hand():
    problem = fedda.Quadratic(A=[[0.5, 2.0]] * 4, b=[[0.0, 1.0], [1.0, 0.0]] * 2, noise=0.1)
    algorithm = fedda.make("fedda-mvr", lr=0.1, w=8.0, c=3.0, eps=0.25, scale=2.0, steps=3)
    found = advise(algorithm, problem, rounds=50)
    assert pytest.approx(2 / 0.25, rel=1e-3) == found.L_H and found.rho == pytest.approx(0.25)
    schedule = Practical(4, 2 * 8.0)
    assert (found.proposed.lr, found.proposed.w, found.proposed.c) == pytest.approx(
        (schedule.lr, schedule.w, schedule.c), rel=2e-3
    )
    assert found.current.eta == pytest.approx(0.05) and found.current.alpha == pytest.approx(3 * 0.05**2)
    assert found.current.stable == pytest.approx(0.05 * 2 * 8, rel=1e-3)
    p = Theorem1(2.0, 0.25, 4, 3, 2.0)
    assert found.literal.eta == pytest.approx(p.eta(0), rel=1e-3) and found.literal.broken == ()
    assert found.current.ratio == pytest.approx(0.05 / p.eta(0), rel=1e-3)
    assert "eta <= rho / (48 lambda L I^2)" in found.current.broken
    gap = 0.5 * (0.5 * 0.25 + 2 * 0.25)  # from x_0 = 0 to the minimum (1/2, 1/2)
    g = torch.tensor([[0.0, -2.0], [-0.5, 0.0]])
    assert found.bound == pytest.approx(p.bound(150, gap, found.constants.sigma, float((g[0] - g[1]).norm())), rel=1e-2)
    assert not found.penalised and advise(replace(algorithm, prox=fedda.prox.L1(0.1)), problem, rounds=1).penalised
    assert not advise(replace(algorithm, prox=fedda.prox.L1Ball(0.1)), problem, rounds=1).penalised
    made = found.algorithm(algorithm)
    assert made.estimator == Mvr(found.proposed.c) and float(made.lr(torch.zeros(()))) == pytest.approx(
        found.proposed.eta
    )


def test_conditions_are_looked_at_over_a_whole_round():
    """(1 + t)^(-1/3) falls by 1.26 in the first step, and by (21 / 2)^(1/3) = 2.19 from the second to the twentieth."""
    problem = fedda.Quadratic(A=[[1.0]] * 4, b=[[0.0], [1.0]] * 2)
    for steps in (2, 20):
        found = advise(fedda.make("fedda-mvr", lr=1e-6, w=1.0, c=1.0, eps=1.0, steps=steps), problem, rounds=2)
        assert ("eta at most halves in a round" in found.current.broken) == (steps == 20)


def test_other_methods_get_no_advice():
    problem = fedda.Quadratic(A=[[1.0]], b=[[0.0]])
    for name in ("fedda-2-1", "stem"):
        with pytest.raises(ValueError, match="Theorem 1 is about FedDA with the MVR estimator"):
            advise(fedda.make(name), problem, 10)
    with pytest.raises(ValueError, match=r"--label must be one of 'fedda-mvr', got 'fedavg'"):
        analysed(find("digits"), "fedavg")


@pytest.mark.parametrize("name", ["digits", "breast-cancer"])
def test_the_proposal_is_near_the_tuned_rate_and_trains(name):
    """The rates of the experiments come from a sweep that knew nothing of this; Theorem 1's are hundreds of times smaller."""
    experiment = find(name).completed()
    problem, algorithm = experiment.problem.build(), experiment.build("fedda-mvr")
    found = advise(algorithm, problem, experiment.rounds)
    assert 1 / 3 < found.proposed.eta / found.current.eta <= 1
    assert found.current.ratio > 100 and found.bound > found.now
    short = experiment.model_copy(update={"rounds": 60, "seeds": [0]})
    ends = trial(short, algorithm, found, problem)
    assert ends["proposed"]["test_accuracy"] > 0.85
    if name == "digits":  # estimates are local, as the page says
        run = fedda.Run(algorithm, problem)
        for _ in range(10):
            run.advance()
        assert 2.5 < curvature_in(problem, run.server.x[0], torch.ones(1)) / found.constants.L < 3.5
    recorded = json.loads((DOCS / f"{name}.json").read_text())
    assert recorded["choices"]["proposed"]["lr"] == pytest.approx(found.proposed.lr, rel=0.01)
    assert recorded["constants"]["L"] == pytest.approx(found.constants.L, rel=0.01)


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_advises_on_a_file(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "own.toml", rounds=4)
    figures = tmp_path / "deep" / "advice.json"
    code, out, _ = inside(
        capsys, monkeypatch, "theory", path, "--try", "--figures", figures, "--set", "fedda-mvr.eps=0.05"
    )
    assert code == 0, out
    found = json.loads(figures.read_text())
    assert found["rho"] == pytest.approx(0.05) and set(found["trained"]) == {"the experiment", "proposed"}
    lr = re.search(r"--set fedda-mvr\.lr=(\S+)", out)[1]
    assert float(lr) == pytest.approx(found["choices"]["proposed"]["lr"], rel=1e-3)
    for words in (
        "L of batches",
        "Theorem 1",
        "outside Theorem 1: not eta <= rho",
        "it says nothing here",
        "after 4 rounds",
    ):
        assert words in out
    assert "constraint sets only" not in out
    words = ("--set", 'fedda-mvr.prox={kind = "l1", gamma = 0.01}')
    code, out, _ = inside(capsys, monkeypatch, "theory", path, *words)
    assert code == 0 and "outside Theorem 1: it is about constraint sets only" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere"], "unknown experiment 'nowhere'"),
        (["--try"], "--label, --try, --set, --samples and --figures are for an EXPERIMENT"),
        (["digits", "--quick"], "leave EXPERIMENT out"),
        (["digits", "--label", "fedavg"], "--label must be one of 'fedda-mvr', got 'fedavg'"),
        (["digits", "--out", "x"], "leave EXPERIMENT out"),
        (["digits", "--samples", "0"], "--samples must be a whole number"),
        (["--quick", "--steps", "0"], "--steps must be a whole number"),
        (["--steps", "3"], "--steps must be at least 1,000, got 3"),
        (["--quick", "--on", "digits"], "digits holds no FedDA with a penalty"),
        (["femnist-variants", "--label", "fedda-2-1"], "--label must be one of"),
    ],
)
def test_mistakes_end_in_one_line(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.chdir(tmp_path)
    code, _, err = inside(capsys, monkeypatch, "theory", *arguments)
    assert code == 2
    is_one_line(err, words)
    assert not list(tmp_path.iterdir())


def test_an_experiment_without_fedda_is_refused(tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "own.toml", algorithms={"fedavg": {"lr": 0.1}})
    code, _, err = inside(capsys, monkeypatch, "theory", path)
    assert code == 2
    is_one_line(err, "holds no FedDA with the MVR estimator")
