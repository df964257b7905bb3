"""Who is in which generation, and which votes count: by hand, and by machine for what nobody thought of."""

import json
import re
import threading
from collections import defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from exogym.errors import PeerLost, RanksDiverged
from exogym.membership import END, ROUND, STATE_SYNC, VALIDATION, Generation
from exogym.membership.client import CoordinatorClient
from exogym.membership.coordinator import (
    LONGEST_KEY,
    LONGEST_VALUE,
    MOST_DIVERGED,
    RETURN_S,
    RETURN_SOON_S,
    Coordinator,
)
from exogym.membership.coordinator_state import FRUITLESS, PATIENCE_S

HOSTS = ("ada", "bob", "cy")


class Member:
    """One host's process, as far as the coordinator sees it. It votes in the generation that it has heard of."""

    def __init__(self, name: str):
        self.name, self.mail = name, []
        self.generation: Generation | None = None
        self.vote = 0
        self.has_voted = self.is_away = False

    def hear(self, message: dict) -> None:
        message = json.loads(json.dumps(message))
        self.mail.append(message)
        if message["type"] == "generation":
            self.generation, self.vote, self.has_voted = Generation.of(message), 0, False
            self.is_away = False
        elif message["type"] == "excluded":
            self.is_away = True
        elif message["type"] != "told" and message["generation"] == self.generation.number:
            assert message["vote"] == self.vote and self.has_voted, "a commit that it does not wait for"
            self.vote, self.has_voted, self.is_away = self.vote + 1, False, message["regroup"]

    def ballot(self, what: str, **changes) -> dict:
        about = {"digest": 7, "samples": {"0": [self.name]}, "round": self.vote, "cut_short": False}
        return {"generation": self.generation.number, "vote": self.vote, "what": what, **about, **changes}


class Meeting:
    """A coordinator with a clock of its own, and all that it has sent."""

    def __init__(self, hosts=HOSTS, min_hosts: int = 1, resumed: bool = False):
        self.members = {host: Member(host) for host in hosts}
        self.sent, self.events, self.now = [], [], 0.0
        self.coordinator = Coordinator(
            hosts, self.send, self.events.append, min_hosts=min_hosts, resumed=resumed, clock=lambda: self.now
        )

    def send(self, host: str, message: dict) -> None:
        self.sent.append((host, message))
        self.members[host].hear(message)

    def come(self, *hosts: str) -> None:
        for host in hosts:
            self.coordinator.ready(host)

    def vote(self, what: str, *hosts: str, **changes) -> None:
        """By default all members."""
        for host in hosts or self.coordinator.generation.members:
            member = self.members[host]
            member.has_voted = True
            self.coordinator.vote(host, member.ballot(what, **changes))

    def trouble(self, host: str) -> None:
        self.coordinator.trouble(host, {"generation": self.members[host].generation.number, "message": "no answer"})

    def wait(self, seconds: float) -> str | None:
        self.now += seconds
        blame = self.coordinator.tick()
        return blame and blame.host

    def generations(self) -> list[tuple[str, ...]]:
        return [tuple(event["hosts"]) for event in self.events if event["type"] == "generation"]

    def commits(self, kind: str = "commit") -> list[dict]:
        return [event for event in self.events if event["type"] == kind]


@pytest.fixture
def meeting() -> Meeting:
    """All have come to one state, and one round has counted."""
    meeting = Meeting()
    meeting.come(*HOSTS)
    meeting.vote(STATE_SYNC)
    meeting.vote(ROUND)
    return meeting


# generations


def test_nobody_is_called_before_all_have_come_and_then_in_the_order_of_hosts():
    meeting = Meeting()
    meeting.come("cy", "ada")
    assert not meeting.sent
    meeting.come("bob")
    assert [host for host, _ in meeting.sent] == list(HOSTS)
    for member in meeting.members.values():
        [message] = member.mail
        assert Generation.of(message) == Generation(
            1, HOSTS, meeting.coordinator.generation.prefix, continues_round=False
        )
    assert len(meeting.coordinator.generation.prefix) == 32


def test_one_that_is_given_up_before_it_came_is_not_waited_for():
    meeting = Meeting()
    meeting.come("cy", "ada")
    meeting.coordinator.lost("bob")
    assert meeting.generations() == [("ada", "cy")]
    assert not meeting.members["bob"].mail


