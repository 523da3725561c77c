"""Rounds compiled for a CPU equal the rounds themselves, to the bit."""

import itertools
import math
import threading
from concurrent.futures import Future

import pytest
import torch

import fedda
from conftest import NAMES, digits, quadratic, stable
from fedda import c_code
from fedda import run as run_module
from fedda.engines import Vectorised, loops, programs
from fedda.engines.loops import ARITHMETIC, COMPARISONS, INTEGER, REAL, SHIFTS, merged
from fedda.engines.participation import CounterDraws
from fedda.engines.programs import CpuProgram, NoProgram, Trial, same
from fedda.recording import record
from recorded_functions import random_function

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not c_code.compiler_command(), reason="there is no C compiler")


@pytest.fixture
def quickly(monkeypatch):
    """Long programs are compiled without optimisation: that is several times faster, and the results are the same."""
    monkeypatch.setattr(loops, "FLAGS", (*loops.FLAGS, "-O0"))


def program_of(function, *inputs):
    program = CpuProgram(record(function, *inputs))
    program.load()
    return program


def check(function, *inputs):
    """The program gives the function's results, twice, and the inputs keep their values."""
    expected = [v.clone() for v in function(*inputs)]
    program, before = program_of(function, *inputs), [v.clone() for v in inputs]
    for _ in range(2):
        found = program(*inputs)
        assert [v.dtype for v in found] == [v.dtype for v in expected]
        assert all(map(same, found, expected))
    assert all(map(same, inputs, before))
    return program


# -- rounds -------------------------------------------------------------------------------------------------------------
def both(name, problem, rounds=3, **how):
    """Two runs; the second one is compiled after its first round."""
    plain, other = (fedda.Run(stable(name), problem, **{"cohort": 3, "engine": Vectorised(), **how}) for _ in range(2))
    assert all(map(same, plain.step(), other.step()))
    other.compile()
    for _ in range(rounds):
        a, b = plain.step(), other.step()
        assert all(map(same, a, b))
    assert plain.evaluate() == other.evaluate()
    assert all(same(v, other.simulation.memory[k]) for k, v in plain.simulation.memory.items())
    assert plain.state().keys() == other.state().keys()
    return other


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["quadratic", "digits"])
def test_every_algorithm(name, kind, quickly):
    run = both(name, quadratic(noise=0.3) if kind == "quadratic" else digits(dtype=torch.float32), seed=[0, 1])
    # Full gradients are taken client by client, and the host asks for ids.
    assert (run.program is None) == (name in ("mime", "mimelite"))


@pytest.mark.parametrize("name", ["fafed", "fedams", "fedglomo", "local-amsgrad", "mime-mvr"])
def test_compiled_before_the_first_round(name, quickly):
    """At the start of these, two fields of the state are one tensor."""
    plain, other = (fedda.Run(stable(name), quadratic(noise=0.3), cohort=3) for _ in range(2))
    other.compile()
    assert other.program is not None
    assert all(all(map(same, plain.step(), other.step())) for _ in range(4))


