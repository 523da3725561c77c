"""Privacy: three attacks that worked on the old rules and fail on the present ones, the noise, the accountant, the
budget, and what lies in the files."""

import json
import math
import os
import stat
from contextlib import suppress
from functools import partial

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import nn

import fedda
from commands import inside
from conftest import close, quadratic, stable
from fedda import rng
from fedda.aggregation import Budget, Clip, Noise, TopK, gaussian
from fedda.aggregation.wrapper import Exchange
from fedda.files import PRIVATE, write_whole

dp = pytest.importorskip("dp_accounting", reason="needs fedda[privacy]")
flwr = pytest.importorskip("flwr", reason="needs fedda[flower]")
from flwr.app import Error, Message  # noqa: E402

from fedda.deploy import InProcessGrid, Site, client_app, export  # noqa: E402
from fedda.deploy.checkpoint import STATE, read_state  # noqa: E402
from fedda.deploy.secret import SecretDraws  # noqa: E402
from fedda.deploy.server import Plan, serve  # noqa: E402
from fedda.deploy.simulate import FILES  # noqa: E402

CLIENTS = 4
LOSS = nn.functional.cross_entropy
NOISE = {"name": "noise", "multiplier": 4.0, "norm": 0.1}


# -- the old rules, as they were -------------------------------------------------------------------------------------------
def old_noise(key, coordinates):
    """Noise as a counter-based hash of a 63-bit key, round, exchange and reply."""
    return rng.normal(rng.fold(key, coordinates))


def old_batch_key(seed, tau, client):
    return int(rng.fold(rng.fold(rng.key(seed, rng.BATCH), tau), client))


def old_cohort(seed, tau, clients, size):
    return rng.choose(rng.fold(rng.key(torch.tensor([seed]), rng.COHORT), tau), clients, size).tolist()


