"""AllReduce's buckets travel while the backward pass still runs."""

import copy
import gc
import pickle
import threading
import time
import weakref

import pytest
import torch
from exogym_toys import Line, Processes, Steps, Tokens, make_step, run_threads, token_batch, train_node
from torch import nn
from torch.utils.checkpoint import checkpoint

from exogym import AllReduceStrategy, FlatParameters, SingleComm
from exogym.errors import SettingError
from exogym.strategy.all_reduce import divide

EACH_ALONE = 1e-6  # bucket_mb: no two parameters share a bucket
MB = 1 << 20


def strategy(**settings):
    return AllReduceStrategy(**{"inner_optim": "sgd", "lr": 0.1, "bucket_mb": EACH_ALONE, **settings})


def threads():
    return [thread for thread in threading.enumerate() if thread.name == "background collectives"]


def linear(inputs, outputs, seed):
    """The same in every rank, also where ranks are threads."""
    layer, generator = nn.Linear(inputs, outputs), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 2)
    return layer


# What is in a bucket.


def parts(sizes, most_mb=None):
    return [[*range(len(sizes))[b.parameters]] for b in divide(sizes, most_mb)]


def test_buckets_go_from_the_last_parameter_to_the_first_and_the_first_is_small():
    quarter = MB // 16  # values of 0.25 MB
    assert parts([quarter] * 14, 2) == [[10, 11, 12, 13], [2, 3, 4, 5, 6, 7, 8, 9], [0, 1]]
    assert parts([quarter] * 3, 0.5) == [[1, 2], [0]]
    assert parts([quarter, 40 * quarter, quarter, quarter], 2) == [[2, 3], [1], [0]]
    assert parts([40 * quarter], 2) == [[0]] and parts([3, 0, 3], EACH_ALONE) == [[2], [1], [0]]
    assert parts([0, 3], EACH_ALONE) == [[1], [0]]


def test_without_a_size_there_are_about_sixteen_of_1_to_25_mb():
    quarter = MB // 16
    assert parts([quarter] * 3) == [[0, 1, 2]]
    assert parts([quarter] * 6) == [[2, 3, 4, 5], [0, 1]]
    assert len(parts([quarter] * 16 * 4 * 3)) == 17  # 48 MB in buckets of 3, but for the first one
    assert [len(part) for part in parts([4 * quarter] * 1000)][:3] == [1, 25, 25]


def test_each_value_is_in_one_bucket():
    sizes = [7, 1, 300_000, 5, 5, 900_000, 2, 80_000]
    for most in (None, 1e-6, 0.1, 1, 4, 100):
        buckets = divide(sizes, most)
        assert [n for b in reversed(buckets) for n in range(8)[b.parameters]] == list(range(8))
        starts = [b.values.start for b in buckets]
        assert [b.values.stop for b in buckets] == [sum(sizes), *starts[:-1]] and starts[-1] == 0
        assert all(b.values.start == sum(sizes[: b.parameters.start]) for b in buckets)


def test_settings():
    assert AllReduceStrategy().config.overlap
    with pytest.raises(SettingError, match="bucket_mb must be above 0"):
        AllReduceStrategy(bucket_mb=0)


# When they leave.


class Held(torch.autograd.Function):
    """Its backward pass does not go on until `held` says so."""

    @staticmethod
    def forward(ctx, x, held):
        ctx.held = held
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.held()
        return grad, None


class Three(nn.Module):
    """Three layers; before the gradients of the first one are computed, `held` is called."""

    def __init__(self, held=lambda: None):
        super().__init__()
        self.first, self.second, self.third = (linear(4, 4, seed) for seed in range(3))
        self.held = held

    def forward(self, batch):
        x = Held.apply(self.first(batch), self.held)
        return self.third(torch.tanh(self.second(x))).pow(2).mean()


def train_held(comm):
    """Backward goes on only when the collectives of the two later layers are over; the order in which all was done."""
    told, are_over = [], threading.Event()
    reduce = comm.all_reduce_

    def all_reduce_(flat):
        told.append(flat.numel())
        reduce(flat)
        if len(told) == 4:
            are_over.set()

    def held():
        assert are_over.wait(20), "nothing was sent during the backward pass"
        told.append("first layer")

    comm.all_reduce_ = all_reduce_
    model = Three(held)
    strategy_ = strategy()
    strategy_.setup(model, comm, 1)
    (model(torch.ones(2, 4) * (comm.rank + 1)) * 2).backward()
    told.append("backward is over")
    result = make_step(strategy_, 2.0, 2)
    strategy_.close()
    return told, result.grad_norm, FlatParameters(model).read().tolist()


