"""MedMNIST (Yang et al. 2023): the two-dimensional sets with one label a sample, in their published .npz files.

Checksums and counts are those of version 3 (Zenodo record 10519652), 28x28 pixels. The larger versions have the same
layout: open them by their path. ChestMNIST has several labels a sample and is not here.
"""

from __future__ import annotations

from .npz import named
from .ondisk import Download, OnDisk, add

PLACE = "https://zenodo.org/records/10519652/files/{}.npz?download=1"
ORGANS = (
    "bladder",
    "left femur",
    "right femur",
    "heart",
    "left kidney",
    "right kidney",
    "liver",
    "left lung",
    "right lung",
    "pancreas",
    "spleen",
)
# name: (what, checksum, samples for training, for testing, names of the classes)
SETS: dict[str, tuple[str, str, int, int, tuple[str, ...]]] = {
    "pathmnist": (
        "PathMNIST: patches of colorectal cancer tissue, RGB.",
        "a8b06965200029087d5bd730944a56c1",
        89_996,
        7180,
        (
            "adipose",
            "background",
            "debris",
            "lymphocytes",
            "mucus",
            "smooth muscle",
            "normal colon mucosa",
            "cancer-associated stroma",
            "colorectal adenocarcinoma epithelium",
        ),
    ),
    "bloodmnist": (
        "BloodMNIST: blood cells under the microscope, RGB.",
        "7053d0359d879ad8a5505303e11de1dc",
        11_959,
        3421,
        (
            "basophil",
            "eosinophil",
            "erythroblast",
            "immature granulocyte",
            "lymphocyte",
            "monocyte",
            "neutrophil",
            "platelet",
        ),
    ),
    "dermamnist": (
        "DermaMNIST: pigmented skin lesions, RGB.",
        "0744692d530f8e62ec473284d019b0c7",
        7007,
        2005,
        (
            "actinic keratosis, intraepithelial carcinoma",
            "basal cell carcinoma",
            "benign keratosis-like lesion",
            "dermatofibroma",
            "melanoma",
            "melanocytic nevus",
            "vascular lesion",
        ),
    ),
    "octmnist": (
        "OCTMNIST: optical coherence tomography of the retina, grey.",
        "c68d92d5b585d8d81f7112f81e2d0842",
        97_477,
        1000,
        ("choroidal neovascularization", "diabetic macular edema", "drusen", "normal"),
    ),
    "pneumoniamnist": (
        "PneumoniaMNIST: chest X-rays of children, grey.",
        "28209eda62fecd6e6a2d98b1501bb15f",
        4708,
        624,
        ("normal", "pneumonia"),
    ),
    "retinamnist": (
        "RetinaMNIST: fundus images, five grades of diabetic retinopathy, RGB.",
        "bd4c0672f1bba3e3a89f0e4e876791e4",
        1080,
        400,
        ("grade 0", "grade 1", "grade 2", "grade 3", "grade 4"),
    ),
    "breastmnist": (
        "BreastMNIST: breast ultrasound, grey.",
        "750601b1f35ba3300ea97c75c52ff8f6",
        546,
        156,
        ("malignant", "normal or benign"),
    ),
    "tissuemnist": (
        "TissueMNIST: cells of the kidney's cortex, grey.",
        "ebe78ee8b05294063de985d821c1c34b",
        165_466,
        47_280,
        (
            "collecting duct, connecting tubule",
            "distal convoluted tubule",
            "glomerular endothelial cells",
            "interstitial endothelial cells",
            "leukocytes",
            "podocytes",
            "proximal tubule segments",
            "thick ascending limb",
        ),
    ),
    "organamnist": (
        "OrganAMNIST: organs in axial slices of CT, grey.",
        "68e3f8846a6bd62f0c9bf841c0d9eacc",
        34_561,
        17_778,
        ORGANS,
    ),
    "organcmnist": (
        "OrganCMNIST: organs in coronal slices of CT, grey.",
        "b9ceb9546e10131b32923c5bbeaea2b1",
        12_975,
        8216,
        ORGANS,
    ),
    "organsmnist": (
        "OrganSMNIST: organs in sagittal slices of CT, grey.",
        "9ab87b696fb54e2a387ebe992d6ed5f1",
        13_932,
        8827,
        ORGANS,
    ),
}


for name, (what, md5, train, test, names) in SETS.items():
    add(
        OnDisk(
            name,
            what,
            files=((f"{name}.npz",),),
            read=named(names),
            train=train,
            test=test,
            classes=len(names),
            downloads=(Download(PLACE.format(name), md5, f"{name}.npz"),),
        )
    )
