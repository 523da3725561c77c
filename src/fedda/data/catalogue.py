"""The data sets that are read from files: what they are, where their files lie and where they come from."""

from __future__ import annotations

from . import cifar, femnist, idx
from .npz import named
from .ondisk import Download, OnDisk, add

COLON = ("fibroblast", "inflammatory", "epithelial", "others")
DIGITS = tuple(str(digit) for digit in range(10))


add(
    OnDisk(
        "cifar10",
        "CIFAR-10: 32x32 colour photographs of ten kinds of things.",
        files=tuple((f"cifar-10-batches-py/{name}",) for name in cifar.BATCHES),
        read=lambda found: cifar.read_cifar10([group[0] for group in found]),
        train=50_000,
        test=10_000,
        classes=10,
        downloads=(
            Download(
                "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
                "c58f30108f718f92721af3b95e74349a",
                "cifar-10-python.tar.gz",
                tuple(f"cifar-10-batches-py/{name}" for name in cifar.BATCHES),
            ),
        ),
    )
)
add(
    OnDisk(
        "femnist",
        "FEMNIST (LEAF): 28x28 hand-written digits and letters, by writer.",
        files=(("femnist/data/train/*.json",), ("femnist/data/test/*.json",)),
        read=lambda found: femnist.read_femnist(*found),
        train=0,  # LEAF makes as much of it as it is asked for
        test=0,
        classes=62,
        clients="the writers",
        how="make it with LEAF (github.com/TalwalkarLab/leaf): in data/femnist run "
        "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample, then put its data/train and data/test there",
    )
)
MIRROR = "https://ossci-datasets.s3.amazonaws.com/mnist"
MD5 = (
    "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "d53e105ee54ea40749a09fcbcd1e9432",
    "9fb629c4189551a2d022fa330f9573f3",
    "ec29112dd5afa0611ce80d1b7f02629c",
)
add(
    OnDisk(
        "mnist",
        "MNIST: 28x28 hand-written digits.",
        # torchvision keeps the same files in MNIST/raw
        files=tuple((f"mnist/{f}.gz", f"mnist/{f}", f"MNIST/raw/{f}", f"MNIST/raw/{f}.gz") for f in idx.FILES),
        read=lambda found: idx.read_mnist([group[0] for group in found]),
        train=60_000,
        test=10_000,
        classes=10,
        downloads=tuple(
            Download(f"{MIRROR}/{file}.gz", md5, f"mnist/{file}.gz") for file, md5 in zip(idx.FILES, MD5, strict=True)
        ),
    )
)
add(
    OnDisk(
        "mnist-writers",
        "MNIST with the writer of each training digit.",
        files=(("mnist-by-writer.npz",),),
        read=named(DIGITS),
        train=60_000,
        test=10_000,
        classes=10,
        clients="539 writers",
        how="put a .npz file with x, y, client (the writer), x_test and y_test there",
    )
)
add(
    OnDisk(
        "colon",
        "Colon histology (CRCHistoPhenotypes): 27x27 patches of four kinds of nuclei.",
        files=(("crchisto.npz",),),
        read=named(COLON),
        train=6997,
        test=2131,
        classes=4,
        how="put a .npz file with train_images, train_labels, test_images and test_labels there",
    )
)
add(
    OnDisk(
        "colon-patients",
        "The same patches of colon nuclei with the patient of each training patch.",
        files=(("crchisto-by-patient.npz",),),
        read=named(COLON),
        train=7765,
        test=2131,
        classes=4,
        clients="48 patients",
        how="put a .npz file with x, y, client (the patient), x_test and y_test there",
    )
)
