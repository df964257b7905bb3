"""Who goes on when some hosts cannot reach each other: by hand, and by machine for what nobody thought of."""

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from test_coordinator import HOSTS, Meeting, Meetings, any_host

from exogym.membership import END, ROUND, STATE_SYNC, VALIDATION
from exogym.membership.client import UNREACHED_S, Unanswered, Wait
from exogym.membership.coordinator import APART_S, RETURN_S
from exogym.membership.coordinator_state import FRUITLESS, PATIENCE_S, Reachability, largest

FOUR = (*HOSTS, "dee")
PAIRS = [tuple(pair) for pair in combinations(FOUR, 2)]


# who goes on


def best_of_all(hosts, pairs, known):
    """`largest`, by trying every set."""
    every = [set(chosen) for count in range(len(hosts) + 1) for chosen in combinations(hosts, count)]
    fit = [chosen for chosen in every if not any(chosen.issuperset(pair) for pair in pairs)]
    if any(chosen & known for chosen in fit):
        fit = [chosen for chosen in fit if chosen & known]
    fit = [chosen for chosen in fit if len(chosen) == max(map(len, fit))]
    fit = [chosen for chosen in fit if len(chosen & known) == max(len(other & known) for other in fit)]
    return min(
        ([host for host in hosts if host in chosen] for chosen in fit), key=lambda c: [hosts.index(h) for h in c]
    )


@given(st.sets(st.tuples(st.integers(0, 6), st.integers(0, 6)).filter(lambda pair: pair[0] < pair[1])), st.data())
def test_the_most_go_on_and_those_who_know_come_first(pairs, data):
    hosts = [0, 1, 2, 3, 4, 5, 6]
    known = data.draw(st.sets(st.sampled_from(hosts)))
    assert largest(hosts, pairs, known) == best_of_all(hosts, pairs, known)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pairs",
    [list(combinations(range(32), 2)), [(n, n + 1) for n in range(0, 32, 2)], [(n, n + 1) for n in range(31)]],
    ids=["nobody reaches anybody", "couples", "a chain"],
)
def test_many_hosts_take_no_long_thought(pairs):
    chosen = largest(range(32), pairs, ())
    assert chosen[0] == 0 and len(chosen) == (1 if len(pairs) > 31 else 16)


def test_there_may_be_nobody():
    assert largest([], [], ["ada"]) == []


# what one rank finds


def test_a_peer_is_unreached_after_turns_in_which_it_was_asked():
    unanswered = Unanswered()
    for _ in range(6):
        unanswered.turn({"bob", "cy"}, UNREACHED_S / 6)
        unanswered.answered("cy")
    assert unanswered.unreached() == set()
    unanswered.turn({"bob", "cy"}, UNREACHED_S / 6)
    assert unanswered.unreached() == {"bob"}
    unanswered.answered("bob")
    unanswered.answered("dee")  # late: it is not asked any more
    assert unanswered.unreached() == set()
    unanswered.turn({"cy"}, 2 * UNREACHED_S)
    unanswered.turn({"bob", "cy"}, 2 * UNREACHED_S)
    assert unanswered.unreached() == {"cy"}, "it begins anew for one that was not asked meanwhile"


def test_only_what_comes_of_it_ends_a_wait():
    now = 10.0
    wait = Wait(lambda: now)
    assert wait.read() == (0, 0.0)
    with pytest.raises(OSError), wait.of(1):
        now = 12.0
        raise OSError
    wait.begins(2)
    now = 15.0
    assert wait.read() == (2, 5.0)
    with wait.of(2):
        pass
    assert wait.read() == (2, 0.0)


def test_one_sides_word_is_enough_and_each_takes_back_its_own():
    reach = Reachability()
    reach.says("ada", {"cy"}, new={"cy"})
    reach.says("cy", set(), new=set())
    assert reach.pairs(HOSTS) == [("ada", "cy")] and reach.pairs(("ada", "bob")) == []
    reach.says("cy", {"ada", "bob"}, new={"ada"})
    reach.says("ada", set(), new=set())
    assert reach.pairs(HOSTS) == [("ada", "cy")]
    reach.forget("ada")
    assert reach.pairs(HOSTS) == []


