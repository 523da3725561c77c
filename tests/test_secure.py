"""Secure aggregation: the server sees sums. Sites die in every stage, masks are uniform, and single replies stay hidden."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import lil_matrix
from torch import nn

from conftest import example
from fedda.aggregation.gaussian import uniform_integers

pytest.importorskip("flwr", reason="needs fedda[flower]")
from flwr.app import ArrayRecord, Error, Message

from fedda.deploy import InProcessGrid, Site, Strategy, TooFewReplies, client_app
from fedda.deploy.client import EVALUATE, HELLO
from fedda.deploy.init import config
from fedda.deploy.keys import make_keys
from fedda.deploy.masking import Terms, Unfit, Unmasking, masked, new_private_key, public_key, revealed
from fedda.deploy.relayed import ABOUT_MODEL
from fedda.deploy.secure import terms_for
from fedda.deploy.secure_client import RECORD, REVEAL
from fedda.deploy.server import Plan, serve
from fedda.deploy.sharing import combine, split
from fedda.deploy.wire import packed
from flowers import PROJECT, Flowers, model, secret_of, site_samples

CLIENTS = 4
SECRET = bytes(range(32))
LOSS = nn.functional.cross_entropy


@pytest.fixture(scope="module")
def data():
    return site_samples(CLIENTS)


@pytest.fixture
def app(data):
    return client_app(lambda context: Site(model(), LOSS, *data[context.node_config["partition-id"]]))


def plan(out, name="fedavg", **changes):
    how = {"clients": CLIENTS, "rounds": 3, "cohort": 0, "batch": 5, "dtype": "float64", "timeout": 0.5, "every": 1}
    how |= {"out": str(out), "secure_aggregation": True, "limit": 100.0} | changes
    return Plan(algorithm=name, params=json.dumps(example(name) | {"steps": 2}), **how)


def run(grid, asked, say=lambda line: None):
    return serve(grid, asked, model, LOSS, say=say, secret=SECRET)


def report_of(asked):
    return json.loads((Path(asked.out) / "report.json").read_text())


def rows_of(asked):
    return [json.loads(line) for line in (Path(asked.out) / "metrics.jsonl").read_text().splitlines()]


def largest_error(asked):
    return report_of(asked)["secure_aggregation"]["largest_error"]


class Faulty(InProcessGrid):
    """`fault(client, task, number)` says whether a site is dead for a message; `number` counts its messages of a task."""

    def __init__(self, app, fault=lambda client, task, number: False, clients=CLIENTS):
        super().__init__(app, clients)
        self.fault, self.seen, self.asked, self.replies = fault, {}, [], []

    def answer(self, message):
        client, task = message.metadata.dst_node_id - 1, message.content["fields"]["task"]
        number = self.seen[client, task] = self.seen.get((client, task), -1) + 1
        if self.fault(client, task, number):
            return Message(Error(code=5, reason="gone"), reply_to=message)
        reply = super().answer(message)
        self.asked.append((client, task, message))
        if reply.has_content() and "tensors" in reply.content:  # the server forgets what it has read
            tensors = [array.numpy().copy() for array in reply.content["tensors"].values()]
            self.replies.append((client, task, dict(reply.content["fields"]), tensors))
        return reply


# -- equal to the plain federation ------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("fedavg", {"weights": "samples", "max_samples": 30, "cohort": 3}),
        ("fedavg", {"secure_bits": 32, "aggregation": '[{"name": "clip", "norm": 0.5, "where": "client"}]'}),
        ("fedda-mvr", {"cohort": 3}),
        ("fedda-cv", {"cohort": 3}),
        ("scaffold", {"cohort": 3}),
        ("stem", {"weights": "samples", "max_samples": 1000, "dtype": "float32"}),
        ("mime", {}),
    ],
)  # fmt: skip
def test_the_model_of_the_plain_federation(name, more, app, tmp_path):
    """The models of two runs differ by the stated error of each mean, and by what three rounds make of it."""
    hidden, open_ = plan(tmp_path / "a", name, **more), plan(tmp_path / "b", name, **more, secure_aggregation=False)
    ours, theirs = run(Faulty(app), hidden), run(Faulty(app), open_)
    most = 30 * largest_error(hidden) + (1e-12 if hidden.dtype == "float64" else 1e-5)
    for mine, other in zip(ours.server, theirs.server, strict=True):
        torch.testing.assert_close(mine, other, rtol=most, atol=most)
    for mine, other in zip(rows_of(hidden), rows_of(open_), strict=True):
        for key in ("gradients", "full_gradients", "dropped", "round"):
            assert mine[key] == other[key]
        for key in ("train_loss", "train_accuracy"):
            assert mine[key] == pytest.approx(other[key], abs=100 * most)
    assert ours.counts.bytes_up != theirs.counts.bytes_up


def test_one_mean_is_within_the_stated_error(app, tmp_path):
    """Of the first exchange, where both runs start from the same model; the bound is used to a tenth at least."""
    for bits in (32, 64):
        hidden = plan(tmp_path / f"a{bits}", "fedda-mvr", rounds=1, secure_bits=bits)
        ours, theirs = (
            run(Faulty(app), asked)
            for asked in (hidden, plan(tmp_path / f"b{bits}", "fedda-mvr", rounds=1, secure_aggregation=False))
        )
        terms = terms_for(CLIENTS, bits, 100.0, 1)
        assert largest_error(hidden) == terms.error == 2.0 ** (9 - bits + 2) / 2
        off = float((ours.server.nu - theirs.server.nu).abs().max())
        assert off <= 3 * terms.error + 1e-15  # a rounding of nu_0, one of nu, and that of x between them
        assert bits == 64 or off > terms.error / 10


def test_quantised_means_of_known_vectors():
    """By hand, at the edge of the range, with the largest weights: nothing wraps."""
    g = np.random.default_rng(0)
    for sites, bits, most in ((2, 32, 1), (5, 32, 70), (40, 64, 10**6), (7, 64, 1)):
        terms = terms_for(sites, bits, 8.0, most)
        values, weights = g.uniform(-8, 8, (sites, 200)), g.integers(1, most + 1, sites)
        values[:, 0], values[:, 1] = 8, -8
        total = sum(terms.encode(v, int(w), (10**6, 3)) for v, w in zip(values, weights, strict=True))
        mean, weight, counts = terms.decode(total.astype(terms.unsigned), 2)
        assert weight == weights.sum() and counts == [sites * 10**6, 3 * sites]
        assert np.abs(mean - weights @ values / weights.sum()).max() <= terms.error + 8 * 2.0**-51
        assert np.log2(terms.step) % 1 == 0


# -- sites die --------------------------------------------------------------------------------------------------------
def dead_from(client, stage, round):
    """A site dies for good just before it would answer the message of this stage in this round."""
    dead = set()

    def fault(who, task, number):
        if who == client and task == stage and number >= round:
            dead.add(who)
        return who in dead

    return fault


@pytest.mark.parametrize("name", ["fedavg", "fedda-mvr", "fedda-cv", "scaffold"])
@pytest.mark.parametrize("stage", ["upload", "shares"])
def test_a_site_dies_in_a_round(name, stage, app, tmp_path):
    """Before its upload it is left out of the sum; after it, its upload counts, and the others take its masks off. The
    plain federation loses the site in the same rounds."""
    start = int(name.startswith("fedda"))  # the exchange for nu_0 has a message for shares too
    own = dead_from(2, "local", 1) if stage == "upload" else dead_from(2, REVEAL, start + 1)
    hidden = plan(tmp_path / "a", name, every=0)
    ours = run(Faulty(app, own), hidden)
    died = 1 if stage == "upload" else 2  # the first round without its reply
    theirs = run(
        Faulty(app, dead_from(2, "local", died)), plan(tmp_path / "b", name, every=0, secure_aggregation=False)
    )
    most = 30 * largest_error(hidden) + 1e-12
    for mine, other in zip(ours.server, theirs.server, strict=True):
        torch.testing.assert_close(mine, other, rtol=most, atol=most)
    assert int(ours.dropped) == int(theirs.dropped) == 3 - died
    assert report_of(hidden)["rejected"]["gone"] >= 3 - died


def test_a_site_that_dies_in_the_key_exchange_joins_with_a_new_key(app, tmp_path, monkeypatch):
    """Its first greetings are lost; the run waits for it, as for any site."""
    monkeypatch.setattr("fedda.deploy.federation.ASK_AGAIN", 0.1)
    hidden, open_ = plan(tmp_path / "a"), plan(tmp_path / "b", secure_aggregation=False)
    with pytest.warns(UserWarning, match="left out"):
        ours = run(Faulty(app, lambda who, task, number: who == 1 and task == HELLO and number < 2), hidden)
    theirs = run(Faulty(app), open_)
    torch.testing.assert_close(ours.server.x, theirs.server.x, rtol=0, atol=30 * largest_error(hidden) + 1e-12)


def test_a_restarted_site_gets_a_new_key_and_is_back(app, tmp_path):
    """It has lost its key between two rounds: it refuses once, is asked for a key, and the round is repeated."""
    hidden = plan(tmp_path / "a", every=0, min_replies=4)
    grid = Faulty(app)

    def forget(who, task, number):
        if who == 3 and task == "local" and number == 1:
            del grid.contexts[4].state[RECORD]
        return False

    grid.fault = forget
    ours = run(grid, hidden)
    theirs = run(Faulty(app), plan(tmp_path / "b", every=0, secure_aggregation=False))
    torch.testing.assert_close(ours.server.x, theirs.server.x, rtol=0, atol=30 * largest_error(hidden) + 1e-12)
    assert report_of(hidden)["rejected"] == {"refused": 1}
    assert "no key" in report_of(hidden)["last"]["refused"]


@pytest.mark.parametrize("stage", ["local", REVEAL])
def test_below_the_threshold_the_round_is_repeated_and_then_ends(stage, app, tmp_path):
    """Two of four sites are dead: no sum, in any attempt. If one comes back in time, the run goes on."""
    asked = plan(tmp_path / "a", every=0, repeats=1)
    with pytest.raises(TooFewReplies, match="2 attempts"):
        run(Faulty(app, lambda who, task, number: who < 2 and task == stage), asked)
    asked = plan(tmp_path / "b", every=0, repeats=1)
    ours = run(Faulty(app, lambda who, task, number: who < 2 and task == stage and number == 0), asked)
    theirs = run(Faulty(app), plan(tmp_path / "c", every=0, secure_aggregation=False))
    torch.testing.assert_close(ours.server.x, theirs.server.x, rtol=0, atol=30 * largest_error(asked) + 1e-12)


def test_many_sites_have_few_neighbours_and_many_may_die():
    """Twenty-four sites: twenty neighbours each. Some die before the upload, some after it."""
    sites, g = 24, np.random.default_rng(1)
    private = [new_private_key() for _ in range(sites)]
    terms = Terms("r", 0, "t", 0, tuple(range(sites)), tuple(map(public_key, private)), ("",) * sites, 16, 64, 8.0, 1)
    assert all(len(terms.neighbours(k)) == 20 for k in range(sites))
    assert all(k in terms.neighbours(j) for k in range(sites) for j in terms.neighbours(k))
    values, unmasking = g.uniform(-8, 8, (sites, 30)), Unmasking(terms, 33)
    up = sorted(g.permutation(sites)[:20].tolist())
    for k in up:
        unmasking.add(k, *masked(terms, k, private[k], terms.encode(values[k], 1, (0, 0))))
    for k in up[3:]:
        unmasking.reveal(k, revealed(terms, k, private[k], up, unmasking.bundles_for(k)))
    assert unmasking.complete
    mean, weight, _ = terms.decode(unmasking.sum(), 2)
    assert weight == len(up) and np.abs(mean - values[up].mean(0)).max() <= terms.error + 1e-14


# -- a real federation ------------------------------------------------------------------------------------------------
TASK = """
import os, time
from pathlib import Path
import numpy as np
import torch
from torch import nn

