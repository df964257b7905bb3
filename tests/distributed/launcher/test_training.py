"""A whole run over simulated workers: who is lost, who comes back, who is to blame, and how it ends."""

from __future__ import annotations

import itertools
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import simulated
from simulated import Run, Toy

from distributed.control.timeouts import Timeouts
from distributed.launcher import worker_group
from distributed.launcher.liveness import Pace
from distributed.launcher.worker_group import TURN_S
from exogym.membership import coordinator
from whisper_tuner.errors import DataError, HostError, RunError

PROJECT = Path(__file__).parents[3]
T = Timeouts()
LATE_S = 2 * TURN_S  # by so much the launcher may be late


def train(toy: Toy) -> None:
    toy.train()


def exits(status: int) -> Callable[[Toy], None]:
    return lambda toy: toy.exit(status)


def fails(toy: Toy, kind: str, message: str, *, foreseen: bool = True) -> None:
    toy.say({"type": "error", "kind": kind, "foreseen": foreseen, "message": message})
    toy.exit(6)


def at_first(body: Callable[[Toy], None]) -> Callable[[Toy], None]:
    """The first worker of the host does this; those after it train."""
    return lambda toy: body(toy) if toy.life == 1 else train(toy)


def at_first_trains_then(body: Callable[[Toy], None]) -> Callable[[Toy], None]:
    return lambda toy: train(toy) if toy.life == 1 else body(toy)


def after(rounds: int, then: Callable[[Toy], None]) -> Callable[[Toy], None]:
    return lambda toy: toy.train(rounds=rounds, then=then)


# listening


def test_work_is_done_when_all_say_so_and_one_has_saved():
    run = Run(train, train, all_rounds=3)
    run.run()
    assert run.generations() == ["01"] and len(run.of("commit")) == 3 and not run.of("lost")
    assert [event["host"] for event in run.of("saved")] == ["host0"]
    assert (run.hosts[0].fetched, run.hosts[1].fetched) == (["final"], [])


def test_events_and_lines_carry_their_host():
    def body(toy):
        toy.print("hello")
        toy.say({"type": "warning", "what": "hot"})
        toy.print('hel\x1e{"type": "warning", "what": "amid a line"}')
        toy.train()

    run = Run(train, body, all_rounds=1)
    run.run()
    assert {"type": "warning", "what": "hot", "host": "host1", "rank": 1} in run.events
    assert run.log == ["host1: hello", "host1: hel"] and len(run.of("warning")) == 2
    assert not run.of("beat") and not run.of("vote")


# leaving, and coming back


def test_a_host_is_left_out_as_long_as_a_person_wants_it():
    asked: set[str] = set()
    run = Run(train, train, train, asked_away=lambda: asked)
    run.at("commit", 2, lambda: asked.add("host1"))
    run.at("commit", 20, asked.clear)
    run.until("generation", 3)
    assert run.generations() == ["012", "02", "012"] and not run.of("lost")
    assert run.of("away") == [{"type": "away", "host": "host1", "reason": "as asked"}]
    assert run.of("back") == [{"type": "back", "host": "host1"}] and run.hosts[1].again == [False]


def test_a_host_that_says_that_it_is_in_use_is_left_out_until_it_says_that_it_is_not():
    run = Run(train, train)
    say = lambda why: run.hosts[1].toy.say({"type": "in_use", "why": why})  # noqa: E731
    run.at("commit", 2, lambda: say("battery"))
    run.at("commit", 30, lambda: say(""))
    run.until("generation", 3)
    assert run.generations() == ["01", "0", "01"] and not run.of("in_use")
    assert [event["reason"] for event in run.of("away")] == ["on battery"]


def test_one_that_is_away_may_be_lost_and_is_still_away_when_it_is_found():
    asked: set[str] = set()
    run = Run(train, train, asked_away=lambda: asked)
    run.at("commit", 2, lambda: asked.add("host1"))
    run.at("away", 1, lambda: run.hosts[1].toy.freeze())
    run.at("lost", 1, lambda: run.background.at(5, run.hosts[1].toy.thaw))
    run.until("away", 2)
    told = [event["type"] for event in run.events if event["type"] in ("away", "lost", "back")]
    assert told == ["away", "lost", "back", "away"] and run.generations() == ["01", "0"]


# losing, and starting again


def test_a_killed_worker_is_lost_and_another_one_joins():
    def body(toy):
        toy.print("last words")
        toy.train()

    run = Run(train, body)
    run.at("commit", 2, lambda: run.hosts[1].toy.exit(-9))
    run.until("generation", 3)
    assert run.generations() == ["01", "0", "01"]
    [lost] = run.of("lost")
    assert (lost["host"], lost["rank"], lost["given_up"]) == ("host1", 1, False)
    reason = "the worker was killed by signal 9 (usually because the system ran out of memory); its last lines:"
    assert lost["reason"] == f"{reason}\n  host1: last words"
    assert run.hosts[1].again == [False, True] and run.hosts[0].again == [False]


def test_the_reason_of_a_loss_is_what_the_worker_said_of_it():
    run = Run(train, at_first(lambda toy: fails(toy, "PeerLost", "host0 fell silent")))
    run.until("generation", 2)  # though it was foreseen, and nothing may have been trained yet: another try may do
    assert run.generations() == ["0", "01"]
    assert [lost["reason"] for lost in run.of("lost")] == ["host0 fell silent"]