def undone(z, bits):
    """x from x ^ (x >> bits), 64 bits."""
    x = z
    for _ in range(64 // bits + 1):
        x = z ^ (x >> np.uint64(bits))
    return x


def unfolded(z, counter):
    """The key from which `rng.fold` has made z with this counter: every step of SplitMix64 can be undone."""
    with np.errstate(over="ignore"):
        z = undone(np.asarray(z, dtype=np.uint64), 31) * np.uint64(pow(rng.MIX2 & rng.MASK, -1, 1 << 64))
        z = undone(z, 27) * np.uint64(pow(rng.MIX1 & rng.MASK, -1, 1 << 64))
        z = undone(z, 30)
        return z - np.uint64((counter + 1) * rng.GOLDEN & rng.MASK)


def signed(n):
    return int(n) - (1 << 64) if int(n) >> 63 else int(n)


# -- attack 1: the noise is inverted ---------------------------------------------------------------------------------------
def keys_that_explain(noise, slice_of_hashes):
    """An attacker knows the noise to three digits. The largest number has a tiny uniform behind it, so few hashes can
    have made it. Each leads back to a key, which must then give the other numbers, too."""
    j = int(noise.abs().argmax())
    candidates = unfolded(unfolded(slice_of_hashes, 0), j)
    tried = torch.from_numpy(candidates.view(np.int64))
    others = torch.tensor([i for i in range(6) if i != j])
    predicted = torch.stack([old_noise(tried, int(i)) for i in others])
    fits = ((predicted - noise[others][:, None]).abs() < 0.05).all(dim=0)
    return tried[fits].tolist()


def hashes_near(answer, width):
    first = np.uint64(max(0, int(answer) - width // 2))
    return first + np.arange(width, dtype=np.uint64)


def test_old_noise_gives_its_key_and_new_noise_does_not():
    d, width = 50_000, 1 << 17
    key = torch.tensor(0x1234567890ABCDE)
    noise = old_noise(key, torch.arange(d)) + 0.01 * torch.randn(d, generator=torch.Generator().manual_seed(0))
    j = int(noise.abs().argmax())
    answer = np.uint64(int(rng.fold(rng.fold(key, j), 0)) & rng.MASK)
    # How few hashes there are to try: those whose uniform is small enough for a number of this size.
    assert float(answer) / 2**64 < 2 * math.exp(-((float(noise[j].abs()) - 0.05) ** 2) / 2)
    assert keys_that_explain(noise, hashes_near(answer, width)) == [int(key)]
    # With the key all other noise is known as well: here that of the next exchange of the same round.
    base = unfolded(int(key) & rng.MASK, 0)
    assert int(rng.fold(torch.tensor(signed(base)), 0)) == int(key)

    # The present noise is no SplitMix of any key: in the slice that would hold the answer for it, there is none.
    fresh = gaussian.normal(gaussian.new_key(), (d,))
    u = math.exp(-(float(fresh.abs().max()) ** 2) / 2)
    for middle in (u / 2, u, 2 * u):
        assert keys_that_explain(fresh, hashes_near(int(middle * 2**64), width)) == []


def test_noise_is_the_chacha20_stream_of_its_key_and_nothing_else():
    """By hand, from the bytes of the `cryptography` package: with any other generator behind it this fails."""
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    key, n = gaussian.new_key(), 1000
    stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(24 * n // 2))
    words = np.frombuffer(stream, np.uint64) >> np.uint64(11)
    high, low, turn = (part.astype(float) for part in np.split(words, 3))
    radius = np.sqrt(-2 * np.log((high + (low + 0.5) * 2.0**-53) * 2.0**-53))
    angle = 2 * np.pi * turn * 2.0**-53
    expected = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    np.testing.assert_allclose(gaussian.normal(key, (n,)).numpy(), expected, rtol=1e-13)


# -- attack 2: cohorts from a batch key ------------------------------------------------------------------------------------
def seed_behind(key, tau, client):
    found = unfolded(unfolded(int(key) & rng.MASK, client), tau)
    return signed(unfolded(unfolded(found, rng.BATCH), 0))


def test_old_batch_keys_give_the_seed_and_new_ones_give_nothing():
    clients, size, seed = 100, 5, 987654321
    key = old_batch_key(seed, 7, 42)
    found = seed_behind(key, 7, 42)
    assert found == seed
    assert [old_cohort(found, tau, clients, size) for tau in range(20)] == [
        old_cohort(seed, tau, clients, size) for tau in range(20)
    ]

    draws = SecretDraws()
    rounds = [draws.cohort(tau, clients, size) for tau in range(200)]
    guesses = {
        seed_behind(key, tau, k)
        for tau, (ids, keys) in enumerate(rounds)
        for k, key in zip(ids.tolist(), keys.tolist(), strict=True)
    }
    assert len(guesses) == 1000  # no two keys lead to the same seed
    guess = guesses.pop()
    right = sum(
        len({*ids.tolist()} & {*old_cohort(guess % 2**63, tau, clients, size)}) for tau, (ids, _) in enumerate(rounds)
    )
    assert right < 90  # of 1000; by chance 50, with a standard deviation of 7


def test_secret_cohorts_are_uniform_and_a_function_of_the_secret():
    draws, n, r, rounds = SecretDraws(bytes(range(32))), 12, 3, 4000
    taken = torch.zeros(n)
    keys = set()
    for tau in range(rounds):
        ids, own = draws.cohort(tau, n, r)
        assert ids.tolist() == sorted(set(ids.tolist())) and len(ids) == r
        taken[ids] += 1
        keys |= set(own.tolist())
    assert len(keys) == rounds * r
    assert stats.chisquare(taken.numpy()).pvalue > 1e-4
    again = SecretDraws(bytes(range(32)))
    assert all(torch.equal(a, b) for a, b in zip(again.cohort(5, n, r), draws.cohort(5, n, r), strict=True))
    other = SecretDraws(bytes(32))
    assert not torch.equal(other.everyone(n)[1], draws.everyone(n)[1])
    draws.attempts = lambda kind: 1  # a repeated attempt has a cohort and batches of its own
    cohorts = [[d.cohort(tau, n, r)[0].tolist() for tau in range(40)] for d in (draws, again)]
    assert sum(a != b for a, b in zip(*cohorts, strict=True)) > 30


class Listening(InProcessGrid):
    """Writes down whom the server asks in each round, and the key that it gives them."""

    def __init__(self, *given):
        super().__init__(*given)
        self.asked = []

    def push_messages(self, messages):
        messages = list(messages)
        own = {
            m.metadata.dst_node_id - 1: m.content["fields"]["key"]
            for m in messages
            if m.content["fields"]["task"] == "local"
        }
        self.asked += [own] if own else []
        return super().push_messages(messages)


def test_a_federation_s_cohorts_come_from_no_seed(tmp_path):
    """What a server sends: two runs of one plan have other cohorts and keys, and no key leads to a seed or a cohort."""
    grids = [Listening(app(), 8) for _ in range(2)]
    how = {"clients": 8, "cohort": 2, "rounds": 12, "every": 0, "aggregation": "[]", "seed": 5}
    for i, grid in enumerate(grids):
        serve(grid, plan(tmp_path / str(i), **how), model, LOSS, say=lambda line: None)
    cohorts = [[sorted(asked) for asked in grid.asked] for grid in grids]
    assert len(cohorts[0]) == 12 and sum(a != b for a, b in zip(*cohorts, strict=True)) > 6
    assert cohorts[0] != [old_cohort(5, tau, 8, 2) for tau in range(12)]
    found = {seed_behind(key, tau, k) for tau, asked in enumerate(grids[0].asked) for k, key in asked.items()}
    assert len(found) == 24 and 5 not in found


def test_a_repeated_attempt_has_another_cohort(tmp_path):
    """The accountant counts attempts as independently sampled: with noise they must be."""
    how = {"clients": 8, "cohort": 2, "every": 0, "rounds": 1}
    same = 0
    for at in range(12):
        grids = [Dying(app(), 8), Listening(app(), 8)]
        with suppress(KeyboardInterrupt):
            serve(grids[0], plan(tmp_path / str(at), **how), model, LOSS, say=lambda line: None)
        serve(grids[1], plan(tmp_path / str(at), **how, resume=True), model, LOSS, say=lambda line: None)
        one, two = (grid.asked[0] for grid in grids)
        same += sorted(one) == sorted(two)
        assert not set(one.values()) & set(two.values())
    assert same < 6  # by chance one in 28


class Dying(Listening):
    """The server dies when the replies of its first round are there."""

    def pull_messages(self, ids):
        found = super().pull_messages(ids)
        if self.asked and found:
            raise KeyboardInterrupt
        return found


def test_secret_draws_give_a_run_of_every_engine_the_same_numbers():
    problem = quadratic(clients=7)
    runs = [
        fedda.Run(stable("scaffold"), problem, cohort=3, engine=engine, draws=SecretDraws(bytes(32)))
        for engine in ("sequential", "vectorised")
    ]
    for run in runs:
        for _ in range(4):
            run.advance()
    close(runs[1].server.x, runs[0].server.x, 1e-12)
    plain = fedda.Run(stable("scaffold"), problem, cohort=3)
    plain.advance()
    assert not plain.simulation.draws.secret and runs[0].simulation.draws.secret


# -- attack 3: a repeated round --------------------------------------------------------------------------------------------
def model():
    return nn.Linear(8, 3)


def samples(k):
    g = torch.Generator().manual_seed(k)
    x = torch.randn(30, 8, generator=g, dtype=torch.float64)
    return x, x[:, :3].argmax(dim=-1)


def app():
    return client_app(lambda context: Site(model(), LOSS, *samples(context.node_config["partition-id"])))


def plan(place, **changes):
    given = {"algorithm": "fedavg", "params": '{"lr": 0.1, "steps": 2}', "clients": CLIENTS, "rounds": 3, "batch": 5}
    given |= {"dtype": "float64", "timeout": 5.0, "every": 1, "out": str(place), "repeats": 0}
    return Plan(**given | {"aggregation": json.dumps([NOISE])} | changes)


class Losing(InProcessGrid):
    """Client 1 fails in the first round; the server dies when it asks for the evaluation of that round."""

    def __init__(self, *given):
        super().__init__(*given)
        self.sent, self.lost, self.die = [], True, True

    def answer(self, message):
        words = message.content["fields"]
        if self.lost and words["task"] == "local" and message.metadata.dst_node_id == 2:
            return Message(Error(code=2, reason="lost"), reply_to=message)
        reply = super().answer(message)
        if words["task"] == "evaluate":
            self.sent.append(torch.from_numpy(message.content["tensors"]["0"].numpy().copy()))
            if self.die and len(self.sent) > CLIENTS:  # the model of round 1 has been sent
                raise KeyboardInterrupt
        return reply


def old_repeated_round():
    """The old rule: noise is a function of the round, and the model of a round was sent before the round was saved."""
    g = torch.Generator().manual_seed(3)
    replies, key = torch.randn(CLIENTS, 8, generator=g, dtype=torch.float64), torch.tensor(99)
    replies = 0.1 * replies / replies.norm(dim=-1, keepdim=True)

    def released(present):
        return (replies[present].sum(dim=0) + 4.0 * 0.1 * old_noise(key, torch.arange(8))) / CLIENTS

    return replies[1], (released([0, 1, 2, 3]) - released([0, 2, 3])) * CLIENTS


def test_a_repeated_round_gave_a_reply_away_and_does_not_now(tmp_path):
    reply, difference = old_repeated_round()
    close(difference, reply, 1e-14)

    grid = Losing(app(), CLIENTS)
    with pytest.raises(KeyboardInterrupt):
        serve(grid, plan(tmp_path / "out"), model, LOSS, say=lambda line: None)
    first = grid.sent[-1]
    kept = fedda.deploy.trained(tmp_path / "out", model().double())
    # It was saved before it was sent, so nothing is repeated: the resumed run sends the very same model.
    close(torch.cat([p.detach().flatten() for p in kept.parameters()]), first.flatten(), 0)
    grid.die = grid.lost = False
    run = serve(grid, plan(tmp_path / "out", resume=True), model, LOSS, say=lambda line: None)
    assert torch.equal(grid.sent[CLIENTS + 1], first)
    assert run.round == 3 and run.privacy.rounds == 0
    assert json.loads((tmp_path / "out" / "privacy.json").read_text()) == {"starts": 1, "rounds": 3}


class Killed(InProcessGrid):
    """The server dies at its n-th message, before or after it was sent."""

    def __init__(self, app, clients, at):
        super().__init__(app, clients)
        self.left = at

    def push_messages(self, messages):
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return super().push_messages(messages)

    def pull_messages(self, ids):
        found = super().pull_messages(ids)
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return found


@pytest.mark.parametrize("name", ["fedda-2-1", "fedavg", "mime"])
def test_a_server_killed_at_every_message_never_uses_noise_twice(name, tmp_path, monkeypatch):
    """Every attempt has noise and a cohort of its own, is in the ledger, and the budget counts it."""
    drawn, keys = [], []
    plain, key_of = gaussian.normal, gaussian.new_key
    monkeypatch.setattr(gaussian, "normal", lambda key, shape: drawn.append(plain(key, shape)) or drawn[-1])
    monkeypatch.setattr(gaussian, "new_key", lambda: keys.append(key_of()) or keys[-1])
    norm = {"fedda-2-1": {"first": 0.1, "local": [0.1, 0.1]}, "mime": {"statistics": 0.1, "local": 0.1}}.get(name, 0.1)
    how = {
        "algorithm": name, "params": json.dumps({"lr": 0.01, "steps": 2}), "cohort": 3, "rounds": 4, "every": 2,
        "aggregation": json.dumps([NOISE | {"norm": norm, "multiplier": 20.0}]),
        "budget": json.dumps({"epsilon": 9.0, "delta": 1e-5}),
    }  # fmt: skip
    deaths = 0
    for at in range(1, 40):
        place = tmp_path / str(at)
        kept_before = len(drawn)
        with suppress(KeyboardInterrupt):
            serve(Killed(app(), CLIENTS, at), plan(place, **how), model, LOSS, say=lambda line: None)
            break  # there are no more messages
        deaths += 1
        begun = (place / "state.safetensors").exists()
        run = serve(InProcessGrid(app(), CLIENTS), plan(place, **how, resume=begun), model, LOSS, say=lambda line: None)
        ledger = json.loads((place / "privacy.json").read_text())
        attempts = len(drawn) - kept_before
        charged = run.privacy
        assert ledger == {"starts": 1 + charged.starts, "rounds": run.round + charged.rounds}
        replies = {"fedda-2-1": (1, 2), "fedavg": (0, 1), "mime": (0, 2)}[name]
        assert attempts <= ledger["starts"] * replies[0] + ledger["rounds"] * replies[1]
        row = json.loads((place / "metrics.jsonl").read_text().splitlines()[-1])
        assert row["epsilon_site"] == pytest.approx(
            charged.accountant.epsilon(ledger["rounds"], 1e-5, "site", ledger["starts"]), rel=1e-12
        )
        assert row["epsilon_site"] <= 9.0
    else:
        raise AssertionError("the run has not ended")
    assert deaths > 8 and len(set(keys)) == len(keys)
    flat = [tuple(v.flatten()[:4].tolist()) for v in drawn]
    assert len(set(flat)) == len(flat)


def test_a_lost_attempt_is_charged(tmp_path):
    """The server dies in the middle of a round with two exchanges: the first mean may have been sent."""
    how = {"algorithm": "mime", "params": '{"lr": 0.01}', "aggregation": json.dumps([NOISE]), "every": 0}
    ended = 0
    for at in range(1, 20):
        place = tmp_path / str(at)
        with suppress(KeyboardInterrupt):
            serve(Killed(app(), CLIENTS, at), plan(place, **how), model, LOSS, say=lambda line: None)
            break
        if not (place / "state.safetensors").exists():
            continue
        run = serve(InProcessGrid(app(), CLIENTS), plan(place, **how, resume=True), model, LOSS, say=lambda line: None)
        ended += run.privacy.rounds
        assert run.privacy.rounds <= 1
    assert ended >= 3  # in each round a death after the first exchange


# -- the noise -------------------------------------------------------------------------------------------------------------
def test_noise_is_gaussian():
    noise = gaussian.normal(bytes(range(32)), (10_000_000,)).numpy()
    assert stats.kstest(noise, "norm").pvalue > 1e-3
    n = len(noise)
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((noise**power).mean()) - moment) < 5 * math.sqrt(variance / n), power
    assert abs(float((noise[:-1] * noise[1:]).mean())) < 5 / math.sqrt(n)
    half = gaussian.CHUNK // 2  # the two numbers of a pair: a cosine and a sine
    assert abs(float((noise[:half] * noise[half : 2 * half]).mean())) < 5 / math.sqrt(half)
    assert len(np.unique(noise)) == n


def test_noise_is_the_stream_of_its_key():
    key = bytes(range(32))
    long = gaussian.normal(key, (3 * gaussian.CHUNK,))
    assert torch.equal(gaussian.normal(key, (3, gaussian.CHUNK)).flatten(), long)
    assert torch.equal(gaussian.normal(key, (2 * gaussian.CHUNK,)), long[: 2 * gaussian.CHUNK])
    assert gaussian.normal(key, (5,)).shape == (5,) and gaussian.normal(key, (2, 1, 3)).shape == (2, 1, 3)
    assert not torch.isclose(gaussian.normal(bytes(32), (100,)), long[:100]).any()


def excluded(pair, width, lattice):
    """Whether no radius that the generator can make leads to this pair of numbers, each known to half a width."""
    low, high = (np.hypot(*(np.abs(pair) + side * width)) for side in (-0.5, 0.5))
    u = np.exp(-(np.array([high, low]) ** 2) / 2)
    return lattice(u)


def test_no_sum_can_be_excluded_by_a_gap_between_large_numbers():
    """53 random bits for the radius leave gaps wider than the grid: a pair in a gap shows that a sum is impossible."""
    d, multiplier = 1_000_000, 8.0
    width = 2 * 2.0**-20 / math.sqrt(d) / multiplier  # of the finest grid that we have used, in standard deviations
    g = np.random.default_rng(0)
    old = lambda u: math.floor(u[1] * 2**53 - 0.5) < math.ceil(u[0] * 2**53 - 0.5)  # noqa: E731  no (k + 0.5) / 2^53
    u, angle = (g.integers(0, 1 << 16, 2000) + 0.5) * 2.0**-53, 2 * np.pi * g.random(2000)
    pairs = np.stack([np.sqrt(-2 * np.log(u)) * np.cos(angle), np.sqrt(-2 * np.log(u)) * np.sin(angle)], axis=-1)
    shifted = pairs + g.normal(size=pairs.shape) * 0.01  # as they would look from a neighbouring sum
    assert not any(excluded(pair, width, old) for pair in pairs)
    assert np.mean([excluded(pair, width, old) for pair in shifted]) > 0.5
    # Now: the low bits count where the high ones are few, and neighbouring radii are closer than a thousandth of the
    # present width, up to the largest that anybody will see.
    for high, low in ((0, 0), (0, 1), (0, 2**52), (1, 0), (1, 2**52), (3, 7), (2**53 - 1, 2**53 - 1)):
        got = gaussian.radius(torch.tensor([high]).double(), torch.tensor([low]).double())
        assert float(got) == pytest.approx(math.sqrt(-2 * math.log((high + (low + 0.5) / 2**53) / 2**53)), rel=1e-14)
    width = 2 * gaussian.SLACK / math.sqrt(d) / multiplier
    for bits in range(1, 106):
        one, two = (math.sqrt(-2 * math.log(v)) for v in (2.0**-bits, 2.0**-bits * (1 + 2.0**-52) + 2.0**-106))
        assert one - two < width / 1000 or bits > 70  # below 2^-70, which nobody will ever see


def test_what_leaves_lies_on_a_grid_that_knows_nothing_of_the_data():
    """Floating-point noise has gaps that depend on the sum (Mironov 2012); multiples of one width have none."""
    norm, d = 0.3, 1000
    width = 2.0 ** math.floor(math.log2(2 * norm * gaussian.SLACK / math.sqrt(d)))
    for total in (torch.zeros(1, d), torch.full((1, d), 1 / 3), torch.linspace(-1, 1, d)[None] / 7):
        out = gaussian.noisy(total.double(), norm, 2.0, gaussian.new_key())
        assert torch.equal(out / width, (out / width).round())
        assert abs(float((out - total).std()) / 0.6 - 1) < 0.1
    # Rounding costs no privacy: two sums that are 2 norm apart stay within 2 norm (1 + SLACK).
    g = torch.Generator().manual_seed(0)
    a = torch.randn(d, generator=g, dtype=torch.float64)
    b = a + 2 * norm * torch.nn.functional.normalize(torch.randn(d, generator=g, dtype=torch.float64), dim=0)
    apart = ((a / width).round() - (b / width).round()).norm() * width
    assert float(apart) <= 2 * norm * (1 + gaussian.SLACK)


def test_private_noise_is_new_every_time_and_a_seed_says_that_it_is_not():
    how = {"rounds": 2, "aggregation": [Noise(1.0, norm=1.0)]}
    one, two = (fedda.train(stable("fedavg"), quadratic(), **how) for _ in range(2))
    assert not torch.isclose(one.x, two.x).any()
    how["aggregation"] = [Noise(1.0, norm=1.0, seed=3)]
    one, two = (fedda.train(stable("fedavg"), quadratic(), **how) for _ in range(2))
    assert torch.equal(one.x, two.x)
    assert {row["privacy"] for row in one.history} == {"not private: reproducible noise"}
    assert not any(key.startswith("epsilon") for row in one.history for key in row)
    replicas = fedda.train(stable("fedavg"), quadratic(), rounds=1, seed=[0, 0], aggregation=[Noise(1.0, norm=1.0)])
    assert not torch.isclose(replicas.x[0], replicas.x[1]).any()


# -- the accountant --------------------------------------------------------------------------------------------------------
def by_hand(multiplier, start, each, rounds, population, cohort, delta):
    """dp-accounting itself: one replaced client moves the q replies of a round by 2 sqrt(q) norms together."""
    accountant = dp.rdp.RdpAccountant(neighboring_relation=dp.NeighboringRelation.REPLACE_ONE)
    if start:
        accountant.compose(dp.GaussianDpEvent(multiplier / (2 * math.sqrt(start))))
    event = dp.GaussianDpEvent(multiplier / (2 * math.sqrt(each)))
    if population is not None:
        event = dp.SampledWithoutReplacementDpEvent(population, cohort, event)
    accountant.compose(event, rounds)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize("name,start,each", [("fedda-2-1", 1, 2), ("fedavg", 0, 1)])
@pytest.mark.parametrize(
    "multiplier,clients,cohort,rounds,delta",
    [(2.0, 100, 5, 100, 1e-5), (8.0, 1000, 50, 400, 1e-6), (16.0, 20, 20, 50, 1e-5)],
)
def test_epsilon_is_what_dp_accounting_says(name, start, each, multiplier, clients, cohort, rounds, delta):
    noise, algorithm = Noise(multiplier, norm=1.0), stable(name)
    whole = None if cohort == clients else clients
    given = {"clients": clients, "rounds": rounds, "delta": delta, "cohort": cohort}
    outside = noise.epsilon(algorithm, **given)
    assert outside == pytest.approx(by_hand(multiplier, start, each, rounds, whole, cohort, delta), rel=1e-9)
    # A site knows about itself: at most `cohort` of the other clients - 1 take part.
    site = noise.epsilon(algorithm, **given, against="site")
    others = None if whole is None else clients - 1
    assert site == pytest.approx(by_hand(multiplier, start, each, rounds, others, cohort, delta), rel=1e-9)
    assert site >= outside
    known = noise.epsilon(algorithm, **given, cohorts="known")
    assert known == pytest.approx(by_hand(multiplier, start, each, rounds, None, cohort, delta), rel=1e-9)


def test_sampling_is_credited_only_where_it_holds():
    noise = Noise(8.0, norm=1.0)
    given = {"clients": 100, "rounds": 50, "delta": 1e-5, "cohort": 5}
    known = noise.epsilon(stable("fedavg"), **given, cohorts="known")
    assert noise.epsilon(stable("fedavg"), **given) < known / 3
    # Where clients remember, what they send shows in which rounds they took part.
    assert noise.epsilon(stable("scaffold"), **given) == pytest.approx(by_hand(8.0, 0, 2, 50, None, 5, 1e-5))
    assert noise.epsilon(stable("fedavg"), **given, aggregation=[noise, TopK(0.1)]) == pytest.approx(known)
    # In a simulation cohorts follow from the seed, which is no secret; a federation has one.
    problem = quadratic(clients=10)
    how = {"cohort": 2, "aggregation": [noise]}
    assert not fedda.Run(stable("fedavg"), problem, **how).privacy.accountant.sampling
    as_federation = fedda.Run(stable("fedavg"), problem, **how, budget={"epsilon": 50.0, "cohorts": "secret"})
    assert as_federation.privacy.accountant.sampling
    assert fedda.Run(stable("fedavg"), problem, **how, draws=SecretDraws()).privacy.accountant.sampling
    assert not fedda.Run(stable("scaffold"), problem, **how, draws=SecretDraws()).privacy.accountant.sampling
    # One less than everybody, seen by a site: nobody is left out for sure.
    nine = fedda.Run(stable("fedavg"), problem, cohort=9, aggregation=[noise], draws=SecretDraws()).privacy.accountant
    assert nine.epsilon(10, 1e-5, "site") == pytest.approx(by_hand(8.0, 0, 1, 10, None, 9, 1e-5))
    assert nine.epsilon(10, 1e-5, "outside") == pytest.approx(by_hand(8.0, 0, 1, 10, 10, 9, 1e-5))


def test_epsilon_lies_between_the_exact_value_and_the_classical_bound():
    """All clients in every round: a composition of Gaussians is one Gaussian, whose exact curve is known (Balle, Wang
    2018), and whose zCDP bound is rho + 2 sqrt(rho log(1 / delta))."""
    rounds, delta, multiplier = 10, 1e-5, 8.0
    got = Noise(multiplier, norm=1.0).epsilon(stable("fedda-mvr"), 10, rounds, delta)
    mu = 2 / multiplier * math.sqrt(1 + 2 * rounds)
    normal = lambda v: math.erfc(-v / math.sqrt(2)) / 2  # noqa: E731
    low, high = 0.0, 100.0
    for _ in range(100):
        mid = (low + high) / 2
        exact = normal(mu / 2 - mid / mu) - math.exp(mid) * normal(-mu / 2 - mid / mu)
        low, high = (mid, high) if exact > delta else (low, mid)
    rho = mu**2 / 2
    assert low <= got <= rho + 2 * math.sqrt(rho * math.log(1 / delta)) + 1e-6


@pytest.mark.parametrize(
    "name,cohort,against,values",
    [
        ("fedavg", 5, "outside", (6.5, 1.1, 0.24)), ("fedda-mvr", 5, "outside", (15, 2.0, 0.42)),
        ("fedda-mvr", 5, "site", (15, 2.0, 0.42)), ("fedda-mvr", 100, "site", (167, 22, 4.1)),
        ("scaffold", 5, "outside", (166, 22, 4.1)),
    ],
)  # fmt: skip
def test_the_epsilons_of_the_page(name, cohort, against, values):
    for multiplier, value in zip((2.0, 8.0, 32.0), values, strict=True):
        got = Noise(multiplier, norm=1.0).epsilon(stable(name), 100, 100, 1e-5, cohort, against=against)
        assert got == pytest.approx(value, rel=0.03)


def test_epsilon_needs_no_problem_also_with_a_penalty_by_name():
    plain, named = (
        fedda.make("fedda-mvr", prox=prox) for prox in (fedda.prox.L1(0.1), fedda.prox.L1(0.1, on="conv.*"))
    )
    noise = Noise(8.0, norm=1.0)
    assert noise.epsilon(named, 10, 5, 1e-5) == noise.epsilon(plain, 10, 5, 1e-5)


# -- the budget ------------------------------------------------------------------------------------------------------------
def test_a_budget_ends_a_run_before_it_is_exceeded():
    noise, problem = Noise(8.0, norm=1.0), quadratic(clients=10)
    budget = {"epsilon": 6.0, "delta": 1e-5}
    with pytest.warns(UserWarning, match=r"the privacy budget is spent after round \d+ of 100"):
        result = fedda.train(stable("fedda-2-1"), problem, rounds=100, every=7, aggregation=[noise], budget=budget)
    last = result.history[-1]
    assert last["epsilon_site"] <= 6.0 and 1 < last["round"] < 100
    beyond = noise.epsilon(stable("fedda-2-1"), 10, last["round"] + 1, 1e-5)
    assert beyond > 6.0 and last["epsilon_outside"] == pytest.approx(last["epsilon_site"])
    epsilons = [row["epsilon_outside"] for row in result.history]
    assert epsilons == sorted(epsilons) and epsilons[0] > 0  # nu_0 is charged, too
    with pytest.warns(UserWarning, match="budget is spent"):
        servers = list(fedda.rounds(stable("fedda-2-1"), problem, rounds=100, aggregation=[noise], budget=budget))
    assert len(servers) == last["round"]
    lenient = fedda.train(stable("fedda-2-1"), problem, rounds=5, aggregation=[noise], budget={"epsilon": 100.0})
    assert lenient.history[-1]["round"] == 5


@pytest.mark.parametrize(
    "given,words",
    [
        ({"budget": {"epsilon": 1.0}}, "budget: a privacy budget needs noise"),
        ({"budget": {"epsilon": 1e-3}, "aggregation": [Noise(1.0, norm=1.0)]}, r"budget: one round more would spend an epsilon of .* and the budget is 0.001"),
        ({"budget": {"epsilon": 9.0}, "aggregation": [Noise(1.0, norm=1.0, seed=0)]}, "budget: not private: reproducible noise"),
        ({"budget": {"epsilon": -1.0}}, "budget: epsilon must be > 0, got -1.0"),
        ({"budget": {"epsilon": 1.0, "delta": 2}}, r"budget: delta must be in \(0, 1\), got 2"),
        ({"budget": {"epsilon": 1.0, "dleta": 1e-5}}, "budget: no key 'dleta'; did you mean 'delta'?"),
        ({"budget": 8.0}, r"budget must be a table such as \{'epsilon': 8.0, 'delta': 1e-5\}, got 8.0"),
        ({"budget": {"epsilon": 1.0, "against": "server"}}, "budget: against must be one of 'outside', 'site'"),
    ],
)  # fmt: skip
def test_a_budget_that_makes_no_sense_is_one_line(given, words):
    with pytest.raises(ValueError, match=f"^{words}"):
        fedda.train(stable("fedavg"), quadratic(), rounds=2, **given)


def test_a_budget_in_an_experiment_file(tmp_path, fedda_inside):
    file = tmp_path / "private.toml"
    file.write_text(
        'name = "private"\nrounds = 50\nevery = 4\nseeds = [0, 1]\n'
        'aggregation = [{name = "noise", multiplier = 8.0, norm = 0.5}]\nbudget = {epsilon = 4.0, delta = 1e-5}\n'
        '[problem]\ndata = "breast-cancer"\nclients = 4\nmodel = "logistic"\n[algorithms.fedavg]\nlr = 0.1\n'
        "[algorithms.fedda-2-1]\nlr = 0.01\neps = 0.1\n"
    )
    code, stdout, stderr = fedda_inside("run", file, "--out", tmp_path / "run")
    assert code == 0, stderr
    assert "the privacy budget is spent after round" in stderr and "epsilon site" in stdout
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    lasts = {label: max(r["round"] for r in rows if r["algorithm"] == label) for label in ("fedavg", "fedda-2-1")}
    assert 0 < lasts["fedda-2-1"] < lasts["fedavg"] < 50  # two replies in a round, and nu_0
    assert all(row["epsilon_site"] <= 4.0 for row in rows)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "delta 1e-05, sampling of cohorts not credited" in page and "Epsilon site" in page
    # Resumed, it is over: no round more, and no row lost.
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert fedda_inside("run", file, "--out", tmp_path / "run", "--resume")[0] == 0
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before
    seeded = file.read_text().replace("norm = 0.5", "norm = 0.5, seed = 0").replace("budget", "#")
    file.write_text(seeded)
    code, stdout, _ = fedda_inside("run", file, "--rounds", 2, "--out", tmp_path / "seeded")
    assert code == 0 and "fedavg: privacy: not private: reproducible noise" in stdout
    assert "not private: reproducible noise" in (tmp_path / "seeded" / "report.html").read_text()


def test_a_federation_stops_at_its_budget_and_says_what_it_spent(tmp_path):
    said = []
    how = {"rounds": 60, "aggregation": json.dumps([NOISE | {"multiplier": 8.0}]), "every": 5, "cohort": 2}
    run = serve(
        InProcessGrid(app(), CLIENTS), plan(tmp_path, **how, budget='{"epsilon": 3.0}'), model, LOSS, say=said.append
    )
    assert 0 < run.round < 60 and said[-1] == f"the privacy budget is spent after round {run.round} of 60"
    assert all(word in said[1] for word in ("epsilon", "against the outside", "against a site"))
    assert json.loads((tmp_path / "report.json").read_text())["why"] == said[-1]
    spent = Noise(8.0, norm=0.1)
    how_many = {"clients": CLIENTS, "delta": 1e-5, "cohort": 2, "against": "site"}
    assert spent.epsilon(stable("fedavg"), rounds=run.round, **how_many) <= 3.0
    assert spent.epsilon(stable("fedavg"), rounds=run.round + 1, **how_many) > 3.0
    # With a larger budget it goes on from there.
    more = plan(tmp_path, **how | {"rounds": run.round + 2}, budget='{"epsilon": 9.0}', resume=True)
    assert serve(InProcessGrid(app(), CLIENTS), more, model, LOSS, say=said.append).round == run.round + 2


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"aggregation": json.dumps([NOISE | {"seed": 1}])}, "not private: reproducible noise: the noise of a federation has no seed"),
        ({"aggregation": "[]", "budget": '{"epsilon": 1}'}, "Plan: a privacy budget needs noise in aggregation"),
        ({"budget": "8"}, "budget must be a table"),
        ({"budget": "0"}, "budget must be a table"),
        ({"budget": "null"}, "budget must be a JSON table"),
        ({"budget": "{"}, "Plan: budget must be a JSON table"),
    ],
)  # fmt: skip
def test_a_plan_without_privacy_is_refused(changes, words, tmp_path):
    with pytest.raises(ValueError, match=words):
        plan(tmp_path, **changes)


