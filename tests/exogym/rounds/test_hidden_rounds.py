"""DiLoCo's rounds whose exchange travels while ranks go on: what comes of them, when there are none, and stops."""

import time

import pytest
import torch
from exogym_toys import Resumable, Scalar, Steps, Tokens, run_threads, token_batch, train_node
from waiting import wait_until

from exogym import (
    Checkpoints,
    DiLoCoStrategy,
    FlatParameters,
    ParameterServerStrategy,
    SPARTADiLoCoStrategy,
)
from exogym.comm.comm import ThreadComm, in_background
from exogym.errors import SettingError
from exogym.strategy.in_flight import InFlight

LR = 0.05


class Quadratic(Scalar):
    """Its gradient is w - batch."""

    def forward(self, batch):
        return ((self.w - batch) ** 2).mean() / 2


def sentences(rank, steps=12):
    return Resumable([[token_batch(2 + rank, seed=100 * rank + step)] for step in range(steps)])


def trained(comm, *, model=None, source=None, epochs=2, checkpoints=None, should_stop=lambda step: False, **settings):
    """The result, the events, and the model."""
    events, model = [], model or Tokens()
    loop = ("checkpoint_interval", "val", "val_interval", "resume", "log_correlation")
    about = {name: settings.pop(name) for name in loop if name in settings}
    strategy = DiLoCoStrategy(**{"lr": LR, "H": 4, "overlap_steps": 2, "outer_momentum": 0} | settings)
    node = train_node(
        model, comm, strategy, source or sentences(comm.rank), epochs=epochs, events=events.append,
        checkpoints=checkpoints, should_stop=lambda: should_stop(node.state.now.step + 1), **about,
    )  # fmt: skip
    try:
        return node.run(), events, model
    finally:
        if checkpoints:
            checkpoints._writer.shutdown()


def rounds(events):
    """Where this rank was when each round counted."""
    return [(event["round"], event["step"]) for event in events if event["type"] == "round"]


# what comes of it


@pytest.mark.parametrize(
    ("outer_lr", "after_each_step"),
    [
        (1.0, [(4.0, 6.0), (2.0, 5.0), (2.5, 3.0), (2.375, 2.375)]),
        (0.5, [(4.0, 6.0), (2.0, 5.0), (4.75, 5.25), (4.625, 4.625)]),
    ],
)
def test_two_rounds_by_hand(outer_lr, after_each_step):
    """From 8 towards 0 and towards 4, half of the way at each step. The changes of round 1 are -6 and -3, their mean
    -4.5: with the outer learning rate 1 the new common weight is 3.5. It counts a step later, when ranks have come to 1
    and 4.5: 1 + (3.5 - 2) = 2.5, and 4.5 + (3.5 - 5) = 3. Round 2 is the last: 3.5 + ((1.25 - 3.5) + (3.5 - 3.5)) / 2.
    """

    def rank_main(comm):
        model, weights = Quadratic(8.0), []
        strategy = DiLoCoStrategy(inner_optim="sgd", lr=0.5, H=2, overlap_steps=1, outer_lr=outer_lr, outer_momentum=0)
        source = Steps([[torch.tensor([4.0 * comm.rank])]] * 4)

        def heard(event):
            if event["type"] == "step":
                weights.append(model.w.item())

        train_node(model, comm, strategy, source, epochs=1, events=heard).run()
        return weights

    assert [*zip(*run_threads(2, rank_main), strict=True)] == after_each_step


def test_a_rank_that_makes_fewer_larger_steps_counts_as_if_it_had_made_as_many():
    """From 8, towards 0 by a half of the way in each of four steps: 0.5. The other one, towards 4, has as many samples
    in one step, and comes to 6: its change is -2, times 4. The mean is -7.75.
    """

    def rank_main(comm):
        model = Quadratic(8.0)
        batch = torch.tensor([4.0 * comm.rank])
        steps = [[batch]] * 4 if comm.rank == 0 else [[batch.repeat(4)], [], [], []]
        node = train_node(
            model, comm, DiLoCoStrategy(inner_optim="sgd", lr=0.5, H=4, outer_momentum=0), Steps(steps), epochs=1
        )
        node.strategy.stretches = stretches
        node.run()
        return model.w.item()

    stretches = True
    assert run_threads(2, rank_main) == [8.0 - (7.5 + 2.0 * 4) / 2] * 2
    stretches = False
    assert run_threads(2, rank_main) == [8.0 - (7.5 + 2.0) / 2] * 2