# the coordinator


class Network(Meeting):
    """All have come to one state, and one round has counted; then some pairs are cut."""

    def __init__(self, hosts=HOSTS, min_hosts=1, blocked=()):
        super().__init__(hosts, min_hosts)
        self.come(*hosts)
        self.vote(STATE_SYNC)
        self.vote(ROUND)
        self.blocked = {frozenset(pair) for pair in blocked}

    def report(self, *hosts, doubtful=(), waits=True, **changes):
        for host in hosts or self.members:
            unreached = [other for other in self.members if frozenset((host, other)) in self.blocked]
            about = {"generation": self.members[host].generation.number, "waits": waits, "unreached": unreached}
            self.coordinator.reach(host, about | changes, doubtful=doubtful)

    def of(self, kind):
        return [event for event in self.events if event["type"] == kind]


def test_a_pair_is_found_and_the_larger_part_goes_on():
    net = Network(blocked=[("bob", "cy")])
    net.report("cy")
    assert net.wait(APART_S / 2) is None and len(net.generations()) == 1
    net.report("bob", "cy")  # which does not begin the wait again
    assert net.wait(APART_S / 2) is None
    assert net.generations() == [HOSTS, ("ada", "bob")] and net.coordinator.generation.continues_round
    assert net.sent[-1] == ("cy", {"type": "excluded"})
    assert net.of("apart") == [{"type": "apart", "pairs": [["bob", "cy"]], "hosts": ["cy"]}]
    net.vote(STATE_SYNC)
    for _ in range(3):
        net.report("cy", "bob", waits=False)
        net.wait(APART_S)
        net.vote(ROUND)
    assert len(net.generations()) == 2 and len(net.of("apart")) == 1 and net.members["ada"].mail[-1]["regroup"] is False


def test_both_come_back_at_the_next_round_when_they_reach_each_other():
    net = Network(blocked=[("bob", "cy")])
    net.report()
    net.wait(APART_S)
    net.vote(STATE_SYNC)
    net.blocked.clear()
    net.report("bob")
    net.vote(ROUND)
    assert net.members["ada"].mail[-1]["regroup"] is False, "cy has not said so"
    net.report("cy")
    assert net.of("reached") == [{"type": "reached", "pairs": [["bob", "cy"]]}]
    net.vote(ROUND)
    assert net.generations() == [HOSTS, ("ada", "bob"), HOSTS] and not net.coordinator.generation.continues_round


def test_of_two_none_goes_on_below_min_hosts():
    net = Network(("ada", "bob"), min_hosts=2, blocked=[("ada", "bob")])
    net.report()
    net.wait(APART_S)
    net.vote(STATE_SYNC)
    net.vote(ROUND)  # which had been begun
    assert net.coordinator.generation is None
    assert net.of("paused") == [{"type": "paused", "hosts": ["ada"], "min_hosts": 2}]
    assert net.of("apart")[-1]["pairs"] == [["ada", "bob"]]
    net.report()
    assert net.wait(RETURN_S) is None and net.coordinator.generation is None
    net.blocked.clear()
    net.report()
    net.wait(0)
    assert net.generations() == [("ada", "bob"), ("ada",), ("ada", "bob")]


def test_who_alone_has_the_newest_state_is_not_left_behind():
    net = Network()
    net.coordinator.lost("bob")
    net.coordinator.lost("cy")
    net.vote(STATE_SYNC)
    net.vote(ROUND)
    net.come("bob", "cy")
    net.blocked = {frozenset(pair) for pair in (("ada", "bob"), ("ada", "cy"))}
    for host in ("bob", "cy"):
        net.coordinator.reach(host, {"generation": 0, "waits": True, "unreached": ["ada"]})
    net.vote(ROUND)
    assert net.members["ada"].mail[-1]["regroup"] is False and net.coordinator.generation.members == ("ada",)