# -- files -----------------------------------------------------------------------------------------------------------------
@pytest.fixture
def fedda_inside(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return partial(inside, capsys, monkeypatch)


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o777])
def test_a_private_file_has_its_mode_whatever_the_umask(umask, tmp_path):
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "secret", b"new", PRIVATE)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "secret").stat().st_mode) == 0o600
    assert [path.name for path in tmp_path.iterdir()] == ["secret"]


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_no_secret_lies_in_any_file_but_its_own(umask, tmp_path, monkeypatch):
    """Neither the server's secret nor a key of the noise, in any spelling; and the secret is nobody else's."""
    keys, key_of = [], gaussian.new_key
    monkeypatch.setattr(gaussian, "new_key", lambda: keys.append(key_of()) or keys[-1])
    before = os.umask(umask)
    try:
        grid = InProcessGrid(app(), CLIENTS)
        for node, context in grid.contexts.items():
            context.node_config["memory"] = str(tmp_path / f"node{node}")
        how = {"algorithm": "scaffold", "params": '{"lr": 0.1}'}
        serve(grid, plan(tmp_path / "out", **how), model, LOSS, say=lambda line: None)
    finally:
        os.umask(before)
    out = tmp_path / "out"
    secret = bytes.fromhex(json.loads((out / "server.secret").read_text())["secret"])
    assert len(secret) == 32
    private = [*(out / name for name in FILES), *tmp_path.glob("node*/*.safetensors")]
    assert len(private) == len(FILES) + CLIENTS
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    spelled = [
        form for key in (secret, *keys) for form in (key, key[::-1], key.hex().encode(), key.hex().upper().encode())
    ]
    spelled += [str(int.from_bytes(key, order)).encode() for key in (secret, *keys) for order in ("little", "big")]
    for path in [p for p in tmp_path.rglob("*") if p.is_file() and p.name != "server.secret"]:
        content = path.read_bytes()
        assert not any(form in content for form in spelled), path
    assert keys and not any(key.hex() in (out / "server.secret").read_text() for key in keys)
    assert not {"noise", "base", "secret"} & set(read_state(out / STATE)[1])
    assert "federation.base" not in load_file(out / "state.safetensors")


