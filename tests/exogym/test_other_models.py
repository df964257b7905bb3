"""Models as people bring them: what they return, what their weights are, and what is refused by name."""

import pickle
from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from exogym_toys import STRATEGIES, Line, Points, Steps, join_batches, run_threads, train_node
from torch import nn
from torch.nn.utils import parametrizations

from exogym import AllReduceStrategy, DiLoCoStrategy, LocalTrainer
from exogym.comm.comm import SingleComm
from exogym.errors import SettingError
from exogym.flat import FlatParameters
from exogym.micro_batches import loss_of
from exogym.nodes import pickled

BATCH = (torch.ones(2, 4), torch.ones(2, 1))


def fit(model, data=None, strategy=None, **settings):
    trainer = LocalTrainer(model, Points(8) if data is None else data)
    settings = {"max_steps": 4, "batch_size": 4, "device": "cpu"} | settings
    trainer.fit(strategy or AllReduceStrategy(inner_optim="sgd", lr=0.1), **settings)
    return trainer


# What forward returns.

LOSS = torch.tensor(2.0, requires_grad=True)
Pair = namedtuple("Pair", "loss tokens")
HAVE_A_LOSS = {
    "a tensor": (LOSS, None),
    "a tensor of one number": (LOSS.view(1), None),
    "tokens": ((LOSS, 3), 3),
    "tokens of numpy": ((LOSS, np.int64(3)), 3),
    "tokens in a tensor": ((LOSS, torch.tensor(3)), 3),
    "no tokens": ((LOSS.detach(), 0), 0),
    "a list": ([LOSS, 3], 3),
    "a loss alone in a tuple": ((LOSS,), None),
    "logits": ((LOSS, torch.zeros(2, 5)), None),
    "logits of one number": ((LOSS, torch.zeros(1, 1)), None),
    "predictions": ((LOSS, torch.tensor([3, 4])), None),
    "logits and more": ((LOSS, torch.zeros(2, 5), torch.zeros(2)), None),
    "figures": ((LOSS, {"accuracy": 0.5}), None),
    "a dict": ({"accuracy": 0.5, "loss": LOSS}, None),
    "a ModelOutput": (OrderedDict(loss=LOSS, logits=torch.zeros(2, 5)), None),
    "an object": (SimpleNamespace(loss=LOSS, logits=None), None),
    "a named tuple": (Pair(LOSS, 3), 3),
}


@pytest.mark.parametrize("kind", HAVE_A_LOSS)
def test_the_loss_is_found_where_the_convention_says(kind):
    output, tokens = HAVE_A_LOSS[kind]
    loss, weight = loss_of(output)
    assert (loss.item(), weight) == (2.0, tokens)


NO_LOSS = {
    "None": (None, "returned NoneType, and its loss is NoneType"),
    "a float": (0.5, "its loss is float"),
    "an empty tuple": ((), "its loss is tuple"),
    "a dict without": ({"logits": torch.zeros(2)}, "returned dict, and its loss is NoneType"),
    "an object without": (SimpleNamespace(loss=None, logits=torch.zeros(2)), "its loss is NoneType"),
    "a loss for each sample": (torch.ones(3, requires_grad=True), r"its loss is torch.float32\[3\]"),
    "whole numbers": (torch.tensor(3), r"its loss is torch.int64\[\]"),
    "complex": (torch.tensor(3j, requires_grad=True), "its loss is torch.complex64"),
    "logits first": ((torch.zeros(2, 5), torch.zeros(3)), r"returned tuple, and its loss is torch.float32\[2, 5\]"),
    "detached": (torch.tensor(0.5), "the model's loss has no gradient"),
    "nan": ((LOSS, float("nan")), "returned nan beside its loss, and that is no number of target tokens"),
    "below zero": ((LOSS, -1), "returned -1 beside its loss"),
    "accuracy": ((LOSS, 0.875), "returned 0.875 beside its loss"),
    "accuracy in a tensor": ((LOSS, torch.tensor(1.0)), r"returned tensor.1.. beside its loss"),
    "a truth value": ((LOSS, True), "returned True beside its loss"),
    "an array": ((LOSS, np.array(3)), r"returned array.3. beside its loss"),
    "text": ((LOSS, "3"), "returned '3' beside its loss"),
    "nothing beside": ((LOSS, None), "returned None beside its loss"),
    "a list of tokens": ((LOSS, torch.tensor([3])), r"returned tensor..3.. beside its loss"),
}