def test_ranks_with_the_same_data_go_on_as_if_they_had_waited():
    """The new common weights are those of the snapshot, up to rounding: there is nothing to add."""

    def rank_main(comm, steps):
        _, _, model = trained(comm, source=sentences(0), inner_optim="sgd", overlap_steps=steps)
        return FlatParameters(model).read()

    waited, hidden = (run_threads(2, lambda comm, n=n: rank_main(comm, n))[0] for n in (0, 3))
    torch.testing.assert_close(waited, hidden, rtol=1e-5, atol=1e-6)


class Watched(Tokens):
    """A forward pass changes its buffer, which ranks average."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, batch):
        self.seen += batch["inputs"].sum()
        return super().forward(batch)


@pytest.fixture
def reads(monkeypatch):
    """For each snapshot whether the background took it; and what makes the one or the other come first."""
    found, read, run, local_step = [], FlatParameters.read, InFlight._run, DiLoCoStrategy.local_step

    def seen(self, out=None, *, buffers=None):
        if buffers is not None:
            found.append(in_background())
            time.sleep(0.002)  # after the moments, before the weights: the other one comes meanwhile
        return read(self, out, buffers=buffers)

    def background_first(self, *about):
        wait_until(lambda: self._flight is None or self._flight._snapshot is not None)
        return local_step(self, *about)

    def rank_first(self):
        wait_until(lambda: self._snapshot is not None)
        run(self)

    monkeypatch.setattr(FlatParameters, "read", seen)
    firsts = {"background": (DiLoCoStrategy, "local_step", background_first), "rank": (InFlight, "_run", rank_first)}
    return found, lambda who: monkeypatch.setattr(*firsts[who])


@pytest.mark.parametrize("first", ["background", "rank", "either"])
def test_what_is_sent_is_the_round_s_end_whoever_reads_it_first(monkeypatch, reads, first):
    """The background, while the rank computes the next step; or the rank, before it changes its weights."""

    def rank_main(comm):
        about = {"share_moments": True, "weigh_steps": True, "overlap_steps": 2, "H": 3, "epochs": 1}
        return [trained(comm, model=Watched(), wire=wire, **about)[0].digest for wire in ("float32", "int4")]

    with monkeypatch.context() as at_once:
        at_once.setattr(FlatParameters, "is_on_cpu", False)
        wanted = run_threads(3, rank_main)
    found, comes_first = reads
    assert len(found) == 2 * 3 * 3 and not any(found)
    found.clear()
    if first != "either":
        comes_first(first)
    assert run_threads(3, rank_main) == wanted == [wanted[0]] * 3
    assert len(found) == 2 * 3 * 3  # each snapshot once
    assert first == "either" or set(found) == {first == "background"}


class Clamped(Tokens):
    """A forward pass changes its weights."""

    def forward(self, batch):
        with torch.no_grad():
            self.hidden.weight.clamp_(-0.1, 0.1)
        return super().forward(batch)


def test_weights_that_a_forward_pass_changes_are_read_before_it(reads):
    run_threads(2, lambda comm: trained(comm, model=Clamped()))
    assert reads[0] and not any(reads[0])


def digests(comm):
    return [trained(comm, wire=wire, outer_momentum=0.9)[0].digest for wire in ("float32", "int8", "bf16")]


def test_it_has_the_same_bits_on_all_ranks_and_each_time():
    first, second = run_threads(5, digests), run_threads(5, digests)
    assert first == second == [first[0]] * 5


def test_it_learns_about_as_well_as_with_waiting():
    def loss(steps, **settings):
        return run_threads(3, lambda comm: trained(comm, overlap_steps=steps, epochs=8, **settings)[0].train_loss)[0]

    waited = loss(0)
    assert waited < 1.2 and loss(1) == pytest.approx(waited, abs=0.1)
    assert loss(3, wire="int8") == pytest.approx(waited, abs=0.15)


def test_a_rank_whose_weights_are_not_finite_takes_the_common_ones():
    def rank_main(comm):
        model, strategy = Scalar(), DiLoCoStrategy(inner_optim="sgd", lr=1.0, H=2, overlap_steps=1, outer_momentum=0)
        strategy.setup(model, comm, 8)
        for step in range(3):
            model.w.grad = torch.tensor([1.0])
            local = strategy.local_step(1.0, 1)
            if step == 1:
                if comm.rank == 0:
                    model.w.data.fill_(float("nan"))
                strategy.begin_exchange(lambda _: None)
        result = strategy.apply(strategy.exchange(stopping=False), local)
        strategy.close()
        return model.w.item(), strategy.agreed_weights().item(), result.skipped

    broken, sound = run_threads(2, rank_main)
    assert broken == (-1.0, -1.0, "the weights were not finite at the end of the round") and sound == (-2.0, -1.0, "")


# who waits, and for how long


class Slow(ThreadComm):
    """What is sent takes a while."""

    def all_reduce_(self, flat):
        super().all_reduce_(flat)
        with self._counted():
            time.sleep(0.2 if flat.numel() > 1 else 0.0)


class Slowly(Tokens):
    def forward(self, batch):
        time.sleep(0.1)
        return super().forward(batch)


def test_only_what_is_waited_for_counts_as_time_and_all_bytes_count(monkeypatch):
    def rank_main(comm):
        comm.__class__ = Slow
        result, events, model = trained(comm, model=Slowly(), H=6, overlap_steps=4, epochs=1)
        told = [event for event in events if event["type"] == "round"]
        steps = [event for event in events if event["type"] == "step"]
        return result, told, steps, FlatParameters(model).numel

    result, (hidden, waited), steps, numel = run_threads(2, rank_main)[0]
    assert (hidden["step"], waited["step"]) == (10, 12)
    assert waited["seconds"] > 0.2 and "seconds_travelling" not in waited
    assert 0.2 < hidden["seconds_travelling"] > hidden["seconds"]
    assert waited["bytes"] == 4 * (numel + 2) + 8 and hidden["bytes"] == waited["bytes"] + 4  # a digest; who stops
    assert result.seconds_communicating < hidden["seconds"] + hidden["seconds_travelling"] + waited["seconds"]
    assert sum(step["bytes"] for step in steps) == 2 * waited["bytes"] + 4


def test_what_needs_all_ranks_at_one_point_is_waited_for():
    """Rounds end after steps 4, 8, ... of 24; those that are hidden count two steps later."""

    def ends(**settings):
        first, second = run_threads(2, lambda comm: rounds(trained(comm, **settings)[1]))
        assert first == second and [number for number, _ in first] == [1, 2, 3, 4, 5, 6]
        return [step for _, step in first]

    last = 24
    assert ends() == [6, 10, 14, 18, 22, last]
    assert ends(overlap_steps=0) == [4, 8, 12, 16, 20, last]
    assert ends(log_correlation=3) == [6, 10, 12, 18, 22, last]
    assert ends(val=Steps([[token_batch(2, seed=9)]]), val_interval=11) == [6, 10, 12, 18, 22, last]
    assert ends(val_interval=1) == ends()  # there is nothing to validate


@pytest.mark.parametrize(("steps", "ends"), [(9, [6, 8, 9]), (10, [6, 10, 10]), (11, [6, 10, 11])])
def test_where_the_work_ends_before_an_exchange_would_it_is_waited_for(steps, ends):
    result, events, _ = run_threads(2, lambda comm: trained(comm, source=sentences(comm.rank, steps), epochs=1))[0]
    assert [step for _, step in rounds(events)] == ends and result.steps == steps


def test_whether_a_round_ends_whole_is_asked_before_its_last_step():
    """But for the last round, after which there is no work that could hide it."""

    def rank_main(comm):
        told, is_cut_short = [], comm.is_cut_short
        comm.ask_ahead = lambda number, *, stopping: told.append(f"ask {number}")
        comm.is_cut_short = lambda number, **about: told.append(f"end {number}") or is_cut_short(number, **about)
        trained(comm, source=sentences(comm.rank, steps=6), should_stop=told.append)
        return told

    for told in run_threads(2, rank_main):
        assert told == [1, 2, 3, "ask 1", 4, "end 1", 5, 6, 7, "ask 2", 8, "end 2", 9, 10, 11, 12]


def test_without_overlap_nothing_more_is_sent():
    class Counted(ThreadComm):
        calls = 0

        def all_reduce_(self, flat):
            super().all_reduce_(flat)
            self.calls += 1

    def rank_main(comm, steps):
        comm.__class__ = Counted
        trained(comm, overlap_steps=steps)
        return comm.calls

    assert run_threads(2, lambda comm: rank_main(comm, 0)) == [6] * 2
    assert run_threads(2, lambda comm: rank_main(comm, 2)) == [6 + 5] * 2


# stops


@pytest.mark.parametrize(
    ("stop_at", "wire"),
    [
        *(((4, None), "float32"), ((None, 5), "int8"), ((5, 5), "float32"), ((6, None), "int8"), ((7, None), "int8")),
        *(((8, 9), "int8"), ((9, 12), "float32"), ((13, 12), "int8"), ((20, 21), "float32"), ((23, None), "int8")),
    ],
)
def test_stopped_and_resumed_is_bit_for_bit_the_uninterrupted_run(tmp_path, stop_at, wire):
    def rank_main(comm, folder, *, stop=(None, None), resume=False):
        result, events, model = trained(
            comm, wire=wire, outer_momentum=0.9, resume=resume,
            checkpoints=Checkpoints(folder, f"rank{comm.rank}") if folder else None,
            should_stop=lambda step: stop[comm.rank] is not None and step >= stop[comm.rank],
        )  # fmt: skip
        losses = {event["step"]: event["loss"] for event in events if event["type"] == "step"}
        return FlatParameters(model).read(), losses, result

    whole = run_threads(2, lambda comm: rank_main(comm, None))
    stopped = run_threads(2, lambda comm: rank_main(comm, tmp_path, stop=stop_at))
    assert all(result.stopped for _, _, result in stopped)
    assert stopped[0][2].digest == stopped[1][2].digest and torch.equal(stopped[0][0], stopped[1][0])
    again = run_threads(2, lambda comm: rank_main(comm, tmp_path, resume=True))
    for (weights, losses, result), (_, before, _), (resumed, rest, end) in zip(whole, stopped, again, strict=True):
        assert torch.equal(weights, resumed)
        assert before | rest == losses and not before.keys() & rest.keys()
        assert (result.digest, result.steps, result.samples, result.rounds) == (
            end.digest, end.steps, end.samples, end.rounds,
        )  # fmt: skip


def test_a_stop_waits_for_the_exchange_that_travels():
    """Asked once, in step 5 of rank 1: it stops in step 7, rank 0 at the end of the round after step 8."""

    def rank_main(comm):
        result, _, _ = trained(comm, should_stop=lambda step: comm.rank == 1 and step == 5)
        return result.stopped, result.steps, result.digest

    (stopped, steps, digest), other = run_threads(2, rank_main)
    assert stopped and steps == 8 and other == (True, 7, digest)


@pytest.mark.parametrize(("interval", "died_at", "resumed_at"), [(1, 11, 10), (1, 9, 6), (2, 13, 10), (3, 24, 14)])
def test_after_a_crash_it_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path, interval, died_at, resumed_at):
    """Checkpoints are written when the exchange has come, with what was trained meanwhile."""

    def rank_main(comm, folder, **settings):
        about = {"checkpoints": Checkpoints(folder, f"rank{comm.rank}"), "checkpoint_interval": interval}
        settings |= {"outer_momentum": 0.9, "wire": "int8", "share_moments": True, "weigh_steps": True}
        result, events, model = trained(comm, **about, **settings)
        steps = sum(event["type"] == "step" for event in events)
        return FlatParameters(model).read(), result.digest, result.samples, result.rounds, steps

    def dies(step):
        assert step < died_at, "died"

    whole = run_threads(2, lambda comm: rank_main(comm, tmp_path / "whole"))
    with pytest.raises(AssertionError, match="died"):
        run_threads(2, lambda comm: rank_main(comm, tmp_path / "run", should_stop=dies))
    resumed = run_threads(2, lambda comm: rank_main(comm, tmp_path / "run", resume=True))
    for (weights, *same, steps), (others, *as_before, fewer) in zip(whole, resumed, strict=True):
        assert torch.equal(weights, others) and same == as_before and fewer == steps - resumed_at == 24 - resumed_at


def test_a_checkpoint_with_steps_beyond_the_agreement_serves_a_rank_that_has_none(tmp_path):
    """All begin at the agreement after step 8, when the checkpoint of step 10 is one rank's alone."""

    def rank_main(comm, **settings):
        about = {"checkpoints": Checkpoints(tmp_path, f"rank{comm.rank}"), "checkpoint_interval": 1}
        result, events, _ = trained(comm, **about, **settings)
        return [event["step"] for event in events if event["type"] == "step"], result.digest

    def dies(step):
        assert step < 12, "died"

    with pytest.raises(AssertionError, match="died"):
        run_threads(2, lambda comm: rank_main(comm, should_stop=dies))
    for index in tmp_path.glob("*/rank1.json"):
        index.unlink()
    first, second = run_threads(2, lambda comm: rank_main(comm, resume=True))
    assert first == second and first[0] == [*range(9, 25)]


# settings


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(SettingError, match="overlap_steps must be at least 0"):
        DiLoCoStrategy(overlap_steps=-1)
    with pytest.raises(SettingError, match="overlap_steps = 5 must be below the steps of a round, which are 5"):
        DiLoCoStrategy(H=5, overlap_steps=5)
    with pytest.raises(SettingError, match="needs an outer_optim that is given by name"):
        DiLoCoStrategy(outer_optim=torch.optim.RMSprop, overlap_steps=1)
    with pytest.raises(SettingError, match="with a parameter server ranks wait"):
        ParameterServerStrategy(overlap_steps=1)
    with pytest.raises(SettingError, match="with sparta_diloco ranks wait"):
        SPARTADiLoCoStrategy(overlap_steps=1)
    DiLoCoStrategy(outer_optim=torch.optim.SGD, outer_lr=1.0, overlap_steps=1)  # means the name
