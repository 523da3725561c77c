"""Images from a folder, a ResNet of your own, a model file at the end.

The folder has a subfolder of images for each class. Without one, fedda's digits are written as a folder.
The network has BatchNorm; `--norm group` converts it to GroupNorm, which needs no statistics of the clients.

    python examples/images.py --images photos --norm batch --out model.pt
"""

import argparse
from pathlib import Path

import torch
from torch import nn

import fedda
from fedda.data.datasets import embedded


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = inputs == outputs and stride == 1
        self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet(channels, classes, width=16):
    """A ResNet with three blocks, for small images."""
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        Block(width, width, 1),
        Block(width, 2 * width, 2),
        Block(2 * width, 4 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(4 * width, classes),
    )


def digits(folder):
    """fedda's digits as a folder of images."""
    from PIL import Image

    for number, (image, label) in enumerate(zip(*embedded("digits"), strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image * 15.9).astype("uint8")).save(place / f"{number}.png")


def train(images, norm="batch", rounds=60, clients=10, width=16, seed=0):
    """The result of a run on the images of a folder."""
    torch.manual_seed(seed)
    shape = fedda.load(str(images), clients=clients).data.x.shape  # [images, channels, height, width], as bytes
    network = resnet(shape[1], classes=len([p for p in Path(images).iterdir() if p.is_dir()]), width=width)
    if norm == "group":
        network = fedda.to_group_norm(network, groups=4)
    problem = fedda.load(
        str(images), clients=clients, partition="dirichlet", alpha=0.5, model=network,
        loss=nn.functional.cross_entropy, batch=16, validation=0.1, metrics=["f1"],
        augment=fedda.augment.crop(1),
    )  # fmt: skip
    algorithm = fedda.make("fedavgm", lr=fedda.schedules.cosine(0.05, warmup=0.05), epochs=1, weight_decay=1e-4)
    return fedda.train(
        algorithm, problem, rounds=rounds, cohort=0.5, seed=seed, weights="samples", patience=10, progress=True
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=Path, help="a folder with a subfolder of images for each class")
    parser.add_argument("--norm", choices=("batch", "group"), default="batch")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--out", type=Path, default=Path("model.pt"))
    given = parser.parse_args()
    if given.images is None:
        given.images = Path("digits")
        digits(given.images)
    result = train(given.images, given.norm, given.rounds, width=given.width)
    print(result)
    print(f"best on validation after round {result.best.round}; written to {fedda.export(result.best, given.out)}")


if __name__ == "__main__":
    main()