def test_a_host_that_is_lost_anyway_costs_nobody_else_his_place():
    net = Network(FOUR, blocked=[("cy", other) for other in FOUR if other != "cy"])
    net.report("ada", "bob", "dee", doubtful=("cy",))
    assert net.wait(APART_S) is None and len(net.generations()) == 1
    net.report("ada")  # it was still heard
    net.coordinator.lost("cy")
    net.report("ada", "bob", "dee")
    net.vote(STATE_SYNC)
    assert net.wait(10 * APART_S) is None
    assert net.generations() == [FOUR, ("ada", "bob", "dee")] and not net.of("apart")
    net.blocked.clear()
    net.come("cy")
    net.report("ada")
    net.vote(ROUND)
    assert net.coordinator.generation.members == FOUR and not net.of("reached")


def test_a_word_of_an_earlier_generation_only_says_who_is_reached():
    net = Network(FOUR, blocked=[("ada", "bob")])
    net.coordinator.lost("dee")
    net.vote(STATE_SYNC)
    net.report("ada", generation=1)
    net.wait(APART_S)
    assert len(net.generations()) == 2
    net.report("ada", "bob")
    net.blocked.clear()
    net.report("ada", "bob", generation=1)
    net.wait(APART_S)
    assert len(net.generations()) == 2 and not net.of("apart")


def test_a_vote_that_counts_shows_that_the_group_works():
    """As where a firewall lets through only what was connected before."""
    net = Network(blocked=[("bob", "cy")])
    net.report()
    net.vote(ROUND)
    net.report(waits=False)
    net.wait(APART_S)
    net.vote(ROUND)
    assert net.generations() == [HOSTS] and not net.of("apart")
    net.coordinator.lost("ada")
    assert net.generations() == [HOSTS, ("bob",)], "but no other would"


def test_nobody_is_blamed_where_a_pair_is_known():
    net = Network(blocked=[("bob", "cy")])
    for _ in range(FRUITLESS):
        net.trouble("bob")
        net.wait(PATIENCE_S)
        net.vote(STATE_SYNC)
    net.trouble("bob")
    net.now += PATIENCE_S
    net.report("bob")
    assert net.coordinator.tick() is None and net.generations()[FRUITLESS + 1 :] == [("ada", "bob")]


def test_one_that_is_lost_and_back_is_not_let_in_while_it_says_that_it_cannot():
    net = Network(blocked=[("bob", "cy")])
    net.report()
    net.wait(APART_S)
    net.vote(STATE_SYNC)
    net.coordinator.lost("cy")
    net.coordinator.ready("cy", anew=False)
    net.report("cy")
    net.vote(ROUND)
    assert net.generations() == [HOSTS, ("ada", "bob")]


def test_what_was_said_of_one_that_is_lost_and_by_it_is_void():
    net = Network(blocked=[("bob", "cy")])
    net.report()
    net.wait(APART_S)
    net.vote(STATE_SYNC)
    net.coordinator.lost("cy")
    net.come("cy")
    net.vote(ROUND)
    assert net.generations() == [HOSTS, ("ada", "bob"), HOSTS] and not net.of("reached")


# what nobody thought of