def frozen_after_two_rounds(*bodies: Callable[[Toy], None], **settings) -> Run:
    """host1 freezes; its host can be reached. The run is stopped once all are in again."""
    run = Run(*(bodies or (train, train)), **settings)
    run.at("commit", 2, lambda: run.hosts[1].toy.freeze())
    run.at("generation", 3, run.stop)
    return run


def test_a_frozen_worker_is_lost_and_goes_on_when_it_thaws():
    run = frozen_after_two_rounds()
    run.at("generation", 2, lambda: run.background.at(9, run.hosts[1].toy.thaw))
    run.run()
    assert run.generations() == ["01", "0", "01"]
    assert run.of("lost")[0]["reason"] == "nothing heard for 3 s: asleep, or its network is gone"
    assert run.of("lost")[0]["silent_for"] == 3.0
    assert [event["host"] for event in run.of("back")] == ["host1"] and len(run.hosts[1].toys) == 1


def test_a_frozen_worker_is_replaced_in_the_end():
    run = frozen_after_two_rounds()
    run.run()
    assert run.generations() == ["01", "0", "01"] and not run.of("back") and len(run.of("lost")) == 1
    assert run.hosts[1].again == [False, True] and run.hosts[1].toys[0].status == -9
    assert run.hosts[1].starts[1][0] - run.time_of("lost") == pytest.approx(T.replace_s, abs=LATE_S)


def test_a_host_that_sleeps_for_long_goes_on_with_the_same_worker():
    run = frozen_after_two_rounds()
    run.at("commit", 2, lambda: (run.hosts[1].toy.freeze(), run.hosts[1].toy.cut()))

    def wake() -> None:
        run.hosts[1].is_cut = False
        run.hosts[1].toy.thaw()

    run.at("generation", 2, lambda: run.background.at(600, wake))
    run.run(1000)
    assert run.generations() == ["01", "0", "01"] and len(run.hosts[1].toys) == 1 and len(run.of("lost")) == 1
    assert len(run.hosts[1].connects) > 500
    assert len([line for line in run.log if "no route to host" in line]) == 1
    assert len(run.hosts[1].toy._unheard) < 100  # nothing piles up for a worker that sleeps
    assert run.time_of("back") - run.time_of("lost") - 600 < 3


def test_a_connection_that_ends_is_a_loss_and_the_same_worker_goes_on_over_another():
    run = frozen_after_two_rounds()

    def end_connection() -> None:
        run.hosts[1].toy.is_cut = True
        run.hosts[1].toy.hear(None)

    run.at("commit", 2, end_connection)
    run.run()
    assert run.generations() == ["01", "0", "01"] and len(run.hosts[1].toys) == 1
    assert [lost["reason"] for lost in run.of("lost")] == ["the SSH connection was lost"]
    assert run.time_of("back") - run.time_of("lost") < 2


def test_one_that_is_heard_again_is_called_once_it_has_acknowledged_a_heartbeat():
    run = frozen_after_two_rounds()
    toy_hears = []

    def freeze() -> None:
        run.hosts[1].toy.is_deaf = True
        run.hosts[1].connect_s = 4.0
        run.hosts[1].toy.freeze()

    run.at("commit", 2, freeze)
    run.at("generation", 2, lambda: run.background.at(0.1, run.hosts[1].toy.thaw))
    run.at("back", 1, lambda: toy_hears.append(run.hosts[1].toy.last_beat))
    run.run()
    assert run.generations() == ["01", "0", "01"] and len(run.hosts[1].toys) == 1 and toy_hears[0] > 5
    assert run.time_of("back") - run.time_of("lost") > 3


def test_one_that_is_heard_and_acknowledges_nothing_is_replaced():
    run = frozen_after_two_rounds()

    def freeze() -> None:
        toy = run.hosts[1].toy
        toy.freeze()
        toy.is_deaf, toy.connect = True, lambda: None

    run.at("commit", 2, freeze)
    run.at("generation", 2, lambda: run.hosts[1].toy.thaw())
    run.run()
    assert run.generations() == ["01", "0", "01"] and not run.of("back") and len(run.hosts[1].toys) == 2


def test_a_silent_host_is_tried_again_as_soon_as_a_try_that_took_long_has_failed():
    run = frozen_after_two_rounds()

    def freeze() -> None:
        run.hosts[1].connect_s = 2.0
        run.hosts[1].toy.freeze()
        run.hosts[1].toy.cut()

    run.at("commit", 2, freeze)
    run.at("generation", 2, lambda: run.background.at(20, lambda: (run.hosts[1].toy.thaw(), mend(run))))
    run.run()
    pauses = [later - sooner for sooner, later in itertools.pairwise(run.hosts[1].connects[:8])]
    assert all(2.0 <= pause <= 2.0 + LATE_S for pause in pauses)


def mend(run: Run) -> None:
    run.hosts[1].is_cut = False


def test_one_whose_last_words_are_heard_is_started_anew_at_once():
    run = frozen_after_two_rounds()
    run.at("generation", 2, lambda: (run.hosts[1].toy.print("too late"), run.hosts[1].toy.exit(75)))
    run.run()
    assert run.generations() == ["01", "0", "01"] and len(run.of("lost")) == 1
    assert run.hosts[1].starts[1][0] - run.time_of("lost") < 1