FOLDER = Path(os.environ["FEDDA_TEST_SAMPLES"])
loss = nn.functional.cross_entropy

def model():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 10))

def samples(k):
    found = np.load(FOLDER / f"{k}.npz")
    return torch.from_numpy(found["x"]), torch.from_numpy(found["y"])
"""
CLIENT = """
from fedda.deploy import Site, client_app
from .task import *

class Mortal(Site):
    # Site 3 waits for its death where the file `fate` says: in which task, after how many messages of it.
    def answer(self, message, context):
        fate, task = FOLDER / "fate", message.content["fields"]["task"]
        if context.node_config["partition-id"] == 3 and fate.exists():
            name, left = fate.read_text().split()
            if name == task and left == "0":
                fate.rename(FOLDER / "dying")
                time.sleep(600)
            elif name == task:
                fate.write_text(f"{name} {int(left) - 1}")
        return super().answer(message, context)

def load(context):
    return Mortal(model(), loss, *samples(context.node_config["partition-id"]), secure=True)

app = client_app(load)
"""
SERVER = """
from fedda.deploy import server_app
from .task import *

app = server_app(model, loss)
"""


@pytest.fixture(scope="module")
def flowers(tmp_path_factory, data):
    """A SuperLink and four nodes, as processes. The sites sign their keys, and know each other."""
    place, folder = tmp_path_factory.mktemp("flowers"), tmp_path_factory.mktemp("samples")
    for k, own in enumerate(data):
        np.savez(folder / f"{k}.npz", x=own.x, y=own.y)
    made = Flowers(place / "here")
    made.environment["FEDDA_TEST_SAMPLES"] = str(folder)
    make_keys(place / "keys", [], list(range(CLIENTS)))
    made.about = lambda k: f"identity='{place / 'keys' / f'node{k}'}' peers='{place / 'keys'}'"
    made.folder, made.app = folder, place / "app"
    (made.app / "secureapp").mkdir(parents=True)
    (made.app / "pyproject.toml").write_text(PROJECT.format(name="secureapp", config=config({})))
    for name, text in {"__init__": "", "task": TASK, "client_app": CLIENT, "server_app": SERVER}.items():
        (made.app / "secureapp" / f"{name}.py").write_text(text)
    try:
        made.open(0)
        for k in range(CLIENTS):
            made.join(k, CLIENTS, about=made.about(k))
        yield made
    finally:
        made.close()


def kill_site(flowers, out):
    """Site 3 dies while it works on this message: its node and all its processes, by SIGKILL."""
    deadline = time.monotonic() + 120
    while not (flowers.folder / "dying").exists():
        ended = (out / "report.json").exists() and json.loads((out / "report.json").read_text())["status"] != "running"
        assert time.monotonic() < deadline and not ended, flowers.logs()
        time.sleep(0.1)
    flowers.kill(flowers.nodes[3])
    (flowers.folder / "dying").unlink()


def test_four_real_sites_of_which_one_is_killed_in_each_stage(flowers, app, tmp_path):
    """In the key exchange (and it joins again), while its shares are asked for, and while it works on its upload. The
    models are those of a plain federation in one process, with the same cohorts and batches."""
    how = {"clients": CLIENTS, "rounds": 1, "batch": 5, "dtype": "float64", "every": 0, "limit": 100.0}
    how |= {"timeout": 120.0, "secure_aggregation": True}
    runs = {"fedda-mvr": [(HELLO, 0), (REVEAL, 1)], "fedavg": [("local", 0)]}
    for name, deaths in runs.items():
        given = json.dumps(example(name) | {"steps": 2})
        asked = Plan(algorithm=name, params=given, out=str(tmp_path / name), **how)
        (flowers.folder / "fate").write_text("{} {}".format(*deaths[0]))
        flowers.submit(flowers.app, algorithm=name, params=given, out=tmp_path / name, **how)
        for i in range(len(deaths)):
            kill_site(flowers, tmp_path / name)
            if i + 1 < len(deaths):
                (flowers.folder / "fate").write_text("{} {}".format(*deaths[i + 1]))
            flowers.join(3, CLIENTS, about=flowers.about(3))
        report = flowers.ended(tmp_path / name)
        assert report["status"] == "finished", flowers.logs()
        missing = deaths[-1][0] == "local"
        fault = dead_from(3, "local", 0) if missing else dead_from(3, "nothing", 0)
        open_ = Plan(
            algorithm=name, params=given, **how | {"secure_aggregation": False}, out=str(tmp_path / f"{name}-plain")
        )
        truth = serve(Faulty(app, fault), open_, model, LOSS, say=lambda line: None, secret=secret_of(tmp_path / name))
        state = load_file(tmp_path / name / "state.safetensors")
        assert int(state["dropped"]) == int(truth.dropped) == int(missing)
        most = 10 * largest_error(asked) + 1e-12
        for field, value in truth.server._asdict().items():
            torch.testing.assert_close(state[f"server.{field}"], value, rtol=most, atol=most)


# -- what the server sees ---------------------------------------------------------------------------------------------
def test_a_single_masked_reply_is_uniform(app, tmp_path):
    """The bytes that the server really gets, of one site: all bits, all bytes, and the numbers over the modulus. A
    plain reply fails the same test."""

    def p_values(numbers):
        raw = numbers.view(np.uint8)
        spread = stats.chisquare(np.bincount(raw, minlength=256)).pvalue
        return [
            spread,
            stats.kstest(numbers / 2.0**64, "uniform").pvalue,
            stats.binomtest(int(np.unpackbits(raw).sum()), 8 * len(raw)).pvalue,
        ]

    grid = Faulty(app)
    run(grid, plan(tmp_path / "a", rounds=12, every=0))
    seen = [tensors[0] for client, task, _, tensors in grid.replies if client == 1 and task == "local"]
    assert len(seen) == 12
    assert min(p_values(np.concatenate(seen).ravel().view(np.uint64))) > 1e-4
    terms = terms_for(CLIENTS, 64, 100.0, 1)
    plain = np.concatenate([terms.encode(np.linspace(-1, 1, 235), 1, (0, 0)) for _ in range(12)])
    assert max(p_values(plain)) < 1e-9


def test_no_field_or_tensor_of_a_reply_tells_sizes_counts_or_metrics(app, data, tmp_path):
    """Whatever the site's data: replies have the same fields, and the same values in the clear."""
    grid = Faulty(app)
    run(grid, plan(tmp_path / "a", weights="samples", max_samples=1000))
    clear = {}
    for client, task, fields, tensors in grid.replies:
        fields = {k: v for k, v in fields.items() if k not in ("client", "public", "signature")}
        clear.setdefault(client, []).append((task, fields, [v.shape for v in tensors]))
    assert all(clear[k] == clear[0] for k in range(1, CLIENTS))
    assert {task for task, *_ in clear[0]} == {HELLO, EVALUATE, "local", REVEAL}
    assert all(set(fields) <= {"protocol", "stamp", "draws", "samples", *ABOUT_MODEL} for _, fields, _ in clear[0])
    assert all(fields["samples"] == 1 for task, fields, _ in clear[0] if task == HELLO)
    assert all(site["samples"] is None for site in report_of(plan(tmp_path / "a"))["sites"].values())