def test_what_is_exported_is_the_model_alone(tmp_path, fedda_inside):
    run = serve(InProcessGrid(app(), CLIENTS), plan(tmp_path / "out"), model, LOSS, say=lambda line: None)
    spent = run.privacy.row(run.round)["epsilon_outside"]
    assert f"epsilon against the outside: {spent:.3g};" in fedda_inside("deploy", "status", tmp_path / "out")[1]
    for name in ("model.safetensors", "model.pt"):
        code, stdout, stderr = fedda_inside("deploy", "export", tmp_path / "out", "--out", tmp_path / name)
        assert code == 0 and "2 parameters: weight, bias" in stdout, stderr
        found = (load_file if name == "model.safetensors" else partial(torch.load, weights_only=True))(tmp_path / name)
        network = model().double()
        network.load_state_dict(found)
        assert torch.equal(torch.cat([p.detach().flatten() for p in network.parameters()]), run.server.x.flatten())
    content = (tmp_path / "model.safetensors").read_bytes()
    assert b"epsilon_outside" in content and b"names" not in content and b"rejected" not in content
    for words in (("nothing", "m.pt"), ("out", "m.onnx"), ("out", "absent/m.pt")):
        with pytest.raises(ValueError, match=r"holds no run|suffix must be|is not a folder"):
            export(tmp_path / words[0], tmp_path / words[1])