def test_one_that_has_ended_while_its_host_was_cut_off_is_started_anew_as_soon_as_that_is_known():
    run = frozen_after_two_rounds()
    run.at("commit", 2, lambda: run.hosts[1].toy.cut())
    run.at("generation", 2, lambda: (run.hosts[1].toy.exit(75), run.background.at(30, lambda: mend(run))))
    run.run()
    assert run.generations() == ["01", "0", "01"] and len(run.of("lost")) == 1
    assert run.hosts[1].starts[1][0] - run.time_of("lost") < 32


def test_the_only_worker_of_a_run_is_not_replaced_because_its_machine_is_busy():
    run = Run(train)
    run.at("commit", 2, lambda: (run.hosts[0].toy.freeze(), run.background.at(50, run.hosts[0].toy.thaw)))
    run.until("commit", 4)
    assert run.generations() == ["0"] and not run.of("lost") and len(run.hosts[0].starts) == 1

    run = Run(train)
    run.at("commit", 2, lambda: run.hosts[0].toy.freeze())
    run.until("generation", 2)
    assert run.of("lost")[0]["silent_for"] == T.silence_alone_s and len(run.hosts[0].starts) == 2


def test_the_longer_rounds_are_the_longer_silence_is_borne():
    for step_s, expected in ((0.2, 3.0), (40.0, 8.0), (200.0, 12.0)):
        run = Run(train, train, patience_s=1000)
        run.step_s = step_s
        run.at("commit", 4, lambda run=run: run.hosts[1].toy.freeze())
        run.until("lost", 1)
        assert run.of("lost")[0]["silent_for"] == pytest.approx(expected, abs=0.1)


STEP = {"type": "step", "step": 99, "epoch": 0, "samples": 1, "seconds": 0.1}


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ([{"type": "alive"}], 3.0),
        ([{"type": "exchange"}], 6.0),
        ([{"type": "exchange"}, STEP], 6.0),
        ([{"type": "exchange"}, {"type": "alive"}, STEP], 3.0),
    ],
)
def test_silence_is_borne_for_longer_while_the_link_is_full(last, expected):
    """As it may be while steps are made."""

    def then(toy):
        for event in last:
            toy.say(event)
        toy.freeze()

    run = Run(train, after(3, then))
    run.until("lost", 1)
    assert [event["silent_for"] for event in run.of("lost")] == [expected]


HELLO = {"type": "hello", "system": "Darwin", "source": "s", "awake": True}


def holds_the_lock_for(seconds: float) -> Callable[[Toy], None]:
    """As a worker on a Mac, whose first import of torch waits until its libraries are scanned."""

    def body(toy: Toy) -> None:
        def imported() -> None:
            toy.thaw()
            toy.say(HELLO)
            toy.train()

        toy.freeze()
        toy.background.at(seconds, imported)

    return body


def test_one_that_holds_the_lock_for_40_s_while_it_imports_is_not_lost():
    run = Run(train, holds_the_lock_for(40.0))
    run.until("commit", 3)
    assert run.generations() == ["01"] and not run.of("lost")
    assert run.hosts[1].again == [False] and run.background.time > 40.0


def test_a_replacement_has_the_same_time():
    """After a reinstallation on that host, for example; the others train meanwhile."""
    run = Run(train, lambda toy: train(toy) if toy.life == 1 else holds_the_lock_for(40.0)(toy))
    run.at("commit", 2, lambda: run.hosts[1].toy.exit(-9))
    run.until("generation", 3)
    assert run.generations() == ["01", "0", "01"] and len(run.of("lost")) == 1
    assert run.hosts[1].again == [False, True]


@pytest.mark.parametrize("end", ["exits", "is cut off"])
def test_one_that_is_gone_while_it_imports_is_noticed_at_once(end):
    def body(toy: Toy) -> None:
        toy.freeze()
        toy.background.at(5.0, lambda: toy.exit(-9) if end == "exits" else toy.hear(None))

    run = Run(train, at_first(body))
    run.until("lost", 1)
    assert run.background.time < 5.0 + LATE_S


def test_one_that_is_frozen_while_it_imports_is_replaced_in_the_end():
    run = Run(train, at_first(lambda toy: toy.freeze()))
    run.until("generation", 2)
    [lost] = run.of("lost")
    assert lost["silent_for"] == T.silence_importing_s and run.generations() == ["0", "01"]


def test_the_silence_of_a_launcher_that_slept_is_nobodys():
    """Its machine was asleep for an hour, and the others' lines have been waiting, or will come in a moment."""
    run = Run(train, train)

    def sleep() -> None:
        run.background.time += 3600

    run.at("commit", 3, sleep)
    run.until("commit", 6, at_most_s=4000)
    assert run.generations() == ["01"] and not run.of("lost")


def test_three_failures_in_a_row_give_a_worker_up():
    run = Run(train, exits(3))
    run.until("lost", 3)
    assert [lost["given_up"] for lost in run.of("lost")] == [False, False, True]
    assert run.of("lost")[2]["reason"] == "the worker ended with status 3, and printed nothing"
    assert set(run.generations()) == {"0"} and run.hosts[1].again == [False, True, True]


def test_failures_with_a_round_in_between_do_not_give_it_up():
    run = Run(train, after(1, exits(-9)))
    run.until("lost", 4)
    assert not any(lost["given_up"] for lost in run.of("lost"))