def test_members_end_a_round_among_themselves_and_newcomers_join_at_the_next(meeting):
    meeting.coordinator.lost("bob")
    assert meeting.coordinator.generation.members == ("ada", "cy") and meeting.coordinator.generation.continues_round
    meeting.come("bob")
    meeting.vote(STATE_SYNC)
    meeting.vote(VALIDATION)
    assert meeting.generations() == [HOSTS, ("ada", "cy")]
    meeting.vote(ROUND)
    assert meeting.generations() == [HOSTS, ("ada", "cy"), HOSTS]
    assert meeting.members["ada"].mail[-2] == {"type": "commit", "generation": 2, "vote": 2, "regroup": True}
    assert not meeting.coordinator.generation.continues_round
    assert len({message["prefix"] for _, message in meeting.sent if message["type"] == "generation"}) == 3


def test_one_that_is_lost_before_all_are_in_sync_leaves_no_round_to_end():
    meeting = Meeting()
    meeting.come("ada", "bob")
    meeting.coordinator.lost("cy")
    meeting.vote(STATE_SYNC, "ada")
    meeting.come("cy")
    assert meeting.generations() == [("ada", "bob")]
    meeting.coordinator.lost("bob")
    assert meeting.generations()[1:] == [("ada", "cy")] and not meeting.coordinator.generation.continues_round


def test_when_all_are_lost_those_who_come_begin_a_round(meeting):
    for host in HOSTS:
        meeting.coordinator.lost(host)
    assert meeting.generations() == [HOSTS, ("bob", "cy"), ("cy",)] and meeting.coordinator.generation is None
    meeting.come(*HOSTS)
    assert meeting.generations()[3:] == [HOSTS] and not meeting.coordinator.generation.continues_round


def test_when_all_are_lost_they_wait_for_each_other_but_not_for_long(meeting):
    """Each may have a checkpoint that the others lack."""
    for host in HOSTS:
        meeting.coordinator.lost(host)
    meeting.come("bob", "cy")
    assert meeting.coordinator.generation is None and meeting.events[-1] == {"type": "orphaned", "hosts": ["ada", "cy"]}
    meeting.wait(RETURN_SOON_S - 1)
    assert meeting.coordinator.generation is None
    meeting.wait(1)
    assert meeting.coordinator.generation.members == ("bob", "cy")
    meeting.vote(STATE_SYNC)
    for host in ("bob", "cy"):
        meeting.coordinator.lost(host)
    meeting.come("bob")  # and once more: an earlier wait does not count
    assert meeting.coordinator.generation is None and meeting.events[-1] == {"type": "orphaned", "hosts": ["cy"]}


def test_one_that_was_only_asleep_remembers_and_waits_for_nobody(meeting):
    for host in HOSTS:
        meeting.coordinator.lost(host)
    meeting.coordinator.ready("cy", anew=False)
    assert meeting.coordinator.generation.members == ("cy",)


def test_one_that_is_back_in_the_middle_of_a_round_is_told_to_wait(meeting):
    meeting.coordinator.lost("cy")
    meeting.vote(STATE_SYNC)
    meeting.coordinator.ready("cy", anew=False)
    assert meeting.sent[-1] == ("cy", {"type": "excluded"})
    meeting.vote(ROUND)
    assert meeting.coordinator.generation.members == HOSTS
    meeting.coordinator.lost("cy")
    meeting.vote(STATE_SYNC)
    meeting.coordinator.ready("cy")  # it has just started, and waits anyway
    assert {"type": "excluded"} not in [message for host, message in meeting.sent[-1:] if host == "cy"]


def test_nobody_waits_for_one_that_is_given_up(meeting):
    for host in HOSTS:
        meeting.coordinator.lost(host, for_good=host == "ada")
    meeting.come("bob", "cy")
    assert meeting.coordinator.generation.members == ("bob", "cy")


def test_who_alone_has_the_newest_state_is_waited_for(meeting):
    """It is lost while it hands that state over to one who was away."""
    for host in ("bob", "cy"):
        meeting.coordinator.lost(host)
    meeting.vote(STATE_SYNC)
    meeting.vote(ROUND)
    meeting.coordinator.ready("bob", anew=False)
    meeting.vote(ROUND)
    assert meeting.coordinator.generation.members == ("ada", "bob")
    meeting.coordinator.lost("ada")
    assert meeting.coordinator.generation is None and meeting.events[-1] == {"type": "orphaned", "hosts": ["ada"]}
    meeting.wait(RETURN_S - 1)
    assert meeting.coordinator.generation is None
    meeting.come("ada")
    assert meeting.coordinator.generation.members == ("ada", "bob")


@pytest.mark.parametrize("how", ["stop", "too late"])
def test_the_wait_for_the_newest_state_has_an_end(meeting, how):
    for host in HOSTS:
        meeting.coordinator.lost(host)
    meeting.come("cy")
    if how == "stop":
        meeting.coordinator.stop()
    else:
        meeting.wait(RETURN_SOON_S)
    assert meeting.coordinator.generation.members == ("cy",)


