"""Which samples a rank trains: those of torch's DistributedSampler without its repeats; and whoever makes the data."""

import functools

import pytest
import torch
from exogym_toys import Line, Points
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, Subset, TensorDataset

from exogym import AllReduceStrategy, FitSettings, LocalTrainer
from exogym.errors import SettingError
from exogym.samplers.batches import DatasetSamples
from exogym.samplers.elastic import ElasticSampler
from exogym.trainer import call_factory, is_factory, samples_of


def ours(length, ranks, epoch, *, shuffle=True, seed=0, batch_size=4):
    """For each rank the numbers of its samples, in its order."""
    names = [f"rank{rank}" for rank in range(ranks)]
    samples = DatasetSamples(range(length), batch_size=batch_size, shuffle=shuffle, seed=seed)
    plans = samples.plan(epoch, None, names, [1.0] * ranks)
    assert len({len(plan) for plan in plans}) == 1
    return [[number for step in plan for number in step] for plan in plans]


def theirs(length, ranks, epoch, *, shuffle=True, seed=0):
    shares = []
    for rank in range(ranks):
        sampler = DistributedSampler(range(length), num_replicas=ranks, rank=rank, shuffle=shuffle, seed=seed)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
    return shares


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("length", [1, 7, 16])
@pytest.mark.parametrize("shuffle", [True, False])
def test_shares_are_those_of_distributed_sampler_without_its_repeats(length, ranks, shuffle):
    """It repeats samples until all ranks have equally many; here the last ranks have one less."""
    for epoch in (0, 1, 5):
        for seed in (0, 3):
            mine, torchs = (f(length, ranks, epoch, shuffle=shuffle, seed=seed) for f in (ours, theirs))
            repeated = -length % ranks
            for rank, (own, other) in enumerate(zip(mine, torchs, strict=True)):
                assert own == (other[:-1] if rank >= ranks - repeated else other)
            assert sorted(n for own in mine for n in own) == list(range(length))


class Told(Points):
    """Notes the epochs that it is told of, and which samples are read in them."""

    def __init__(self, size):
        super().__init__(size)
        self.epochs = []

    def set_epoch(self, epoch):
        self.epochs.append(epoch)


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: lambda rank, num_nodes, train_dataset: data])
def test_a_data_set_is_told_of_each_epoch(wrap):
    train, val = Told(16), Told(8)
    LocalTrainer(Line(), wrap(train), wrap(val)).fit(AllReduceStrategy(), num_epochs=3, batch_size=4, device="cpu")
    assert (train.epochs, val.epochs) == ([0, 1, 2], [])


def test_a_resumed_run_tells_the_epoch_that_it_is_in(tmp_path):
    settings = {"num_epochs": 3, "batch_size": 4, "device": "cpu", "save_dir": str(tmp_path)}
    steps, first, second = [], Told(16), Told(16)
    LocalTrainer(Line(), first).fit(
        AllReduceStrategy(), logger=steps.append, should_stop=lambda: len(steps) > 6, **settings
    )
    LocalTrainer(Line(), second).fit(AllReduceStrategy(), resume=True, **settings)
    assert first.epochs == [0, 1] and second.epochs == [1, 2]


# factories


def documented(rank, num_nodes, train_dataset):
    return rank, num_nodes, train_dataset


def keyword_only(rank, num_nodes, *, train_dataset):
    return rank, num_nodes, train_dataset


def other_names(r, n, is_training):
    return r, n, is_training


def in_between(train_dataset, rank, num_nodes):
    return rank, num_nodes, train_dataset


def gathers(*arguments):
    return arguments


def gathers_keywords(**named):
    return named["rank"], named["num_nodes"], named["train_dataset"]


def with_more(root, rank, num_nodes, train_dataset):
    return rank, num_nodes, train_dataset


class Maker:
    def __call__(self, rank, num_nodes, train_dataset):
        return rank, num_nodes, train_dataset


@pytest.mark.parametrize(
    "factory",
    [
        *(documented, keyword_only, other_names, in_between, gathers),
        *(gathers_keywords, functools.partial(with_more, "/data"), Maker()),
    ],
)
def test_a_factory_gets_what_is_documented(factory):
    assert call_factory(factory, 1, 3, False) == (1, 3, False)
    assert call_factory(factory, 0, 3, True) == (0, 3, True)


def by_val(rank, num_nodes, val):
    return rank, num_nodes, not val


def by_another_name(r, n, is_test=True):
    return r, n, not is_test


def both(rank, num_nodes, *, train, validation):
    assert train is not validation
    return rank, num_nodes, train


