"""Second moments v of a sequence of gradients g, as in adaptive optimisers."""

from torch import Tensor

KINDS = ("adam", "yogi", "adagrad")


def second_moment(kind: str, v: Tensor, g: Tensor, beta2: float | Tensor) -> Tensor:
    """Adam: v <- b v + (1-b) g^2.  Yogi: v <- v - (1-b) g^2 sign(v - g^2).  Adagrad: v <- v + g^2.

    >>> second_moment("adagrad", torch.tensor([1.0]), torch.tensor([2.0]), 0.9)
    tensor([5.])
    """
    if kind == "adam":
        return beta2 * v + (1 - beta2) * g**2
    if kind == "yogi":
        return v - (1 - beta2) * g**2 * (v - g**2).sign()
    return v + g**2


def debiased(moment: Tensor, beta: float | Tensor, n: float | Tensor) -> Tensor:
    """A moment that started at zero, after n updates, with its bias removed: moment / (1 - beta^n), as in Adam."""
    return moment / (1 - beta**n)
