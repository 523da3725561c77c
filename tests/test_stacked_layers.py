"""Embeddings and linear layers of a stack of models against autograd in float64: on a GPU where there is one, else in
Triton's interpreter, which computes in float32 whatever the precision, but for bfloat16."""

import os

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ["TRITON_INTERPRET"] = "1"  # read where the kernels are defined: before they are imported
pytest.importorskip("triton", reason="needs Triton")

from fedda.problems.gradients import embedding  # noqa: E402
from fedda.problems.gradients.kernels import embedding as embedding_kernels  # noqa: E402
from fedda.problems.gradients.stackable import stackable  # noqa: E402
from test_kernels import bfloat16_products  # noqa: E402, F401
from test_layers import error, scalar_bounds  # noqa: E402, F401

DEVICE = "cuda" if CUDA else "cpu"
BOUND = {"float32": 1e-6, "tf32": 1e-3, "bf16": 1e-2}


@pytest.fixture
def calls(monkeypatch):
    """The kernels that were called, by their names."""
    called = []

    def count(module, name):
        kernel = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *args: called.append(name) or kernel(*args))

    count(embedding_kernels, "weight_gradient")
    return called


# -- embeddings --------------------------------------------------------------------------------------------------------
def tables(precision, n, table, tokens, shared=False, number=None, **how):
    """Rows and gradients of tables by our kernel, and by PyTorch in float64, one model after the other."""
    torch.manual_seed(0)
    w, rows = torch.randn(n, *table), torch.randint(number or table[0], (*(() if shared else (n,)), *tokens))
    d = torch.randn(n, *tokens, table[1])

    def ours(w, rows):
        return embedding.embedding(rows, w, **how, kernels=precision)

    def results(function, w, rows, d):
        w = w.detach().requires_grad_()
        out = function(w, rows)
        return out.detach().cpu(), torch.autograd.grad(out, w, d)[0]

    one = [
        results(lambda w, r: F.embedding(r, w, **how), w[i].double(), rows if shared else rows[i], d[i].double())
        for i in range(n)
    ]
    got = results(vmap(ours, (0, None if shared else 0)), w.to(DEVICE), rows.to(DEVICE), d.to(DEVICE))
    return got, [torch.stack(v) for v in zip(*one, strict=True)]


TABLES = {
    "sentences": (2, (7, 5), (2, 3), {}),
    "one row": (2, (1, 3), (5,), {}),
    "one token": (2, (3, 1), (), {}),
    "80 rows, one model": (1, (80, 64), (3, 70), {}),
    "80 rows, more than 64 columns": (2, (80, 65), (9,), {}),
    "3000 rows": (2, (3000, 2), (130,), {}),
    "3000 rows, few of them used": (2, (3000, 2), (70,), {"number": 3}),
    "the stack shares the tokens": (3, (7, 5), (2, 33), {"shared": True}),
    "padding": (2, (3, 5), (2, 9), {"padding_idx": 0}),
    "padding in the last row": (2, (3, 5), (2, 9), {"padding_idx": -1}),
    "mean gradients": (2, (5, 5), (2, 9), {"scale_grad_by_freq": True}),
    "mean gradients and padding": (2, (3, 5), (2, 9), {"scale_grad_by_freq": True, "padding_idx": 1, "shared": True}),
}


@pytest.mark.parametrize("case", TABLES)
def test_gradients_of_tables_equal_autograd_in_float64(case, calls):
    n, table, tokens, how = TABLES[case]
    (out, dw), (rows, expected) = tables("float32", n, table, tokens, **how)
    assert dw.shape == expected.shape and dw.dtype == torch.float32
    torch.testing.assert_close(out, rows.float(), rtol=0, atol=1e-6 if "scale_grad_by_freq" in how else 0)
    assert error(dw, expected) < BOUND["float32"] and calls == ["weight_gradient"]
    assert not dw.cpu()[expected == 0].any()


@pytest.mark.parametrize("precision", ["tf32", "bf16"])
def test_gradients_of_tables_are_sums_of_rounded_numbers(precision, calls):
    (_, dw), (_, expected) = tables(precision, 2, (520, 33), (2, 70))
    assert error(dw, expected) < BOUND[precision] and calls
    if CUDA or precision == "bf16":
        assert error(dw, expected) > 1e-5


def test_a_vocabulary_is_skipped_where_no_token_is():
    """Programs with a branch give the same sums."""
    d, rows = torch.randn(2, 70, 3, device=DEVICE), torch.randint(1030, (2, 70), device=DEVICE)
    small, large = (embedding_kernels.weight_gradient(d, rows, number, "float32") for number in (1024, 1030))
    rows = rows[..., None].expand(d.shape).cpu()
    expected = torch.zeros(2, 1030, 3, dtype=torch.float64).scatter_add(1, rows, d.cpu().double())
    assert torch.equal(small, large[:, :1024]) and error(large, expected) < BOUND["float32"]


def test_gradients_of_tables_repeat_to_the_bit():
    first, second = (tables("tf32", 2, (7, 5), (2, 70))[0][1] for _ in range(2))
    assert torch.equal(first, second)


def test_tables_that_do_not_fit_stay_pytorch_s(calls, monkeypatch):
    def gradient(w, rows, function=F.embedding, **how):
        w = w.requires_grad_()
        return torch.autograd.grad(vmap(stackable(lambda w, r: function(r, w, **how), "tf32"))(w, rows).sum(), w)[0]

    w, rows = torch.randn(2, 4, 3, device=DEVICE), torch.tensor([[0, 3], [1, 1]], device=DEVICE)
    counts = torch.tensor([[1.0, 0, 0, 1], [0, 2, 0, 0]], device=DEVICE)[..., None].expand(2, 4, 3)
    assert torch.equal(gradient(w, rows, lambda r, w: torch.embedding(w, r)), counts) and calls.pop()
    assert torch.equal(gradient(w, rows.int()), counts) and calls.pop()
    assert torch.equal(gradient(w.double(), rows), counts.double())
    frozen = vmap(stackable(F.embedding, "tf32"), (0, None))(rows, w[0])
    monkeypatch.setattr(embedding, "MOST", 7)
    assert torch.equal(gradient(w, rows), counts)
    assert torch.equal(frozen, w[0][rows]) and not calls
