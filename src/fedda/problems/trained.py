"""The way out: a trained model as an ordinary nn.Module, with its standardisation inside."""

import copy

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
