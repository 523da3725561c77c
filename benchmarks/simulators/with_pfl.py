"""FedAvg in pfl-research (package `pfl`), in one process, or in several under torchrun."""

import os
import time
from importlib.metadata import version

import numpy as np
import shared
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByUser
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch.nn import functional as F


class Module(torch.nn.Module):
    """The model with the two methods that pfl asks for."""

    def __init__(self, net):
        super().__init__()
        self.net = net

    def loss(self, x, y):
        return F.cross_entropy(self.net(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Ends(TrainingProcessCallback):
    def __init__(self):
        self.ends = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.ends.append(time.time())
        return False, Metrics()


def main():
    job = shared.job()
    settings, module = job.settings, Module(job.model())
    rank, processes = (int(os.environ.get(name, default)) for name, default in (("RANK", 0), ("WORLD_SIZE", 1)))
    np.random.seed(job.seed)  # chooses users: the same in all processes
    torch.manual_seed(job.seed * processes + rank)  # chooses batches: another in each
    users = FederatedDataset(
        lambda user: Dataset(job.batches(user)), get_user_sampler("minimize_reuse", list(range(settings.clients)))
    )
    clock = Ends()
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=job.rounds,
            evaluation_frequency=job.rounds,  # at the first round alone, which is not timed
            train_cohort_size=settings.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(training_data=users, val_data=users, postprocessors=[WeightByUser()]),
        model=PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0)),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=settings.lr, local_batch_size=settings.batch
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[clock],
    )
    if rank == 0:
        shared.report("pfl" if processes == 1 else f"pfl-{processes}", version("pfl"), job, clock.ends, module.net)


if __name__ == "__main__":
    main()