@pytest.mark.parametrize(
    "how",
    [
        {"drop": 0.4},
        {"sampling": "samples"},
        {"availability": [(i, 0, 3 + i) for i in range(10)]},
        {"weights": "samples"},
        {"aggregation": [fedda.aggregation.TopK(0.1)]},
        {"aggregation": [fedda.aggregation.Clip(1.0)]},
        {"aggregation": [fedda.aggregation.Median()]},
        {"cohort": 10},
        {"engine": Vectorised(chunk=2)},
        {"engine": Vectorised(path="traced")},
        {"engine": Vectorised(path="chain")},
        {"cnn": True, "engine": Vectorised(path="chain")},
        {"cnn": True, "engine": Vectorised(path="native")},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["fedda-mvr", "scaffold"])
def test_options(name, how, quickly):
    network = {"model": "cnn", "filters": 4, "layers": 2} if (how := dict(how)).pop("cnn", False) else {}
    assert both(name, digits(dtype=torch.float32, **network), **how).program is not None


@pytest.mark.parametrize("more", [{"stragglers": 0.5}, {"weight_decay": 0.1}, {"max_grad_norm": 0.1},
                                  {"prox": fedda.prox.L1(0.01)}], ids=str)  # fmt: skip
def test_options_of_the_algorithm(more, quickly):
    plain, other = (fedda.Run(stable("fedda-mvr", **more), digits(), cohort=3) for _ in range(2))
    other.compile()
    assert other.program is not None
    assert all(all(map(same, plain.step(), other.step())) for _ in range(3))
    assert plain.evaluate() == other.evaluate()


def test_rounds_that_need_fewer_steps_than_the_program_takes(quickly):
    """Of the rounds with stragglers, some have nobody who takes all steps."""
    plain, other = (fedda.Run(stable("fedda-mvr", stragglers=0.9), digits(), cohort=2) for _ in range(2))
    other.compile()
    assert other.program is not None
    for _ in range(20):
        assert all(map(same, plain.step(), other.step()))
        assert plain.counts.gradients - plain.idle == other.counts.gradients - other.idle
    assert plain.counts.gradients < other.counts.gradients and other.idle > plain.idle >= 0


@pytest.mark.parametrize(
    ("more", "why"),
    [
        ({"epochs": 2}, "there are more than 4,000 operations"),
        ({"prox": fedda.prox.L2Ball(0.5)}, "reads a number"),  # Newton's method stops when it has converged
    ],
    ids=str,
)
def test_rounds_without_a_program(more, why, caplog):
    run = fedda.Run(stable("fedda-mvr", **more), digits(), cohort=3)
    with caplog.at_level("INFO", "fedda.run"):
        run.compile()
    assert run.program is None and why in caplog.text
    run.step()


def test_a_replica_that_diverges_keeps_its_state_and_the_others_continue():
    problem = quadratic(noise=0.0)
    runs = [fedda.Run(stable("fedavg"), problem, seed=[0, 1]) for _ in range(2)]
    for run in runs:
        run.server.x[1] = math.nan
    runs[1].compile()
    assert all(all(map(same, runs[0].step(), runs[1].step())) for _ in range(5))
    assert runs[1].ended.tolist() == [False, True]


def test_a_run_that_diverges_ends_in_the_same_round():
    rounds = []
    for compiled in (False, True):
        run = fedda.Run(fedda.make("fedavg", lr=1e30), quadratic(noise=0.0), cohort=3)
        if compiled:
            run.compile()
            assert run.program is not None
        with pytest.raises(fedda.Diverged):
            for _ in range(100):
                run.advance()
        rounds.append(run.round)
    assert rounds[0] == rounds[1]


def decided(monkeypatch, seconds):
    """A run, and its first states, up to the decision between round and program, which have these times."""
    monkeypatch.setattr(run_module, "COMPILE_AFTER", (0.0, 0))
    monkeypatch.setattr(Trial, "compare", lambda trial, state: seconds)
    run = fedda.Run(stable("fedda-mvr"), digits(), cohort=3)
    states = [run.step()]
    if run.trial is not None:  # the compiler is still at work
        run.trial.loading.result()
        states.append(run.step())
    assert not run.wants_program
    return run, states


def test_a_run_switches_by_itself_and_nobody_sees_it(monkeypatch):
    run, found = decided(monkeypatch, (2.0, 1.0))
    assert run.program is not None
    found += [run.step() for _ in range(4)]
    plain = fedda.Run(stable("fedda-mvr"), digits(), cohort=3, engine=Vectorised(graph=False))
    for state in found:  # also the states of rounds long past
        assert all(map(same, plain.step(), state))


def test_the_faster_of_both_is_used(monkeypatch):
    assert decided(monkeypatch, (1.0, 2.0))[0].program is None


def test_a_resumed_run_may_switch_at_another_round():
    plain = fedda.Run(stable("fedda-mvr"), digits(), cohort=3)
    for _ in range(6):
        plain.step()
    first = fedda.Run(stable("fedda-mvr"), digits(), cohort=3)
    first.compile()
    for _ in range(3):
        first.step()
    state = {name: value.clone() for name, value in first.state().items()}
    first.step()
    second = fedda.Run(stable("fedda-mvr"), digits(), cohort=3, state=state)
    second.step()
    second.compile()
    for _ in range(2):
        second.step()
    a, b = plain.state(), second.state()
    assert a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


class Own(type(stable("fedavg"))):
    """An algorithm of a user, who counts the rounds."""

    rounds = 0

    def round(self, state, cohort):
        type(self).rounds += 1
        return super().round(state, cohort)


def test_code_of_the_user_runs_in_every_round(monkeypatch):
    monkeypatch.setattr(run_module, "COMPILE_AFTER", (0.0, 0))
    run = fedda.Run(Own(lr=0.1), quadratic(), cohort=3)
    for _ in range(5):
        run.step()
    assert Own.rounds == 5 and run.program is None
    lazy = fedda.Run(fedda.make("fedavg", lr=lambda t: 0.1 / (1 + t)), quadratic(), cohort=3)
    lazy.step()
    assert lazy.program is None and not lazy.wants_program
    looped = fedda.Run(stable("fedavg"), digits(), cohort=3, engine=Vectorised(path="loop"))  # it calls the model
    looped.step()
    assert looped.trial is None and not looped.wants_program
    run.compile()  # unless they ask for it
    assert run.program is not None


def test_draws_of_the_user_are_asked_in_every_round(monkeypatch):
    monkeypatch.setattr(run_module, "COMPILE_AFTER", (0.0, 0))
    rounds = []

    class Draws(CounterDraws):
        def cohort(self, tau, clients, size):
            rounds.append(tau)
            return super().cohort(tau, clients, size)

    run = fedda.Run(stable("fedavg"), quadratic(), cohort=3, draws=Draws(torch.tensor([0])))
    for _ in range(4):
        run.step()
    assert rounds == [0, 1, 2, 3] and not run.wants_program


class Counted(torch.nn.Module):
    """A model that vmap cannot take, and that counts its calls."""

    def __init__(self):
        super().__init__()
        self.linear, self.calls = torch.nn.Linear(4, 2), 0

    def forward(self, x):
        self.calls += 1
        return self.linear(x) * (1.0 if float(x.detach().sum()) > 0 else 2.0)


def test_a_model_that_vmap_cannot_take_is_called_in_every_round():
    x, owner = torch.randn(12, 4), torch.arange(12) % 3
    loss = torch.nn.functional.cross_entropy
    problem = fedda.problem(Counted(), loss, x=x, y=owner % 2, client=owner, batch=2)
    with pytest.warns(UserWarning, match="one by one"):
        run = fedda.Run(stable("fedavg"), problem, engine=Vectorised(path="traced"))
        run.step()
    assert run.problem.calls_user_code


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_large_rounds_are_left_alone(name, monkeypatch):
    monkeypatch.setattr(programs, "MOST_BYTES", 1000)
    run = fedda.Run(stable(name), digits(), cohort=3)
    run.compile()
    assert run.program is None
    run.step()


@pytest.mark.parametrize("engine", ["sequential", Vectorised(graph=False)], ids=str)
def test_engines_without_programs(engine, monkeypatch):
    monkeypatch.setattr(run_module, "COMPILE_AFTER", (0.0, 0))
    run = fedda.Run(stable("fedavg"), quadratic(), cohort=3, engine=engine)
    run.step()
    run.compile()
    assert run.program is None and run.trial is None


def test_without_a_compiler_rounds_run_as_before(monkeypatch):
    monkeypatch.setattr(programs, "library", lambda *about: None)
    run = fedda.Run(stable("fedavg"), quadratic(), cohort=3)
    run.compile()
    assert run.program is None
    run.step()


def test_other_hyper_parameters_need_no_other_code():
    texts = set()
    for lr in (0.1, 0.037):
        run = fedda.Run(stable("fedda-mvr", lr=lr), digits(), cohort=3)
        run.compile()
        texts.add(run.program.source.text)
    assert len(texts) == 1


# -- operations ---------------------------------------------------------------------------------------------------------
SPECIAL = [0.0, -0.0, 1.0, -1.5, 2.0, 1e-40, -1e-310, 1e30, -1e300, math.inf, -math.inf, math.nan, 0.1, 3.0]


def numbers(dtype):
    if dtype.is_floating_point:
        x = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    elif dtype is torch.bool:
        x = torch.tensor([True, False])
    else:
        info = torch.iinfo(dtype)
        x = torch.tensor([0, 1, 7, info.max, info.min, info.max - 1, 2, 100], dtype=dtype)
    return x


def layouts(x):
    """Broadcast, transposed, every second number."""
    yield x[:, None], x[None]
    yield x[:, None].expand(-1, len(x)), x[None].expand(len(x), -1).clone()
    yield x[:1], x[-1]
    wide = torch.stack([x, x], 1)
    yield wide[:, 0], wide.t()[1]


OPERATIONS = [*ARITHMETIC, *REAL, *INTEGER, *COMPARISONS, aten.where.self]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("op", OPERATIONS, ids=str)
def test_every_operation_on_every_number(op, dtype):
    """Also of very small numbers, infinities, nan and -0; all in one program."""
    if op in SHIFTS:
        second = [0, 5]
    elif op is aten.pow.Tensor_Scalar:
        second = [2]
    elif "Scalar" in op._overloadname or op in (aten.clamp_min.default, aten.clamp_max.default):
        second = [0.1, -0.0, 2] if dtype.is_floating_point else [0, 3]
    else:
        second = []

    def function(*inputs):
        results = []
        for a, b in zip(inputs[::2], inputs[1::2], strict=True):
            if op is aten.where.self:
                results += [op(a == a, a, b), op(a != b, a, b)]
            elif len([v for v in op._schema.arguments if not v.kwarg_only and not v.has_default_value()]) == 1:
                results.append(op(a))
            else:
                results += [op(a, number) for number in second] or [op(a, b)]
        return results

    def possible(pair):
        try:
            return bool(function(*pair))
        except RuntimeError:  # PyTorch has no such operation, or not for these shapes
            return False

    pairs = [pair for pair in layouts(numbers(dtype)) if possible(pair)]
    assert pairs or dtype is torch.bool or op in (*INTEGER, *REAL, *SHIFTS)
    if pairs:
        check(function, *itertools.chain(*pairs))


TYPES = [torch.float32, torch.float64, torch.int64, torch.bool]


@pytest.mark.parametrize("types", list(itertools.product(TYPES, TYPES)), ids=str)
def test_mixed_types(types):
    a, b = (numbers(t) for t in types)
    a, b = a[:, None], b[None]
    check(lambda a, b: [a + b, a * b, a < b, a == b, torch.where(a == b, a, b), a.to(types[1]), b.to(types[0])], a, b)
    check(lambda a, b: [a * b[0, 0], a[0, 0] + b, a / 2 + b, a > 0.5, 1 - b.to(torch.float32)], a, b)


def test_clamp():
    x = numbers(torch.float32)
    check(lambda x: [x.clamp(-1, 1), x.clamp(min=0.1), x.clamp(max=0.1), x.clamp(2.0, 1.0), x.clamp(min=-0.0)], x)


# -- memory -------------------------------------------------------------------------------------------------------------
def changed_in_place(x, y):
    a = x.clone()
    b = a + 1
    a.mul_(2)  # b keeps its values
    a[0].add_(y[0])
    c = a * b
    a.copy_(y)
    view = c.t()
    view.sub_(1)
    return [a, b, c, view, a + view.t()]


def written_to(x, y):
    a, b = torch.zeros(3, 3), torch.zeros(2, 3, 4)
    torch.mm(x, y.t(), out=a)
    c = a + 1
    torch.mul(x, y, out=b[0])
    torch.max(x * y, 1, out=(b[1, :, 0], places := torch.empty(3, dtype=torch.int64)))
    d = b[1] * 2
    b[1, :, 1:].zero_()
    torch._foreach_add_([a, b], 1.0)
    return [a, b, c, d, places, torch.addmm(a, x, x.t(), out=a) - c]


def outputs_that_share(x, y):
    z = x + y
    return [z, z, z.t(), x, x.reshape(-1), torch.zeros(3), z[0], y.sum(0), z.sum(1)]


def joined(x, y):
    a, b = x * 2, y - 1
    s, c, d = torch.stack([a, b, a]), torch.cat([a, b[:1]]), torch.cat([a, b], -1)
    return [s + 1, c, d * d, torch.stack([a, x], -1), s.sum(0) + a, torch.stack([a[0], b[1]]).amax(0)]


def rows(x, y):
    indices = torch.tensor([2, 0, 2, 1])
    pairs = torch.stack([indices, indices.flip(0)])
    a = x * 2
    b, c, d = a[indices], a.index_select(0, indices % 2), y[0][pairs - 1]
    e = a.t().index_select(0, indices) + 1
    x = x + a[-1:]
    return [b + 1, c, d * d, e, x[indices - 3], torch.arange(3)[indices], a[indices, indices]]


def types(x, y):
    a, n = (x * 3).clone(), (x > 0).clone()
    a.add_(y.double() / 3)  # computed in float64
    b = a.mul_(1 / y.double()) - 1
    return [a, b, n == True, n.long() + True, torch.where(n, True, 0.5), x * True]  # noqa: E712


def lists(x, y):
    z = torch.zeros(3, 4)
    first, *_ = z.unbind()
    first += x[0]  # so z is no constant
    parts = [(x + i).unsafe_split(2, 1) for i in range(3)]  # views that share memory with a result
    return [z, *(a * b for a, b in parts), *some_lists(x, y)]


def some_lists(x, y):
    a, b = (x * y).unbind()[:2]
    c, d = (x + y).split(2, dim=1)
    values, places = (x - y).sort(dim=1)
    return [a + b, c * d[:, :1], values * 2, places + 1, *y.chunk(2, 1)]


def constants(x, y):
    k = torch.arange(4) * 2 + 1
    ones = torch.ones_like(x)
    other = torch.zeros_like(y)
    other += x  # no constant
    return [x * k, k.view(2, 2) + 1, ones - x, other, torch.full((2,), 0.5) + y[0, :2]]


@pytest.mark.parametrize(
    "function", [changed_in_place, written_to, outputs_that_share, joined, rows, types, lists, constants]
)
def test_memory(function):
    torch.manual_seed(0)
    check(function, torch.randn(3, 4), torch.randn(3, 4))
    check(function, torch.randn(4, 3).t(), torch.randn(1, 4).expand(3, 4))


def test_tensors_from_outside_are_read_anew_and_changed_in_place():
    held, memory = torch.tensor([1.0, 2.0]), torch.zeros(2)

    def function(x):
        memory.add_(x)
        return [x * held + memory]

    program = program_of(function, torch.ones(2))
    memory.zero_()
    held.fill_(3.0)
    assert program(torch.tensor([1.0, 2.0]))[0].tolist() == [4.0, 8.0] and memory.tolist() == [1.0, 2.0]
    assert program(torch.tensor([1.0, 2.0]))[0].tolist() == [5.0, 10.0]


def test_an_index_out_of_range_is_refused_and_touches_no_memory():
    program = program_of(lambda x, i: [x[i] * 2], torch.ones(3, 4), torch.tensor([0, 1]))
    for wrong in (3, -4, 1 << 62):
        with pytest.raises(IndexError, match="out of range"):
            program(torch.ones(3, 4), torch.tensor([0, wrong]))
    assert program(torch.ones(3, 4), torch.tensor([-3, 2]))[0].tolist() == [[2.0] * 4] * 2


def test_two_inputs_that_are_one_tensor_when_recorded():
    x, y = torch.randn(3), torch.randn(3)
    program = program_of(lambda x, y: [x - 2 * y], x, x)
    assert same(program(x, y)[0], x - 2 * y)


def test_inputs_of_another_layout_are_copied_and_those_of_another_shape_or_type_refused():
    program = program_of(lambda x: [x * 2], torch.zeros(3, 4))
    x = torch.randn(4, 3).t()
    assert same(program(x)[0], x * 2) and same(program(x[:1].expand(3, 4))[0], x[:1].expand(3, 4) * 2)
    with pytest.raises(ValueError, match="shape"):
        program(torch.zeros(4, 3))
    with pytest.raises(ValueError, match="float64"):
        program(torch.zeros(3, 4, dtype=torch.float64))


def test_products_are_rounded_before_they_are_added():
    check(lambda x, y: [x * y + x, y - x * 1.1, (x * x + y * y) * x], *torch.randn(2, 1000).unbind())


@pytest.mark.parametrize("seed", range(25))
def test_random_functions(seed):
    torch.manual_seed(seed)
    check(random_function(seed), torch.randn(3, 5), torch.randn(3, 5))


def test_threads(monkeypatch):
    """A long loop is divided among threads."""
    monkeypatch.setattr(programs, "THREAD_WORK", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    check(joined, torch.randn(3, 4), torch.randn(3, 4))
    check(lambda x, y: [(x + y).t() * 2, x - 1], torch.randn(100, 7), torch.randn(1, 7))
    assert any(thread.name.startswith("fedda") for thread in threading.enumerate())


def test_memory_is_used_again():
    def function(x):
        for _ in range(20):
            x = (x * 2).sin()
        return [x]

    program = check(function, torch.randn(1000))
    assert len({v.data_ptr() for v in program.fixed if v is not None}) <= 2
    assert len({v.data_ptr() for v in program.now if v is not None}) <= 5  # results of PyTorch's operations do not stay


# -- what cannot be compiled ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x: [x * float(x[0])], "reads a number"),
        (lambda x: [x * x.tolist()[0]], "tolist reads numbers"),
        (lambda x: [x + torch.from_numpy(x.numpy())], "numpy reads numbers"),
        (lambda x: [x.nonzero()], "depends on numbers"),
        (lambda x: [x[x > 0]], "depends on numbers"),
        (lambda x: [x.view(torch.int32)], "as another type"),
    ],
)
def test_functions_without_a_program(function, message):
    with pytest.raises(NoProgram, match=message):
        Trial(function, [torch.ones(3)], [])


