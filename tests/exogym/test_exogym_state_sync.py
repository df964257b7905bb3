"""How ranks that meet come to one state, and what passes between them."""

import json
import math

import pytest
import torch
from exogym_toys import Processes, run_threads
from hypothesis import given, settings
from hypothesis import strategies as st

from exogym import entry
from exogym.communication import Comm
from exogym.entry import DAMAGED, MARKS, NOT_BEGUN, Entered, enter, receive_state, send_state
from exogym.errors import CheckpointError, PeerLost, RanksDiverged

STATE = {
    "steps": 3,
    "loss": math.pi,
    "val_loss": None,
    "names": ("ä", ["b"], {}),
    "done": {0: torch.tensor([True, False]), 1: torch.zeros(0, dtype=torch.bool)},
    "weights": torch.arange(600, dtype=torch.float32).reshape(20, 30).T,
    "moments": [torch.tensor(2.5), torch.tensor([[1, 2]]), torch.tensor([1.5], dtype=torch.bfloat16)],
    "bytes": torch.arange(7, dtype=torch.uint8),
}


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return a == b


# what passes between two ranks


def pass_on(comm, state):
    if comm.rank == 0:
        return send_state(comm, state, to=1)
    return receive_state(comm, source=0)


def test_a_state_arrives_as_it_was(monkeypatch):
    [_, arrived] = run_threads(2, lambda comm: pass_on(comm, STATE))
    assert same(arrived, STATE)
    monkeypatch.setattr(entry, "PIECE", 1000)  # what is larger goes in pieces
    [_, arrived] = run_threads(2, lambda comm: pass_on(comm, STATE))
    assert same(arrived, STATE)


def pass_on_then_lie(comm):
    """Over one connection: a state, and then the header of one that is too large."""
    arrived = pass_on(comm, STATE)
    if comm.rank == 0:
        comm.send(torch.tensor([100, 2**50]), 1)
        return True
    with pytest.raises(PeerLost, match="rank 0 sent a state of an impossible size"):
        receive_state(comm, source=0)
    return same(arrived, STATE)


def test_a_state_arrives_in_another_process_as_it_was():
    with Processes(2, pass_on_then_lie) as processes:
        assert processes.result(0) and processes.result(1)


class Tape(Comm):
    """What is sent can be changed, and is received in turn."""

    rank, world_size = 0, 2
    all_reduce_ = broadcast_ = all_gather = barrier = None

    def __init__(self):
        super().__init__()
        self.sent = []

    def send(self, flat, dst):
        self.sent.append(flat.clone())

    def recv(self, flat, src):
        flat.copy_(self.sent.pop(0))


@pytest.fixture
def tape() -> Tape:
    """Of STATE: the header, the text, and each tensor that is not empty."""
    tape = Tape()
    send_state(tape, STATE, to=1)
    assert [flat.numel() for flat in tape.sent[2:]] == [2, 2400, 4, 16, 2, 7]
    return tape


def announce(tape: Tape, record: object) -> None:
    """Send this instead of the text."""
    text = record if isinstance(record, bytes) else json.dumps(record).encode()
    tape.sent[1] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    tape.sent[0][0] = len(text)


def text_of(tape: Tape) -> dict:
    return json.loads(bytes(tape.sent[1].numpy()))


def test_what_is_sent_at_once_is_limited(monkeypatch):
    monkeypatch.setattr(entry, "PIECE", 1000)
    tape = Tape()
    send_state(tape, STATE, to=1)
    assert [flat.numel() for flat in tape.sent[3:6]] == [1000, 1000, 400]


