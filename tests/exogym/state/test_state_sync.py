"""How ranks that meet come to one state, and what passes between them."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from exogym_toys import Processes, run_threads
from hypothesis import given, settings
from hypothesis import strategies as st

from exogym.comm.comm import Comm
from exogym.errors import CheckpointError, PeerLost, RanksDiverged
from exogym.state import state_sync
from exogym.state.node_state import NOT_BEGUN, Version
from exogym.state.state_sync import MOST, MUST_MATCH, Offer, receive_state, send_state, sync_state

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
    monkeypatch.setattr(state_sync, "PIECE", 1000)  # what is larger goes in pieces
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
    all_reduce_ = broadcast_ = all_gather = None

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
    monkeypatch.setattr(state_sync, "PIECE", 1000)
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


NO_TENSORS = {"state": 1, "tensors": [], "hash": state_sync._hash([state_sync._text(1)])}
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
    """What sync_state asks of a rank; the state is a word. Its version is (term, count), its fingerprint a number."""

    strategy = SimpleNamespace(divides_model=False)

    def __init__(
        self, state: str, version=NOT_BEGUN, *, fingerprint=7, offers=(), fixed=(1, 2, 3), damaged=False, own=True
    ):
        self.state, self.loaded, self._own = state, [], own
        self._version, self._fingerprint, self._offers = (
            Version(*version),
            fingerprint,
            [offer(*about) for about in offers],
        )
        self._fixed, self._damaged = fixed, damaged

    def fixed_fingerprints(self):
        return list(self._fixed)

    def version(self):
        return self._version

    def fingerprint_of(self, agreed):
        return self._fingerprint

    def offers(self):
        return list(self._offers), self._damaged

    def load(self, offer, *, exactly, inside):
        self.loaded.append((offer.number, exactly, inside))
        self.state = f"checkpoint {offer.number}"
        return self._own

    def agreed_state(self):
        return {"state": self.state}

    def load_agreed_state(self, state):
        self.state = state["state"]


def offer(count: int, *, term: int = 1, fingerprint: int | None = None, inside: bool = False) -> Offer:
    """A checkpoint after `count` agreements, each of them one change."""
    return Offer(Version(term, count), 1000 + count if fingerprint is None else fingerprint, 2 * count + inside)


def offers(*counts: int) -> list[tuple[int]]:
    return [(count,) for count in counts]


def meet(*ranks: Rank) -> list:
    return run_threads(len(ranks), lambda comm: sync_state(comm, ranks[comm.rank], ranks[comm.rank]))


def states(*ranks: Rank) -> list[str]:
    meet(*ranks)
    return [rank.state for rank in ranks]


def test_equals_leave_all_as_it_is():
    ranks = [Rank(name, (1, 4)) for name in "abc"]
    assert {(one.received, one.checkpoint, one.term) for one in meet(*ranks)} == {(False, None, 1)}
    assert [rank.state for rank in ranks] == ["a", "b", "c"]


def test_alone_it_goes_on_with_what_it_has():
    assert states(Rank("a", (1, 4))) == ["a"]


def test_at_the_beginning_others_get_the_weights_of_rank_0_if_theirs_differ():
    ranks = [Rank("a", fingerprint=1), Rank("b", fingerprint=2), Rank("c", fingerprint=1), Rank("d", fingerprint=3)]
    assert [one.received for one in meet(*ranks)] == [False, True, False, True]
    assert [rank.state for rank in ranks] == ["a", "a", "c", "a"]


def test_those_who_are_behind_get_the_state_of_those_ahead():
    """Also a new process, whose checkpoint is older."""
    ranks = [Rank("a", (1, 2)), Rank("b", (1, 5)), Rank("c", offers=offers(4)), Rank("d", (1, 5))]
    assert [one.received for one in meet(*ranks)] == [True, False, True, False]
    assert [rank.state for rank in ranks] == ["b", "b", "b", "d"] and not ranks[2].loaded


def test_of_one_version_and_another_fingerprint_the_first_one_is_right():
    """However they came to differ: after a validation that counted on some, or by rounding."""
    assert states(Rank("a", (1, 2)), Rank("b", (1, 5), fingerprint=1), Rank("c", (1, 5), fingerprint=2)) == [
        "b",
        "b",
        "b",
    ]


def test_what_was_done_after_going_back_is_newer_than_what_had_been_done_before():
    """A sleeper that had come further, when the others went back to a checkpoint and went on from there."""
    assert states(Rank("sleeper", (1, 9)), Rank("b", (2, 3)), Rank("c", (2, 3))) == ["b", "b", "c"]


def test_a_checkpoint_that_is_newer_than_what_anybody_remembers_is_begun_from():
    ranks = [Rank("a", (1, 5)), Rank("b", offers=offers(6))]
    [first, second] = meet(*ranks)
    assert (first.received, second.received, first.term) == (True, False, 2)
    assert [rank.state for rank in ranks] == ["checkpoint 12"] * 2


def test_they_begin_from_the_newest_checkpoint_that_all_have():
    ranks = [
        Rank("a", offers=offers(4, 6)),
        Rank("b", offers=offers(3, 4, 6, 7)),
        Rank("c", offers=offers(4, 6), own=False),
    ]
    synced = meet(*ranks)
    assert [(one.checkpoint, bool(one.exactly), one.term) for one in synced] == [
        (6, True, 2),
        (6, True, 2),
        (6, False, 2),
    ]
    assert all(rank.loaded == [(12, True, False)] for rank in ranks)


def test_a_part_of_a_round_is_each_ranks_own():
    """One was stopped inside the round after the agreement that the other saved; both remember the same agreement."""
    ranks = [Rank("a", offers=[(5,)]), Rank("b", offers=[])]
    ranks[1]._offers = [offer(5, inside=True)]
    assert all(one.exactly for one in meet(*ranks))
    assert [rank.loaded for rank in ranks] == [[(10, True, True)], [(11, True, True)]]


def test_the_same_number_with_another_fingerprint_is_not_the_same_checkpoint():
    """One host kept a round that the others lost, and trained again."""
    ranks = [Rank("a", offers=offers(2, 3)), Rank("b", offers=offers(2))]
    ranks[1]._offers += [offer(3, term=2, fingerprint=5)]
    synced = meet(*ranks)
    assert [(one.checkpoint, one.exactly, one.term) for one in synced] == [(2, True, 3)] * 2
    ranks = [Rank("a", offers=offers(3)), Rank("b")]
    ranks[1]._offers = [offer(3, term=2, fingerprint=5)]
    assert [one.received for one in meet(*ranks)] == [True, False]
    assert [rank.loaded for rank in ranks] == [[], [(6, False, False)]]


def test_without_a_common_checkpoint_the_newest_is_given_to_all():
    ranks = [Rank("a", offers=offers(2)), Rank("b", offers=offers(4)), Rank("c"), Rank("d", offers=offers(4))]
    synced = meet(*ranks)
    assert [one.received for one in synced] == [True, False, True, False]
    assert all(one.checkpoint == 4 and not one.exactly for one in synced)
    assert [rank.state for rank in ranks] == ["checkpoint 8"] * 4
    assert [rank.loaded for rank in ranks] == [[], [(8, False, False)], [], [(8, False, False)]]


def test_one_whose_checkpoints_are_damaged_gets_those_of_another():
    ranks = [Rank("a", damaged=True), Rank("b", offers=offers(4))]
    assert [one.received for one in meet(*ranks)] == [True, False]
    assert ranks[0].state == "checkpoint 8"


def test_when_all_checkpoints_are_damaged_their_hosts_are_named():
    with pytest.raises(CheckpointError, match=r"all checkpoints are damaged: rank0, rank2$"):
        meet(Rank("a", damaged=True), Rank("b"), Rank("c", damaged=True))


def test_one_that_all_have_is_not_worth_several_rounds():
    """One host was lost long before the others were stopped."""
    ranks = [Rank("a", offers=offers(20, 29)), Rank("b", offers=offers(10, 20))]
    assert [(one.checkpoint, one.received) for one in meet(*ranks)] == [(29, False), (29, True)]


def test_only_the_newest_of_many_checkpoints_are_offered():
    ranks = [Rank("a", offers=offers(*range(40))), Rank("b", offers=offers(*range(10), 38))]
    assert {(one.checkpoint, one.exactly) for one in meet(*ranks)} == {(38, True)}
    ranks = [Rank("a", offers=offers(*range(MOST + 1))), Rank("b", offers=offers(0))]
    assert {one.checkpoint for one in meet(*ranks)} == {MOST}


@pytest.mark.parametrize("number", range(len(MUST_MATCH)))
def test_what_ranks_do_not_share_is_named(number):
    other = [1, 2, 3]
    other[number] = -(2**63)
    with pytest.raises(RanksDiverged, match=r"rank\d and rank\d do not share " + MUST_MATCH[number][:11]):
        meet(Rank("a", (1, 4)), Rank("b", (1, 4)), Rank("c", fixed=other))