def test_a_run_whose_secret_is_gone_is_not_resumed(tmp_path):
    serve(InProcessGrid(app(), CLIENTS), plan(tmp_path / "out"), model, LOSS, say=lambda line: None)
    (tmp_path / "out" / "server.secret").unlink()
    with pytest.raises(ValueError, match=r"server\.secret is missing"):
        serve(InProcessGrid(app(), CLIENTS), plan(tmp_path / "out", resume=True), model, LOSS, say=lambda line: None)


@pytest.mark.parametrize("content", [None, "", "[]", '{"starts": 1, "rounds": 1}', '{"starts": "x", "rounds": 9}'])
def test_a_lost_or_old_ledger_is_not_believed(content, tmp_path):
    serve(InProcessGrid(app(), CLIENTS), plan(tmp_path / "out"), model, LOSS, say=lambda line: None)
    ledger = tmp_path / "out" / "privacy.json"
    ledger.unlink() if content is None else ledger.write_text(content)
    with pytest.raises(
        ValueError, match=r"privacy\.json: is lost, old or damaged: it must count at least 1 starts and 3 rounds"
    ):
        serve(
            InProcessGrid(app(), CLIENTS),
            plan(tmp_path / "out", rounds=5, resume=True),
            model,
            LOSS,
            say=lambda line: None,
        )


