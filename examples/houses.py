"""House prices from a table: regression over cities that share no row, with the mean absolute error.

    python examples/houses.py --table houses.csv --target price --client city

Without a table, an artificial one is written. The end is a file with predictions for new rows.
"""

import argparse
from pathlib import Path

import numpy as np
from torch import nn

import fedda

CITIES = {"Bonn": 2600.0, "Kiel": 2900.0, "Mainz": 3100.0, "Ulm": 3400.0}  # price of a square metre


def write_table(path, rows=600, seed=0):
    random = np.random.default_rng(seed)
    lines = ["area,year,kind,city,price"]
    for _ in range(rows):
        city = random.choice(list(CITIES))
        area, year, kind = random.uniform(30, 180), random.integers(1920, 2024), random.choice(["flat", "house"])
        price = CITIES[city] * area * (1 + 0.2 * (kind == "house")) * (1 - 0.003 * (2024 - year))
        lines.append(f"{area:.1f},{year},{kind},{city},{price * random.normal(1, 0.05):.1f}")
    path.write_text("\n".join(lines) + "\n")


def train(table, target="price", client="city", rounds=200, seed=0):
    """The result of a run on the table; targets are in hundred thousands, which keeps the loss near one."""
    features = fedda.load(str(table), target=target, client=client).data.x.shape[1]
    network = nn.Sequential(nn.Linear(features, 32), nn.ReLU(), nn.Linear(32, 1), nn.Flatten(0))

    def loss(output, price):
        return nn.functional.mse_loss(output, price / 1e5)

    def error(output, price):  # of each row, in the currency of the table
        return (output * 1e5 - price).abs()

    problem = fedda.load(
        str(table), target=target, client=client, model=network, loss=loss, batch=32, validation=0.1,
        metrics={"mae": fedda.Metric(error, higher_is_better=False)},
    )  # fmt: skip
    return fedda.train(
        fedda.make("scaffold", lr=0.02, epochs=1), problem, rounds=rounds, seed=seed, weights="samples", progress=True
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", type=Path, help="a .csv or .parquet file")
    parser.add_argument("--target", default="price")
    parser.add_argument("--client", default="city")
    parser.add_argument("--rounds", type=int, default=200)
    given = parser.parse_args()
    if given.table is None:
        given.table = Path("houses.csv")
        write_table(given.table)
    result = train(given.table, given.target, given.client, given.rounds)
    print(f"mean absolute error on test rows: {result.history[-1]['test_mae']:,.0f}")
    for row in result.clients:
        print(f"  {row['client']}: {row['samples']} rows, {row['train_mae']:,.0f}")


if __name__ == "__main__":
    main()
