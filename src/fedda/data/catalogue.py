"""The data sets that are read from files: their contents, their files and their downloads.

MedMNIST (Yang et al. 2023): the two-dimensional sets with one label per sample, version 3 (Zenodo record 10519652), in
28x28 pixels. The larger versions have the same layout: open them by their path. ChestMNIST has several labels per
sample and is not supported.
"""

from . import cifar, femnist, idx
from .from_files import Download, FileDataset, add
from .npz import npz_reader

COLON = ("fibroblast", "inflammatory", "epithelial", "others")
CIFAR_FILES = tuple(f"cifar-10-batches-py/{name}" for name in cifar.BATCHES)
CIFAR_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR_MD5 = "c58f30108f718f92721af3b95e74349a"
MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
MNIST_MD5 = {
    "train-images-idx3-ubyte": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "train-labels-idx1-ubyte": "d53e105ee54ea40749a09fcbcd1e9432",
    "t10k-images-idx3-ubyte": "9fb629c4189551a2d022fa330f9573f3",
    "t10k-labels-idx1-ubyte": "ec29112dd5afa0611ce80d1b7f02629c",
}
MEDMNIST_URL = "https://zenodo.org/records/10519652/files/{}.npz?download=1"
ORGANS = (
    "bladder; left femur; right femur; heart; left kidney; right kidney; liver; left lung; right lung; pancreas; spleen"
)
# name: summary, checksum, training samples, test samples, classes
MEDMNIST = {
    "pathmnist": (
        "PathMNIST: patches of colorectal cancer tissue, RGB.", "a8b06965200029087d5bd730944a56c1", 89_996, 7180,
        "adipose; background; debris; lymphocytes; mucus; smooth muscle; normal colon mucosa; "
        "cancer-associated stroma; colorectal adenocarcinoma epithelium",
    ),
    "bloodmnist": (
        "BloodMNIST: blood cells under the microscope, RGB.", "7053d0359d879ad8a5505303e11de1dc", 11_959, 3421,
        "basophil; eosinophil; erythroblast; immature granulocyte; lymphocyte; monocyte; neutrophil; platelet",
    ),
    "dermamnist": (
        "DermaMNIST: pigmented skin lesions, RGB.", "0744692d530f8e62ec473284d019b0c7", 7007, 2005,
        "actinic keratosis, intraepithelial carcinoma; basal cell carcinoma; benign keratosis-like lesion; "
        "dermatofibroma; melanoma; melanocytic nevus; vascular lesion",
    ),
    "octmnist": (
        "OCTMNIST: optical coherence tomography of the retina, grey.", "c68d92d5b585d8d81f7112f81e2d0842", 97_477, 1000,
        "choroidal neovascularization; diabetic macular edema; drusen; normal",
    ),
    "pneumoniamnist": (
        "PneumoniaMNIST: chest X-rays of children, grey.", "28209eda62fecd6e6a2d98b1501bb15f", 4708, 624,
        "normal; pneumonia",
    ),
    "retinamnist": (
        "RetinaMNIST: fundus images, five grades of diabetic retinopathy, RGB.", "bd4c0672f1bba3e3a89f0e4e876791e4",
        1080, 400, "grade 0; grade 1; grade 2; grade 3; grade 4",
    ),
    "breastmnist": (
        "BreastMNIST: breast ultrasound, grey.", "750601b1f35ba3300ea97c75c52ff8f6", 546, 156,
        "malignant; normal or benign",
    ),
    "tissuemnist": (
        "TissueMNIST: cells of the kidney's cortex, grey.", "ebe78ee8b05294063de985d821c1c34b", 165_466, 47_280,
        "collecting duct, connecting tubule; distal convoluted tubule; glomerular endothelial cells; "
        "interstitial endothelial cells; leukocytes; podocytes; proximal tubule segments; thick ascending limb",
    ),
    "organamnist": (
        "OrganAMNIST: organs in axial slices of CT, grey.", "68e3f8846a6bd62f0c9bf841c0d9eacc", 34_561, 17_778, ORGANS,
    ),
    "organcmnist": (
        "OrganCMNIST: organs in coronal slices of CT, grey.", "b9ceb9546e10131b32923c5bbeaea2b1", 12_975, 8216, ORGANS,
    ),
    "organsmnist": (
        "OrganSMNIST: organs in sagittal slices of CT, grey.", "9ab87b696fb54e2a387ebe992d6ed5f1", 13_932, 8827, ORGANS,
    ),
}  # fmt: skip

add(
    FileDataset(
        "cifar10",
        "CIFAR-10: 32x32 colour photographs of ten kinds of things.",
        files=tuple((file,) for file in CIFAR_FILES),
        read=lambda paths: cifar.read_cifar10([group[0] for group in paths]),
        train=50_000, test=10_000, classes=10,
        downloads=(Download(CIFAR_URL, CIFAR_MD5, "cifar-10-python.tar.gz", CIFAR_FILES),),
    )
)  # fmt: skip
add(
    FileDataset(
        "femnist",
        "FEMNIST (LEAF): 28x28 hand-written digits and letters, by writer.",
        files=(("femnist/data/train/*.json",), ("femnist/data/test/*.json",)),
        read=lambda paths: femnist.read_femnist(*paths),
        train=0, test=0,  # LEAF makes any number of samples
        classes=62,
        clients="the writers",
        how="make it with LEAF (github.com/TalwalkarLab/leaf): in data/femnist run "
        "./preprocess.sh -s niid --sf 1.0 -k 0 -t sample, then put its data/train and data/test there",
    )
)  # fmt: skip
add(
    FileDataset(
        "mnist",
        "MNIST: 28x28 hand-written digits.",
        # torchvision keeps the same files in MNIST/raw
        files=tuple((f"mnist/{f}.gz", f"mnist/{f}", f"MNIST/raw/{f}", f"MNIST/raw/{f}.gz") for f in idx.FILES),
        read=lambda paths: idx.read_mnist([group[0] for group in paths]),
        train=60_000, test=10_000, classes=10,
        downloads=tuple(Download(f"{MNIST_URL}/{f}.gz", MNIST_MD5[f], f"mnist/{f}.gz") for f in idx.FILES),
    )
)  # fmt: skip
add(
    FileDataset(
        "mnist-writers", "MNIST with the writer of each training digit.", (("mnist-by-writer.npz",),),
        npz_reader([str(digit) for digit in range(10)]), train=60_000, test=10_000, classes=10, clients="539 writers",
        how="put a .npz file with x, y, client (the writer), x_test and y_test there",
    )
)  # fmt: skip
add(
    FileDataset(
        "colon", "Colon histology (CRCHistoPhenotypes): 27x27 patches of four kinds of nuclei.", (("crchisto.npz",),),
        npz_reader(COLON), train=6997, test=2131, classes=4,
        how="put a .npz file with train_images, train_labels, test_images and test_labels there",
    )
)  # fmt: skip
add(
    FileDataset(
        "colon-patients", "The same patches of colon nuclei with the patient of each training patch.",
        (("crchisto-by-patient.npz",),), npz_reader(COLON), train=7765, test=2131, classes=4, clients="48 patients",
        how="put a .npz file with x, y, client (the patient), x_test and y_test there",
    )
)  # fmt: skip
for name, (summary, md5, train, test, names) in MEDMNIST.items():
    classes, file = names.split("; "), f"{name}.npz"
    downloads = (Download(MEDMNIST_URL.format(name), md5, file),)
    add(FileDataset(name, summary, ((file,),), npz_reader(classes), train, test, len(classes), downloads=downloads))