def test_losing_a_newcomer_is_no_matter_for_the_others(meeting):
    meeting.coordinator.lost("bob")
    meeting.come("bob")
    meeting.coordinator.lost("bob")
    meeting.vote(STATE_SYNC)
    meeting.vote(ROUND)
    assert meeting.generations() == [HOSTS, ("ada", "cy")]
    assert meeting.members["ada"].mail[-1]["regroup"] is False


# votes


def test_it_counts_when_the_last_one_has_voted(meeting):
    sent = len(meeting.sent)
    meeting.vote(ROUND, "ada", "cy")
    assert len(meeting.sent) == sent and len(meeting.commits()) == 1
    meeting.vote(ROUND, "bob")
    assert meeting.sent[sent:] == [
        (host, {"type": "commit", "generation": 1, "vote": 2, "regroup": False}) for host in HOSTS
    ]
    samples = {host: {"0": [host]} for host in HOSTS}
    assert meeting.commits()[1:] == [{"type": "commit", "generation": 1, "round": 2, "samples": samples}]


def test_a_vote_counts_once(meeting):
    meeting.vote(ROUND, "ada", "ada", "ada")
    assert len(meeting.commits()) == 1


def test_votes_and_trouble_of_another_time_are_ignored(meeting):
    sent = len(meeting.sent)
    before = meeting.members["bob"].ballot(ROUND, vote=1)
    meeting.vote(ROUND, "ada", "cy")
    for late in (before, before | {"vote": 3}, before | {"generation": 0}, before | {"generation": 2, "vote": 2}):
        meeting.coordinator.vote("bob", late)
    assert len(meeting.sent) == sent
    asleep = meeting.members["bob"]
    meeting.coordinator.lost("bob")
    meeting.vote(STATE_SYNC)
    meeting.vote(ROUND, "ada", "cy")
    sent = len(meeting.sent)
    meeting.coordinator.vote("bob", asleep.ballot(ROUND))
    meeting.coordinator.vote("bob", asleep.ballot(ROUND, generation=2, vote=2))
    meeting.coordinator.trouble("bob", {"generation": 1, "message": "late"})
    meeting.coordinator.trouble("ada", {"generation": 1, "message": "late"})
    assert meeting.wait(PATIENCE_S + 1) is None and len(meeting.sent) == sent


def test_votes_before_the_generation_are_void(meeting):
    """A round for which two of three had voted is voted on again by those who are left."""
    meeting.vote(ROUND, "ada", "bob")
    meeting.coordinator.lost("bob")
    assert len(meeting.commits()) == 1
    meeting.vote(STATE_SYNC)
    meeting.vote(ROUND, "cy")
    assert len(meeting.commits()) == 1
    meeting.vote(ROUND, "ada")
    assert set(meeting.commits()[1]["samples"]) == {"ada", "cy"}


def test_a_round_that_a_stop_cut_short_is_told_apart(meeting):
    meeting.vote(ROUND, cut_short=True)
    assert len(meeting.commits()) == 1 and len(meeting.commits("stopped")) == 1


PLACE = r"cy is at \[.*7.*\] in the work, ada at \[.*8"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"digest": 8}, "the weights of cy are not those of ada before round"),
        ({"what": VALIDATION}, "cy is at validation, ada at round"),
        ({"position": [7, 1, 0]}, PLACE),
    ],
)
def test_ranks_that_differ_begin_the_round_anew_from_one_state(meeting, changes, told):
    """And only if that happens again and again, without a round that counts, is it an error."""
    for again in range(MOST_DIVERGED):
        before = meeting.coordinator.generation
        meeting.vote(ROUND, "ada", "bob", position=[8, 1, 0])
        meeting.coordinator.vote("cy", meeting.members["cy"].ballot(ROUND, position=[8, 1, 0]) | changes)
        assert re.search(told, meeting.commits("warning")[again]["what"])
        now = meeting.coordinator.generation
        assert now.number > before.number and now.members == before.members and not now.continues_round
        meeting.vote(STATE_SYNC)
    meeting.vote(ROUND, "ada", "bob", position=[8, 1, 0])
    with pytest.raises(RanksDiverged, match=told):
        meeting.coordinator.vote("cy", meeting.members["cy"].ballot(ROUND, position=[8, 1, 0]) | changes)


