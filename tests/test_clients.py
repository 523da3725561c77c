"""What a client offers to a task: samples, random numbers and unequal work, the same in every engine."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch

import fedda
from conftest import close, digits, last, quadratic
from fedda.aggregation.dry_run import ZeroGradientClient
from fedda.algorithms.fedda import Squares
from fedda.algorithms.fedda_cv import Corrected, FedDACV
from fedda.core import Algorithm, Client, ClientWrapper, on_client
from fedda.engines import Vectorised
from fedda.engines.counting import CountedClient
from fedda.engines.simulated import ClientStack
from fedda.rules.preconditioners import Identity
from fedda.rules.schedules import Constant
from fedda.theory.recording import RecordedClient

ENGINES = ["sequential", "vectorised", Vectorised(chunk=1), Vectorised(chunk=3)]
SIZES = [1, 2, 3, 4, 5, 6, 7]


def unequal(noise=0.3):
    base = quadratic(clients=7, noise=noise)
    return fedda.Quadratic(base.A, base.b, noise, sizes=SIZES)


@dataclass(frozen=True)
class Lottery(Algorithm):
    """Takes a number from each client, one exchange after the other; x takes as many steps as there are samples."""

    class Server(NamedTuple):
        x: torch.Tensor
        mean: torch.Tensor
        other: torch.Tensor
        samples: torch.Tensor

    steps: int = 7

    def init(self, x, clients):
        return self.Server(x, x[..., :1], x[..., :1], x[..., :1])

    def round(self, server, cohort):
        (first,) = cohort.average(self.draw, server.x)
        other, samples, x = cohort.average(self.local, server.x)
        return self.Server(x, first, other, samples)

    @on_client
    def draw(self, client, x):
        one, two = client.uniform(), client.uniform()
        return (one + 100 * two,)

    @on_client(model_replies=(2,))
    def local(self, client, x):
        other, samples = client.uniform(), client.samples
        for i in range(self.steps):
            (g,) = client.gradients(x, active=samples > i)
            x = x - 0.1 * g
        return other, samples, x


def test_samples_and_random_numbers_are_the_same_in_every_engine():
    problem = unequal()
    truth = last(Lottery(), problem, 3, cohort=4, seed=3, engine="sequential")
    for engine in ENGINES[1:]:
        for a, b in zip(last(Lottery(), problem, 3, cohort=4, seed=3, engine=engine), truth, strict=True):
            close(a, b, 1e-12)
    together = last(Lottery(), problem, 3, cohort=4, seed=[8, 3])
    for a, b in zip(together, truth, strict=True):
        close(a[1], b, 1e-12)
    assert not torch.allclose(together.mean[0], together.mean[1])
    half = fedda.Run(Lottery(), problem, cohort=4, seed=3)
    half.step()
    resumed = fedda.Run(Lottery(), problem, cohort=4, seed=3, state=half.state())
    resumed.step()
    for a, b in zip(resumed.step(), truth, strict=True):
        close(a, b, 1e-12)
    alone = last(Lottery(), problem, 1, engine="sequential")
    assert alone.samples.item() == 4.0  # the mean of 1 to 7


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_are_uniform_and_fresh(dtype):
    problem = quadratic(clients=4000).to(dtype=dtype)
    run = fedda.Run(Lottery(), problem)
    seen = []
    for tau in range(2):
        cohort = run.simulation.cohort(tau, 4000)
        for _ in range(2):  # two exchanges, in which no batch is drawn
            cohort.drawn_before = cohort.drawn_so_far
            client = ClientStack(cohort, slice(0, 4000), stacked=True)
            seen += [client.uniform(), client.uniform()]
            cohort.drawn_so_far = client.drawn_so_far
    for u in seen:
        assert u.shape == (4000, 1) and u.dtype == dtype and u.min() > 0 and u.max() < 1
        assert abs(float(u.mean()) - 0.5) < 0.02 and abs(float(u.var()) - 1 / 12) < 0.01
    together = torch.cat(seen, dim=1).T
    assert (torch.corrcoef(together.double()) - torch.eye(8)).abs().max() < 0.08


def test_a_random_number_shifts_no_batch():
    """All algorithms of a comparison get the same batches, also one that draws random numbers."""

    @dataclass(frozen=True)
    class Drawing(fedda.algorithms.fedavg.FedAvg):
        @on_client(model_replies=(0,))
        def local(self, client, x, t):
            client.uniform()
            return super().local(client, x, t)

    a, b = (
        last(algorithm(lr=0.1), quadratic(), 3, cohort=3) for algorithm in (Drawing, fedda.algorithms.fedavg.FedAvg)
    )
    assert torch.equal(a.x, b.x)


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_gradients_are_zero_and_uncounted_where_a_client_is_not_active(engine):
    """Client k has k samples, and so takes k steps: by hand, and in the counts."""
    problem = unequal(noise=0.0)
    run = fedda.Run(Lottery(), problem, engine=engine, seed=[0, 1])
    server = run.step()
    ends = []
    for k, n in enumerate(SIZES):
        x = torch.zeros(4, dtype=torch.float64)
        for _ in range(n):
            x = x - 0.1 * problem.A[k] * (x - problem.b[k])
        ends.append(x)
    close(server.x[0, 0], torch.stack(ends).mean(0), 1e-12)
    assert [row["gradients"] for row in run.evaluate()] == [sum(SIZES)] * 2
    again = fedda.Run(Lottery(), problem, engine=engine, seed=[0, 1], state=run.state())
    again.step()
    assert [row["gradients"] for row in again.evaluate()] == [2 * sum(SIZES)] * 2


def test_each_replica_counts_its_own_gradients():
    problem = unequal()
    run = fedda.Run(Lottery(), problem, cohort=3, seed=[0, 1, 2])
    run.step()
    alone = [fedda.train(Lottery(), problem, rounds=1, cohort=3, seed=s).history[-1]["gradients"] for s in range(3)]
    assert [row["gradients"] for row in run.evaluate()] == alone and len(set(alone)) > 1


def test_a_run_without_unequal_work_keeps_no_count_of_it():
    run = fedda.Run(fedda.make("fedavg"), quadratic())
    run.step()
    assert "idle" not in run.state()


@dataclass(frozen=True)
class Lazy:
    """A plain estimate whose clients rest in the last steps: client k takes k of them."""

    steps: int = 3

    def __call__(self, nu, x, x_prev, eta, client):
        step = getattr(client, "seen", 0)
        client.seen = step + 1
        active = client.samples - 1 > step
        (g,) = client.gradients(x, active=active)
        return torch.where(active, g, 0.0)


@pytest.mark.parametrize("v_input", ["z", "gradients"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
def test_control_variates_are_means_over_the_steps_taken(engine, v_input):
    """c_k is the mean of the gradients that client k took; a client that took none keeps its own."""
    base = quadratic(clients=3, noise=0.0)
    problem = fedda.Quadratic(base.A, base.b, sizes=[1, 2, 4])
    algorithm = FedDACV(Constant(0.1), Lazy(), Identity(), steps=3, v_input=v_input)
    run = fedda.Run(algorithm, problem, engine=engine)
    start = run.server
    server = run.step()
    g = [lambda x, k=k: problem.A[k] * (x - problem.b[k]) for k in range(3)]
    x0, nu0 = start.x[0], start.nu[0]
    first = x0 - 0.1 * nu0
    second = first - 0.1 * g[2](first)
    third = second - 0.1 * g[2](second)
    expected = torch.stack([torch.zeros_like(x0), g[1](first), (g[2](first) + g[2](second) + g[2](third)) / 3])
    close(run.simulation.memory["c"], expected, 1e-12)
    close(server.c[0], expected.mean(0), 1e-12)


def test_every_wrapper_passes_on_the_whole_protocol():
    """A property that is added to the protocol and to `ClientWrapper` is in all of them."""
    names = {name for name in vars(Client) if not name.startswith("_")}
    assert {"samples", "uniform", "gradients", "memory", "count", "full_gradient"} <= names
    assert names <= set(dir(ClientWrapper)) and names - {"active", "count", "memory"} <= set(dir(ClientStack))
    for wrapper in (CountedClient, Squares, Corrected, RecordedClient, ZeroGradientClient):
        assert issubclass(wrapper, ClientWrapper)


@pytest.mark.parametrize("sizes", [[1, 2], [1, 2, 0, 4, 5], [1.0] * 5, 3])
def test_sizes_of_a_quadratic_are_checked(sizes):
    base = quadratic()
    with pytest.raises(ValueError, match="Quadratic: sizes must be 5 whole numbers >= 1, one for each client, got"):
        fedda.Quadratic(base.A, base.b, sizes=sizes)


def test_samples_are_those_of_the_data():
    problem = digits(clients=5)
    run = fedda.Run(Lottery(), problem)
    client = ClientStack(run.simulation.everyone(), slice(0, 5), stacked=True)
    assert torch.equal(client.samples[:, 0], problem.sizes.double())


@dataclass(frozen=True)
class Replying(Algorithm):
    """Replies what `reply` makes of x and g."""

    class Server(NamedTuple):
        x: torch.Tensor

    reply: object
    steps: int = 1

    def init(self, x, clients):
        return self.Server(x)

    def round(self, server, cohort):
        return self.Server(cohort.average(self.local, server.x)[0])

    @on_client
    def local(self, client, x):
        (g,) = client.gradients(x)
        return self.reply(x - 0.1 * g, g)


MISTAKES = {
    "a forgotten tuple": (lambda x, g: x, r"must reply a tuple of tensors, got a Tensor: write `return \(x,\)`"),
    "nothing": (lambda x, g: None, r"must reply a tuple of tensors, got a NoneType: write `return \(x,\)`"),
    "a number": (lambda x, g: (x, 0.1), r"reply 1 must be a tensor, got a float: make it one for each client"),
    "a norm": (lambda x, g: (x, g.norm()), r"reply 1 is one number for all clients together.*`g.norm\(dim=-1, keepdim=True\)`"),
    "a lost last axis": (lambda x, g: (x, g.norm(dim=-1)), r"reply 1 must be \[.*, m\], one row for each client, got \["),
    "a lost client axis": (lambda x, g: (x.mean(dim=-2),), r"reply 0 must be \[.*, m\], one row for each client, got \["),
    "the wrong axis": (lambda x, g: (x.transpose(-1, -2),), r"reply 0 must be \[.*, m\], one row for each client, got \["),
}  # fmt: skip


@pytest.mark.parametrize("seed", [0, [0, 1]], ids=["alone", "replicas"])
@pytest.mark.parametrize("engine", ["sequential", "vectorised"])
@pytest.mark.parametrize("kind", MISTAKES)
def test_replies_are_checked_where_they_arrive(kind, engine, seed):
    reply, line = MISTAKES[kind]
    with pytest.raises(ValueError, match=rf"^Replying\.local:? {line}") as why:
        last(Replying(reply), quadratic(), 1, engine=engine, seed=seed)
    assert "\n" not in str(why.value)
    with pytest.raises(ValueError, match=rf"^Replying\.local:? {line}"):  # before any wrapper touches them
        last(Replying(reply), quadratic(), 1, engine=engine, seed=seed, aggregation=[fedda.aggregation.Clip(1.0)])