def test_a_program_that_differs_is_not_used():
    count = []

    def function(x):
        count.append(1)
        return [x + len(count)]

    trial = Trial(function, [torch.ones(3)], [])
    with pytest.raises(NoProgram, match="differ"):
        trial.compare([torch.ones(3)])


def test_a_program_is_compared_from_another_state_too():
    first = torch.ones(3)
    trial = Trial(lambda x: [x + (1 if x is first else 2)], [first], [])  # as if the state had been special
    with pytest.raises(NoProgram, match="differ"):
        trial.compare([first])


@pytest.mark.parametrize("what", [KeyboardInterrupt, RuntimeError])
def test_a_trial_that_is_interrupted_leaves_the_memory_as_it_was(what):
    memory, calls = torch.zeros(3), []

    def function(x):
        memory.add_(1)
        calls.append(1)
        if len(calls) == 2:
            raise what("in a trial")
        return [x + memory]

    trial = Trial(function, [torch.ones(3)], [memory])
    with pytest.raises(NoProgram if what is RuntimeError else what, match="in a trial"):
        trial.compare([torch.ones(3)])
    assert memory.tolist() == [0.0] * 3


def test_a_process_forked_while_the_compiler_works_goes_on_without_a_program(monkeypatch):
    monkeypatch.setattr(programs, "in_background", lambda function: Future())  # a thread that is not there
    trial = Trial(lambda x: [x + 1], [torch.ones(3)], [])
    assert not trial.ready()
    monkeypatch.setattr(programs.os, "getpid", lambda: -1)
    assert trial.ready()
    with pytest.raises(NoProgram, match="forked"):
        trial.compare([torch.ones(3)])


def test_a_trial_leaves_the_memory_as_it_was():
    memory = torch.zeros(3)
    trial = Trial(lambda x: [x + memory.add_(1)], [torch.ones(3)], [memory])
    assert memory.tolist() == [0.0] * 3
    trial.compare([torch.ones(3)])
    assert memory.tolist() == [0.0] * 3


def test_axes_are_joined():
    assert merged((2, 3, 4), [[12, 4, 1], [0, 4, 1]]) == ([2, 12], [[12, 1], [0, 1]])
    assert merged((), [[]]) == ([1], [[0]])