def test_what_was_wrong_once_is_forgotten_when_a_round_counts(meeting):
    for _ in range(2 * MOST_DIVERGED):
        meeting.vote(ROUND, "ada", "bob")
        meeting.coordinator.vote("cy", meeting.members["cy"].ballot(ROUND) | {"digest": 8})
        meeting.vote(STATE_SYNC)
        meeting.vote(ROUND)
    assert len(meeting.commits()) == 1 + 2 * MOST_DIVERGED


@pytest.mark.parametrize("comes", [True, False])
def test_a_resumed_run_waits_for_one_that_may_have_what_the_others_lack_but_not_for_ever(comes):
    meeting = Meeting(resumed=True)
    meeting.coordinator.lost("ada")
    meeting.come("bob", "cy")
    assert not meeting.generations()
    if comes:
        meeting.come("ada")
    else:
        meeting.wait(RETURN_SOON_S + 1)
    assert meeting.generations() == [HOSTS if comes else ("bob", "cy")]


def test_a_stop_may_find_ranks_at_different_steps(meeting):
    meeting.vote(ROUND, "ada", "bob", position=[8, 1, 0], cut_short=True)
    meeting.vote(ROUND, "cy", position=[7, 1, 0], cut_short=True)
    assert len(meeting.commits("stopped")) == 1


# min_hosts, and a stop


def test_below_min_hosts_the_round_is_ended_and_then_it_waits():
    meeting = Meeting(min_hosts=2)
    meeting.come(*HOSTS)
    meeting.vote(STATE_SYNC)
    meeting.coordinator.lost("ada")
    meeting.coordinator.lost("bob")
    assert meeting.generations() == [HOSTS, ("bob", "cy"), ("cy",)] and not meeting.commits("paused")
    meeting.vote(STATE_SYNC)
    meeting.vote(ROUND)
    assert meeting.members["cy"].mail[-1]["regroup"] is True and len(meeting.generations()) == 3
    assert meeting.commits("paused") == [{"type": "paused", "hosts": ["cy"], "min_hosts": 2}]
    meeting.come("ada")
    assert meeting.generations()[3:] == [("ada", "cy")] and not meeting.coordinator.generation.continues_round


def test_a_pause_is_told_once_for_the_same_hosts():
    meeting = Meeting(min_hosts=3)
    meeting.come("ada", "bob")
    meeting.coordinator.lost("cy")
    meeting.come("bob")
    meeting.coordinator.lost("cy")
    assert [event["hosts"] for event in meeting.commits("paused")] == [["ada", "bob"]]
    meeting.coordinator.lost("bob")
    assert [event["hosts"] for event in meeting.commits("paused")][1:] == [["ada"]]


def test_a_stop_ends_a_pause_and_lets_nobody_in():
    meeting = Meeting(min_hosts=3)
    meeting.come("ada", "bob")
    meeting.coordinator.lost("cy")
    meeting.coordinator.stop()
    assert meeting.generations() == [("ada", "bob")]
    meeting.come("cy")
    meeting.vote(STATE_SYNC)
    meeting.vote(ROUND)
    assert meeting.members["ada"].mail[-1]["regroup"] is False and meeting.generations() == [("ada", "bob")]


def test_a_stop_waits_for_nobody():
    meeting = Meeting()
    meeting.come("ada", "bob")
    meeting.coordinator.stop()
    assert meeting.generations() == [("ada", "bob")]


# trouble


def test_a_group_that_does_not_answer_is_formed_anew(meeting):
    meeting.trouble("bob")
    assert meeting.wait(PATIENCE_S / 2) is None
    meeting.trouble("ada")  # which does not begin the wait again
    assert len(meeting.generations()) == 1
    assert meeting.wait(PATIENCE_S / 2) is None
    assert meeting.generations() == [HOSTS, HOSTS] and meeting.coordinator.generation.continues_round
    assert meeting.wait(10 * PATIENCE_S) is None and len(meeting.generations()) == 2


def test_where_a_stranger_was_in_the_group_nobody_is_given_up(meeting):
    for _ in range(3 * FRUITLESS):
        number = meeting.coordinator.generation.number
        meeting.coordinator.trouble("bob", {"generation": number, "message": "no key", "stranger": True})
        meeting.trouble("ada")
        assert meeting.wait(PATIENCE_S) is None and meeting.coordinator.generation.number == number + 1
    assert "bob: somebody on the network took the place of a host" in meeting.commits("warning")[0]["what"]
    assert given_up(meeting, "bob") == "bob"  # what comes without one still counts