ORDER = [4, 16, 4, 16, "first layer", "backward is over", 4, 6 + 3 + 16]  # 6 parameters, three numbers


def test_buckets_are_reduced_before_the_backward_pass_has_ended():
    for told, *rest in (ranks := run_threads(2, train_held)):
        assert told == ORDER or told == [*ORDER[:5], 4, "backward is over", *ORDER[7:]]
        assert rest == [*ranks[0][1:]]


@pytest.mark.slow
def test_also_between_real_processes():
    with Processes(2, train_held) as processes:
        ranks = [processes.result(rank) for rank in range(2)]
    for told, *rest in ranks:
        assert told[:5] == ORDER[:5] and rest == [*ranks[0][1:]]


def count_calls(comm):
    calls, reduce = [], comm.all_reduce_
    comm.all_reduce_ = lambda flat: (calls.append((flat.numel(), threading.current_thread().name)), reduce(flat))[1]
    return calls


def test_inside_no_sync_gradients_only_add_up():
    def rank_main(comm):
        calls, model, reduce_all = count_calls(comm), Three(), strategy()
        reduce_all.setup(model, comm, 1)
        x = [torch.full((2, 4), comm.rank + number + 1.0) for number in range(3)]
        for part in x[:2]:
            with reduce_all.no_sync():
                model(part).backward()
        assert not calls
        model(x[2]).backward()
        mine = [p.grad.clone() for p in model.parameters()]
        make_step(reduce_all, 3.0, 6)
        reduce_all.close()
        return [size for size, _ in calls], mine, [p.grad for p in model.parameters()]

    (calls, one, mean), (_, other, _) = run_threads(2, rank_main)
    assert calls == [4, 16, 4, 16, 4, 25]  # once, though there were three backward passes
    for ours, theirs, reduced in zip(one, other, mean, strict=True):
        torch.testing.assert_close(reduced, (ours + theirs) / 6)


def test_the_loop_sends_once_for_three_micro_batches():
    def rank_main(comm):
        calls, model = count_calls(comm), Three()
        steps = Steps([[torch.full((2, 4), comm.rank + n + 1.0) for n in range(3)]] * 2)
        train_node(model, comm, strategy(), steps, epochs=1).run()
        return [name for size, name in calls if size in (4, 16, 25)]

    for names in run_threads(2, rank_main):
        assert len(names) == 12 and names.count("background collectives") >= 8


def test_without_overlap_no_thread_is_started():
    def rank_main(comm):
        calls = count_calls(comm)
        train_node(Three(), comm, strategy(overlap=False), Steps([[torch.ones(2, 4)]] * 2), epochs=1).run()
        return {name for _, name in calls}, len(calls)

    assert all("background collectives" not in names and calls >= 12 for names, calls in run_threads(2, rank_main))


# The same numbers as without.


def trained(comm, model, batches, **settings):
    about = {name: settings.pop(name) for name in ("precision",) if name in settings}
    model = model()
    node = train_node(model, comm, strategy(**settings), Steps(batches(comm.rank)), epochs=2, **about)
    result = node.run()
    return FlatParameters(model).read().tolist(), result.digest


def token_steps(rank):
    steps = [[token_batch(rank + n + 1, seed=10 * step + 3 * rank + n) for n in range(3)] for step in range(4)]
    if rank == 1:
        steps[1] = []
    return steps


class Untied(nn.Module):
    """The middle layer works twice; which of two heads does, the batch decides; one is never used."""

    def __init__(self):
        super().__init__()
        self.never = linear(3, 3, 0)
        self.heads = nn.ModuleList(linear(4, 1, seed) for seed in range(2))
        self.middle = linear(4, 4, 1)
        self.frozen = linear(4, 4, 2).requires_grad_(False)

    def forward(self, batch):
        x, head = batch
        return self.heads[int(head[0])](self.middle(torch.tanh(self.frozen(self.middle(x))))).pow(2).mean()


