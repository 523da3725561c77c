"""FedAvg in Flower's simulation on Ray (package `flwr[simulation]`): two clients at a time with one thread each, or
one at a time with two."""

import os
import time
from importlib.metadata import version

os.environ["FLWR_TELEMETRY_ENABLED"] = "0"  # nothing is sent anywhere, and no round waits for it

import shared
import torch
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch.nn import functional as F

CORES = 2


class Timed(FedAvg):
    def __init__(self, **options):
        super().__init__(**options)
        self.ends = []

    def aggregate_train(self, server_round, replies):
        result = super().aggregate_train(server_round, replies)
        self.ends.append(time.time())
        return result


def client_app(job):
    app = ClientApp()

    @app.train()
    def train(message, context):
        torch.set_num_threads(job.threads)
        model = shared.cnn() if job.workload == "cnn" else shared.mlp()
        model.load_state_dict(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=job.settings.lr)
        client, number = int(context.node_config["partition-id"]), int(message.content["config"]["server-round"])
        # Else every worker process would begin with the same random numbers, whatever the seed.
        torch.manual_seed((job.seed * job.rounds + number) * job.settings.clients + client)
        x, y = job.batches(client)
        for inputs, targets in zip(x.split(job.settings.batch), y.split(job.settings.batch), strict=True):
            optimiser.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimiser.step()
        # The weight of a reply: the same for all, as in every other program.
        reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(reply), reply_to=message)

    return app


def main():
    job = shared.job()
    settings, model = job.settings, job.model()
    strategy = Timed(
        fraction_train=settings.cohort / settings.clients, fraction_evaluate=0.0, min_available_nodes=settings.clients
    )
    server = ServerApp()

    @server.main()
    def serve(grid, context):
        result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=job.rounds)
        model.load_state_dict(result.arrays.to_torch_state_dict())

    run_simulation(
        server,
        client_app(job),
        num_supernodes=settings.clients,
        backend_config={"client_resources": {"num_cpus": job.threads}, "init_args": {"num_cpus": CORES}},
    )
    shared.report("flower", version("flwr"), job, strategy.ends, model)


if __name__ == "__main__":
    main()