def test_what_a_member_sets_is_told_to_the_others_of_its_generation(meeting):
    said = {"generation": meeting.coordinator.generation.number, "key": "0/1", "value": "QUJD"}
    sent = len(meeting.sent)
    meeting.coordinator.set("bob", said)
    meeting.coordinator.set("bob", {**said, "generation": 0})
    assert meeting.sent[sent:] == [(host, {"type": "told", **said}) for host in ("ada", "cy")]
    for wrong in ({"key": 1}, {"value": None}, {"value": "A" * (LONGEST_VALUE + 1)}, {"key": "k" * (LONGEST_KEY + 1)}):
        with pytest.raises(ValueError, match=r"no (key|value) of at most \d+ characters"):
            meeting.coordinator.set("bob", {**said, **wrong})
    assert len(meeting.sent) == sent + 2


def test_a_value_is_waited_for_until_its_generation_is_over():
    client = CoordinatorClient()
    first, second = (Generation(number, HOSTS, "p", False).message() for number in (1, 2))
    client.put(first)
    told = {"type": "told", "generation": 1, "key": "0/1", "value": "QUJD"}
    assert waited_for(lambda: client.wait_for_told(1, "0/1", 9), client, told) == "QUJD"
    with pytest.raises(PeerLost, match="not all members of generation 1 came"):
        client.wait_for_told(1, "0/2", 0.01)
    client.put(second)
    client.put({**told, "generation": 1, "key": "0/2"})
    with pytest.raises(PeerLost):
        client.wait_for_told(1, "0/1", 9)
    with pytest.raises(PeerLost):
        client.wait_for_told(2, "0/2", 0.01)


def test_trouble_is_over_when_one_is_lost(meeting):
    meeting.trouble("ada")
    meeting.coordinator.lost("cy")
    assert meeting.wait(10 * PATIENCE_S) is None and meeting.generations() == [HOSTS, ("ada", "bob")]


def given_up(meeting: Meeting, *reporting: str, newcomer: str = "") -> str:
    """Who is given up after generations that come to nothing but what `reporting` say."""
    if newcomer:
        meeting.coordinator.lost(newcomer)
        meeting.vote(STATE_SYNC)
        meeting.come(newcomer)
        meeting.vote(ROUND)
    formed = len(meeting.generations())
    for _ in range(FRUITLESS):
        for host in reporting:
            meeting.trouble(host)
        if not reporting:
            meeting.coordinator.stalled()
        assert meeting.wait(PATIENCE_S) is None
        if reporting and not newcomer:
            meeting.vote(STATE_SYNC)  # to come to one state proves nothing
    for host in reporting:
        meeting.trouble(host)
    if not reporting:
        meeting.coordinator.stalled()
    blamed = meeting.wait(PATIENCE_S)
    assert meeting.generations()[formed:] == [HOSTS] * FRUITLESS
    return blamed


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("reports", [True, False])
def test_the_only_one_that_reports_trouble_or_does_not_is_given_up(meeting, host, reports):
    assert given_up(meeting, *([host] if reports else (other for other in HOSTS if other != host))) == host


@pytest.mark.parametrize("host", HOSTS)
def test_the_only_one_in_trouble_is_given_up_where_all_others_have_voted(meeting, host):
    for _ in range(FRUITLESS + 1):
        meeting.vote(STATE_SYNC, *(other for other in HOSTS if other != host))
        meeting.trouble(host)
        blamed = meeting.wait(PATIENCE_S)
    assert blamed == host


@pytest.mark.parametrize("newcomer", HOSTS)
@pytest.mark.parametrize("reporting", [(), HOSTS])
def test_where_nothing_tells_them_apart_a_newcomer_is_given_up(meeting, newcomer, reporting):
    assert given_up(meeting, *reporting, newcomer=newcomer) == newcomer


def test_where_nothing_at_all_says_who_is_to_blame_the_last_in_rank_is_given_up(meeting):
    assert given_up(meeting) == "cy"


def test_what_was_reported_goes_with_the_blame(meeting):
    for _ in range(FRUITLESS + 1):
        meeting.coordinator.trouble("bob", {"generation": meeting.coordinator.generation.number, "message": "refused"})
        meeting.now += PATIENCE_S
        blame = meeting.coordinator.tick()
    assert blame == ("bob", "bob: refused")


def test_a_round_that_counts_is_no_fruitless_generation(meeting):
    for _ in range(3 * FRUITLESS):
        meeting.trouble("bob")
        assert meeting.wait(PATIENCE_S) is None
        meeting.vote(STATE_SYNC)
        meeting.vote(ROUND)


def test_one_that_is_alone_is_not_given_up(meeting):
    meeting.coordinator.lost("ada")
    meeting.coordinator.lost("bob")
    for _ in range(3 * FRUITLESS):
        meeting.trouble("cy")
        assert meeting.wait(PATIENCE_S) is None