# -- Flower's generator falls, ours does not --------------------------------------------------------------------------
def test_a_mask_of_flowers_generator_is_found_and_ours_is_not():
    """A site's vector is small, so a right guess of the mask leaves small numbers. Flower's seed has 32 bits: it is found
    in a slice of 2^12 of them; the whole range is 2^20 such slices. Ours has no such seed: neither
    Flower's generator nor the ChaCha20 streams of keys with 32 bits give anything that resembles the mask."""
    from flwr.common.secure_aggregation.secaggplus_utils import pseudo_rand_gen

    key, modulus, numbers = bytes(np.random.default_rng(3).integers(0, 256, 32, dtype=np.uint8)), 1 << 32, 8
    vector = np.arange(numbers, dtype=np.int64) * 1000
    folded = 0
    for i in range(0, 32, 4):  # as Flower does: XOR of eight words
        folded ^= int.from_bytes(key[i : i + 4], "little")
    flowers = (vector + pseudo_rand_gen(key, modulus, [(numbers,)])[0]) % modulus
    ours = (vector + uniform_integers(key, numbers, 32)) % modulus
    seeds = range(max(0, folded - 2**11), folded + 2**11)

    def broken(seen, mask_of):
        """The seeds whose mask leaves small numbers, tried with the first number before all of them."""
        hits = []
        for seed in seeds:
            first = mask_of(seed, 1)
            if (int(seen[0]) - int(first[0])) % modulus < 1 << 20:
                left = (seen - mask_of(seed, numbers)) % modulus
                if int(left.max()) < 1 << 20:
                    hits.append((seed, left.tolist()))
        return hits

    def twister(seed, count):
        return np.random.RandomState(seed).randint(0, modulus - 1, count, dtype=np.int64)

    def chacha(seed, count):
        return uniform_integers(seed.to_bytes(4, "little") * 8, count, 32).astype(np.int64)

    assert broken(flowers, twister) == [(folded, vector.tolist())]
    assert broken(ours, twister) == [] and broken(ours, chacha) == []