@pytest.mark.parametrize("kind", NO_LOSS)
def test_what_has_no_loss_is_refused_with_the_contract(kind):
    output, message = NO_LOSS[kind]
    with pytest.raises(SettingError, match=f"{message}.*must return the mean loss"):
        loss_of(output)


class Returns(Line):
    def __init__(self, output):
        super().__init__()
        self.output = output

    def forward(self, batch):
        return self.output(super().forward(batch))


def test_a_dict_trains_as_the_bare_loss_does_and_nothing_is_hidden_by_the_search_for_a_size():
    bare, told = (fit(Returns(output)).model for output in (lambda loss: loss, lambda loss: {"loss": loss}))
    assert torch.equal(bare.linear.weight, told.linear.weight)
    with pytest.raises(SettingError, match=r"0\.5 beside its loss"):
        fit(Returns(lambda loss: (loss, 0.5)))


def test_a_mistake_on_several_nodes_comes_as_itself():
    with pytest.raises(SettingError, match=r"^the model returned float, and its loss is float") as caught:
        fit(Returns(lambda loss: loss.item()), num_nodes=2)
    assert "Traceback" not in str(caught.value)


# What the weights are.


REFUSED = {
    "complex": (lambda: nn.Parameter(torch.ones(2, dtype=torch.cfloat)), "other is torch.complex64.*view_as_real"),
    "float64": (lambda: nn.Parameter(torch.ones(2).double()), r"other is torch.float64.*model.float\(\)"),
    "lazy": (lambda: nn.LazyLinear(3), "other.weight has no shape yet: call the model"),
    "a lazy buffer": (lambda: nn.LazyBatchNorm1d(affine=False), "other.running_mean has no shape yet"),
    "scripted": (lambda: torch.jit.script(nn.Linear(4, 1)), "other is a ScriptModule"),
    "traced": (lambda: torch.jit.trace(nn.Linear(4, 1), torch.ones(1, 4)), "other is a ScriptModule"),
}


def holding(other):
    model = Line()
    model.other = other
    return model


@pytest.mark.parametrize("kind", REFUSED)
def test_what_ranks_cannot_train_together_is_refused_by_name(kind):
    make, message = REFUSED[kind]
    with pytest.raises(SettingError, match=message):
        LocalTrainer(holding(make()), Points(8))


@pytest.mark.parametrize("model", [None, lambda batch: batch])
def test_what_is_no_module_is_refused(model):
    with pytest.raises(SettingError, match=r"must be a torch.nn.Module, not"):
        LocalTrainer(model, Points(8))


def test_a_model_that_became_float64_later_is_refused_where_it_would_be_rounded():
    trainer = LocalTrainer(Line(), Points(8))
    trainer.model.double()
    with pytest.raises(SettingError, match=r"linear\.weight is torch\.float64"):
        trainer.fit(AllReduceStrategy(), device="cpu", minibatch_size=4)


def test_a_model_without_anything_to_train_is_refused():
    with pytest.raises(SettingError, match="no trainable parameters"):
        fit(Line().requires_grad_(False))


def test_numbers_of_other_kinds_in_buffers_stay_as_they_are():
    """A constant in float64 to its last bit, and complex ones, as of rotary embeddings."""
    model = Line()
    model.register_buffer("window", torch.linspace(0, 1, 7, dtype=torch.float64))
    model.register_buffer("turns", torch.polar(torch.ones(5), torch.arange(5.0)))
    model.register_buffer("precise", torch.polar(torch.ones(5).double(), torch.arange(5.0).double()))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    def rank_main(comm):
        own = holding(None)
        for name, buffer in before.items():
            own.register_buffer(name, buffer.clone())
        train_node(own, comm, DiLoCoStrategy(inner_optim="sgd", lr=0.1, H=2), Steps([[BATCH]] * 4), epochs=1).run()
        return dict(own.named_buffers())

    for found in run_threads(2, rank_main):
        assert all(torch.equal(found[name], buffer) for name, buffer in before.items())