def test_trouble_is_over_when_the_generation_is():
    """Two meet, one says that the other does not answer, and then it is lost: too few are left to begin."""
    meeting = Meeting(min_hosts=3)
    meeting.come(*HOSTS)
    meeting.trouble("ada")
    meeting.coordinator.lost("bob")
    assert meeting.coordinator.generation is None
    assert meeting.wait(PATIENCE_S) is None


def test_fruitless_generations_of_others_are_not_held_against_anybody(meeting):
    for _ in range(FRUITLESS):
        meeting.trouble("ada")
        meeting.wait(PATIENCE_S)
        meeting.vote(STATE_SYNC)
    meeting.coordinator.lost("bob")  # it was bob
    meeting.trouble("ada")
    assert meeting.wait(PATIENCE_S) is None


# the end


def test_after_the_end_nothing_is_sent(meeting):
    meeting.vote(END)
    assert meeting.coordinator.ended and meeting.members["bob"].mail[-1]["vote"] == 2
    sent, events = len(meeting.sent), len(meeting.events)
    meeting.coordinator.lost("bob")
    meeting.come("bob")
    meeting.coordinator.stop()
    meeting.trouble("ada")
    assert meeting.wait(10 * PATIENCE_S) is None
    assert (len(meeting.sent), len(meeting.events)) == (sent, events)


@pytest.mark.parametrize("what", [ROUND, END])
def test_a_vote_that_counts_ends_the_trouble(meeting, what):
    """As when all seem stuck, which the launcher says in the name of a member, and then they come through."""
    meeting.trouble("ada")
    meeting.vote(what)
    sent = len(meeting.sent)
    assert meeting.wait(PATIENCE_S) is None and len(meeting.sent) == sent


# the client


def generation(number: int) -> dict:
    return Generation(number, HOSTS, "prefix", continues_round=False).message()


def commit(number: int, vote: int, *, regroup: bool = False) -> dict:
    return {"type": "commit", "generation": number, "vote": vote, "regroup": regroup}


def waited_for(wait, client: CoordinatorClient, *messages: dict):
    """What `wait` returns once the last message is put; it must not return before."""
    outcome = []
    waiting = threading.Thread(target=lambda: outcome.append(wait()), daemon=True)
    waiting.start()
    for message in messages:
        waiting.join(0.05)
        assert not outcome
        client.put(message)
    waiting.join(5)
    return outcome[0]


def test_a_rank_waits_for_a_generation_and_gets_the_newest():
    client = CoordinatorClient()
    assert waited_for(lambda: client.next_generation(after=0).number, client, generation(1)) == 1
    client.put(generation(2))
    client.put(generation(5))
    assert client.next_generation(after=1).number == 5
    assert waited_for(lambda: client.next_generation(after=5).number, client, commit(5, 0), generation(6)) == 6


@pytest.mark.parametrize("regroup", [True, False])
def test_a_rank_waits_for_its_own_commit(regroup):
    client = CoordinatorClient()
    client.put(generation(3))
    due = commit(3, 1, regroup=regroup)
    assert waited_for(lambda: client.wait_for_commit(3, 1), client, commit(2, 1), commit(3, 0), due) is regroup


def test_a_vote_of_a_generation_that_is_over_does_not_count_unless_it_had_been_said():
    client = CoordinatorClient()
    client.put(generation(3))
    assert not client.is_superseded(3) and client.is_superseded(2)
    assert client.is_left_behind(2) and not client.is_left_behind(3)
    assert waited_for(lambda: client.wait_for_commit(3, 1), client, generation(4)) is None
    client.put(commit(4, 0))
    client.put(generation(5) | {"continues_round": True})
    assert not client.is_left_behind(4)
    assert client.wait_for_commit(4, 0) is False


def test_a_rank_that_is_out_waits_for_the_generation_that_calls_it():
    client = CoordinatorClient()
    client.put(generation(3))
    client.put({"type": "excluded"})
    assert client.is_left_behind(3)
    assert waited_for(lambda: client.next_generation(after=2).number, client, commit(3, 0), generation(6)) == 6
    assert not client.is_left_behind(6)


# what nobody thought of

any_host = st.sampled_from((*HOSTS, "dee"))


# away