def head_steps(rank):
    generator = torch.Generator().manual_seed(rank)
    return [[(torch.randn(3, 4, generator=generator), torch.full((3,), (rank + n) % 2))] for n in range(4)]


MODELS = {"tied, frozen, accumulated": (Tokens, token_steps), "twice, sometimes, never": (Untied, head_steps)}
models = pytest.mark.parametrize(("model", "batches"), MODELS.values(), ids=MODELS)


def with_and_without(comm, model, batches, precisions=("float32",)):
    """Weights and digest with and without overlap, and without buckets, clipped."""
    kinds = [{"overlap": overlap, "bucket_mb": mb} for overlap in (True, False) for mb in (EACH_ALONE, 100.0)]
    kinds = [kind | {"precision": precision} for precision in precisions for kind in kinds]
    return [trained(comm, model, batches, max_norm=0.05, **kind) for kind in kinds]


@models
def test_two_ranks_have_the_same_bits_with_and_without_overlap(model, batches):
    ranks = run_threads(2, lambda comm: with_and_without(comm, model, batches))
    assert ranks[0] == ranks[1]
    assert all(kind == ranks[0][0] for kind in ranks[0])


@pytest.mark.slow
@models
def test_three_processes_have_the_same_bits_with_and_without_overlap(model, batches):
    # bf16 not in threads: these share torch's cache of what autocast has converted, so that bits depend on chance.
    with Processes(3, with_and_without, model, batches, ("float32", "bf16"), timeout=120.0) as processes:
        ranks = [processes.result(rank, timeout=240) for rank in range(3)]
    assert ranks[0] == ranks[1] == ranks[2]
    plain, half = ranks[0][:4], ranks[0][4:]
    for with_, whole, without, also_whole in (plain, half):
        assert with_ == without and whole == also_whole
        assert with_[0] == pytest.approx(whole[0], rel=1e-5, abs=1e-6)
    assert plain[0] != half[0]


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.never = (nn.Parameter(torch.ones(1, 1)) for _ in range(3))


def test_a_parameter_that_only_one_rank_uses_and_one_that_nobody_does():
    def rank_main(comm):
        model, reduce_all = TwoHeads(), strategy(lr=1.0, weight_decay=0.5)
        reduce_all.setup(model, comm, 1)
        (model.a * 1.0 + (model.b if comm.rank == 0 else 0)).sum().backward()
        make_step(reduce_all, 1.0, 1)
        reduce_all.close()
        return model.a.item(), model.b.item(), model.never.item()

    # lr 1, decay 0.5: 1 - (mean gradient + 0.5); the parameter that nobody used does not even decay
    assert run_threads(2, rank_main) == [(-0.5, 0.0, 1.0)] * 2


# What is not finite, or changes when it has been sent.


@pytest.mark.parametrize(("layer", "calls"), [("third", 6), ("second", 12), ("first", 12)])
def test_a_gradient_that_is_not_finite_leaves_a_rank_out_and_no_part_of_it_counts(layer, calls):
    """In the bucket that is sent first nothing has to be repeated."""

    def rank_main(comm):
        told, model, reduce_all = count_calls(comm), Three(), strategy()
        reduce_all.setup(model, comm, 1)
        if comm.rank == 1:
            getattr(model, layer).bias.register_hook(lambda grad: grad * float("nan"))
        (model(torch.ones(2, 4) * (comm.rank + 1)) * 2).backward()
        result = make_step(reduce_all, 2.0, 2, stopping=comm.rank == 1)
        reduce_all.close()
        return len(told), result.skipped, result.stop, FlatParameters(model).read()

    def alone(comm):
        model, reduce_all = Three(), strategy()
        reduce_all.setup(model, comm, 1)
        if comm.rank == 0:
            (model(torch.ones(2, 4)) * 2).backward()
        make_step(reduce_all, 2.0 if comm.rank == 0 else 0.0, 2)
        reduce_all.close()
        return FlatParameters(model).read()

    (count, good, stop, weights), (_, bad, _, other) = run_threads(2, rank_main)
    assert (count, good, bad, stop) == (calls, "", "the gradient is not finite", True)
    assert torch.equal(weights, other) and torch.equal(weights, run_threads(2, alone)[0])