def bound(train_dataset, val_dataset, rank, num_nodes, evaluation):
    assert train_dataset == "a" and val_dataset == "b"
    return rank, num_nodes, not evaluation


@pytest.mark.parametrize(
    "factory", [by_val, by_another_name, both, functools.partial(bound, train_dataset="a", val_dataset="b")]
)
def test_the_kind_of_data_goes_by_the_name_of_its_argument(factory):
    """Upstream of commit c8012ac calls factories with (rank, num_nodes, val), of 9fa323c with train_dataset."""
    assert call_factory(factory, 1, 3, True) == (1, 3, True)
    assert call_factory(factory, 0, 3, False) == (0, 3, False)


def only_two(rank, num_nodes):
    return rank, num_nodes


@pytest.mark.parametrize("factory", [only_two, lambda r, n: (r, n), lambda rank, num_nodes, seed=0: (rank, num_nodes)])
def test_a_factory_may_leave_the_kind_of_data_out(factory):
    assert call_factory(factory, 1, 3, True) == (1, 3)


def test_a_factory_that_takes_something_else_is_refused():
    message = r"takes \(rank, num_nodes, train_dataset\), or `val` as the third, not \((path|a, b, c)\)"
    for factory in (lambda path: path, lambda a, b, c: (a, b, c)):
        with pytest.raises(SettingError, match=message):
            call_factory(factory, 0, 1, True)


def test_what_counts_as_a_factory():
    class Callable(Points):
        def __call__(self, *_):
            raise AssertionError("a data set")

    class List(list):
        def __call__(self, *_):
            raise AssertionError("a data set")

    assert not any(map(is_factory, (Callable(2), List(), [1, 2], Points(2), None)))
    assert all(map(is_factory, (documented, Maker(), Points, lambda *_: None)))


def factory(rank, num_nodes, train_dataset):
    assert train_dataset
    return Subset(Points(16), range(rank, 16, num_nodes))


@pytest.mark.slow
def test_a_factory_for_training_beside_a_data_set_for_validation():
    events = []
    trainer = LocalTrainer(model=Line(), train_dataset=factory, val_dataset=Points(6))
    trainer.fit(strategy=AllReduceStrategy(lr=0.1), num_nodes=2, batch_size=4, device="cpu", logger=events.append)
    assert trainer.result.steps == 2 and sum(result.samples for result in trainer.results) == 16
    losses = [event["loss"] for event in events if event["type"] == "validation"]
    x, y = Points(6).x, Points(6).y
    assert losses == pytest.approx([trainer.model((x, y)).item()] * 2, rel=1e-5)


# val_size


def validated(data, **settings):
    settings = FitSettings(strategy=AllReduceStrategy(), **{"batch_size": 4, "device": "cpu"} | settings)
    return samples_of(data, 0, 1, settings, training=False)


@pytest.mark.parametrize("size", [1, 3, 4, 10])
def test_val_size_is_the_number_of_samples_spread_over_all(size):
    samples = validated(TensorDataset(torch.arange(10)), val_size=size)
    used = [int(samples.dataset[n][0]) for n in range(len(samples))]
    assert len(used) == size and used == {1: [0], 3: [0, 3, 6], 4: [0, 2, 5, 7], 10: list(range(10))}[size]


def test_more_than_there_are_is_all_and_each_ranks_own_is_cut():
    assert len(validated(Points(5), val_size=100)) == 5
    assert len(validated(lambda rank, num_nodes, train_dataset: Points(5), val_size=2)) == 2


