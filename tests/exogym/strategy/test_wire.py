"""Sums that travel in fewer bits: what rounding takes away comes later, and all ranks have the same bits."""

import pytest
import torch
from exogym_toys import Line, Points, Processes, Steps, run_threads, train_node
from hypothesis import given, settings
from hypothesis import strategies as st

from exogym import DiLoCoStrategy, FlatParameters, ParameterServerStrategy, SingleComm, digest
from exogym.errors import SettingError
from exogym.strategy.diloco_settings import WIRES
from exogym.strategy.parameter_server import ServerCommunicator
from exogym.strategy.wire import AT_ONCE, BLOCK, LAST, WireSum, _bytes, _get, _pieces, _round_off

ROUNDED = [wire for wire in WIRES if wire != "float32"]
STEPS = {"int4": 7, "int8": 127, LAST: 32767}  # from 0 to the largest value of a block
HEADER = torch.tensor([1.0, 0.0])
NOTHING = torch.empty(0)


def normal(size: int, seed: int) -> torch.Tensor:
    """Values whose blocks are of very different size."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, generator=generator) * 10 ** torch.linspace(-6, 3, max(size, 1))[:size]


def rounded_off(values, wire, unsent=NOTHING):
    """What does not travel, and what arrives."""
    left, sent, arrived = values.clone(), torch.empty(_bytes(values.numel(), wire), dtype=torch.uint8), values * 0
    _round_off(left, unsent, sent, wire, feeds_back=True)
    for piece, place in _pieces(arrived, sent, wire):
        _get(place, piece, wire)
    return left, arrived


@settings(deadline=None)
@given(wire=st.sampled_from([*STEPS, "bf16"]), blocks=st.integers(1, 9), seed=st.integers(0, 99))
def test_rounding_errs_by_half_a_step_and_keeps_what_it_takes_away(wire, blocks, seed):
    values = normal(blocks * BLOCK, seed)
    left, arrived = rounded_off(values, wire)
    torch.testing.assert_close(arrived + left, values, rtol=1e-6, atol=0)
    assert torch.equal(left, values - arrived)  # to the bit: what ranks add up is what this one takes to have arrived
    if wire == "bf16":
        assert (left.abs() <= values.abs() / 256).all()
        return
    most = values.view(-1, BLOCK).abs().amax(1, keepdim=True)
    assert (left.view(-1, BLOCK).abs() <= most / STEPS[wire] * 0.51).all()


@settings(deadline=None)
@given(wire=st.sampled_from([*STEPS, "bf16"]), values=st.integers(1, AT_ONCE + BLOCK), seed=st.integers(0, 99))
def test_what_was_left_earlier_travels_with_the_values_that_it_is_of(wire, values, seed):
    """It has no values of the padding, and may end inside a block or a piece."""
    whole = normal(-(-values // BLOCK) * BLOCK, seed)
    unsent, together = normal(values, seed + 1), whole.clone()
    together[:values] += unsent
    for once, apart in zip(rounded_off(together, wire), rounded_off(whole, wire, unsent), strict=True):
        assert torch.equal(once, apart)


@pytest.mark.parametrize("wire", [*STEPS, "bf16"])
def test_many_values_are_rounded_piece_by_piece(wire):
    values = normal(2 * AT_ONCE + BLOCK, 1)
    left, arrived = rounded_off(values, wire)
    torch.testing.assert_close(arrived + left, values, rtol=1e-6, atol=0)
    assert torch.equal(rounded_off(values[-BLOCK:], wire)[0], left[-BLOCK:])


def test_values_that_are_not_there_or_all_alike_arrive():
    for values in (torch.zeros(BLOCK), torch.full((BLOCK,), 3.0), torch.full((BLOCK,), 1e-42)):
        for wire in ROUNDED:
            left, arrived = rounded_off(values, wire)
            torch.testing.assert_close(arrived + left, values)


def summed_up(total, values, **arguments):
    total.flat(values.numel()).copy_(values)
    return total.sum(HEADER, **arguments)


def sums(comm, wire, size, rounds):
    """Totals of each round; what was put in, as it is and without signs; and what is left."""
    total, put = WireSum(comm, wire), torch.zeros(2, size, dtype=torch.float64)
    totals = []
    for number in range(rounds):
        mine = normal(size, 100 * number + comm.rank)
        again, _ = summed_up(total, mine)
        summed, header = summed_up(total, mine)
        assert torch.equal(again, summed)  # one that does not count leaves nothing behind
        assert header.tolist() == [comm.world_size, 0.0]
        totals.append(summed.clone())
        total.accept()
        put += torch.stack([mine, mine.abs()])
    return totals, put, total.residual


@pytest.mark.parametrize("wire", ROUNDED)
@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 5 * BLOCK + 7])
def test_all_ranks_have_the_same_sums_and_nothing_is_lost(wire, ranks, size):
    outcomes = run_threads(ranks, lambda comm: sums(comm, wire, size, rounds=4))
    for totals, _, _ in outcomes:
        assert [digest(total) for total in totals] == [digest(total) for total in outcomes[0][0]]
    came = sum(total.double() for total in outcomes[0][0])
    left = sum(residual.double() for _, _, residual in outcomes if residual is not None)
    put, size_of_all = sum(put for _, put, _ in outcomes)
    assert ((came + left - put).abs() <= 1e-5 * size_of_all).all()


def test_a_sum_takes_the_room_of_those_before_it_that_counted():
    def rank_main(comm):
        total, used = WireSum(comm, "int8"), []
        for accepted in (True, True, True, False, True):
            total.flat(3 * BLOCK).fill_(comm.rank)
            used.append((total.sum(HEADER)[0], total._padded))  # kept, so that each has an address of its own
            if accepted:
                total.accept()
        return [{tensor.data_ptr() for tensor in each} for each in used], total.residual.data_ptr()

    for rooms, residual in run_threads(2, rank_main):
        assert len(rooms[0] | rooms[1] | rooms[2]) == 3  # what is summed, what comes of it, and what was left
        assert not rooms[4] & rooms[3]
        assert residual in rooms[4]


def test_a_sum_is_made_again_by_fewer_ranks():
    def rank_main(comm):
        total, mine = WireSum(comm, "int4"), normal(5 * BLOCK, comm.rank)
        for _ in range(3):
            summed_up(total, mine)
            total.accept()
        summed_up(total, mine)  # of which a peer is lost before it counts
        left, total.comm = total.residual.clone(), SingleComm()
        alone = summed_up(total, mine)[0].clone()
        total.accept()
        again, _ = summed_up(total, mine)
        return torch.equal(alone, mine + left), torch.equal(again, mine)

    assert run_threads(3, rank_main) == [(True, True)] * 3


@pytest.mark.parametrize("numel", [BLOCK, 5 * BLOCK - 7])
@pytest.mark.parametrize("wire", ["int4", "bf16"])
def test_what_was_left_is_taken_along_by_another_number_of_ranks(wire, numel):
    """Its values are those of other parts now, some of nobody's."""
    left = [normal(numel, 10 + rank) * 1e-3 for rank in range(3)]

    def rank_main(comm):
        total, mine = WireSum(comm, wire), normal(numel, comm.rank)
        total.residual = left[comm.rank]
        came = summed_up(total, mine)[0].clone()
        total.accept()
        return came, total.residual

    for ranks in (2, 3):
        came, kept = zip(*run_threads(ranks, rank_main), strict=True)
        given = sum(normal(numel, rank) + left[rank] for rank in range(ranks))
        torch.testing.assert_close(came[0] + sum(kept), given, rtol=1e-5, atol=1e-5 * given.abs().max().item())