class Turning(Line):
    """Its complex buffer follows the data, as BatchNorm's mean does."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(3, dtype=torch.cfloat))

    def forward(self, batch):
        self.mean.lerp_(batch[1].mean() * torch.tensor([1j, 1 + 1j, 2]), 0.5)
        return super().forward(batch)


@pytest.mark.parametrize("name", ["allreduce", "diloco", "sparta_diloco", "demo"])
def test_complex_buffers_are_averaged(name):
    def rank_main(comm):
        model, y = Turning(), torch.full((2, 1), comm.rank + 1.0)
        train_node(model, comm, STRATEGIES[name](lr=0.0), Steps([[(torch.ones(2, 4), y)]]), epochs=1).run()
        return model.mean

    for mean in run_threads(2, rank_main):
        torch.testing.assert_close(mean, 0.75 * torch.tensor([1j, 1 + 1j, 2]))


# What changes while it trains.


class Thaws(Line):
    """Freezes its bias, or thaws it, in the third forward pass."""

    def __init__(self, trained):
        super().__init__()
        self.linear.bias.requires_grad_(trained)
        self.passes, self.then = 0, not trained

    def forward(self, batch):
        self.passes += 1
        if self.passes == 3:
            self.linear.bias.requires_grad_(self.then)
        return super().forward(batch)


class Grows(Line):
    """Makes a layer when it is first called."""

    def forward(self, batch):
        if not hasattr(self, "head"):
            self.head = nn.Linear(1, 1)
        return self.head(self.linear(batch[0])).mean()


@pytest.mark.parametrize(
    ("make", "name"),
    [(lambda: Thaws(True), "linear.bias"), (lambda: Thaws(False), "linear.bias"), (Grows, "head.weight")],
)
def test_what_is_trained_may_not_change_on_the_way(make, name):
    with pytest.raises(SettingError, match=f"{name} is new, or its requires_grad was changed, since training began"):
        fit(make(), minibatch_size=4)


def test_a_change_that_is_taken_back_within_the_pass_is_none():
    class Peeks(Line):
        def forward(self, batch):
            self.requires_grad_(False)
            self.linear(batch[0])
            self.requires_grad_(True)
            return super().forward(batch)

    assert fit(Peeks()).result.steps == 4


def test_the_search_for_a_size_leaves_no_flags_behind():
    """It makes several passes, and so comes to the third before training begins."""
    model = Thaws(False)
    fit(model, max_steps=2)
    assert model.passes == 0 and not model.linear.bias.requires_grad


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        self.table = nn.EmbeddingBag(9, 4, sparse=sparse)

    def forward(self, batch):
        return self.table(batch).square().mean()


@pytest.mark.parametrize("strategy", ["allreduce", "diloco", "demo", "own"])
def test_sparse_gradients_are_refused_by_name(strategy):
    data = torch.randint(9, (8, 3))
    with pytest.raises(SettingError, match=r"gradient of table\.weight is sparse.*sparse=False"):
        fit(Words(sparse=True), data, STRATEGIES[strategy](lr=0.1))
    fit(Words(sparse=False), data, STRATEGIES[strategy](lr=0.1))


def test_sparse_gradients_are_refused_where_they_are_sent_during_the_backward_pass():
    def rank_main(comm):
        model = nn.Sequential(nn.Linear(4, 4), nn.EmbeddingBag(9, 4, sparse=True))
        model.forward = lambda batch: model[1](batch[0]).mean() + model[0](batch[1]).mean()
        source = Steps([[(torch.ones(2, 3, dtype=torch.long), torch.ones(2, 4))]])
        train_node(model, comm, AllReduceStrategy(bucket_mb=1e-6), source, epochs=1).run()

    with pytest.raises(SettingError, match=r"gradient of 1\.weight is sparse"):
        run_threads(2, rank_main)


# Modules whose weight is computed of others.

COMPUTED = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "both": lambda layer: parametrizations.spectral_norm(parametrizations.weight_norm(layer)),
    "orthogonal": parametrizations.orthogonal,
}


class Computed(Line):
    def __init__(self, wrap):
        super().__init__()
        self.linear = wrap(self.linear)


@pytest.mark.parametrize("kind", COMPUTED)
def test_parametrized_modules_travel(kind):
    """Their classes are made for each of them, so pickle cannot find these by name, and torch refuses."""
    model = Computed(COMPUTED[kind])
    copy = pickle.loads(pickled(model))
    assert type(copy.linear).__name__ == "ParametrizedLinear" and "weight" not in copy.linear._parameters
    assert copy(BATCH) == model(BATCH)
    copy.load_state_dict(model.state_dict())
    fit(copy)
    assert not torch.equal(copy.linear.weight, model.linear.weight)


@pytest.mark.slow  # processes
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_parametrized_modules_train_on_two_nodes_as_on_one(kind):
    models = [Computed(COMPUTED[kind]) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for nodes, model in enumerate(models, 1):
        fit(model, Points(16), num_nodes=nodes, max_steps=6, batch_size=8 // nodes, shuffle=False)
    torch.testing.assert_close(models[0].linear.weight, models[1].linear.weight, rtol=1e-4, atol=1e-5)


# Parameters of any kind.


class Mixed(nn.Module):
    """Of no dimension, in bf16, in another order of memory, tied; frozen whole numbers; a branch that not all take."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.conv = nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last)
        self.first, self.second = nn.Linear(4, 3, bias=False), nn.Linear(4, 3, bias=False)
        self.second.weight = self.first.weight
        self.low = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.whole = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)
        self.branch = nn.Parameter(torch.ones(3))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, batch):
        x, taken = batch
        self.count += 1
        images = torch.einsum("bi,bj->bij", x, x).unflatten(1, (2, 2)).transpose(2, 3)
        found = self.conv(images).mean((2, 3)) + self.first(x) * self.second(x) + self.low * self.whole
        if taken.any():
            found = found * self.branch
        return (self.scale * found).square().mean()