@pytest.mark.parametrize("num_nodes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_fewer_than_a_batch_are_validated_on(num_nodes):
    trainer = LocalTrainer(Line(), Points(16), Points(9))
    settings = {"batch_size": 8, "device": "cpu", "num_nodes": num_nodes}
    trainer.fit(AllReduceStrategy(), val_size=1, **settings)
    data = Points(9)
    assert trainer.result.val_loss == pytest.approx(trainer.model((data.x[:1], data.y[:1])).item(), rel=1e-5)


def test_val_size_without_use_is_an_error():
    with pytest.raises(SettingError, match="without val_dataset: val_size would not be used"):
        LocalTrainer(Line(), Points(4)).fit(AllReduceStrategy(), val_size=3)


def test_64_samples_are_validated_on_unless_another_number_is_given():
    assert [len(validated(Points(100), **given)) for given in ({}, {"val_size": None})] == [64, 100]
    LocalTrainer(Line(), Points(4)).fit(AllReduceStrategy(), device="cpu")  # 64 was not asked for


# kinds of samples, and mistakes


class Uneven(Points):
    """Its samples are no tensors of one shape: torch cannot make a batch of them."""

    def __getitem__(self, i):
        return [*super().__getitem__(i), "word" * i]

    def collate_fn(self, samples):
        x, y, words = zip(*samples, strict=True)
        return {"x": torch.stack(x), "y": torch.stack(y), "words": words}


@pytest.mark.parametrize(
    "wrap", [lambda data: data, lambda data: Subset(data, range(6)), lambda data: lambda r, n: data]
)
def test_a_data_sets_own_collate_fn_makes_the_batches(wrap):
    class Reads(Line):
        def forward(self, batch):
            assert len(batch["words"]) == len(batch["x"]) and type(batch["words"][0]) is str
            return super().forward((batch["x"], batch["y"]))

    trainer = LocalTrainer(Reads(), wrap(Uneven(8)), wrap(Uneven(8)))
    trainer.fit(AllReduceStrategy(), batch_size=4, val_size=3, device="cpu")
    assert trainer.result.val_loss is not None


class OfAnyKind(Line):
    def forward(self, batch):
        if isinstance(batch, dict):
            batch = batch["x"], batch["y"]
        elif isinstance(batch, torch.Tensor):
            x = batch.float().reshape(len(batch), -1)[:, :1].expand(-1, 4)
            batch = x, x.sum(1, keepdim=True)
        return super().forward(batch)


KINDS = {
    "tuples": Points(9),
    "dicts": [{"x": torch.ones(4), "y": torch.ones(1), "ids": f"clip {n}"} for n in range(9)],
    "lists": [[torch.ones(4), torch.ones(1)] for _ in range(9)],
    "tensors": list(torch.randn(9, 4)),
    "one tensor": torch.randn(9, 4),
    "numbers": [0.5, 1.5, 2.5, 3.5, 4.5, 5.5, 6.5, 7.5, 8.5],
    "whole numbers": range(9),
}


@pytest.mark.parametrize("kind", KINDS)
def test_samples_of_any_kind(kind):
    trainer = LocalTrainer(OfAnyKind(), KINDS[kind], KINDS[kind])
    trainer.fit(AllReduceStrategy(lr=1e-3), num_epochs=2, batch_size=4, device="cpu")
    assert trainer.result.samples == 18 and trainer.result.val_loss is not None


@pytest.mark.parametrize(
    ("length", "num_nodes"),
    [(1, 1), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((1, 2), (7, 3)))],
)
def test_less_data_than_a_batch_of_all_ranks(length, num_nodes):
    trainer = LocalTrainer(Line(), Points(length))
    trainer.fit(AllReduceStrategy(lr=0.1), num_epochs=2, num_nodes=num_nodes, batch_size=4, device="cpu")
    assert trainer.result.steps == 2 and sum(result.samples for result in trainer.results) == 2 * length


class Stream(IterableDataset):
    def __iter__(self):
        return iter([1, 2, 3])

    def __len__(self):
        return 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((Points(0), None), "train_dataset is empty: Points has no sample"),
        ((Points(4), Points(0)), "val_dataset is empty: Points has no sample"),
        ((lambda *_: Points(0), None), "there is nothing to train on: no rank has a sample"),
        ((None, None), "train_dataset is None"),
        ((lambda *_: None, None), "train_dataset is None, or its factory returned None"),
        ((DataLoader(Points(4)), None), "give the data set itself, not a DataLoader"),
        ((Stream(), None), "Stream has no length or no order"),
    ],
)
def test_data_that_cannot_be(data, message):
    with pytest.raises(SettingError, match=message):
        LocalTrainer(Line(), *data).fit(AllReduceStrategy(), device="cpu")


def test_sizes_that_a_source_of_batches_would_not_use():
    source = ElasticSampler(DatasetSamples(Points(4), batch_size=2), ["rank0"], "rank0")
    with pytest.raises(SettingError, match="ElasticSampler makes its own batches: minibatch_size would not be used"):
        LocalTrainer(Line(), source).fit(AllReduceStrategy(), minibatch_size=1, device="cpu")


def test_only_the_kind_of_data_is_told_to_a_factory():
    """Not a second flag, nor one that a partial has set; and None is no kind."""

    def two(rank, num_nodes, train_dataset, test=False):
        return train_dataset, test

    def unset(rank, num_nodes, train=None):
        return train

    assert [call_factory(two, 0, 1, training) for training in (True, False)] == [(True, False), (False, False)]
    assert [call_factory(unset, 0, 1, training) for training in (True, False)] == [True, False]
    assert call_factory(functools.partial(unset, train=True), 0, 1, False) is True
