"""The paper's theory as code: its measure, lemmas, theorem and constants, on recorded runs and real problems.

>>> import fedda
>>> from fedda.theory import Synthetic, measure, traces
>>> problem = Synthetic(A=[[1.0], [1.0]], b=[[-1.0], [1.0]], noise=0.1)
>>> algorithm = fedda.make("fedda-mvr", lr=0.5, w=8.0, eps=1.0)
>>> [G] = [measure(trace, problem) for trace in traces(algorithm, problem, rounds=1, x0=torch.ones(1))]
>>> bool((G.total == G.step + G.error).all())
True
"""

from . import lemmas
from .advice import Advice, advise
from .estimates import Constants, constants
from .methods import CORRECTED, PRINTED, Method
from .rates import Decay, decay
from .recording import Recording
from .synthetic import Synthetic
from .theorem import Practical, Theorem1, local_steps
from .trace import Measure, Trace, measure, traces

__all__ = [
    "CORRECTED", "PRINTED", "Advice", "Constants", "Decay", "Measure", "Method", "Practical", "Recording", "Synthetic",
    "Theorem1", "Trace", "advise", "constants", "decay", "lemmas", "local_steps", "measure", "traces",
]  # fmt: skip