def test_too_little_memory_is_no_failure_and_is_tried_again_later():
    def body(toy):
        if toy.life in (2, 3, 4):
            fails(toy, "TooLittleMemory", "3 GB are missing")
        else:
            toy.train(rounds=2 if toy.life == 1 else None, then=exits(1))

    run = Run(train, body)
    run.until("generation", 3)
    assert not any(lost["given_up"] for lost in run.of("lost")) and len(run.hosts[1].starts) == 5
    times = [when for when, _ in run.hosts[1].starts]
    assert all(later - sooner > T.back_off_s[-1] - LATE_S for sooner, later in itertools.pairwise(times[1:]))


def test_an_abort_while_a_group_forms_is_no_failure():
    """As gloo makes of what a stranger says at its port; it may happen again and again."""

    def body(toy):
        if toy.life <= 5:
            toy._take = lambda message: toy.exit(-signal.SIGABRT)  # once it is called
        toy.train()

    run = Run(train, body, min_hosts=2)
    run.until("commit", 2)
    assert [lost["given_up"] for lost in run.of("lost")] == [False] * 5


def test_an_abort_of_a_worker_that_is_alone_is_a_failure():
    """It has no group, so no stranger can have done that: a run would be tried again for ever."""

    def body(toy):
        toy._take = lambda message: toy.exit(-signal.SIGABRT)
        toy.train()

    run = Run(body)
    with pytest.raises(RunError, match="signal 6"):
        run.run()
    assert [lost["given_up"] for lost in run.of("lost")] == [False, False, True]


def test_memory_that_runs_out_in_training_each_time_is_a_failure():
    """The others form a group with it each time, and lose what they have trained of the round."""

    def body(toy):
        toy.train(rounds=2 if toy.life == 1 else 0, then=lambda toy: fails(toy, "TooLittleMemory", "memory ran out"))

    run = Run(train, body)
    run.until("lost", 3)
    assert [lost["given_up"] for lost in run.of("lost")] == [False, False, True]
    assert "memory ran out" in run.of("lost")[-1]["reason"]


def test_a_run_ends_when_every_worker_is_given_up():
    def body(toy):
        toy.print("no disk")
        toy.exit(3)

    run = Run(body, exits(3))
    with pytest.raises(RunError, match=r"host0: the worker ended with status 3; its last lines:\n  host0: no disk"):
        run.run()


def test_below_min_hosts_it_waits_for_the_lost_one():
    run = Run(train, train, min_hosts=2)
    run.hosts[1].start_errors[2] = HostError("host1", "no route to host")
    run.at("commit", 2, lambda: run.hosts[1].toy.exit(-9))
    run.until("generation", 3)
    assert run.generations() == ["01", "0", "01"]  # in the second they only ended the round
    assert [(event["hosts"], event["min_hosts"]) for event in run.of("paused")] == [(["host0"], 2)]


def test_a_run_ends_when_too_few_are_left_for_min_hosts():
    run = Run(train, exits(3), min_hosts=2)
    with pytest.raises(RunError, match="host1: the worker ended with status 3"):
        run.run()


@pytest.mark.parametrize("kind", ["NotFinite", "ZeroDivisionError"])
def test_an_error_before_anything_is_trained_ends_the_run(kind):
    run = Run(train, lambda toy: fails(toy, kind, "it is so", foreseen=False))
    with pytest.raises(RunError, match="host1: it is so"):
        run.run()


def test_later_a_foreseen_error_ends_the_run_and_another_one_does_not():
    run = Run(train, after(1, lambda toy: fails(toy, "X", f"error {toy.life}", foreseen=toy.life == 2)))
    with pytest.raises(RunError, match="host1: error 2"):
        run.run()
    assert [lost["reason"] for lost in run.of("lost")] == ["error 1"]


NONSENSE = [
    {"type": "step"},
    {"type": "vote"},
    {"type": "start"},
    {"type": "beat"},
    {"type": "beat", "heard": "all"},
    {"type": "want", "files": 7},
    {"type": "listens", "address": "127.0.0.1", "port": "4000"},
    {"type": "listens", "address": "host1", "port": 4000},
    {"type": "listens", "port": 4000},
    {"type": "reach", "generation": 1, "waits": True, "unreached": [["127.0.0.1", 0]]},
    {"type": "reach", "generation": 1, "waits": True, "unreached": [[[], {}]]},
    {"type": "reach", "generation": 1, "waits": True, "unreached": 7},
]


@pytest.mark.parametrize("event", NONSENSE, ids=str)
def test_a_worker_that_says_less_than_it_must_is_replaced_and_no_other(event):
    run = Run(train, at_first(after(1, lambda toy: toy.say(event))))
    run.until("generation", 3)
    assert run.generations() == ["01", "0", "01"]
    assert [lost["host"] for lost in run.of("lost")] == ["host1"]
    assert "is incomplete" in run.of("lost")[0]["reason"]
    assert run.hosts[1].toys[0].status is not None


# those who hold up the others


def test_a_worker_that_makes_no_step_while_others_wait_is_replaced():
    run = Run(train, at_first(after(2, lambda toy: None)), patience_s=20)
    run.until("generation", 3)
    assert run.generations() == ["01", "0", "01"]
    assert [lost["host"] for lost in run.of("lost")] == ["host1"]
    assert run.of("lost")[0]["reason"] == "made no step for 20 s while others were waiting for it"
    assert run.hosts[1].again == [False, True] and run.hosts[1].toys[0].status == -9


