"""Recorded gradients without changes in place: the same numbers, and changed only where nothing else reads the old
ones."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedda.problems.gradients.vmap import StackedGradient, simplify
from fedda.recording import record


def in_place(module):
    """The operations of a recording that change a tensor."""
    targets = [node.target for node in module.graph.nodes if hasattr(node.target, "_schema")]
    return [str(target) for target in targets if target._schema.is_mutable]


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(5, 7), nn.Linear(7, 7), nn.Linear(7, 3)

    def forward(self, x):
        x = F.relu(self.first(x), inplace=True)
        y = self.second(x)
        y += x
        return self.third(y.mul_(2.0).relu_())


def test_a_network_with_changes_in_place_has_the_gradients_of_the_loop():
    torch.manual_seed(0)
    network = Network()
    shapes = {name: p.shape for name, p in network.named_parameters()}

    def objective(x, inputs, targets):
        parts = x.split([shape.numel() for shape in shapes.values()])
        named = {name: part.view(shape) for part, (name, shape) in zip(parts, shapes.items(), strict=True)}
        return F.cross_entropy(torch.func.functional_call(network, named, (inputs,)), targets)

    x = torch.randn(3, sum(shape.numel() for shape in shapes.values()), dtype=torch.float64)
    batch = torch.randn(3, 4, 5, dtype=torch.float64), torch.randint(0, 3, (3, 4))
    stacked = StackedGradient(objective)
    recorded = stacked.record(x, *batch)
    assert not in_place(recorded)
    assert torch.allclose(recorded(x + 0.1, *batch), stacked.loop(x + 0.1, *batch), rtol=1e-12, atol=1e-14)


def a_view_is_read(x):
    y = x * 2
    view = y[:1]
    y.add_(1.0)
    return [view + y]


def a_view_is_changed(x):
    y = x * 2
    y.view(-1).sub_(1.0)
    return [y]


def the_input_is_changed(x):
    x.add_(1.0)
    return [x * 2]


def another_type(x):
    y = x * 2
    y.add_(x.double())
    return [y]


def views_of_the_new_numbers(x):
    y = x * 2
    y.add_(1.0)
    view = y[:1]
    y.mul_(3.0)
    return [view.clone(), y.view(-1).clone()]


def another_order(x):
    y = x.t() * 2
    y.add_(1.0)
    return [y]


def another_operation_of_this_name(x):
    y = x * 2
    y.pow_(2)  # with a number; pow takes tensors
    return [y]


def a_comparison(x):
    y = x * 2
    return [1 - y.gt_(0.5)]  # numbers, where gt gives truth values


def another_shape(x):
    y = x * 2
    y.unsqueeze_(1)
    return [y.view(-1) + 1]


def a_mask(x):
    y = x * 2
    y.masked_fill_(x > 0, 1.0)
    return [y + 1]


def equal_numbers_of_which_one_changes(x):
    y, z = x * 2, x * 2
    y[0] = 5.0
    return [y + z, z * 1.0]


def a_list(x):
    y, z = x * 2, x * 2
    torch._foreach_add_([y, z], 1.0)
    return [y * z]


def twice(x):
    y = x * 2
    y.add_(x).relu_()
    return [y.exp(), y.t().reshape(-1)]


def test_the_rest_of_a_graph_with_changes_in_place_is_simplified():
    def function(x):
        y = x * 2
        y[0] = 5.0
        unused = x * 3  # noqa: F841
        return [y, (x + 1) * (x + 1)]

    x = torch.randn(3, 4)
    module = simplify(record(function, x))
    names = [str(node.target) for node in module.graph.nodes]
    assert names.count("aten.add.Tensor") == 1 and names.count("aten.mul.Tensor") == 2
    assert all(torch.equal(a, b) for a, b in zip(module(x), function(x), strict=True))


@pytest.mark.parametrize(
    ("function", "left"),
    [
        (a_view_is_read, ["aten.add_.Tensor"]),
        (a_view_is_changed, ["aten.sub_.Tensor"]),
        (the_input_is_changed, ["aten.add_.Tensor"]),
        (another_type, ["aten.add_.Tensor"]),
        (views_of_the_new_numbers, ["aten.mul_.Tensor"]),
        (another_order, []),
        (another_operation_of_this_name, ["aten.pow_.Scalar"]),
        (a_comparison, ["aten.gt_.Scalar"]),
        (another_shape, []),
        (a_mask, []),
        (equal_numbers_of_which_one_changes, ["aten.fill_.Tensor"]),
        (a_list, ["aten._foreach_add_.Scalar"]),
        (twice, []),
    ],
    ids=lambda v: getattr(v, "__name__", ""),
)
def test_only_changes_that_nothing_else_sees_are_replaced(function, left):
    x = torch.randn(3, 4)
    module = simplify(record(function, x.clone()))
    assert in_place(module) == left and all(f".{name.split('.')[1]}" in module.code for name in left)
    assert all(torch.equal(a, b) for a, b in zip(module(x.clone()), function(x.clone()), strict=True))
