"""Shakespeare with the package, and the models for sequences: the numbers they are known by, and engines that agree."""

import numpy as np
import pytest
import torch

import fedda
from conftest import close
from fedda.data import open_dataset


def test_shakespeare_is_split_by_role_in_time():
    data = open_dataset("shakespeare")
    assert data.x.shape == (12859, 64) and data.x_test.shape == (1429, 64) and data.classes == 65
    assert len(set(data.client)) == len(set(data.client_test)) == 99
    np.testing.assert_array_equal(data.x[0, 1:], data.y[0, :-1])  # the target is the next character
    text = "".join(data.names[i] for i in data.x[data.client == "ROMEO"].ravel()[:40])
    assert text == "Is the day so young?\nAy me! sad hours se"


@pytest.mark.parametrize(("model", "parameters"), [("transformer", 242_561), ("lstm", 280_897), ("gru", 171_745)])
def test_models_have_their_size(model, parameters):
    assert fedda.load("shakespeare", clients=3, partition="by_client", model=model).d == parameters


@pytest.mark.parametrize(
    "options",
    [
        {"model": "transformer", "heads": 2},
        {"model": "lstm", "layers": 2},
        {"model": "gru", "layers": 2, "embedding": 4},
    ],
)
def test_engines_agree_on_sequences_with_dropout(options):
    problem = fedda.load(
        "shakespeare", clients=3, partition="by_client", width=8, dropout=0.2, batch=2, dtype=torch.float64, **options
    )
    algorithm = fedda.make("fedavg", lr=0.5, steps=2)
    ends = [last(algorithm, problem, engine) for engine in ("sequential", "vectorised")]
    close(*ends, 1e-12)


def last(algorithm, problem, engine):
    *_, server = fedda.rounds(algorithm, problem, rounds=2, seed=1, engine=engine)
    return server.x


def test_what_does_not_fit_is_one_line():
    with pytest.raises(ValueError, match="width must be a multiple of heads, got 10 and 4"):
        fedda.load("shakespeare", partition="by_client", model="transformer", width=10)
    with pytest.raises(ValueError, match="the data must be sequences of tokens"):
        fedda.load("digits", model="lstm")