class Reentrant(nn.Module):
    """A part that is used twice, each time in a checkpoint of its own: its gradient comes in two parts."""

    def __init__(self):
        super().__init__()
        self.first, self.part, self.last = (linear(4, 4, seed) for seed in range(3))

    def forward(self, batch):
        x = self.first(batch)
        x = checkpoint(self.part, x, use_reentrant=True)
        x = checkpoint(self.part, torch.tanh(self.first(x)), use_reentrant=True)
        return self.last(x).pow(2).mean()


def test_a_gradient_that_comes_in_two_parts_is_sent_whole_and_the_rank_overlaps_no_more():
    def rank_main(comm, **settings):
        calls, model, reduce_all = count_calls(comm), Reentrant(), strategy(**settings)
        reduce_all.setup(model, comm, 3)
        counts = []
        for step in range(3):
            model.zero_grad(set_to_none=True)
            model(torch.ones(2, 4) * (comm.rank + step + 1)).backward()
            make_step(reduce_all, 2.0, 2)
            counts.append(len(calls))
        reduce_all.close()
        return counts, FlatParameters(model).read().tolist(), {name for _, name in calls[12:]}

    ranks = run_threads(2, rank_main)
    without = run_threads(2, lambda comm: rank_main(comm, overlap=False))
    assert without[0][0] == [6, 12, 18] and ranks[0][0] == [12, 18, 24]
    assert ranks[0][1] == ranks[1][1] == without[0][1]
    assert all("background collectives" not in names for *_, names in ranks)


def test_the_last_micro_batch_has_no_finite_loss():
    """Then nothing leaves before the end."""

    def rank_main(comm):
        nan = torch.full((2, 4), float("nan"))
        batches = [torch.ones(2, 4) * (comm.rank + 1), *([nan] if comm.rank == 0 else [])]
        model = Three()
        train_node(model, comm, strategy(), Steps([batches] * 2), epochs=1).run()
        return FlatParameters(model).read()

    def good(comm):
        model = Three()
        train_node(model, comm, strategy(), Steps([[torch.ones(2, 4) * (comm.rank + 1)]] * 2), epochs=1).run()
        return FlatParameters(model).read()

    assert all(map(torch.equal, run_threads(2, rank_main), run_threads(2, good)))


# Its end.


def test_after_a_run_nothing_is_left_of_it():
    def rank_main(comm):
        model, made = Three(), strategy()
        pickle.loads(pickle.dumps(made))
        train_node(model, comm, made, Steps([[torch.ones(2, 4)]] * 2), epochs=1).run()
        assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
        alive = weakref.ref(made)
        del made
        gc.collect()
        return alive() is None

    assert run_threads(2, rank_main) == [True, True] and not threads()


def test_a_model_in_training_can_be_copied_and_pickled_and_does_not_keep_the_strategy():
    model, reduce_all = Line(), strategy()
    reduce_all.setup(model, SingleComm(), 1)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not any(p._post_accumulate_grad_hooks for p in other.parameters())
    alive = weakref.ref(reduce_all)
    del reduce_all
    gc.collect()
    assert alive() is None
    model((torch.ones(2, 4), torch.ones(2, 1))).backward()


def fails_in_backward(comm):
    """Rank 0 fails in its first layer, when it has sent the others; rank 1 is busy with something else."""

    failed = []

    def held():
        failed.append(time.monotonic())
        raise ZeroDivisionError("in backward")

    if comm.rank:
        time.sleep(8)
        return None
    node = train_node(Three(held), comm, strategy(), Steps([[torch.ones(2, 4)]]), epochs=1)
    node.comm.join = lambda member: None  # rank 1 does not come
    with pytest.raises(ZeroDivisionError):
        node.run()
    comm.close()
    return time.monotonic() - failed[0], len(threads())


@pytest.mark.slow
def test_a_rank_that_fails_in_backward_ends_at_once():
    seconds, left = run_threads(2, fails_in_backward)[0]
    assert seconds < 1 and left == 0
    with Processes(2, fails_in_backward) as processes:
        seconds, left = processes.result(0)
    assert seconds < 1.5 and left == 0