def test_a_start_that_is_refused_is_not_charged(tmp_path):
    for _ in range(2):
        with pytest.raises(ValueError, match=r"one round more would spend an epsilon of 2\.17"):
            asked = plan(tmp_path / "out", budget='{"epsilon": 0.01}')
            serve(InProcessGrid(app(), CLIENTS), asked, model, LOSS, say=lambda line: None)
    assert not (tmp_path / "out" / "privacy.json").exists()


def test_a_budget_below_what_was_spent_is_called_exceeded(tmp_path):
    said = []
    serve(InProcessGrid(app(), CLIENTS), plan(tmp_path), model, LOSS, say=said.append)
    less = plan(tmp_path, rounds=9, resume=True, budget='{"epsilon": 3.0}')
    serve(InProcessGrid(app(), CLIENTS), less, model, LOSS, say=said.append)
    assert said[-1].startswith("the privacy budget is exceeded: ") and said[-1].endswith(" of 3 after round 3 of 9")


@pytest.mark.parametrize("secret", [b"", b"abc", "0" * 32])
def test_a_secret_that_is_none_is_refused(secret, tmp_path):
    with pytest.raises(ValueError, match="the secret must be 32 bytes"):
        serve(InProcessGrid(app(), CLIENTS), plan(tmp_path / "out"), model, LOSS, secret=secret)
    assert not list(tmp_path.iterdir())


