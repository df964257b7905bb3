from collections import namedtuple

import pytest
import torch
from exogym_toys import Points

from exogym.batches import BatchSource, DatasetBatches, count_samples, to_device
from exogym.errors import SettingError


class Numbers(torch.utils.data.Dataset):
    def __init__(self, size):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, i):
        return {"i": torch.tensor(i)}


def drawn(batches, epoch=0):
    return [[b["i"].tolist() for b in step] for step in batches.epoch(epoch)]


def flattened(steps):
    return [i for step in steps for batch in step for i in batch]


def test_ranks_share_the_dataset_and_accumulate():
    shares = [DatasetBatches(Numbers(22), rank=r, num_nodes=2, batch_size=4, minibatch_size=3) for r in range(2)]
    assert isinstance(shares[0], BatchSource)
    steps = [drawn(s) for s in shares]
    assert [len(s) for s in steps] == [3, 3] == [s.steps_per_epoch for s in shares]
    assert [[len(b) for b in step] for step in steps[0]] == [[3, 1], [3, 1], [3]]
    assert sorted(flattened(steps[0]) + flattened(steps[1])) == list(range(22))


def test_each_epoch_is_shuffled_anew_and_reproducibly():
    batches = DatasetBatches(Numbers(16), batch_size=4, seed=3)
    assert drawn(batches, 0) != drawn(batches, 1)
    assert drawn(batches, 1) == drawn(DatasetBatches(Numbers(16), batch_size=4, seed=3), 1)
    assert drawn(batches) != drawn(DatasetBatches(Numbers(16), batch_size=4, seed=4))
    assert flattened(drawn(DatasetBatches(Numbers(5), batch_size=2, shuffle=False))) == list(range(5))


def test_padding_gives_all_ranks_as_many_steps_and_validation_counts_each_sample_once():
    padded = [DatasetBatches(Numbers(7), rank=r, num_nodes=3, batch_size=2) for r in range(3)]
    assert [len(flattened(drawn(b))) for b in padded] == [3, 3, 3]
    once = [DatasetBatches(Numbers(7), rank=r, num_nodes=3, batch_size=2, pad=False) for r in range(3)]
    assert sorted(i for b in once for i in flattened(drawn(b))) == list(range(7))
    assert [b.steps_per_epoch for b in once] == [2, 1, 1]


def test_a_rank_with_less_data_gets_empty_steps():
    assert drawn(DatasetBatches(Numbers(3), batch_size=2, shuffle=False, steps_per_epoch=4)) == [
        [[0, 1]],
        [[2]],
        [],
        [],
    ]
    assert drawn(DatasetBatches(Numbers(0), batch_size=2, steps_per_epoch=2)) == [[], []]


def test_mistakes():
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(())

    with pytest.raises(SettingError, match="Stream has no length"):
        DatasetBatches(Stream())
    with pytest.raises(SettingError, match="minibatch_size"):
        DatasetBatches(Points(4), batch_size=2, minibatch_size=3)


def test_batches_of_any_shape_move_and_count():
    Pair = namedtuple("Pair", "x name")
    batch = {"a": [torch.ones(3, 2)], "ids": ["x", "y", "z"], "pair": Pair(torch.ones(3), "n")}
    moved = to_device(batch, torch.device("meta"))
    assert (
        moved["a"][0].is_meta and moved["pair"].x.is_meta and moved["pair"].name == "n" and moved["ids"] == batch["ids"]
    )
    assert count_samples(batch) == 3 == count_samples((torch.ones(3, 4), torch.ones(3)))
    with pytest.raises(SettingError, match="at least one tensor"):
        count_samples({"ids": ["x"]})
