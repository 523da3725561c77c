"""Shared problems and settings for the tests."""

import os
import re
import signal
import sys

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # before torch: a thread that waits leaves the processor to others

import hypothesis
import pytest
import torch

import fedda
import warm
import watchdog
from fedda import plugins, registry
from memory_checked import memory_checked

watchdog.watch()  # first: what tests start takes its environment from here

if "FEDDA_TEST_PLUGIN" in os.environ:  # the shared table of properties on an algorithm that lives elsewhere
    plugins.load(os.environ["FEDDA_TEST_PLUGIN"])

torch.set_num_threads(1)  # small tensors: a second thread only waits
os.environ["OMP_NUM_THREADS"] = "1"  # nor in the processes that tests start, whose last bits would depend on it
# What is started in the background (`make test &` in a script) ignores SIGINT, and so would all that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The same cases in every run, and none of them too slow.
hypothesis.settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
hypothesis.settings.load_profile("fixed")

# What takes longest, to be begun first: at the end the processes have little left to wait for.
LONGEST = [
    "test_federation.py", "test_doors.py", "test_distributed.py", "test_kernels.py", "test_reproduce.py", "test_engines.py",
    "test_resume.py", "test_docs.py README.md", "test_docs.py deployment.md", "test_deploy.py", "test_privacy.py",
    "test_relay.py", "test_secure.py", "test_site.py", "test_notebooks.py", "test_packaging.py",
    "test_reproduce_smoke.py", "test_report.py", "test_cli.py", "test_aggregation.py", "test_datasets.py",
    "test_theory_theorem.py", "test_examples.py", "test_fusing.py", "test_structure.py", "test_fedda_cv.py",
    "test_claims.py", "test_deploy_app.py", "test_identities.py", "test_docs.py report.md", "test_docs.py theory.md",
    "test_prox.py", "test_theory_claims.py", "test_hosts.py", "test_config.py", "test_watchdog.py",
]  # fmt: skip


def group(nodeid):
    """The tests that one process runs, one after the other: a file, since they share what they set up. Of the pages of
    the documentation each is a group, with its commands in their order."""
    file, _, test = nodeid.partition("::")
    name = file.rpartition("/")[2]
    page = re.match(r"test_(?:commands|python_snippets)_run\[(.+?)-\d+\]", test) if name == "test_docs.py" else None
    return f"{name} {page[1]}" if page else name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return group(nodeid)

    return Groups(config, log)


def pytest_configure():
    """On a fresh machine matplotlib first makes a list of fonts; where that takes long it says so on stderr."""
    import matplotlib.font_manager  # noqa: F401


def pytest_collection_modifyitems(items):
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(group(item.nodeid), len(order)))


@pytest.fixture(autouse=True)
def seeded():
    """The same weights in every run: torch's initialisation draws from the global stream."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_access_outside():
    """Kernels that run in Triton's interpreter stay inside of their arguments' memory."""
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton" in sys.modules:
        with memory_checked():
            yield
    else:
        yield


@pytest.fixture(scope="module", autouse=True)
def pictures(request):
    """Runs, here and in forked processes, write their report without its pictures, which cost most. Files that look at
    them say PICTURES = True."""
    import commands
    import no_pictures

    with pytest.MonkeyPatch.context() as patch:
        if not getattr(request.module, "PICTURES", False):
            no_pictures.prepare(patch.setattr)
            patch.setitem(commands.ENVIRONMENT, warm.PREPARE, "no_pictures")
        yield


NAMES = [entry.name for entry in registry.algorithms if entry.alias_of is None]


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


def example(name):
    """Hyper-parameters with which an algorithm is stable on the small problems below."""
    return registry.algorithms.find(name).example


def stable(name, **more):
    return fedda.make(name, **example(name) | more)


def variants():
    """(name, options) for every option that an algorithm's class offers to the tests, where the name takes it."""
    for name in NAMES:
        for params in type(stable(name)).variants:
            if params.keys() <= registry.algorithms.find(name).defaults.keys():
                yield name, params


def quadratic(clients=5, d=4, noise=0.3, seed=0, common=False):
    """Heterogeneous quadratics; with `common`, one Hessian for all clients."""
    g = torch.Generator().manual_seed(seed)
    A = 0.2 + torch.rand(1 if common else clients, d, generator=g, dtype=torch.float64)
    b = torch.randn(clients, d, generator=g, dtype=torch.float64)
    return fedda.Quadratic(A.expand(clients, d).clone(), b, noise=noise)


def digits(clients=10, model="mlp", dtype=torch.float64, **options):
    """Unequal clients: Dirichlet."""
    options = {"partition": "dirichlet", "alpha": 0.5, "hidden": 8, **options}
    if model != "mlp":
        options.pop("hidden")
    return fedda.load("digits", clients=clients, model=model, batch=4, dtype=dtype, **options)


def last(algorithm, problem, rounds, **how):
    """The server state after `rounds` rounds."""
    return list(fedda.rounds(algorithm, problem, rounds, **how))[-1]


def path(algorithm, problem, rounds, **how):
    """The models after each round, [rounds, d]."""
    return torch.stack([server.x.squeeze(-2) for server in fedda.rounds(algorithm, problem, rounds, **how)])


def close(a, b, tol=1e-10):
    """Equal to `tol`, relative to the size of the values."""
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    assert a.shape == b.shape, (a.shape, b.shape)
    error = float((a - b).abs().max() / (1 + b.abs().max()))
    assert error <= tol, error