def test_readings_of_a_machine_are_no_progress_and_carry_their_host():
    def stuck(toy):
        toy.say({"type": "machine", "cpu": 3})
        toy.later(1.0, lambda: stuck(toy))

    run = Run(train, at_first(after(2, stuck)), patience_s=20)
    run.until("generation", 3)
    assert "made no step for 20 s" in run.of("lost")[0]["reason"]
    assert {"type": "machine", "cpu": 3, "host": "host1", "rank": 1} in run.events


def test_a_run_ends_when_the_last_one_is_given_up_and_another_was_for_being_stuck():
    def stuck(toy):
        toy.is_stuck = lambda toy: True
        toy.train()

    run = Run(stuck, at_first_trains_then(exits(3)), patience_s=20)
    run.at("lost", 3, lambda: run.hosts[1].toy.exit(3))
    with pytest.raises(RunError, match="no host is left\nhost0: made no step for 20 s"):
        run.run()
    assert [lost["host"] for lost in run.of("lost")] == ["host0"] * 3 + ["host1"] * 3


def test_a_worker_that_says_why_it_makes_no_step_is_waited_for():
    def waits(toy, left=10):
        toy.say({"type": "alive"})
        toy.later(10, lambda: waits(toy, left - 1) if left else toy.exit(3))

    run = Run(train, after(2, waits), patience_s=20)
    run.until("lost", 1)
    assert "ended with status 3" in run.of("lost")[0]["reason"]


def test_a_newcomer_is_not_blamed_for_one_that_stalls():
    """It has told of no step yet, since all wait for the one that stalls."""
    run = Run(train, train, train, patience_s=20)
    run.agrees_each_step = True
    run.at("commit", 5, lambda: run.hosts[0].toy.exit(-9))
    run.at("generation", 3, lambda: setattr(run.hosts[1].toy, "is_stuck", lambda toy: True))
    run.at("generation", 4, lambda: (setattr(run.hosts[1].toy, "is_stuck", lambda toy: False), stop_later(run)))
    run.run()
    assert run.generations() == ["012", "12", "012", "012"] and len(run.of("lost")) == 1


def stop_later(run: Run) -> None:
    run.background.at(5, run.stop)


def test_one_that_fell_back_to_a_checkpoint_is_not_blamed_by_its_old_number_of_steps():
    """Numbers of steps from before members began anew tell nothing of who is behind now."""
    pace = Pace(20, T)
    pace.step("a", 500, 1.0)
    pace.step("b", 502, 1.0)
    pace.entered(["a", "b", "newcomer"])
    for host in ("a", "b", "newcomer"):
        pace.moved(host, 0.0)
    assert pace.stuck(["newcomer", "a", "b"], 21.0, entering=False)[0] is None  # nobody is behind anybody
    pace.step("b", 301, 1.0)
    pace.step("newcomer", 301, 1.0)
    for host in ("a", "b", "newcomer"):
        pace.moved(host, 30.0)
    assert pace.stuck(["newcomer", "a", "b"], 51.0, entering=False)[0] == "a"


def test_one_with_whom_no_group_forms_is_replaced():
    def never_enters(toy):
        toy._cast = lambda what: toy.say({"type": "trouble", "generation": toy.generation, "message": "no route"})
        toy.train()

    run = Run(train, at_first(never_enters))
    run.until("generation", coordinator.FRUITLESS + 3)
    assert run.generations() == ["01"] * (coordinator.FRUITLESS + 1) + ["0", "01"]
    [lost] = run.of("lost")
    assert lost["host"] == "host1"
    assert lost["reason"].startswith("the others cannot connect to it: another network, or a firewall?")


# starting


def test_a_host_that_cannot_be_reached_later_is_tried_again_and_again():
    run = Run(train, train)
    run.hosts[1].start_errors = {start: HostError("host1", "no route to host") for start in (2, 3, 4)}
    run.at("commit", 2, lambda: run.hosts[1].toy.exit(-9))
    run.until("generation", 3)
    assert run.hosts[1].again == [False, True, True, True, True]
    times = [when for when, _ in run.hosts[1].starts]
    waits = [later - sooner for sooner, later in itertools.pairwise(times[1:])]
    assert waits == pytest.approx([1.0, 2.0, 4.0], abs=LATE_S)
    assert len(run.of("lost")) == 1 and len([line for line in run.log if "no route to host" in line]) == 1
    assert run.generations() == ["01", "0", "01"]


def test_the_user_is_told_once_that_a_host_with_another_address_is_not_found_by_the_old_one(monkeypatch):
    monkeypatch.setattr(simulated, "NAMES", "10.0.0.{}")
    run = Run(train, train)
    run.hosts[1].start_errors = {start: HostError("10.0.0.1", "port 22: no answer") for start in range(2, 14)}
    run.at("commit", 2, lambda: run.hosts[1].toy.exit(-9))
    run.until("generation", 3)
    [warning] = run.of("notice")
    assert warning["host"] == "10.0.0.1" and "only if it has another address" in warning["what"].lower()


@pytest.mark.parametrize(("name", "told"), [("192.168.1.31", True), ("mac-mini.local", False), ("studio", False)])
def test_only_a_host_that_is_given_by_its_address_needs_a_name(name, told):
    said = [
        worker_group.advice(name, HostError(name, "port 22: no answer"), tries, is_new=tries == 1)
        for tries in range(1, 30)
    ]
    assert len(list(filter(None, said))) == told