def test_a_mask_depends_on_all_bits_of_its_key():
    key = bytearray(SECRET)
    masks = {uniform_integers(bytes(key), 4, 64).tobytes()}
    for bit in range(256):
        key[bit // 8] ^= 1 << bit % 8
        masks.add(uniform_integers(bytes(key), 4, 64).tobytes())
        key[bit // 8] ^= 1 << bit % 8
    assert len(masks) == 257


# -- what a site does not reveal --------------------------------------------------------------------------------------
def four(needed=3, number=0):
    private = [new_private_key() for _ in range(4)]
    terms = Terms("r", number, "t", 0, tuple(range(4)), tuple(map(public_key, private)), ("",) * 4, needed, 64, 8.0, 1)
    unmasking = Unmasking(terms, 5)
    for k in range(4):
        unmasking.add(k, *masked(terms, k, private[k], terms.encode(np.array([k / 4, -1.0]), 1, (0, 0))))
    return terms, private, unmasking


def test_a_site_never_reveals_both_kinds_of_share_of_one_site():
    """For a site that has uploaded: the share of its own mask, and of its pairs only those with missing sites."""
    terms, private, unmasking = four()
    del unmasking.bundles[3]
    up = [0, 1, 2]
    shares = revealed(terms, 0, private[0], up, unmasking.bundles_for(0))
    assert len(shares) == unmasking.shares_from(0) == 3 * 2  # of each upload: its own mask, and its pair with site 3
    terms, private, unmasking = four()
    assert len(revealed(terms, 0, private[0], range(4), unmasking.bundles_for(0))) == 4  # own masks alone


def test_sites_refuse_sums_of_too_few():
    terms, private, unmasking = four()
    for up, why in (([0, 1], "needs 3 sites"), ([0, 1, 1], "sites in the terms"), ([0, 1, 9], "sites in the terms")):
        with pytest.raises(Unfit, match=why):
            revealed(terms, 0, private[0], up, [])
    with pytest.raises(Unfit, match="its own upload is not in the sum"):
        revealed(terms, 0, private[0], [1, 2, 3], [])
    with pytest.raises(Unfit, match="must need at least 3 of them, got 2"):
        four(needed=2)
    bundles = unmasking.bundles_for(0)
    with pytest.raises(Unfit, match="not authentic"):
        revealed(terms, 0, private[0], range(4), [bundles[1], bundles[0], *bundles[2:]])


def lies(terms, target):
    """For each site a list of uploads, such that the shares that the sites reveal unmask `target` alone, or None if there
    are no such lists: a linear programme over all that a server may say. The unknown (h, i) is 1 if site h hears that i
    has not uploaded."""
    names, around = terms.names, terms.holders(target)
    rows, unknown = [], {}

    def at(*key):
        return unknown.setdefault(key, len(unknown))

    def require(weights, low=-np.inf, high=np.inf):
        rows.append((weights, low, high))

    for h in names:  # what a site checks
        require({at(h, h): 1}, high=0)
        require({at(h, i): 1 for i in names}, high=len(names) - terms.needed)
        for name in terms.holders(h):  # if this one has uploaded, enough of its holders have
            size = len(terms.holders(name))
            weights = {at(h, i): 1 for i in terms.holders(name)}
            require(weights | {at(h, name): 1 - size}, high=size - terms.threshold(name))
    require({at(h, target): 1 for h in around}, high=len(around) - terms.threshold(target))  # the target's own mask
    for other in terms.neighbours(target):  # and its key with each neighbour, from the shares of one of the two
        for owner, missing, first in ((target, other, 1), (other, target, 0)):
            told = {at("told", owner, missing, h): 1 for h in terms.holders(owner)}
            for h in terms.holders(owner):
                require({at("told", owner, missing, h): 1, at(h, missing): -1}, high=0)
                require({at("told", owner, missing, h): 1, at(h, owner): 1}, high=1)
            enough = terms.threshold(owner)
            require(told | {at("first", other): -enough if first else enough}, low=0 if first else enough)
    matrix = lil_matrix((len(rows), len(unknown)))
    for row, (weights, *_) in enumerate(rows):
        for column, weight in weights.items():
            matrix[row, column] = weight
    bounds = LinearConstraint(matrix.tocsr(), [low for _, low, _ in rows], [high for *_, high in rows])
    whole = np.ones(len(unknown))
    found = milp(0 * whole, constraints=bounds, integrality=whole, bounds=Bounds(0, 1))
    assert found.status in (0, 2), found.message  # solved, or shown to have no solution
    if found.x is None:
        return None
    return {h: [i for i in names if found.x[at(h, i)] < 0.5] for h in names}


def test_no_lists_of_uploads_unmask_a_single_site(monkeypatch):
    """A server that tells each site another list. If half of the holders were enough, as is safe if all sites are
    neighbours, it would get a reply on a ring, to the last bit."""
    sites, target = 30, 7
    private = [new_private_key() for _ in range(sites)]
    values = np.random.default_rng(1).uniform(-8, 8, (sites, 10))

    def exchange():
        keys = tuple(map(public_key, private))
        return Terms("r", 0, "t", 0, tuple(range(sites)), keys, ("",) * sites, 20, 64, 8.0, 1)

    assert lies(exchange(), target) is None
    monkeypatch.setattr("fedda.deploy.masking.two_thirds", lambda sites: sites // 2 + 1)
    terms, server = exchange(), Unmasking(exchange(), 13)
    uploads = {k: masked(terms, k, private[k], terms.encode(values[k], 1, (0, 0))) for k in range(sites)}
    for site, told in lies(terms, target).items():
        server.bundles = {k: uploads[k][1] for k in told}
        server.reveal(site, revealed(terms, site, private[site], told, server.bundles_for(site)))
    wanted = [(target, None)]
    for other in terms.neighbours(target):
        pairs = [pair for pair in ((target, other), (other, target)) if pair in server.shares]
        wanted.append(max(pairs, key=lambda pair: len(server.shares[pair])))
    alone = Unmasking(terms, 13)
    alone.add(target, *uploads[target])
    for (owner, missing), shares in ((pair, server.shares[pair]) for pair in wanted):
        assert len(shares) >= terms.threshold(owner)
        alone.shares[target, missing if owner == target else owner] = shares
    mean, weight, _ = terms.decode(alone.sum(), 2)
    assert weight == 1 and np.abs(mean - values[target]).max() <= terms.error


def test_two_shares_of_three_say_nothing():
    """Every value of the secret fits two shares: with any third share they give another secret."""
    shares = split(SECRET, 3, 4)
    assert combine({1: shares[0], 2: shares[1], 4: shares[3]}) == SECRET
    others = {combine({1: shares[0], 2: shares[1], 4: bytes([i]) * 32}) for i in range(50)}
    assert len(others) == 50 and SECRET not in others


@pytest.mark.parametrize("attack", ["again", "other keys", "twice revealed", "plain", "fewer"])
def test_a_site_refuses_what_a_bad_server_may_ask(attack, app, data, tmp_path):
    """An exchange again with other values, terms without its key, shares twice, replies without masks, a small sum."""
    grid = Faulty(app)
    run(grid, plan(tmp_path / "a", every=0, rounds=1))
    last = {(client, task): message for client, task, message in grid.asked}
    (work, shares), context = (last[0, task] for task in ("local", REVEAL)), grid.contexts[1]
    site = Site(model(), LOSS, *data[0], secure=True)

    def why(message):
        return site.answer(message, context).content["refused"]["why"]

    fields = work.content["fields"]
    if attack == "again":
        assert why(work) == f"exchange {json.loads(fields['secure'])['number']} is not new"
    elif attack == "other keys":
        terms = json.loads(fields["secure"])
        terms |= {"number": 99, "keys": [public_key(new_private_key()) for _ in range(4)]}
        fields["secure"] = json.dumps(terms)
        assert why(work) == "the terms do not have this site's key"
    elif attack == "twice revealed":
        assert "were revealed" in why(shares)
    elif attack == "plain":
        fields["secure"] = ""
        assert why(work) == "this site takes part in secure aggregation only"
    else:
        terms = json.loads(fields["secure"])
        fields["secure"] = json.dumps(terms | {"number": 99, "needed": 1})
        assert "must need at least 3 of them, got 1" in why(work)


@pytest.mark.parametrize("liar", [None, "a false key", "an unsigned key", "an invented site"])
def test_sites_that_know_each_other_refuse_keys_that_a_peer_has_not_signed(liar, app, tmp_path):
    """A server that passes on a key of its own for site 2 could read what the others send to it."""
    make_keys(tmp_path / "keys", [], list(range(CLIENTS)))
    peers = tmp_path / "peers"
    peers.mkdir()
    for k in range(CLIENTS - (liar == "an invented site")):
        (peers / f"node{k}.pub").write_bytes((tmp_path / "keys" / f"node{k}.pub").read_bytes())
    grid = Faulty(app)
    for k, context in enumerate(grid.contexts.values()):
        context.node_config |= {"identity": str(tmp_path / "keys" / f"node{k}"), "peers": str(peers)}
    good = grid.answer

    def answer(message):
        reply = good(message)
        if message.metadata.dst_node_id == 3 and message.content["fields"]["task"] == HELLO:
            change = {"a false key": {"public": public_key(new_private_key())}, "an unsigned key": {"signature": ""}}
            for name, value in change.get(liar, {}).items():
                reply.content["fields"][name] = value
        return reply

    grid.answer = answer
    asked = plan(tmp_path / "a", rounds=1, every=0, repeats=0)
    if liar is None:
        assert int(run(grid, asked).dropped) == 0
        return
    with pytest.raises(TooFewReplies):
        run(grid, asked)
    why = "no key of site 3 among its peers" if liar == "an invented site" else "site 2 has not signed its public key"
    assert why in report_of(asked)["sites"]["0"]["last"]["refused"]


def test_a_wrong_upload_is_noticed_and_not_used(app, tmp_path):
    """A site adds something to its masked vector: the sum of the weights shows that masks do not cancel."""
    grid, asked = Faulty(app), plan(tmp_path / "a", every=0, repeats=0)
    good = grid.answer

    def answer(message):
        reply = good(message)
        if message.metadata.dst_node_id == 2 and message.content["fields"]["task"] == "local":
            fields = {k: v for k, v in reply.content["fields"].items() if k != "protocol"}
            first, second = (torch.from_numpy(reply.content["tensors"][i].numpy().copy()) for i in "01")
            reply = Message(packed((first + 12345, second), fields), reply_to=message)
        return reply

    grid.answer = answer
    with pytest.raises(TooFewReplies):
        run(grid, asked)
    assert "the masks do not cancel" in report_of(asked)["last"]["malformed"]


def test_a_value_that_is_too_large_does_not_leave_the_site(data, tmp_path):
    """The site refuses, and is left out, as in a plain federation."""
    bad = [type(own)(own.x * (1e6 if k == 1 else 1), own.y) for k, own in enumerate(data)]
    app = client_app(lambda context: Site(model(), LOSS, *bad[context.node_config["partition-id"]]))
    asked = plan(tmp_path / "a", every=0)
    assert int(run(Faulty(app), asked).dropped) == 3
    assert report_of(asked)["rejected"] == {"refused": 3}
    assert report_of(asked)["last"]["refused"] == "client 1: a value is larger than the limit, 100"  # not how large


# -- resumed ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["scaffold", "fedda-cv"])
def test_resumed_with_memory_and_without_secrets_on_disk(name, app, tmp_path):
    class Died(Exception):
        pass

    def die(line):
        if line.startswith("round 2"):
            raise Died

    whole = run(Faulty(app), plan(tmp_path / "a", name))
    grid = Faulty(app)
    for node, context in grid.contexts.items():
        context.node_config["memory"] = str(tmp_path / f"node{node}")
    with pytest.raises(Died):
        run(grid, plan(tmp_path / "b", name), say=die)
    keys = [bytes(context.state[RECORD]["private"]) for context in grid.contexts.values()]
    fresh = Faulty(app)  # Flower gives a run that is submitted again a fresh state
    for node, context in fresh.contexts.items():
        context.node_config["memory"] = str(tmp_path / f"node{node}")
    again = run(fresh, plan(tmp_path / "b", name, resume=True))
    for mine, other in zip(again.server, whole.server, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-12)
    written = b"".join(file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())
    assert keys and not any(key in written or key.hex().encode() in written for key in keys)
    with pytest.raises(ValueError, match="secure-aggregation was True and is False"):
        run(Faulty(app), plan(tmp_path / "b", name, resume=True, secure_aggregation=False))


def test_as_a_strategy(app, tmp_path):
    """The same option for those who have a Flower app. The two runs draw other batches, of almost all samples."""
    ends, net = {}, model()
    for hidden in (True, False):
        strategy = Strategy(
            net, LOSS, "fedavg", {"lr": 0.1}, clients=CLIENTS, batch=1000, out=str(tmp_path / str(hidden)),
            secure_aggregation=hidden, dtype="float64",
        )  # fmt: skip
        done = strategy.start(Faulty(app), ArrayRecord(net.state_dict()), num_rounds=2, timeout=5)
        ends[hidden] = torch.cat([v.flatten() for v in done.arrays.to_torch_state_dict().values()])
    moved = (ends[False] - nn.utils.parameters_to_vector(net.parameters())).norm()
    assert 0 < (ends[True] - ends[False]).norm() < 0.3 * moved


# -- refused by name --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"aggregation": '[{"name": "median"}]'}, "gives the server a sum, and Median needs single replies"),
        ({"aggregation": '[{"name": "trimmed"}]'}, "gives the server a sum, and Trimmed needs single replies"),
        ({"aggregation": '[{"name": "noise", "multiplier": 1.0, "norm": 1.0}]'}, "Noise needs single replies"),
        ({"aggregation": '[{"name": "clip", "norm": 1.0}]'}, "use where='client'"),
        ({"aggregation": '[{"name": "topk"}]'}, "TopK does not send"),
        ({"aggregation": '[{"name": "float16"}]'}, "Float16 does not send"),
        ({"params": '{"epochs": 1}', "max_samples": 9}, "hides the sites' sizes, which epochs"),
        ({"secure_bits": 16}, "secure_bits must be 32 or 64, got 16"),
        ({"cohort": 1, "min_replies": 1}, "needs at least 2 sites"),
        ({"weights": "samples", "max_samples": 2**31, "secure_bits": 32}, "does not fit into 32 bits"),
    ],
)  # fmt: skip
def test_what_needs_more_than_sums_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message) as refused:
        Plan(**{"clients": 4, "secure_aggregation": True, "out": str(tmp_path / "out")} | changes)
    assert "\n" not in str(refused.value)


def test_algorithms_that_need_more_are_refused_before_any_file(app, tmp_path):
    how = {"clients": 4, "secure_aggregation": True, "out": str(tmp_path / "out")}
    for name, params, more, message in (
        ("fednova", {"work": "samples"}, {}, "FedNova needs single replies"),
        ("scaffold", {}, {"weights": "samples", "max_samples": 9}, "Scaffold needs the total of all sites' sizes"),
    ):
        with pytest.raises(ValueError, match=message):
            run(Faulty(app), Plan(algorithm=name, params=json.dumps(params), **how, **more))
    assert not (tmp_path / "out").exists()