def test_a_strategy_with_noise_gives_its_metrics(tmp_path):
    from flwr.app import ArrayRecord

    from fedda.deploy import Strategy

    how = {"clients": CLIENTS, "batch": 5, "dtype": "float64", "out": str(tmp_path), "aggregation": json.dumps([NOISE])}
    strategy = Strategy(model().double(), LOSS, "fedavg", {"lr": 0.1}, **how)
    result = strategy.start(InProcessGrid(app(), CLIENTS), ArrayRecord(model().double().state_dict()), num_rounds=2)
    assert result.evaluate_metrics_clientapp[2]["epsilon_site"] > 0


def test_several_wrappers_and_budget_words():
    assert Budget.of(Budget(3.0)) == Budget(3.0)
    how = {"rounds": 1, "aggregation": [Clip(1.0, "client"), Noise(1.0, norm=1.0)]}
    row = fedda.train(stable("fedavg"), quadratic(), **how).history[-1]
    assert row["privacy"] == "delta 1e-05, sampling of cohorts not credited" and row["epsilon_site"] > 0
    key = torch.tensor([1])
    zero, weights = [torch.zeros(3, 4, dtype=torch.float64)], torch.ones(3, 1)
    one, two = (Noise(1.0, norm=1.0).combine(zero, weights, Exchange("local", 3, key))[0][0] for _ in range(2))
    assert not torch.isclose(one, two).any()