def test_the_permission_that_a_mac_takes_away_with_the_terminal_is_named():
    def no_route() -> HostError:
        error = HostError("host1", "port 22: No route to host")
        error.__cause__ = OSError(65, "No route to host")
        return error

    run = Run(train, train)
    run.hosts[1].start_errors = {start: no_route() for start in (2, 3)}
    run.at("commit", 2, lambda: run.hosts[1].toy.exit(-9))
    run.until("generation", 3)
    [warning] = run.of("notice")
    assert "terminal closed" in warning["what"] and warning["host"] == "host1"
    page, _, title = warning["what"].rpartition(": ")[2].partition("#")
    headings = (PROJECT / page).read_text().lower().splitlines()
    assert "## " + title.replace("-", " ") in [line.replace(",", "") for line in headings]


class MovingMeeting:
    line = ""

    def __init__(self):
        self.is_due, self.connected = False, []

    def moved(self, connected) -> str:
        self.connected = list(connected)
        if not self.is_due:
            return ""
        self.is_due, self.line = False, '{"type": "meeting", "address": "10.0.0.9"}'
        return "the address of this machine has changed"

    def left(self, connected) -> str:
        return ""


def test_workers_are_told_where_to_meet_when_the_master_has_another_address():
    """Those that are there at once, one that starts later when it does: it must not look for the old place."""
    meeting = MovingMeeting()
    run = Run(train, train, meeting=meeting)
    run.hosts[1].own_address = "10.0.0.9"
    run.at("commit", 2, lambda: setattr(meeting, "is_due", True))
    run.at("warning", 1, lambda: run.background.at(1, lambda: run.hosts[1].toy.exit(-9)))
    run.until("generation", 3)
    assert meeting.connected == ["10.0.0.9"]
    assert run.of("warning") == [{"type": "warning", "what": "the address of this machine has changed"}]
    assert [toy.heard.count(meeting.line) for host in run.hosts for toy in host.toys] == [1, 1, 1]
    assert run.hosts[1].toy.heard[0] == meeting.line


def test_a_group_that_is_about_to_meet_at_the_old_place_is_called_anew():
    meeting = MovingMeeting()

    def train_unless_at_first(toy: Toy) -> None:
        toy.is_deaf = toy.life == 1
        toy.train()

    run = Run(train, train_unless_at_first, meeting=meeting)
    run.at("generation", 1, lambda: setattr(meeting, "is_due", True))
    run.at("generation", 2, lambda: (run.hosts[1].toy.connect(), run.stop()))
    run.run()
    assert run.generations() == ["01", "01"] and not run.of("lost") and run.time_of("generation", 2) < 20


def hangs_in_the_first_group(toy: Toy) -> None:
    toy.is_stuck = lambda toy: toy.generation == 1 and len(toy.host.run.of("commit")) >= 3
    toy.train()


def test_a_group_whose_connections_went_with_an_address_is_called_anew():
    """Over a second network: no SSH connection breaks, nobody is lost, and gloo says nothing."""
    meeting = MovingMeeting()
    run = Run(hangs_in_the_first_group, hangs_in_the_first_group, meeting=meeting)
    run.at("commit", 3, lambda: setattr(meeting, "is_due", True))
    run.until("generation", 2)
    assert run.generations() == ["01", "01"] and not run.of("lost")
    assert run.time_of("generation", 2) - run.time_of("commit", 3) < 10


@pytest.mark.parametrize("is_member", [True, False])
def test_a_host_that_listens_at_another_address_has_left_its_group(is_member):
    def at(address: str):
        return lambda: run.hosts[1].toy.say({"type": "listens", "address": address, "port": 4000})

    body = hangs_in_the_first_group if is_member else train
    run = Run(body, body)
    run.at("commit", 1, at("10.0.0.1"))
    run.at("commit", 3, at("10.0.0.2" if is_member else "10.0.0.1"))
    run.until("generation" if is_member else "commit", 2 if is_member else 9)
    assert run.generations() == (["01", "01"] if is_member else ["01"]) and not run.of("lost")
    assert not is_member or run.time_of("generation", 2) - run.time_of("commit", 3) < 10


def test_an_error_of_the_programs_own_in_reaching_a_host_ends_no_run():
    run = frozen_after_two_rounds()
    run.hosts[1].start_errors[2] = AssertionError("in the SSH library")
    run.at("generation", 2, lambda: run.hosts[1].toy.exit(1))
    run.run()
    assert run.generations() == ["01", "0", "01"] and run.hosts[1].again == [False, True, True]
    assert "host1: AssertionError: in the SSH library" in run.log


def test_a_host_whose_files_cannot_be_read_here_is_tried_again():
    run = Run(train, train, min_hosts=2)
    run.hosts[1].start_errors = {start: DataError("model.safetensors: cannot be read") for start in (2, 3)}
    run.at("commit", 2, lambda: run.hosts[1].toy.exit(-9))
    run.until("generation", 3)
    assert run.hosts[1].again == [False, True, True, True]
    assert run.log == ["host1: model.safetensors: cannot be read"]


@pytest.mark.parametrize("error", [DataError("train.csv: cannot be read"), HostError("host0", "no route to host")])
def test_the_first_stop_ends_a_run_whose_hosts_cannot_be_started(error):
    run = Run(train)
    run.hosts[0].start_errors = dict.fromkeys(range(2, 100), error)
    run.at("commit", 1, lambda: run.hosts[0].toy.exit(-9))
    run.at("lost", 1, lambda: run.background.at(30, run.stop))
    with pytest.raises(RunError, match="stopped while no host was connected"):
        run.run()


