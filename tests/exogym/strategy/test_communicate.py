"""Collectives on any tensor: with threads, with real processes, and on the default group of torch.distributed."""

import pytest
import torch
import torch.distributed as dist
from exogym_toys import Processes, run_threads

from exogym.comm.process_group import (
    DefaultGroupComm,
    default_group,
    join_local_store,
    leave_default_group,
    local_store,
)
from exogym.errors import PeerLost, SettingError
from exogym.strategy import communicate

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32, torch.uint8)
DTYPES = (*FLOATS, *INTEGERS, torch.bool)
SHAPES = ((), (3,), (2, 3), (0, 4))
CASES = [(shape, dtype) for shape in SHAPES for dtype in DTYPES if shape == (2, 3) or dtype == torch.float32]


def of_rank(rank, shape, dtype):
    numbers = torch.arange(torch.Size(shape).numel()).reshape(shape)
    return ((numbers + rank) % 3).to(dtype)


def every_collective(comm):
    """What is wrong, in words: nothing."""
    wrong = []
    with communicate.use(comm):
        assert communicate.current() is comm
        for shape, dtype in CASES:
            wrong += [f"{name} {dtype} {shape}" for name in found_wrong(comm.rank, comm.world_size, shape, dtype)]
        wrong += unusual(comm.rank, comm.world_size)
    return wrong


def reductions(tensors, dtype):
    """op -> what it gives, for those ops that this dtype has."""
    stacked = torch.stack(tensors)
    found = {"max": stacked.to(torch.uint8).amax(0).to(dtype)}
    if dtype != torch.bool:
        found["sum"] = stacked.double().sum(0).to(dtype)
    if dtype in FLOATS:
        found["mean"] = (stacked.double().sum(0).to(dtype) / len(tensors)).to(dtype)
    return found


def found_wrong(rank, ranks, shape, dtype):
    """The names of collectives that give something else."""
    all_of = [of_rank(other, shape, dtype) for other in range(ranks)]
    mine, last = all_of[rank].clone(), ranks - 1
    parts = [all_of[rank] if place == rank else of_rank(rank + place, shape, dtype) for place in range(ranks)]
    for_me = [all_of[rank] if other == rank else of_rank(other + rank, shape, dtype) for other in range(ranks)]

    def gives(expected, returned, tensor=None):
        if tensor is not None and returned is not tensor:
            return False
        return returned.dtype == dtype and returned.shape == shape and torch.equal(returned, expected)

    for op, expected in reductions(all_of, dtype).items():
        tensor = mine.clone()
        if not gives(expected, communicate.all_reduce(tensor, op), tensor):
            yield f"all_reduce {op}"
        tensor = mine.clone()
        if not gives(expected if rank == last else mine, communicate.reduce(tensor, last, op), tensor):
            yield f"reduce {op}"
    for op, expected in reductions(for_me, dtype).items():
        tensor = mine.clone()
        if not gives(expected, communicate.reduce_scatter(tensor, parts, op), tensor):
            yield f"reduce_scatter {op}"
    if not all(map(gives, all_of, communicate.all_gather(mine))):
        yield "all_gather"
    gathered = communicate.gather(mine, last)
    if (gathered is None) != (rank != last) or not all(map(gives, all_of, gathered or all_of)):
        yield "gather"
    tensor = mine.clone()
    if not gives(all_of[last], communicate.broadcast(tensor, last), tensor):
        yield "broadcast"
    tensor = torch.zeros_like(mine)
    if not gives(all_of[rank], communicate.scatter(tensor, all_of if rank == last else None, last), tensor):
        yield "scatter"


def unusual(rank, ranks):
    """Columns of a matrix, and weights that are trained."""
    matrix = torch.zeros(3, 4)
    matrix[:, 1] = rank + 1
    communicate.all_reduce(matrix[:, 1])
    in_all = ranks * (ranks + 1) / 2
    if matrix.tolist() != [[0, in_all, 0, 0]] * 3:
        yield f"columns: {matrix.tolist()}"
    weight = torch.nn.Parameter(torch.full((2, 2), rank + 1.0))
    communicate.broadcast(communicate.all_reduce(weight, "mean"))
    if weight.tolist() != [[in_all / ranks] * 2] * 2 or not weight.requires_grad or weight.grad_fn:
        yield f"a parameter: {weight}"


@pytest.mark.parametrize("ranks", [2, 3])
def test_every_collective_with_threads(ranks):
    assert run_threads(ranks, every_collective) == [[]] * ranks


def test_every_collective_alone():
    assert communicate.current().world_size == 1
    assert [list(found_wrong(0, 1, *case)) for case in CASES] == [[]] * len(CASES)