def mixed_batch(rank):
    return torch.randn(4, 4, generator=torch.Generator().manual_seed(rank)), torch.full((4,), rank)


@pytest.mark.parametrize("name", STRATEGIES)
def test_parameters_of_any_kind_end_alike_on_all_ranks(name):
    def rank_main(comm):
        model, order = Mixed(), torch.channels_last
        if name == "sharded":  # which refuses any other
            order = torch.contiguous_format
            model.conv.to(memory_format=order)
        before = FlatParameters(model).read()
        train_node(model, comm, STRATEGIES[name](lr=0.02), Steps([[mixed_batch(comm.rank)]] * 6), epochs=1).run()
        assert model.conv.weight.is_contiguous(memory_format=order)
        assert model.second.weight is model.first.weight and model.whole.tolist() == [1, 2, 3] and model.count == 6
        after = FlatParameters(model).read()
        assert (after != before).float().mean() > 0.8
        return after

    first, second = run_threads(2, rank_main)
    assert torch.equal(first, second)


def test_a_gradient_on_one_rank_only_counts_as_zeros_on_the_other():
    """As one process with the batch of both, whose mean it is."""
    alone = Mixed()
    both = join_batches([dict(enumerate(mixed_batch(rank))) for rank in range(2)])

    class Each(Mixed):
        def forward(self, batch):
            return sum(Mixed.forward(self, (batch[0][part], batch[1][part])) for part in (slice(4), slice(4, 8))) / 2

    alone.__class__ = Each
    sgd = {"inner_optim": "sgd", "lr": 0.1}
    train_node(alone, SingleComm(), AllReduceStrategy(**sgd), Steps([[(both[0], both[1])]]), epochs=1).run()

    def rank_main(comm):
        model = Mixed()
        train_node(model, comm, AllReduceStrategy(**sgd), Steps([[mixed_batch(comm.rank)]]), epochs=1).run()
        return FlatParameters(model).read()

    for found in run_threads(2, rank_main):
        torch.testing.assert_close(found, FlatParameters(alone).read(), rtol=1e-3, atol=1e-4)
