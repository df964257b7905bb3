import multiprocessing
import random
import threading
import time

import numpy as np
import pytest
import torch
from exogym_toys import Line, Points, Sentences, Tokens, run_threads

from exogym import AllReduceStrategy, DiLoCoStrategy, FitSettings, LocalTrainer, LoopSettings, Trainer
from exogym.comm.comm import ThreadComm, _Shared
from exogym.comm.elastic import ElasticComm
from exogym.errors import SettingError
from exogym.flat import FlatParameters, digest
from exogym.membership.client import CoordinatorClient
from exogym.membership.coordinator import Coordinator


def unequal_shares(rank, num_nodes, train_dataset):
    return Points((5 if rank else 12) if train_dataset else 4 + rank)


def test_two_nodes_train_and_the_model_comes_back():
    model, events = Tokens(), []
    before = FlatParameters(model).read()
    fit = LocalTrainer(model, Sentences(), Sentences())
    returned = fit.fit(
        strategy=DiLoCoStrategy(lr=0.05, H=4),
        num_epochs=6,
        num_nodes=2,
        batch_size=4,
        minibatch_size=2,
        device="cpu",
        logger=events.append,
        timeout=60,
    )
    assert returned is fit.model is model and not torch.equal(FlatParameters(model).read(), before)
    assert digest(FlatParameters(model).read()) == fit.result.digest
    assert [result.digest for result in fit.results] == [fit.result.digest] * 2
    assert fit.results[0] is fit.result and fit.results[1].samples == 72
    assert (fit.result.steps, fit.result.rounds) == (18, 5)
    assert fit.model.head.weight is fit.model.embedding.weight
    for number in range(1, 6):
        assert len({e["digest"] for e in events if e["type"] == "round" and e["round"] == number}) == 1
    losses = [e["loss"] for e in events if e["type"] == "validation" and e["rank"] == 0]
    assert losses[-1] < 0.9 * losses[0] and losses[-1] == fit.result.val_loss
    assert not multiprocessing.active_children()


def test_one_node_trains_here_and_leaves_the_random_state_alone():
    model, strategy = Line(), AllReduceStrategy(lr=0.05)
    before = model((Points(4).x, Points(4).y)).item()
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    trainer = LocalTrainer(model, Points(16), Points(4))
    trainer.fit(strategy=strategy, num_epochs=30, device="cpu", batch_size=8)
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[1:]
    assert trainer.result.val_loss < 0.5 * before
    assert trainer.result.val_loss == pytest.approx(model((Points(4).x, Points(4).y)).item())
    assert not hasattr(strategy, "comm")


class ThreadTrainer(Trainer):
    """Another way for ranks to meet: what a trainer over a network does."""

    def __init__(self, comms, *data):
        super().__init__(Line(), *data)
        self.comms = comms

    def _build_connection(self, rank):
        return self.comms[rank]

    def fit(self, **settings):
        def rank_main(comm):
            events = []
            node = ThreadTrainer({comm.rank: comm}, self.train_dataset, self.val_dataset)
            node.run_rank(comm.rank, FitSettings(**settings), events=events.append)
            return node.model, events

        return run_threads(2, rank_main)


class ElasticTrainer(Trainer):
    """Ranks that a coordinator calls together, as NetworkTrainer's are."""

    def __init__(self, meeting, name, *data):
        super().__init__(Line(), *data)
        self.meeting, self.name = meeting, name

    def _build_connection(self, rank):
        return ElasticComm(self.name, NAMES, self.meeting.clients[self.name], self.meeting.say(self.name), self._join)

    def _join(self, generation, rank, interrupted):
        return ThreadComm(rank, self.meeting.groups.setdefault(generation.number, _Shared(len(NAMES), 20)))

    def fit(self, **settings):
        events = []
        self.run_rank(NAMES.index(self.name), FitSettings(**settings), events=events.append)
        return self.model, events


class Meeting:
    def __init__(self):
        self.lock, self.groups = threading.RLock(), {}
        self.clients = {name: CoordinatorClient() for name in NAMES}
        self.coordinator = Coordinator(
            NAMES, lambda name, message: self.clients[name].put(message), lambda event: None, clock=time.monotonic
        )

    def say(self, name):
        def say(message):
            with self.lock:
                if message["type"] in ("vote", "round_end", "trouble"):
                    getattr(self.coordinator, message["type"])(name, message)

        return say

    def fit(self, *data, **settings):
        def rank_main(comm):
            with self.lock:
                self.coordinator.ready(NAMES[comm.rank])
            return ElasticTrainer(self, NAMES[comm.rank], *data).fit(**settings)

        return run_threads(len(NAMES), rank_main)


NAMES = ("ada", "bob")


@pytest.mark.parametrize("strategy", [AllReduceStrategy, DiLoCoStrategy])
def test_factories_where_ranks_are_called_together(strategy):
    """As NetworkTrainer does: there is no group yet when the data sets are made."""
    settings = {"num_epochs": 2, "batch_size": 4, "device": "cpu"}
    ranks = Meeting().fit(unequal_shares, unequal_shares, strategy=strategy(lr=0.05), **settings)
    samples = [[e["samples"] for e in events if e["type"] == "step"] for _, events in ranks]
    assert samples == [[4, 4, 4] * 2, [4, 1, 0] * 2]
    assert torch.equal(ranks[0][0].linear.weight, ranks[1][0].linear.weight)
    plain = ThreadTrainer({}, unequal_shares, unequal_shares).fit(strategy=strategy(lr=0.05), **settings)
    assert torch.equal(ranks[0][0].linear.weight, plain[0][0].linear.weight)
    totals = [[e["total_steps"] for e in events if e["type"] in ("start", "plan")] for _, events in ranks]
    assert totals == [[6], [4, 6]]


def test_a_factorys_data_are_shuffled_anew_in_each_epoch():
    seen = []

    class Watched(Points):
        def __getitem__(self, i):
            seen.append(i)
            return super().__getitem__(i)

    LocalTrainer(Line(), lambda *_: Watched(8)).fit(
        strategy=AllReduceStrategy(), num_epochs=2, batch_size=4, minibatch_size=4, device="cpu"
    )
    first, second = seen[:8], seen[8:]
    assert sorted(first) == sorted(second) == list(range(8)) and first != second and first != sorted(first)


@pytest.mark.slow
def test_should_stop_reaches_the_nodes():
    seen = []
    trainer = LocalTrainer(Line(), Points(16))
    trainer.fit(
        strategy=AllReduceStrategy(),
        max_steps=10**6,
        num_nodes=2,
        batch_size=8,
        device="cpu",
        logger=seen.append,
        should_stop=lambda: len(seen) > 5,
        timeout=60,
    )
    assert trainer.result.stopped and trainer.result.steps < 10**6


def test_settings_that_cannot_be():
    trainer = LocalTrainer(Line(), Points(4))
    with pytest.raises(SettingError, match=r"'num_epoch'; did you mean 'num_epochs'\?"):
        trainer.fit(strategy=AllReduceStrategy(), num_epoch=3)
    with pytest.raises(SettingError, match="give num_epochs or max_steps"):
        LoopSettings()
    assert FitSettings(strategy=AllReduceStrategy()).num_epochs == 1
    with pytest.raises(SettingError, match=r"the train_dataset must travel .* by pickle, and cannot: .*lock"):
        locked = Points(4)
        locked.lock = threading.Lock()
        LocalTrainer(Line(), locked).fit(strategy=AllReduceStrategy(), num_epochs=1, num_nodes=2)
