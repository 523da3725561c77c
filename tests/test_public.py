"""The public interface: what it is, that `dir` shows it and nothing else, and that each parameter is explained."""

import importlib
import inspect

import pytest

import fedda
from fedda import listing, registry
from fedda.meanings import MEANINGS, args_of, meanings

# The public modules. Public are the names in their `__all__`, and of a class the methods without an underscore, except
# those of algorithms that `fedda.Algorithm` does not have: they are how a method works, not how it is used.
MODULES = (
    "fedda", "aggregation", "algorithms", "augment", "data", "deploy", "engines", "estimators", "preconditioners", "prox",
    "registry", "report", "schedules", "testing", "track",
)  # fmt: skip


def module_of(name):
    return fedda if name == "fedda" else getattr(fedda, name, None) or importlib.import_module(f"fedda.{name}")


def public(name):
    """(label, thing) of everything in a public module that can be called."""
    module, seen = module_of(name), set()
    for label in module.__all__:
        thing = getattr(module, label)
        if not (inspect.isclass(thing) or inspect.isroutine(thing)) or id(thing) in seen:  # a module, a type
            continue
        seen.add(id(thing))
        is_error = inspect.isclass(thing) and issubclass(thing, Exception)
        if not (
            is_error or getattr(thing.__init__, "__module__", "") == "typing"
        ):  # users make neither errors nor protocols
            yield label, thing
        if inspect.isclass(thing) and name != "algorithms":
            for method, value in vars(thing).items():
                function = getattr(value, "__func__", value)  # of a class or static method
                if not method.startswith("_") and inspect.isfunction(function):
                    yield f"{label}.{method}", function


def explained(thing):
    """The parameters of a function, method or class, and those that its docstring explains."""
    names = [name for name in inspect.signature(thing).parameters if name not in ("self", "cls") and name[0] != "_"]
    return names, args_of(inspect.getdoc(thing))


@pytest.mark.parametrize("name", MODULES)
def test_every_parameter_of_the_public_interface_is_explained(name):
    found = list(public(name))
    assert len(found) > 1
    for label, thing in found:
        assert inspect.getdoc(thing), f"fedda.{name}.{label} has no docstring"
        wanted, told = explained(thing)
        missing = [name for name in wanted if not told.get(name)]
        assert not missing, f"fedda.{name}.{label} does not explain {', '.join(missing)}"
        unknown = set(told) - set(wanted)
        assert not unknown, f"fedda.{name}.{label} explains {', '.join(unknown)}, which it does not take"


@pytest.mark.parametrize("name", MODULES)
def test_dir_shows_the_public_names_alone(name):
    module = module_of(name)
    if name == "fedda":
        assert set(dir(fedda)) == {*fedda.__all__, *MODULES, "__version__"} - {"fedda"}
    else:
        assert sorted(dir(module)) == sorted(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


def test_every_hyper_parameter_of_every_algorithm_has_a_meaning():
    used = set()
    for entry in registry.algorithms:
        names = [*entry.defaults, *entry.common]
        used |= set(names) | set(inspect.signature(type(entry(**entry.example))).parameters)
        texts = meanings(entry.build, names)
        assert all(texts.values()), (entry.name, texts)
        told = args_of(entry.build.__doc__)
        assert all(texts[name] == told[name] for name in entry.defaults), entry.name
    assert set(MEANINGS) <= used, "a row of the table that no algorithm uses"


def test_an_algorithm_s_own_words_come_before_those_of_the_table():
    for cls, parent in ((fedda.algorithms.FedYogi, fedda.algorithms.FedAdam), (fedda.algorithms.FedNova, None)):
        told = args_of(cls.__doc__)
        assert told["momentum" if parent is None else "eps"] != MEANINGS["momentum" if parent is None else "eps"]
        assert parent is None or told["eps"] == args_of(parent.__doc__)["eps"]
        assert told["lr"] == MEANINGS["lr"]


@pytest.mark.parametrize("other", [fedda.rounds, fedda.Run])
def test_an_argument_means_the_same_as_in_train(other):
    told = args_of(fedda.train.__doc__)
    shared = args_of(other.__doc__).keys() & told.keys()
    assert len(shared) >= 15 and {name: args_of(other.__doc__)[name] for name in shared} == {n: told[n] for n in shared}


def test_every_parameter_of_every_registered_name_has_a_meaning():
    for entries in listing.REGISTRIES.values():
        for entry in entries:
            for parameter, *_, meaning in listing.parameters(entry)[1]:
                assert meaning, f"{entries.kind} {entry.name}: {parameter}"
