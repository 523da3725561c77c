"""The way out: a trained model as an ordinary nn.Module, with its standardisation inside."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

from .neural import Neural, Scale


class Standardised(nn.Module):
    """A model that takes samples as they were stored, such as images of bytes, and standardises them first.

    >>> import torch
    >>> Standardised(nn.Identity(), torch.tensor(2.0), torch.tensor(4.0))(torch.tensor([2, 10], dtype=torch.uint8))
    tensor([0., 2.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module, mean: Tensor, std: Tensor):
        super().__init__()
        self.model = model
        self.register_buffer("mean", mean.clone())
        self.register_buffer("std", std.clone())

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.model(Scale(self.mean, self.std)(x))
        return out


PREDICTED = 1_000  # samples that the model takes at once


def trained_state(
    problem: Neural, x: Tensor, weights: Tensor | None = None, client: int | None = None
) -> dict[str, Tensor]:
    """The state_dict of the user's module at the flat parameters x [d]: parameters, BatchNorm's statistics, buffers.
    Personal parameters are those of `client`, or else the mean over clients (see `Problem.personalised`)."""
    state = {name: value.detach().clone() for name, value in problem.model.state_dict().items()}
    values = problem.named_values(x, weights, client)
    for name, value in values.items():
        if name in state:  # a tied parameter has several names
            state[name] = value.detach().clone().to(state[name].dtype)
    return state


def trained_model(problem: Neural, x: Tensor, weights: Tensor | None = None, client: int | None = None) -> nn.Module:
    """The user's module in eval mode with these parameters; it takes samples as the problem stores them."""
    model = copy.deepcopy(problem.model)
    model.load_state_dict(trained_state(problem, x, weights, client))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    if problem.scale is not None:
        model = Standardised(model, *problem.scale)
    return model.eval()


@torch.no_grad()
def predictions(problem: Neural, model: nn.Module, x: Tensor) -> dict[str, list[Any]]:
    """The predictions of a trained model for samples, as columns. For classes: the class, by its name if it has one,
    and its probability. For regression: the number, or several numbers."""
    outputs = torch.cat([model(part) for part in x.split(PREDICTED)])
    if outputs.dim() > 2 or len(outputs) != len(x):
        raise ValueError(
            f"predict: the model must give one vector for each sample, got shape {list(outputs.shape[1:])}: "
            "export it instead"
        )
    if problem.data.y.is_floating_point():
        columns = outputs.reshape(len(x), -1).T.tolist()
        names = ["prediction"] if len(columns) == 1 else [f"prediction_{i}" for i in range(len(columns))]
        return dict(zip(names, columns, strict=True))
    if outputs.dim() == 2 and outputs.shape[1] > 1:
        probability, number = outputs.double().softmax(dim=1).max(dim=1)
    else:  # one logit for two classes
        positive = outputs.reshape(-1).double().sigmoid()
        number = (outputs.reshape(-1) > 0).long()
        probability = torch.where(number == 1, positive, 1 - positive)
    known = problem.class_names
    classes = number.tolist() if known is None else [known[k] for k in number.tolist()]
    return {"prediction": classes, "probability": probability.tolist()}
