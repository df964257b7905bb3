from collections import namedtuple

import pytest
import torch
from exogym_toys import Points

from exogym.errors import SettingError
from exogym.samplers.batches import BatchSource, DatasetBatches, count_samples, to_device


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


def test_a_step_is_cut_into_micro_batches():
    batches = DatasetBatches(Numbers(11), batch_size=4, minibatch_size=3)
    assert isinstance(batches, BatchSource)
    steps = drawn(batches)
    assert len(steps) == 3 == batches.steps_per_epoch
    assert [[len(b) for b in step] for step in steps] == [[3, 1], [3, 1], [3]]
    assert sorted(flattened(steps)) == list(range(11))


def test_each_epoch_is_shuffled_anew_and_reproducibly():
    batches = DatasetBatches(Numbers(16), batch_size=4, seed=3)
    assert drawn(batches, 0) != drawn(batches, 1)
    assert drawn(batches, 1) == drawn(DatasetBatches(Numbers(16), batch_size=4, seed=3), 1)
    assert drawn(batches) != drawn(DatasetBatches(Numbers(16), batch_size=4, seed=4))
    assert flattened(drawn(DatasetBatches(Numbers(5), batch_size=2, shuffle=False))) == list(range(5))


def test_a_rank_with_less_data_gets_empty_steps():
    batches = DatasetBatches(Numbers(3), batch_size=2, shuffle=False, may_be_lengthened=True)
    batches.steps_per_epoch = 4
    assert drawn(batches) == [[[0, 1]], [[2]], [], []]
    nothing = DatasetBatches(Numbers(0), batch_size=2, may_be_lengthened=True)
    nothing.steps_per_epoch = 2
    assert drawn(nothing) == [[], []]


def test_mistakes():
    for size in (0, 3):
        with pytest.raises(SettingError, match="minibatch_size"):
            DatasetBatches(Points(4), batch_size=2, minibatch_size=size)


def test_batches_of_any_shape_move_and_count():
    Pair = namedtuple("Pair", "x name")
    batch = {"a": [torch.ones(3, 2)], "ids": ["x", "y", "z"], "pair": Pair(torch.ones(3), "n")}
    moved = to_device(batch, torch.device("meta"))
    assert (
        moved["a"][0].is_meta and moved["pair"].x.is_meta and moved["pair"].name == "n" and moved["ids"] == batch["ids"]
    )
    assert count_samples(batch) == 3 == count_samples((torch.ones(3, 4), torch.ones(3)))
    assert count_samples({"x": torch.ones(80, 4), "ids": []}) == 0  # noise alone, without a clip
    with pytest.raises(SettingError, match="at least one tensor"):
        count_samples({"texts": ["x"]})


def test_samples_are_put_together_as_the_caller_says():
    batches = DatasetBatches(Numbers(3), batch_size=2, shuffle=False, collate=lambda samples: [s["i"] for s in samples])
    assert list(batches.epoch(0)) == [[[0, 1]], [[2]]]