def test_a_host_leaves_where_a_round_has_counted_and_is_back_at_the_next(meeting):
    meeting.coordinator.leave("bob", "asked")
    meeting.vote(VALIDATION)
    assert meeting.generations() == [HOSTS]
    meeting.vote(ROUND)
    assert meeting.generations() == [HOSTS, ("ada", "cy")] and meeting.members["bob"].mail[-1] == {"type": "excluded"}
    meeting.coordinator.lost("cy")
    meeting.come("cy")
    meeting.vote(STATE_SYNC)
    meeting.coordinator.come_back("bob")
    assert [event["type"] for event in meeting.events if event.get("host") == "bob"] == ["away"]
    meeting.vote(ROUND)
    assert meeting.generations()[2:] == [("ada",), HOSTS]
    assert {"type": "away", "host": "bob", "reason": "asked"} in meeting.events
    assert meeting.events[-2:-1] == [{"type": "back", "host": "bob"}]
    meeting.vote(STATE_SYNC)
    meeting.coordinator.leave("bob", "asked")
    meeting.coordinator.lost("bob")
    meeting.come("bob")
    told = [event for event in meeting.events if event["type"] == "away" and event["host"] == "bob"]
    assert told[-1] == {"type": "away", "host": "bob", "reason": "asked", "found": True}


def test_one_that_is_away_is_there_once_more_for_those_who_have_lost_the_newest_state(meeting):
    meeting.coordinator.leave("cy", "on battery")
    meeting.vote(ROUND)  # cy remembers it: those who go on have not met yet
    for host in ("ada", "bob"):
        meeting.coordinator.lost(host)
    assert meeting.commits("paused")[-1] == {"type": "paused", "hosts": [], "min_hosts": 1, "away": ["cy"]}
    meeting.come("ada")
    assert meeting.generations()[-1] == ("ada", "cy")
    meeting.vote(STATE_SYNC)
    assert meeting.generations()[-1] == ("ada",) and not meeting.coordinator.generation.continues_round
    assert [event["type"] for event in meeting.events[-2:]] == ["away", "generation"]
    assert len(meeting.commits()) == 2


def test_where_all_are_away_the_run_pauses_and_a_stop_ends_it_with_what_they_have(meeting):
    for host in HOSTS:
        meeting.coordinator.leave(host, "asked")
    meeting.vote(ROUND)
    assert meeting.coordinator.generation is None and meeting.commits("paused")[-1]["away"] == [*HOSTS]
    meeting.coordinator.stop()
    assert meeting.generations()[-1] == HOSTS
    meeting.vote(STATE_SYNC)
    meeting.vote(END)
    assert meeting.coordinator.ended


@pytest.mark.parametrize("resumed", [False, True])
def test_one_that_is_away_before_it_has_come_is_waited_for_only_if_it_may_have_the_newest_state(resumed):
    meeting = Meeting(resumed=resumed)
    meeting.coordinator.leave("bob", "asked")
    meeting.come("ada", "cy")
    assert meeting.generations() == ([] if resumed else [("ada", "cy")])
    meeting.come("bob")
    if resumed:
        meeting.vote(STATE_SYNC)
    assert meeting.generations()[-1] == ("ada", "cy")


def test_fewer_than_min_hosts_are_left_and_a_stop_is_not_held_up_by_who_is_away():
    meeting = Meeting(min_hosts=3)
    meeting.come(*HOSTS)
    meeting.vote(STATE_SYNC)
    meeting.coordinator.leave("bob", "asked")
    meeting.vote(ROUND)
    about = {"hosts": ["ada", "cy"], "min_hosts": 3, "away": ["bob"]}
    assert meeting.commits("paused") == [{"type": "paused", **about}]
    meeting.coordinator.stop()
    assert meeting.generations()[-1] == ("ada", "cy")