def test_an_untouched_tape_is_read(tape):
    announce(tape, text_of(tape))
    assert same(receive_state(tape, 0), STATE)


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_a_flipped_bit_in_a_tensor_is_noticed(data):
    tape = Tape()
    send_state(tape, STATE, to=1)
    flat = data.draw(st.sampled_from(tape.sent[2:]))
    flat[data.draw(st.integers(0, flat.numel() - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(PeerLost, match="arrived damaged: another hash"):
        receive_state(tape, 0)


def test_a_changed_number_beside_the_tensors_is_noticed(tape):
    text = bytes(tape.sent[1].numpy())
    assert text.count(b'["steps", 3]') == 1
    announce(tape, text.replace(b'["steps", 3]', b'["steps", 7]'))
    with pytest.raises(PeerLost, match="damaged"):
        receive_state(tape, 0)


@pytest.mark.parametrize("header", [(0, 9), (-1, 9), (2**26, 9), (2**62, 9), (9, -1), (9, 2**40)])
def test_an_impossible_header_is_refused_before_memory_is_taken(tape, header):
    tape.sent[0] = torch.tensor(header)
    with pytest.raises(PeerLost, match="impossible size"):
        receive_state(tape, 0)
    assert len(tape.sent) == 7  # nothing more was read


NO_TENSORS = {"state": 1, "tensors": [], "hash": entry._hash([entry._text(1)])}
DAMAGED_TEXTS = {
    "no text": b"\xff\xfe",
    "no JSON": b"{",
    "too deep": b"[" * 100_000,
    "no record": [1],
    "nothing of a record": {},
    "no hash": {"state": 1, "tensors": []},
    "a tensor that is not sent": NO_TENSORS | {"state": {"tensor": "0"}},
    "no tree": NO_TENSORS | {"state": {"dict": [1]}},
    "an unknown type": NO_TENSORS | {"tensors": [["0", "torch.complex64", [1]]]},
    "a pickle": NO_TENSORS | {"tensors": [["0", "torch.storage", [1]]]},
    "a negative shape": NO_TENSORS | {"tensors": [["0", "torch.float32", [-1]]]},
    "a shape that is too large": NO_TENSORS | {"tensors": [["0", "torch.float32", [2**40, 2**40]]]},
    "a shape beyond all numbers": NO_TENSORS | {"tensors": [["0", "torch.float32", [2**70]]]},
    "a shape that is none": NO_TENSORS | {"tensors": [["0", "torch.float32", "abc"]]},
}


@pytest.mark.parametrize("text", DAMAGED_TEXTS.values(), ids=DAMAGED_TEXTS)
def test_a_damaged_text_is_refused(tape, text):
    announce(tape, text)
    with pytest.raises(PeerLost, match="the state that rank 0 sent arrived damaged"):
        receive_state(tape, 0)


def test_more_than_was_announced_is_refused_before_memory_is_taken(tape):
    tape.sent[0][1] = 2000
    with pytest.raises(PeerLost, match="larger than announced"):
        receive_state(tape, 0)
    assert len(tape.sent) == 5  # the first tensor was read, the second would be too large


# coming to one state


class Rank:
    """An Entrant whose state is a word."""

    def __init__(self, state: str, *, agreements=NOT_BEGUN, digest=7, offers=(), marks=(1, 2, 3), own=True):
        self.state, self.loaded, self._own = state, [], own
        self._agreements, self._digest, self._offers, self._marks = agreements, digest, offers, marks

    def marks(self):
        return list(self._marks)

    def agreements(self):
        return self._agreements

    def digest(self):
        return self._digest

    def offers(self):
        return list(self._offers)

    def load(self, number, *, exactly):
        self.loaded.append((number, exactly))
        self.state = f"checkpoint {number}"
        return self._own

    def agreed_state(self):
        return {"state": self.state}

    def load_agreed_state(self, state):
        self.state = state["state"]


def meet(*ranks: Rank) -> list[Entered]:
    return run_threads(len(ranks), lambda comm: enter(comm, ranks[comm.rank]))


def test_equals_leave_all_as_it_is():
    ranks = [Rank(name, agreements=4) for name in "abc"]
    assert meet(*ranks) == [Entered()] * 3
    assert [rank.state for rank in ranks] == ["a", "b", "c"]


def test_alone_it_goes_on_with_what_it_has():
    rank = Rank("a", agreements=4)
    assert meet(rank) == [Entered()] and rank.state == "a"


def test_at_the_beginning_others_get_the_weights_of_rank_0_if_theirs_differ():
    ranks = [Rank("a", digest=1), Rank("b", digest=2), Rank("c", digest=1), Rank("d", digest=3)]
    assert [entered.received for entered in meet(*ranks)] == [False, True, False, True]
    assert [rank.state for rank in ranks] == ["a", "a", "c", "a"]


def test_those_who_are_behind_get_the_state_of_those_ahead():
    """Also a new process, whatever checkpoints it has."""
    ranks = [Rank("a", agreements=2), Rank("b", agreements=5), Rank("c", offers=[9]), Rank("d", agreements=5)]
    assert meet(*ranks) == [Entered(received=True), Entered(), Entered(received=True), Entered()]
    assert [rank.state for rank in ranks] == ["b", "b", "b", "d"] and not ranks[2].loaded


def test_those_ahead_must_have_the_same_weights():
    with pytest.raises(RanksDiverged, match="the weights of rank2 are not those of rank1"):
        meet(Rank("a"), Rank("b", agreements=5, digest=1), Rank("c", agreements=5, digest=2))


def test_they_begin_from_the_newest_checkpoint_that_all_have():
    ranks = [Rank("a", offers=[4, 6]), Rank("b", offers=[4, 5, 6, 8]), Rank("c", offers=[4, 6, 8], own=False)]
    entered = meet(*ranks)
    assert entered == [Entered(checkpoint=6, exactly=True)] * 2 + [Entered(checkpoint=6, exactly=False)]
    assert all(rank.loaded == [(6, True)] for rank in ranks)


def test_without_a_common_checkpoint_the_newest_is_given_to_all():
    ranks = [Rank("a", offers=[2]), Rank("b", offers=[4]), Rank("c"), Rank("d", offers=[4])]
    entered = meet(*ranks)
    assert [each.received for each in entered] == [True, False, True, False]
    assert all(each.checkpoint == 4 and not each.exactly for each in entered)
    assert [rank.state for rank in ranks] == ["checkpoint 4"] * 4
    assert [rank.loaded for rank in ranks] == [[], [(4, False)], [], [(4, False)]]


def test_one_whose_checkpoints_are_damaged_gets_those_of_another():
    ranks = [Rank("a", offers=[DAMAGED]), Rank("b", offers=[4])]
    assert meet(*ranks) == [Entered(received=True, checkpoint=4), Entered(checkpoint=4)]
    assert ranks[0].state == "checkpoint 4"


def test_when_all_checkpoints_are_damaged_their_hosts_are_named():
    with pytest.raises(CheckpointError, match=r"all checkpoints are damaged: rank0, rank2$"):
        meet(Rank("a", offers=[DAMAGED]), Rank("b"), Rank("c", offers=[DAMAGED]))


def test_one_that_all_have_is_not_worth_several_rounds():
    """One host was lost long before the others were stopped."""
    ranks = [Rank("a", offers=[20, 29]), Rank("b", offers=[10, 20])]
    assert meet(*ranks) == [Entered(checkpoint=29), Entered(received=True, checkpoint=29)]


def test_only_the_newest_of_many_checkpoints_are_offered():
    ranks = [Rank("a", offers=range(40)), Rank("b", offers=[*range(10), 38])]
    assert meet(*ranks) == [Entered(checkpoint=38, exactly=True)] * 2


@pytest.mark.parametrize("number", range(len(MARKS)))
def test_what_ranks_do_not_share_is_named(number):
    other = [1, 2, 3]
    other[number] = -(2**63)
    with pytest.raises(RanksDiverged, match=r"rank\d and rank\d do not share " + MARKS[number][:11]):
        meet(Rank("a", agreements=4), Rank("b", agreements=4), Rank("c", marks=other))