def says_hello(source: Callable[[Toy], str], system: str = "Linux") -> Callable[[Toy], None]:
    def body(toy):
        toy.say({"type": "hello", "pid": 1, "system": system, "source": source(toy)})
        toy.train()

    return body


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(("a", "Linux"), ("b", "Linux"), "host[01] runs different code"), (("a", "Darwin"), ("a", "Linux"), "Macs")],
)
def test_ranks_that_cannot_train_together_are_refused(first, second, words):
    run = Run(*(says_hello(lambda toy, source=source: source, system) for source, system in (first, second)))
    with pytest.raises(RunError, match=words):
        run.run()


@pytest.mark.parametrize("number", [0, 2])
def test_a_worker_that_comes_back_with_other_code_is_given_up(number):
    bodies = [says_hello(lambda toy: "1")] * 3
    bodies[number] = says_hello(lambda toy: str(toy.life))
    run = Run(*bodies)
    run.at("commit", 2, lambda: run.hosts[number].toy.exit(-9))
    run.until("lost", 2)
    name = f"host{number}"
    assert [(lost["host"], lost["given_up"]) for lost in run.of("lost")] == [(name, False), (name, True)]
    assert run.of("lost")[1]["reason"].startswith(f"{name} runs different code from host")


def test_each_worker_hears_where_the_others_listen():
    def body(toy):
        toy.say({"type": "listens", "address": "127.0.0.1", "port": 4000 + 10 * toy.host.rank + toy.life})
        toy.train()

    run = Run(body, body)
    run.at("commit", 3, lambda: run.hosts[1].toy.exit(-9))
    run.until("generation", 3)

    def peers(toy: Toy) -> str:
        return [line for line in toy.heard if "peers" in line][-1]

    assert '[["127.0.0.1", 4012]]' in peers(run.hosts[0].toy)
    assert '[["127.0.0.1", 4001]]' in peers(run.hosts[1].toys[0])
    assert '[["127.0.0.1", 4001]]' in peers(run.hosts[1].toy)


# audio; see also test_audio_push.py


def wants(toy: Toy) -> None:
    toy.say({"type": "want", "files": ["a.wav", "b.wav"]})


def test_files_that_a_worker_wants_are_sent_and_the_others_named():
    run = Run(lambda toy: (wants(toy), toy.train()), all_rounds=1)
    run.hosts[0].unsendable = ["b.wav"]
    run.run()
    assert run.hosts[0].wanted == [["a.wav", "b.wav"]]
    assert '{"type": "unsent", "files": ["b.wav"]}' in run.hosts[0].toy.heard and not run.of("lost")


def test_a_host_that_does_not_take_its_files_is_given_up():
    """They would be left out otherwise: the others train them."""
    run = Run(train, at_first(after(1, wants)))

    def send(files, wanted):
        raise HostError("host1", "the disk is full")

    run.hosts[1].send = send
    run.until("lost", 1)
    assert run.of("lost")[0]["reason"] == "clips cannot be sent to it: host1: the disk is full"


# the end


def test_stop_reaches_a_worker_that_comes_later_and_does_not_wait_for_one_that_still_loads():
    run = Run(train, train)
    run.hosts[1].start_s = 5.0
    run.stop()
    run.run()
    assert run.hosts[0].toy.stopping and run.generations() == ["0"]


def saves_after(seconds: float) -> Callable[[Toy], None]:
    def body(toy):
        toy.saves = lambda toy: toy.later(seconds, lambda: toy.say({"type": "saved"}))
        toy.train()

    return body


def test_saving_may_take_longer_than_a_round():
    run = Run(saves_after(200), saves_after(200), patience_s=20, all_rounds=1)
    run.run()
    assert run.generations() == ["01"] and not run.of("lost")


def saves_by(act: Callable[[Toy], None]) -> Callable[[Toy], None]:
    def body(toy):
        toy.saves = act
        toy.train()

    return body


@pytest.mark.parametrize("instead", [exits(-9), lambda toy: None], ids=["dies", "takes too long"])
def test_another_one_saves_when_the_first_is_lost_or_takes_too_long(instead):
    run = Run(saves_by(instead), train, all_rounds=1)
    run.run()
    assert run.exporter.name == "host1"
    assert (run.hosts[0].fetched, run.hosts[1].fetched) == ([], ["final"])


def test_another_one_saves_when_the_model_cannot_be_fetched_and_it_has_heard_the_launcher_meanwhile():
    run = Run(train, train, all_rounds=1)
    run.hosts[0].fetch_error, run.hosts[0].fetch_s = HostError("host0", "the connection was lost"), 100.0
    run.run()
    assert run.exporter.name == "host1" and run.hosts[1].fetched == ["final"]
    [warning] = run.of("warning")
    assert warning["what"] == "the model it saved cannot be fetched: host0: the connection was lost"
    assert run.hosts[1].toy.last_beat > 190


def test_the_model_is_fetched_from_the_one_that_has_saved_it_though_another_was_asked_meanwhile():
    def late(toy):
        toy.freeze()
        toy.background.at(15.0, toy.thaw)
        toy.later(0.1, lambda: toy.say({"type": "saved"}))

    run = Run(saves_by(late), saves_after(100), all_rounds=1)
    run.run()
    assert run.exporter.name == "host0" and run.of("lost")
    assert (run.hosts[0].fetched, run.hosts[1].fetched) == (["final"], [])


