"""Data sets and partitions."""

import numpy as np
import pytest

import fedda
from fedda import registry
from fedda.data.partition import by_client, split

LABELS = np.repeat(np.arange(10), 5000)


def test_dominant_class_is_the_paper_s_cifar10_split():
    owner = split("dominant_class", LABELS, 10, rho=0.8)
    table = np.array([[np.sum((owner == k) & (c == LABELS)) for c in range(10)] for k in range(10)])
    assert (np.diag(table) == 4000).all() and (table[~np.eye(10, dtype=bool)] == 111).all()
    assert [np.sum((owner == -1) & (c == LABELS)) for c in range(10)] == [1] * 10


@pytest.mark.parametrize("clients,rho", [(20, 0.8), (10, 1.0), (10, 0.0), (30, 0.5)])
def test_dominant_class_elsewhere(clients, rho):
    owner = split("dominant_class", LABELS, clients, rho=rho)
    for k in range(clients):
        counts = np.bincount(LABELS[owner == k], minlength=10)
        assert counts[k % 10] == int(rho * 5000 / (clients // 10) + 1e-9)
        assert (np.delete(counts, k % 10) == int((1 - rho) * 5000 / (clients - clients // 10) + 1e-9)).all()


def test_iid_is_equal_up_to_one_and_shuffled():
    owner = split("iid", LABELS[:1003], 10)
    assert sorted(np.bincount(owner)) == [100] * 7 + [101] * 3
    assert not np.array_equal(owner, split("iid", LABELS[:1003], 10, seed=1))
    assert np.array_equal(owner, split("iid", LABELS[:1003], 10))


@pytest.mark.parametrize("alpha", [0.001, 0.1, 100.0])
@pytest.mark.parametrize("clients", [1, 10, 1000])
def test_dirichlet_leaves_no_client_empty(alpha, clients):
    labels = LABELS[::25]  # 2000 samples for up to 1000 clients
    owner = split("dirichlet", labels, clients, alpha=alpha)
    assert (owner >= 0).all() and (np.bincount(owner, minlength=clients) > 0).all()


def test_dirichlet_alpha_is_evenness():
    def skew(alpha):
        owner = split("dirichlet", LABELS, 10, alpha=alpha)
        table = np.array([np.bincount(LABELS[owner == k], minlength=10) for k in range(10)])
        return (table.max(1) / table.sum(1)).mean()

    assert skew(0.05) > 0.5 > 0.25 > skew(10.0) > 0.1


def test_by_client_keeps_the_data_s_own_owners():
    ids = np.array([40, 7, 7, 99, 40, 12])
    assert by_client(ids).tolist() == [2, 0, 0, 3, 2, 1]
    assert by_client(ids, 2).tolist() == [-1, 0, 0, 1, -1, -1]  # the first and the last
    names = np.repeat(np.arange(100), 3)
    chosen = [by_client(names, 20, seed, "random") for seed in (0, 0, 1)]
    assert (chosen[0] == chosen[1]).all() and (chosen[0] != chosen[2]).any()
    kept = [np.unique(names[owner >= 0]) for owner in chosen]
    assert [len(own) for own in kept] == [20] * 3 and len(np.unique(np.diff(kept[0]))) > 2  # not evenly spread
    assert sorted(set(chosen[0].tolist())) == list(range(-1, 20))
    assert split("by_client", ids * 0, 4, client=ids).tolist() == [2, 0, 0, 3, 2, 1]


def test_classes_of_one_size_are_shuffled_apart():
    """The order within a class is the class's own: equal sizes must not mean equal choices."""
    owner = split("dominant_class", LABELS, 10, rho=0.5).reshape(10, 5000)
    first = [np.flatnonzero(row == k).tolist() for k, row in enumerate(owner)]
    assert len({tuple(chosen) for chosen in first}) == 10


@pytest.mark.parametrize("shards,clients", [(2, 100), (1, 10), (3, 7)])
def test_shards_are_equal_and_hold_few_classes(shards, clients):
    owner = split("shards", LABELS, clients, shards=shards)
    sizes = np.bincount(owner)
    assert sizes.sum() == len(LABELS) and sizes.max() - sizes.min() <= shards
    classes = [len(np.unique(LABELS[owner == k])) for k in range(clients)]
    # a shard of at most one class's size lies in two classes at most
    assert max(classes) <= shards * (1 if 10 % (clients * shards) == 0 or clients * shards % 10 == 0 else 2)
    if shards > 1:
        assert not np.array_equal(owner, split("shards", LABELS, clients, seed=1, shards=shards))


@pytest.mark.parametrize("labels,clients", [(1, 10), (2, 10), (2, 100), (3, 7), (10, 4), (2, 3)])
def test_label_count_is_exact(labels, clients):
    owner = split("label_count", LABELS, clients, labels=labels)
    table = np.array([np.bincount(LABELS[owner == k], minlength=10) for k in range(clients)])
    assert ((table > 0).sum(1) == labels).all()
    owners = (table > 0).sum(0)
    assert owners.max() - owners.min() <= 1 and (owners.min() >= 1) == (labels * clients >= 10)
    for c in np.flatnonzero(owners):  # shared equally, and nothing is left over
        shares = table[:, c][table[:, c] > 0]
        assert shares.sum() == 5000 and shares.max() - shares.min() <= 1
    if labels == 2 and clients == 100:  # not the same pairs over and over
        assert len({tuple(np.flatnonzero(row)) for row in table}) > 15


@pytest.mark.parametrize("alpha", [0.01, 0.5, 100.0])
@pytest.mark.parametrize("clients", [1, 10, 1000])
def test_quantity_skew_is_in_sizes_alone(alpha, clients):
    labels = LABELS[::25]
    owner = split("quantity_skew", labels, clients, alpha=alpha)
    sizes = np.bincount(owner)
    assert len(sizes) == clients and sizes.min() >= 1 and sizes.sum() == len(labels)
    largest = np.bincount(labels[owner == sizes.argmax()], minlength=10) / sizes.max()
    if sizes.max() > 500:
        assert abs(largest - 0.1).max() < 0.05


def test_quantity_skew_alpha_is_evenness():
    sizes = {alpha: np.bincount(split("quantity_skew", LABELS, 10, alpha=alpha)) for alpha in (0.1, 100.0)}
    assert sizes[0.1].max() > 20000 and sizes[100.0].max() < 8000


@pytest.mark.parametrize("name", [entry.name for entry in registry.partitions if entry.name != "by_client"])
def test_a_partition_is_a_function_of_its_seed(name):
    owner = split(name, LABELS, 20, seed=3)
    assert np.array_equal(owner, split(name, LABELS.copy(), 20, seed=3))
    assert not np.array_equal(owner, split(name, LABELS, 20, seed=4))


@pytest.mark.parametrize("bad,line", [
    (lambda: split("shards", LABELS[:30], 10, shards=4), "shards: 10 clients with 4 shards each need as many samples, got 30"),
    (lambda: split("shards", LABELS, 10, shards=0), "shards: shards must be a whole number >= 1, got 0"),
    (lambda: split("label_count", LABELS, 10, labels=11), "label_count: labels must be a whole number from 1 to 10, got 11"),
    (lambda: split("label_count", LABELS, 10, labels=1.5), "label_count: labels must be a whole number >= 1, got 1.5"),
    (lambda: split("label_count", LABELS[::2500], 20, labels=2), "label_count: class 0 has 2 samples for 4 clients"),
    (lambda: split("quantity_skew", LABELS, 4, alpha=-1), "quantity_skew: alpha must be > 0, got -1"),
    (lambda: split("by_client", LABELS, 4), "take one of iid, dominant_class, dirichlet, shards, label_count, quantity_skew"),
    (lambda: split("dominant_class", LABELS, 12), "clients must be a multiple of the number of classes, 10, got 12"),
    (lambda: split("iid", LABELS[:3], 4), "iid: clients must be a whole number from 1 to 3, got 4"),
    (lambda: split("dirichlet", LABELS, 4, alpha=0.0), "dirichlet: alpha must be > 0, got 0.0"),
    (lambda: split("dirichle", LABELS, 4), "unknown partition 'dirichle'; did you mean 'dirichlet'?"),
    (lambda: split("by_client", LABELS, 4), "by_client: this data set names no clients"),
    (lambda: split("dominant_class", LABELS[::5000], 10, rho=0.5), "would get no sample"),
])  # fmt: skip
def test_bad_partitions_are_refused(bad, line):
    with pytest.raises(ValueError, match=line):
        bad()


@pytest.mark.parametrize("name,samples,shape", [("digits", 1797, (1, 8, 8)), ("breast-cancer", 569, (30,))])
def test_embedded_data(name, samples, shape):
    data = registry.datasets.find(name)()
    assert len(data.y) + len(data.y_test) == samples and data.x.shape[1:] == shape
    assert len(data.y_test) == round(samples / 5) and set(np.unique(data.y)) == set(range(data.classes))
    everything = np.concatenate([data.x, data.x_test]).reshape(samples, -1)
    assert len(np.unique(everything, axis=0)) >= samples - 5  # train and test are disjoint
    held = data.validation()
    assert len(held.y) + len(held.y_test) == len(data.y)
    problem = fedda.load(name, clients=2, model="logistic", validation=True)
    assert len(problem.test.y) == len(held.y_test) and int(problem.sizes.sum()) == len(held.y)


def test_breast_cancer_is_standardised_on_the_training_part():
    data = registry.datasets.find("breast-cancer")()
    assert abs(data.x.mean(0)).max() < 1e-5 and abs(data.x.std(0) - 1).max() < 1e-5
    assert abs(data.x_test.mean(0)).max() > 1e-3