class Meetings(RuleBasedStateMachine):
    """Hosts come, fall silent, wake up, die; members vote and complain: rules, in any order.

    What must hold is said where messages arrive (`send`), and below the rules.
    """

    @initialize(min_hosts=st.integers(1, 3), here=st.sets(any_host, min_size=2))
    def begin(self, min_hosts, here):
        self.meeting = Meeting((*HOSTS, "dee"), min_hosts)
        self.coordinator, self.members = self.meeting.coordinator, self.meeting.members
        self.coordinator.send = self.send
        self.there, self.awaited, self.left = set(), set(self.members), set()
        self.voters, self.agreed = defaultdict(set), {}
        self.last: Generation | None = None
        for host in sorted(here):
            self.come(host, anew=True)

    def send(self, host, message):
        if message["type"] == "generation":
            assert not self.coordinator.ended, "nothing after the end"
            self.called(Generation.of(message))
        elif message["type"] == "excluded":
            assert host not in self.coordinator.members, "no member is told to wait"
            self.meeting.send(host, message)
            return
        else:
            key = message["generation"], message["vote"]
            assert key[0] == self.last.number and self.voters[key] == set(self.last.members), "all have voted for it"
            assert not self.coordinator.ended or self.agreed[key] == END, "nothing after the end"
        assert host in self.last.members, "it hears of no generation but its own"
        self.meeting.send(host, message)

    def called(self, generation):
        if generation == self.last:
            return
        assert generation.number == (self.last.number if self.last else 0) + 1
        there = tuple(host for host in self.members if host in self.there)
        if generation.continues_round:
            assert generation.members == tuple(host for host in there if host in self.last.members), "no newcomer"
        else:
            enough = not self.awaited and len(self.there - self.left) >= self.coordinator.min_hosts
            assert generation.members == tuple(self.may_come()) and (enough or self.coordinator.stopping)
        self.last = generation

    def may_come(self):
        """Who is there and not away, or all if only those who are away may have the newest state."""
        there = [host for host in self.members if host in self.there]
        here = [host for host in there if host not in self.left]
        return here if self.coordinator.state.remembering.intersection(here) else there

    @rule(host=any_host, anew=st.booleans())
    def come(self, host, anew):
        """Back after silence, or as a new process."""
        if host not in self.there:
            if anew:
                self.members[host] = Member(host)
            self.there.add(host)
            self.awaited.discard(host)
            self.coordinator.ready(host, anew=anew)

    @rule(host=any_host)
    def lose(self, host):
        self.there.discard(host)
        self.awaited.discard(host)
        self.coordinator.lost(host)

    @rule(host=any_host)
    def leave(self, host):
        self.left.add(host)
        self.awaited.discard(host)
        self.coordinator.leave(host, "asked")

    @rule(host=any_host)
    def come_back(self, host):
        self.left.discard(host)
        self.coordinator.come_back(host)

    @rule(host=any_host, what=st.sampled_from((ROUND, ROUND, ROUND, ROUND, VALIDATION, END)))
    def vote(self, host, what):
        """Also by one that was given up, and does not know."""
        member = self.members[host]
        if member.generation and not member.has_voted and not member.is_away and not self.coordinator.ended:
            key = member.generation.number, member.vote
            what = STATE_SYNC if member.vote == 0 else self.agreed.setdefault(key, what)
            self.voters[key].add(host)
            member.has_voted = True
            self.coordinator.vote(host, member.ballot(what))

    @rule(what=st.sampled_from((ROUND, ROUND, ROUND, VALIDATION, END)))
    def all_vote(self, what):
        for host in self.last.members if self.last else ():
            self.vote(host, what)

    @rule(host=any_host, generation=st.integers(-1, 1), vote=st.integers(-1, 1))
    def vote_at_the_wrong_time(self, host, generation, vote):
        member = self.members[host]
        if member.generation and (generation or vote):
            changes = {"generation": member.generation.number + generation, "vote": member.vote + vote}
            self.coordinator.vote(host, member.ballot(ROUND, **changes))

    @rule(host=any_host)
    def complain(self, host):
        if self.members[host].generation:
            self.members[host].is_away = True  # until it is called again
            self.meeting.trouble(host)

    @rule(seconds=st.sampled_from((PATIENCE_S / 2, PATIENCE_S)))
    def wait(self, seconds):
        if blamed := self.meeting.wait(seconds):
            assert blamed in self.last.members and len(self.last.members) > 1
            self.lose(blamed)

    @rule()
    def stop(self):
        self.coordinator.stop()

    @invariant()
    def members_are_there_and_know_it(self):
        if self.coordinator.generation and not self.coordinator.ended:
            assert self.coordinator.generation == self.last
            for host in self.last.members:
                assert host in self.there and self.members[host].generation == self.last

    @invariant()
    def nobody_waits_in_vain(self):
        here = self.there - self.left
        enough = self.there and (self.coordinator.stopping or len(here) >= self.coordinator.min_hosts)
        if enough and not self.awaited and self.coordinator.state.orphaned_since is None:
            assert self.coordinator.generation

    def teardown(self):
        """Whatever has happened: once all are well, rounds go on, and come to an end."""
        if not hasattr(self, "coordinator"):
            return
        rounds, was_ending = len(self.meeting.commits()), END in self.agreed.values()
        for what in [ROUND] * 12 + [END] * 12:
            for host in self.members:
                self.come_back(host)
                self.come(host, anew=False)
            if self.coordinator.ended:
                break
            for host in self.last.members:
                self.vote(host, what)
            self.wait(PATIENCE_S)
        assert self.coordinator.ended
        if not was_ending:
            assert len(self.meeting.commits()) >= rounds + 2
            assert self.coordinator.stopping or set(self.last.members) == set(self.members)


TestMeetings = Meetings.TestCase
TestMeetings.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