def test_it_is_an_error_when_nobody_can_save():
    run = Run(*[saves_by(exits(1))] * 2, all_rounds=1)
    with pytest.raises(RunError, match="every host was lost before the model was saved"):
        run.run()


def test_the_reason_why_the_model_is_not_saved_is_told():
    run = Run(saves_by(lambda toy: fails(toy, "ModelError", "the disk is full")), all_rounds=1)
    with pytest.raises(RunError, match="host0: the disk is full"):
        run.run()


def test_the_end_leaves_no_process():
    """Neither one that trains, nor a frozen one, nor one that is being started."""
    run = Run(train, train, at_first(after(2, exits(3))))
    run.at("lost", 1, lambda: setattr(run.hosts[2], "start_s", 5.0))

    def interrupted() -> bool:
        if len(run.hosts[2].starts) == 2:
            raise KeyboardInterrupt
        return False

    with pytest.raises(KeyboardInterrupt):
        run.training.run(interrupted)
    run.hosts[1].toy.freeze()
    run.training.end()
    run.background.pass_until(run.background.time + 10, lambda: False)
    assert [[toy.status is not None for toy in host.toys] for host in run.hosts] == [[True], [True], [True, True]]


@pytest.mark.parametrize(("seconds", "at_most"), [(0.5, 1.4), (60.0, 3.0)], ids=["slow", "out of reach"])
def test_silent_hosts_are_killed_side_by_side_and_not_waited_for_for_long(monkeypatch, seconds, at_most):
    run = Run(*[train] * 4)
    run.at("commit", 2, lambda: [host.toy.freeze() for host in run.hosts[1:]])
    run.until("lost", 3)
    killed = []
    for host in run.hosts[1:]:
        host.toy.kill = lambda toy=host.toy: (killed.append(toy), time.sleep(seconds))
    began = time.monotonic()
    monkeypatch.setattr(worker_group, "KILL_S", 2.0)
    run.training.end()
    assert len(killed) == 3 and time.monotonic() - began < at_most


# those who cannot reach each other


def apart(run: Run) -> None:
    """From now on host1 and host2 can do nothing together, and report it as a probe of theirs would."""

    def report(toy: Toy, told: bool = False) -> None:
        unreached = [["127.0.0.1", 4003 - toy.host.rank]] if run.is_apart else []
        if (unreached or told) and toy.generation:
            about = {"generation": toy.generation, "waits": stuck(toy), "unreached": unreached}
            toy.say({"type": "reach", **about})
        toy.later(0.2, lambda: report(toy, bool(unreached)))

    def stuck(toy: Toy) -> bool:
        return run.is_apart and {"host1", "host2"} <= set(toy.members)

    run.is_apart = True
    for host in run.hosts[1:]:
        host.toy.is_stuck = stuck
        host.toy.later(0, lambda toy=host.toy: report(toy))


def listens(toy: Toy) -> None:
    toy.say({"type": "listens", "address": "127.0.0.1", "port": 4000 + toy.host.rank})
    toy.train()


class OtherNetwork(MovingMeeting):
    """Where the hosts that are apart reach each other, or not."""

    def __init__(self, helps):
        super().__init__()
        self.helps, self.run, self.left_at = helps, None, []

    def left(self, connected) -> str:
        self.left_at.append(self.run.background.time)
        self.run.is_apart = self.run.is_apart and not self.helps
        self.line = '{"type": "meeting", "address": "10.0.0.9"}'
        return "they meet elsewhere"


@pytest.mark.parametrize("helps", [True, False])
def test_hosts_that_are_apart_in_one_network_meet_in_another(helps):
    meeting = OtherNetwork(helps)
    meeting.run = run = Run(listens, listens, listens, meeting=meeting)
    run.at("commit", 3, lambda: apart(run))
    if helps:
        run.at("generation", 3, run.stop)
    else:
        run.at("apart", 1, lambda: run.background.at(70, run.stop))
    run.run()
    assert run.generations() == (["012", "01", "012"] if helps else ["012", "01"]) and not run.of("lost")
    assert len(run.of("warning")) == len(meeting.left_at) == (1 if helps else 3)
    assert all(after - before >= 30 for before, after in itertools.pairwise(meeting.left_at))
    assert meeting.line in run.hosts[2].toy.heard


def test_two_who_cannot_reach_each_other_are_parted_until_they_can():
    run = Run(listens, listens, listens)
    run.at("commit", 3, lambda: apart(run))
    run.at("generation", 2, lambda: run.background.at(5, lambda: setattr(run, "is_apart", False)))
    run.until("generation", 3)
    assert run.generations() == ["012", "01", "012"] and not run.of("lost")
    assert run.of("apart") == [{"type": "apart", "pairs": [["host1", "host2"]], "hosts": ["host2"]}]
    assert run.of("reached") == [{"type": "reached", "pairs": [["host1", "host2"]]}]


def test_one_that_is_lost_while_they_say_that_they_do_not_reach_it_is_just_lost():
    run = Run(listens, listens, listens)
    run.step_s = 40.0  # so that 8 s of silence are borne

    def freeze() -> None:
        run.hosts[1].toy.freeze()
        run.background.at(4.0, lambda: apart(run))

    run.at("commit", 3, freeze)
    run.at("generation", 2, lambda: (setattr(run, "is_apart", False), run.hosts[1].toy.thaw()))
    run.until("generation", 3)
    assert run.generations() == ["012", "02", "012"] and not run.of("apart")
    assert "nothing heard" in run.of("lost")[0]["reason"]