class Networks(Meetings):
    """As Meetings, and links between two hosts go and come; those who wait say so, soon, late, or never.

    A generation with a pair who cannot reach each other comes to no vote.
    """

    def __init__(self):
        super().__init__()
        self.blocked, self.said = set(), {}

    @rule(host=any_host, anew=st.booleans())
    def come(self, host, anew):
        if host not in self.there and anew:
            self.forget(host)
        Meetings.come(self, host, anew)

    @rule(host=any_host)
    def lose(self, host):
        self.forget(host)
        self.there.discard(host)
        self.awaited.discard(host)
        self.coordinator.lost(host)

    def forget(self, host):
        self.said.pop(host, None)
        for others in self.said.values():
            others.discard(host)

    @rule(pair=st.sampled_from(PAIRS))
    def block(self, pair):
        self.blocked.add(frozenset(pair))

    @rule(pair=st.sampled_from(PAIRS))
    def unblock(self, pair):
        self.blocked.discard(frozenset(pair))

    @rule(host=any_host, late=st.booleans(), doubtful=st.sets(any_host), waits=st.booleans())
    def report(self, host, late=False, doubtful=frozenset(), waits=True):
        if host not in self.there:
            return
        member = self.members[host]
        number = (member.generation.number if member.generation else 0) - late
        unreached = {other for other in self.there if frozenset((host, other)) in self.blocked}
        before = self.said.get(host, set())
        is_old = host in self.coordinator.members and number != self.last.number
        if not self.coordinator.ended:
            self.said[host] = unreached & before if is_old else unreached - (doubtful - before)
        self.coordinator.reach(
            host, {"generation": number, "waits": waits, "unreached": sorted(unreached)}, doubtful=doubtful
        )

    def known(self, hosts):
        return [
            (a, b)
            for a, b in PAIRS
            if {a, b} <= set(hosts) and (b in self.said.get(a, ()) or a in self.said.get(b, ()))
        ]

    def called(self, generation):
        if generation == self.last:
            return
        assert generation.number == (self.last.number if self.last else 0) + 1
        there = self.may_come()
        if generation.continues_round:
            there = [host for host in self.last.members if host in self.there]
        else:
            enough = len({*generation.members} - self.left) >= self.coordinator.min_hosts
            assert self.coordinator.stopping or (not self.awaited and enough)
        assert not self.known(generation.members), "a pair known to be apart"
        knowing = self.coordinator.state.remembering & set(there) or self.coordinator.state.last & set(there)
        assert list(generation.members) == best_of_all(there, self.known(there), knowing)
        self.last = generation

    def works(self):
        return self.last and not any(pair <= set(self.last.members) for pair in self.blocked)

    @rule(host=any_host, what=st.sampled_from((ROUND, ROUND, ROUND, ROUND, VALIDATION, END)))
    def vote(self, host, what):
        member = self.members[host]
        if member.generation and (member.generation != self.last or self.works()):
            Meetings.vote(self, host, what)

    @invariant()
    def nobody_waits_in_vain(self):
        there, state = self.may_come(), self.coordinator.state
        most = best_of_all(there, self.known(there), state.remembering & {*there} or state.last & {*there})
        ready = most and not self.awaited and state.orphaned_since is None
        if ready and (self.coordinator.stopping or len({*most} - self.left) >= self.coordinator.min_hosts):
            self.coordinator.tick()  # it looks again when one of them reaches another
            assert self.coordinator.generation

    def teardown(self):
        """With links as they are it comes to a generation that lasts; when all are well, everybody is in."""
        if not hasattr(self, "coordinator"):
            return
        for _ in range(FRUITLESS + 8):
            self.go_on()
        formed, rounds = self.coordinator.state.formed, len(self.meeting.commits())
        for _ in range(5):
            self.go_on()
        assert self.coordinator.state.formed == formed, "no end of generations"
        if self.coordinator.generation and not self.coordinator.ended:
            assert self.works() and len(self.meeting.commits()) > rounds
        self.blocked.clear()
        for host in self.members:
            self.come_back(host)
        for _ in range(FRUITLESS + 8):
            self.go_on()
        if not self.coordinator.ended and not self.coordinator.stopping:
            assert set(self.last.members) == set(self.members) and self.coordinator.generation == self.last
        for _ in range(12):
            self.go_on(END)
        assert self.coordinator.ended

    def go_on(self, what=ROUND):
        for host in self.members:
            self.come(host, anew=False)
        for host in self.members:
            self.report(host)
        self.wait(RETURN_S if self.coordinator.state.orphaned_since is not None else PATIENCE_S)
        for host in self.last.members if self.last and not self.coordinator.ended else ():
            self.vote(host, what)


TestNetworks = Networks.TestCase
TestNetworks.settings = settings(max_examples=70, stateful_step_count=40, deadline=None)