def digests(comm):
    """Of all totals, and of what is left, for each format."""
    outcomes = (sums(comm, wire, 3 * BLOCK, rounds=2) for wire in ROUNDED)
    return [[digest(total) for total in (*totals, left)] for totals, _, left in outcomes]


def test_real_processes_have_the_sums_that_threads_have():
    with Processes(3, digests) as processes:
        assert [processes.result(rank) for rank in range(3)] == run_threads(3, digests)


@pytest.mark.parametrize("wire", ROUNDED)
def test_the_last_sum_has_all_that_was_left(wire):
    def rank_main(comm):
        total, mine = WireSum(comm, wire), normal(2 * BLOCK, comm.rank)
        came = summed_up(total, mine)[0].clone()
        total.accept()
        rest, _ = summed_up(total, torch.zeros_like(mine), last=True)
        return mine, came, came + rest

    outcomes = run_threads(3, rank_main)
    wanted = sum(mine for mine, _, _ in outcomes)
    most = wanted.view(-1, BLOCK).abs().amax(1)
    early, late = [(outcomes[0][n] - wanted).view(-1, BLOCK).abs().amax(1) / most for n in (1, 2)]
    assert (early > 1e-3).all() and (late < 1e-4).all()


@pytest.mark.parametrize(("wire", "bytes_each"), [("bf16", 2), ("int8", 1), ("int4", 0.5)])
def test_bytes_of_a_rank_do_not_grow_with_the_ranks(wire, bytes_each):
    size = 60 * BLOCK

    def rank_main(comm):
        summed_up(WireSum(comm, wire), torch.ones(size))
        return comm.bytes_sent

    for ranks in (2, 5):
        scales = 0 if wire == "bf16" else 4 / BLOCK
        wanted = 2 * (ranks - 1) / ranks * size * (bytes_each + scales) + (ranks - 1) * 8
        assert run_threads(ranks, rank_main) == [wanted] * ranks


def trained(comm, **settings):
    points, model = Points(40), Line()
    steps = Steps([[(points.x[i + comm.rank :: 12], points.y[i + comm.rank :: 12])] for i in range(0, 12, 3)])
    train_node(model, comm, DiLoCoStrategy(H=2, lr=0.05, **settings), steps, epochs=5).run()
    return FlatParameters(model).read()


@pytest.mark.parametrize(("wire", "near"), [("bf16", 2e-3), ("int8", 2e-3), ("int4", 2e-2)])
def test_training_ends_where_it_does_with_exact_sums(wire, near):
    exact, rounded = (run_threads(3, lambda comm, wire=each: trained(comm, wire=wire))[0] for each in ("float32", wire))
    start = FlatParameters(Line()).read()
    assert not torch.equal(exact, rounded)
    assert (exact - rounded).norm() < near * (exact - start).norm()


def test_alone_nothing_is_rounded():
    assert torch.equal(trained(SingleComm(), wire="int8"), trained(SingleComm()))


def test_settings_that_cannot_be_are_refused():
    with pytest.raises(SettingError, match="unknown wire 'int9'; did you mean 'int8'"):
        DiLoCoStrategy(wire="int9")
    with pytest.raises(SettingError, match="a parameter server sends float32 only"):
        ParameterServerStrategy(wire="int8")
    with pytest.raises(SettingError, match="a parameter server sends float32 only"):
        ServerCommunicator(wire="int8")