def test_every_collective_with_real_processes():
    with Processes(3, every_collective) as processes:
        assert [processes.result(rank, 150) for rank in range(3)] == [[]] * 3


def on_the_default_group(comm, port):
    assert default_group() is None and communicate.current().world_size == 1
    store, rank, ranks = join_local_store(port), comm.rank, comm.world_size
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    group = communicate.current()
    assert isinstance(group, DefaultGroupComm) and (group.rank, group.world_size) == (rank, ranks)
    wrong = [name for case in CASES for name in found_wrong(rank, ranks, *case)]
    wrong += unusual(rank, ranks)
    assert communicate.current() is group and group.bytes_sent > 0 and group.seconds > 0
    with communicate.use(comm):
        assert communicate.current() is comm
    assert communicate.current() is group
    if rank == 1:
        leave_default_group()
        assert communicate.current().world_size == 1
        return wrong
    with pytest.raises(PeerLost, match=f"rank 0 of {ranks} lost a peer"):
        communicate.all_reduce(torch.ones(2))
    return wrong


def test_every_collective_on_the_default_group():
    store = local_store()
    with Processes(2, on_the_default_group, store.port) as processes:
        assert [processes.result(rank, 150) for rank in range(2)] == [[], []]


def test_the_communicator_is_set_for_one_thread_and_for_one_context():
    def rank_main(comm):
        communicate.use(comm)
        with communicate.use(None):
            assert communicate.current().world_size == 1
        assert communicate.current() is comm
        return communicate.all_reduce(torch.tensor(comm.rank + 1)).item()

    assert run_threads(3, rank_main) == [6, 6, 6]
    assert communicate.current().world_size == 1


ONE = torch.ones(2)
WRONG = {
    "unknown op 'summ'; did you mean 'sum'?": lambda: communicate.all_reduce(ONE, "summ"),
    "op mean: not of torch.int64; convert the tensor to a float, or take the sum": (
        lambda: communicate.reduce(torch.ones(2, dtype=torch.int64), op="mean")
    ),
    "op sum: not of torch.bool; take the max": lambda: communicate.all_reduce(torch.ones(2) > 0),
    "op max: not of torch.complex64; convert": lambda: communicate.all_reduce(ONE.to(torch.complex64), "max"),
    "src must be a rank from 0 to 1, not 2": lambda: communicate.broadcast(ONE, 2),
    "src must be a rank from 0 to 1, not -1": lambda: communicate.scatter(ONE, [ONE, ONE], -1),
    "dst must be a rank from 0 to 1, not 5": lambda: communicate.gather(ONE, 5),
    "scatter: one part for each of the 2 ranks, not 0": lambda: communicate.scatter(ONE),
    "reduce_scatter: one part for each of the 2 ranks, not 1": lambda: communicate.reduce_scatter(ONE, [ONE]),
    r"scatter: part 1 is \(3,\) torch.float32, not \(2,\) torch.float32": (
        lambda: communicate.scatter(ONE, [ONE, torch.ones(3)])
    ),
    r"reduce_scatter: part 0 is \(2,\) torch.float64, not \(2,\)": (
        lambda: communicate.reduce_scatter(ONE, [ONE.double(), ONE])
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_arguments_are_refused(message):
    def rank_main(comm):
        if comm.rank == 0:
            with communicate.use(comm), pytest.raises(SettingError, match=message):
                WRONG[message]()

    run_threads(2, rank_main)


def test_only_the_source_has_parts():
    def rank_main(comm):
        with communicate.use(comm):
            if comm.rank == 1:
                with pytest.raises(SettingError, match="only rank 0, which is src, has parts; this is rank 1"):
                    communicate.scatter(ONE, [ONE, ONE])

    run_threads(2, rank_main)


def test_parts_may_be_the_rows_of_a_tensor():
    def rank_main(comm):
        with communicate.use(comm):
            rows = torch.arange(4.0).view(2, 2)
            own = communicate.scatter(torch.zeros(2), rows if comm.rank == 0 else None)
            return own.tolist(), communicate.reduce_scatter(torch.zeros(2), rows).tolist()

    assert run_threads(2, rank_main) == [([0.0, 1.0], [0.0, 2.0]), ([2.0, 3.0], [4.0, 6.0])]


def test_complex_numbers_travel():
    def rank_main(comm):
        with communicate.use(comm):
            return [value.item() for value in communicate.all_gather(torch.tensor(1j * comm.rank))]

    assert run_threads(2, rank_main) == [[0j, 1j]] * 2
