"""The table of a worker's states: each way between them, and what holds whatever happens in whatever order."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distributed.control.timeouts import Timeouts
from distributed.launcher import liveness
from distributed.launcher.liveness import MOST_FAILURES, TABLE, Action, Event, Liveness, State, advance, due_event

T = Timeouts()
SILENCE_S = 3.0
NOW = 100.0
STATES = {
    State.WAITING: Liveness(due=NOW),
    State.STARTING: Liveness(state=State.STARTING, busy=True, tries=1),
    State.LOADING: Liveness(state=State.LOADING, heard=NOW),
    State.READY: Liveness(state=State.READY, heard=NOW, loaded=True),
    State.SILENT: Liveness(state=State.SILENT, lost=NOW, due=NOW + 1, loaded=True),
    State.UNACKNOWLEDGED: Liveness(state=State.UNACKNOWLEDGED, lost=NOW, heard=NOW, heard_again=NOW, loaded=True),
    State.GIVEN_UP: Liveness(state=State.GIVEN_UP, failures=MOST_FAILURES),
}


def after(worker: Liveness, *events: Event, now: float = NOW) -> Liveness:
    for event in events:
        worker, _ = advance(worker, event, now, T)
    return worker


def due(worker: Liveness, now: float) -> Event | None:
    return due_event(worker, now, SILENCE_S, T)


def test_every_event_in_every_state_goes_where_the_table_says():
    for state, event in itertools.product(State, Event):
        worker, action = advance(STATES[state], event, NOW, T)
        assert (worker.state, action) == TABLE.get((state, event), (state, None)), (state, event)


IMPORTED = after(STATES[State.LOADING], Event.IMPORTED)


@pytest.mark.parametrize(
    ("worker", "limit"),
    [
        (STATES[State.LOADING], T.silence_importing_s),
        (IMPORTED, T.silence_loading_s),
        (STATES[State.READY], SILENCE_S),
    ],
    ids=["importing", "loading", "ready"],
)
def test_silence(worker, limit):
    assert due(worker, NOW + limit) is None
    assert due(worker, NOW + limit + 0.1) is Event.SILENCE
    heard = after(worker, Event.HEARD, now=NOW + limit)
    assert due(heard, NOW + 2 * limit) is None


def test_another_worker_imports_anew():
    worker = after(IMPORTED, Event.EXITED, Event.DUE, Event.STARTED)
    assert worker.state is State.LOADING and due(worker, NOW + T.silence_importing_s) is None


@pytest.mark.parametrize("state", [State.LOADING, State.READY])
def test_one_that_falls_silent_is_looked_for_over_other_connections(state):
    lost = after(STATES[state], Event.SILENCE)
    assert due(lost, NOW + T.reconnect_s - 0.1) is None and due(lost, NOW + T.reconnect_s) is Event.DUE
    trying, action = advance(lost, Event.DUE, NOW + 1, T)
    assert action is Action.RECONNECT and due(trying, NOW + 100) is None  # while that goes on


def test_one_that_was_cut_off_is_looked_for_at_once():
    assert due(after(STATES[State.READY], Event.CUT_OFF), NOW) is Event.DUE


def test_a_host_that_cannot_be_reached_is_tried_once_a_second_and_at_once_where_a_try_takes_longer():
    silent = after(STATES[State.READY], Event.SILENCE)
    trying = after(silent, Event.DUE, now=NOW + 1)
    assert due(after(trying, Event.FAILED, now=NOW + 1.1), NOW + 1.9) is None
    assert due(after(trying, Event.FAILED, now=NOW + 1.1), NOW + 2) is Event.DUE
    assert due(after(trying, Event.FAILED, now=NOW + 3.5), NOW + 3.5) is Event.DUE


def reached(*, at: float) -> Liveness:
    """A silent one, lost at NOW, whose host was reached."""
    return after(after(STATES[State.READY], Event.SILENCE), Event.DUE, Event.RECONNECTED, now=NOW + at)


@pytest.mark.parametrize(("at", "replaced"), [(1.0, T.replace_s), (11.0, 11.0 + T.listen_s), (3600.0, 3603.0)])
def test_one_that_does_not_answer_though_its_host_does_is_replaced(at, replaced):
    worker = reached(at=at)
    assert due(worker, NOW + replaced - 0.1) is not Event.NO_ANSWER
    assert due(worker, NOW + replaced) is Event.NO_ANSWER
    worker, action = advance(worker, Event.NO_ANSWER, NOW + replaced, T)
    assert action is Action.START and worker.busy


def test_a_host_that_was_reached_for_a_moment_only_does_not_count_as_reached():
    worker = after(reached(at=1.0), Event.DUE, Event.FAILED, now=NOW + 5)
    assert due(worker, NOW + 100) is Event.DUE


def test_no_worker_is_replaced_while_a_thread_connects_to_it():
    assert due(after(reached(at=1.0), Event.DUE, now=NOW + 5), NOW + 100) is None


def test_a_silent_one_that_is_heard_is_connected_to_at_once_and_returns_when_it_acknowledges():
    worker = after(STATES[State.SILENT], Event.HEARD)
    assert worker.state is State.UNACKNOWLEDGED and due(worker, NOW) is Event.DUE
    returned, action = advance(worker, Event.ACKNOWLEDGED, NOW + 1, T)
    assert returned.state is State.READY and action is Action.REPORT_RETURN


def test_one_that_is_heard_over_a_connection_that_has_just_been_made_needs_no_other():
    worker = after(reached(at=1.0), Event.HEARD, now=NOW + 1.1)
    assert worker.state is State.UNACKNOWLEDGED and due(worker, NOW + 1.1) is None
    assert due(worker, NOW + 1 + T.listen_s) is Event.DUE
    assert due(after(worker, Event.CUT_OFF, now=NOW + 2), NOW + 2) is Event.DUE


def test_one_that_was_lost_while_it_loaded_returns_to_that_or_has_loaded_meanwhile():
    worker = after(STATES[State.LOADING], Event.SILENCE, Event.HEARD)
    assert after(worker, Event.ACKNOWLEDGED).state is State.LOADING
    assert after(worker, Event.LOADED).state is State.UNACKNOWLEDGED
    assert after(worker, Event.LOADED, Event.ACKNOWLEDGED).state is State.READY


def test_one_that_is_heard_but_acknowledges_nothing_is_replaced_in_the_end():
    """Though it may be heard again at any moment."""
    worker = after(reached(at=1.0), Event.HEARD, now=NOW + 2)
    assert due(after(worker, Event.DUE, now=NOW + 2), NOW + 2 + T.acknowledge_s) is Event.NOT_ACKNOWLEDGED
    worker = after(worker, Event.NOT_ACKNOWLEDGED, Event.HEARD, now=NOW + 8)
    assert due(worker, NOW + 8 + T.acknowledge_s) is Event.NO_ANSWER


@pytest.mark.parametrize("state", [State.SILENT, State.UNACKNOWLEDGED])
@pytest.mark.parametrize("event", [Event.NOBODY_THERE, Event.EXITED])
def test_a_lost_one_that_has_ended_is_started_anew_at_once_and_that_is_no_failure(state, event):
    worker = after(STATES[state], event, now=NOW + 5)
    assert due(worker, NOW + 5) is Event.DUE and worker.failures == 0


def test_failures_wait_longer_each_time_and_three_in_a_row_are_one_too_many():
    worker = STATES[State.READY]
    for pause in T.back_off_s[: MOST_FAILURES - 1]:
        worker = after(worker, Event.EXITED)
        assert due(worker, NOW + pause - 0.1) is None and due(worker, NOW + pause) is Event.DUE
        worker = after(worker, Event.DUE, Event.STARTED, Event.LOADED)
    assert after(liveness.counted(worker), Event.EXITED).state is State.WAITING
    assert after(worker, Event.EXITED).state is State.GIVEN_UP


@pytest.mark.parametrize("state", [State.LOADING, State.READY, State.SILENT, State.UNACKNOWLEDGED])
def test_to_be_blamed_is_a_failure(state):
    assert after(STATES[state], Event.BLAMED).failures == 1


def test_an_abort_that_a_stranger_can_bring_about_is_no_failure():
    worker = STATES[State.READY]
    for _ in range(2 * MOST_FAILURES):
        worker = after(replace(worker, state=State.READY), Event.ABORTED)
    assert worker.state is State.WAITING and worker.failures == 0 and worker.due == NOW + 4


def test_a_host_that_cannot_be_reached_for_a_start_is_tried_again_and_again():
    worker, pauses = STATES[State.WAITING], []
    for _ in range(8):
        worker = after(worker, Event.DUE, Event.FAILED)
        pauses.append(worker.due - NOW)
    assert pauses == [*T.back_off_s, T.back_off_s[-1], T.back_off_s[-1]]
    assert worker.failures == 0


RESULTS = {
    Action.START: [Event.STARTED, Event.FAILED],
    Action.RECONNECT: [Event.RECONNECTED, Event.FAILED, Event.NOBODY_THERE],
}
BY_CLOCK = {Event.DUE, Event.SILENCE, Event.NO_ANSWER, Event.NOT_ACKNOWLEDGED}
SAID = [event for event in Event if event not in BY_CLOCK.union(*RESULTS.values())]
STEP = st.tuples(st.sampled_from(["clock", "result", *SAID]), st.floats(0, 20), st.integers(0, 2))


@settings(max_examples=150, deadline=None)
@given(st.lists(STEP, max_size=80))
def test_whatever_happens_in_whatever_order(steps):
    worker, now, running = Liveness(), 0.0, None
    for what, passed, choice in steps:
        if what == "clock":
            now += passed
            event = due(worker, now)
        elif what == "result":
            event = RESULTS[running][choice % len(RESULTS[running])] if running else None
        else:
            event = what
        if event is None:
            continue
        before = worker
        worker, action = advance(before, event, now, T)
        if what == "result":
            running = None
        if action in RESULTS:
            assert running is None, "two threads for one worker"
            running = action
        assert worker.busy == (running is not None)
        if before.state is State.GIVEN_UP:
            assert worker.state is State.GIVEN_UP and action is None
        if action is Action.START:
            assert before.state is State.WAITING or before.is_lost
        if action is Action.REPORT_RETURN:
            assert event is Event.ACKNOWLEDGED and worker.is_there
        if action is Action.REPORT_LOSS:
            assert not worker.is_there
        if before.is_there and not worker.is_there:
            assert action is Action.REPORT_LOSS or event is Event.FINISHED
        if worker.is_there and not before.is_there:
            assert event in (Event.STARTED, Event.ACKNOWLEDGED)
        assert worker.failures <= MOST_FAILURES
        settled = replace(worker, busy=False)  # once its thread has reported, something is due in time
        assert settled.state in (State.GIVEN_UP, State.STARTING) or due(settled, now + 100) is not None
