"""Functions of tensors for the tests of what runs recorded operations: programs on CPUs, fused kernels on GPUs."""

import math
import random

import torch
from torch import nn
from torch.func import functional_call

from fedda.problems.gradients.vmap import StackedGradient
from fedda.problems.sequences import transformer

aten = torch.ops.aten
SPECIAL = [0.0, -0.0, 1.0, -1.5, 2.0, 1e-40, -1e-310, 6e-8, 1e30, -1e300, 70000.0, 1 + 2**-8, 1 + 3 * 2**-8,
           math.inf, -math.inf, math.nan, 0.1, 3.0]  # fmt: skip


def random_function(seed):
    """Some twenty operations on random earlier results."""

    def function(x, y):
        draw, values = random.Random(seed), [x, y, x[:1], y[:, :1]]
        for _ in range(draw.randint(5, 30)):
            a, b = draw.choice(values), draw.choice(values)
            kind = draw.randrange(12)
            if kind < 6:
                new = (a + b, a * b, a - b, torch.where(a > b, a, b), 1.5 - a, a.clamp(-1, 1))[kind]
            elif kind == 6:
                new = a.sum(0, keepdim=True)
            elif kind == 7:
                new = a.t().contiguous().t()
            elif kind == 8:
                new = a.clone()
                new.add_(0.5)
            elif kind == 9:
                new = a[:1] * 2
            elif kind == 10:
                new = torch.stack([a, a * 0.5]).sum(0)
            else:
                new = a * 1.0
                new.copy_(b if b.shape == a.shape else a + 1)
            values.append(new)
        return [draw.choice(values) for _ in range(5)]

    return function


# What engines/fusing.py fuses: two arrays of floats, a mask and integers.
ELEMENTWISE = {
    "add": lambda a, b, m, k: a + b,
    "subtract": lambda a, b, m, k: a - b,
    "multiply": lambda a, b, m, k: a * b,
    "divide": lambda a, b, m, k: a / b,
    "numbers": lambda a, b, m, k: (0.7 * a - 1.5) / 4,
    "subtract from a number": lambda a, b, m, k: 1.25 - a,
    "scalars": lambda a, b, m, k: aten.sub.Scalar(aten.add.Scalar(aten.mul.Scalar(a, 1.7), 0.5), 2.5),
    "mask as a factor": lambda a, b, m, k: a * m,
    "integers as factors": lambda a, b, m, k: a * k,
    "negate": lambda a, b, m, k: -a,
    "abs": lambda a, b, m, k: a.abs(),
    "reciprocal": lambda a, b, m, k: a.reciprocal(),
    "square": lambda a, b, m, k: a**2,
    "where": lambda a, b, m, k: torch.where(m, a, b),
    "masked_fill": lambda a, b, m, k: a.masked_fill(m, -1.1),
    "masked_fill with infinity": lambda a, b, m, k: a.masked_fill(m, -math.inf),
    "maximum": lambda a, b, m, k: torch.maximum(a, b),
    "minimum": lambda a, b, m, k: torch.minimum(a, b),
    "clamp": lambda a, b, m, k: a.clamp(-1.5, 2),
    "clamp_min": lambda a, b, m, k: aten.clamp_min(a, 0.5),
    "clamp_max": lambda a, b, m, k: a.clamp(max=0.5),
    "relu": lambda a, b, m, k: a.relu(),
    "threshold_backward": lambda a, b, m, k: aten.threshold_backward(b, a, 0),
    "less": lambda a, b, m, k: (a < b) | (a >= 0.5),
    "equal": lambda a, b, m, k: torch.logical_and(a == b, a != 0),
    "not": lambda a, b, m, k: torch.logical_not(m ^ (a > 1)) & ~m,
    "to float32": lambda a, b, m, k: a.float() * 1.1,
    "to float64": lambda a, b, m, k: a.double() * 1.1,
    "to bfloat16": lambda a, b, m, k: a.bfloat16() * 1.1,
    "to float16": lambda a, b, m, k: a.half() * 1.1,
    "to bool": lambda a, b, m, k: a.bool() & m,
    "from bool": lambda a, b, m, k: m.to(a.dtype),
    "from integers": lambda a, b, m, k: k.to(a.dtype),
    "copy": lambda a, b, m, k: a.clone(),
    "copy to another order": lambda a, b, m, k: (a * 1.1).transpose(0, 1).clone(memory_format=torch.contiguous_format),
    "views between": lambda a, b, m, k: ((a + b).unsqueeze(1) * 2).squeeze(1) - 0.1,
}
LAYOUTS = {
    "contiguous": lambda v: v,
    "permuted": lambda v: v.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "expanded": lambda v: v[:, :1].expand(v.shape),
    "every second": lambda v: torch.stack([v, v], -1)[..., 0],
}


def arguments(dtype, layout, device="cpu"):
    """Special numbers, each beside each; the first array has the layout."""
    g, n = torch.Generator().manual_seed(0), len(SPECIAL)
    special = torch.tensor(SPECIAL, dtype=torch.float64).to(dtype)
    a = special[:, None, None].expand(n, n, 12).clone()
    a[..., 4:] = torch.randn(n, n, 8, dtype=torch.float64, generator=g).to(dtype)
    b = special[None, :, None].expand(n, n, 12).contiguous()
    k = torch.randint(-(1 << 62), 1 << 62, (n, n, 12), generator=g) >> torch.arange(12) * 5
    return [v.to(device) for v in (LAYOUTS[layout](a), b, torch.rand(n, n, 12, generator=g) < 0.5, k)]


class Normed(nn.Module):
    """A residual block with GroupNorm, as in benchmarks/models.py."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.out = nn.Conv2d(2, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.Linear(4, 3)
        self.second, self.skip = nn.Conv2d(4, 4, 3, 1, 1), nn.Conv2d(2, 4, 1, 2)

    def forward(self, x):
        x = (self.skip(x) + self.norm(self.second(self.norm(self.first(x)).relu()))).relu()
        return self.out(x.mean((-2, -1)))


def network_gradient(kind, precision, device="cpu"):
    """The gradients of two clients, and their arguments. In bfloat16 autocast adds its conversions."""
    g = torch.Generator().manual_seed(0)
    if kind == "resnet":
        module, batch = Normed(), (torch.randn(2, 3, 2, 6, 6, generator=g), torch.tensor([[0, 1, 2]] * 2))
    else:
        module, _ = transformer((5,), 7, width=8, layers=1, heads=2)
        tokens = torch.randint(0, 7, (2, 3, 5), generator=g)
        batch = tokens, tokens.roll(1, -1)
    module.to(device)
    names, shapes = zip(*((name, p.shape) for name, p in module.named_parameters()), strict=True)

    def objective(x, inputs, targets):
        parts = x.split([shape.numel() for shape in shapes])
        parameters = {name: v.view(shape) for name, v, shape in zip(names, parts, shapes, strict=True)}
        with torch.autocast(device, torch.bfloat16, enabled=precision == torch.bfloat16):
            scores = functional_call(module, parameters, (inputs,))
            return nn.functional.cross_entropy(scores.flatten(0, -2), targets.flatten())

    x = torch.randn(2, sum(shape.numel() for shape in shapes), generator=g) * 0.3
    return StackedGradient(objective), [v.to(device) for v in (x, *batch)]
