"""FedAvg in FedLab (package `fedlab`): its standalone pipeline with the serial trainer."""

import random
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from types import ModuleType

if find_spec("torchvision") is None:
    # FedLab imports it for its own data sets, of which none is used here; not every build of torch has one that fits.
    sys.modules["torchvision"] = ModuleType("torchvision")
    sys.modules["torchvision"].transforms = sys.modules["torchvision.transforms"] = ModuleType("transforms")

import shared
from fedlab.contrib.algorithm.basic_client import SGDSerialClientTrainer
from fedlab.contrib.algorithm.basic_server import SyncServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch.utils.data import DataLoader, RandomSampler, TensorDataset


class Clients:
    """A client's samples as FedLab asks for them; the loader draws with replacement, enough for all local steps."""

    def __init__(self, job):
        samples = job.samples()
        self.drawn = job.settings.steps * job.settings.batch
        self.data = [TensorDataset(*mine) for mine in zip(samples.x, samples.y, strict=True)]

    def get_dataloader(self, id, batch_size):
        sampler = RandomSampler(self.data[id], replacement=True, num_samples=self.drawn)
        return DataLoader(self.data[id], batch_size, sampler=sampler)


class Pipeline(StandalonePipeline):
    def __init__(self, handler, trainer):
        super().__init__(handler, trainer)
        self.ends = []

    def evaluate(self):  # FedLab calls it after each round
        self.ends.append(time.time())


def main():
    job = shared.job()
    settings, model = job.settings, job.model()
    random.seed(job.seed)  # FedLab chooses its cohorts with it
    trainer = SGDSerialClientTrainer(model, settings.clients)
    trainer.setup_dataset(Clients(job))
    trainer.setup_optim(epochs=1, batch_size=settings.batch, lr=settings.lr)
    handler = SyncServerHandler(model, job.rounds, settings.cohort / settings.clients)
    pipeline = Pipeline(handler, trainer)
    pipeline.main()
    shared.report("fedlab", version("fedlab"), job, pipeline.ends, handler.model)


if __name__ == "__main__":
    main()
