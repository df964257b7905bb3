"""The crew and the lifeline, with real processes that speak the workers' protocol but do not train."""

import itertools
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from waiting import wait_until

from distributed.control.channel import LAUNCHER_GONE
from distributed.hosts.paths import PROJECT
from distributed.launcher import audio_push as supply
from distributed.launcher import worker_group as workers
from distributed.launcher.worker_group import Crew
from distributed.plan.launch_env import environment
from distributed.ssh.machine import LocalMachine
from exogym.membership import blame, coordinator
from whisper_tuner.errors import DataError, HostError, RunError

TOY = [sys.executable, str(Path(__file__).with_name("toy_worker.py"))]
TRAIN = "train()"
DIE = "print('last words', flush=True); os.kill(os.getpid(), 9)"


def spec_of(do: str, *, life: int = 1, silence_s: float = 20) -> bytes:
    return json.dumps({"do": textwrap.dedent(do), "life": life, "silence_s": silence_s}).encode() + b"\n"


class ToyPost:
    """Starts toy workers on this machine; `unreachable` are the tries that fail, counted from 1."""

    def __init__(self, rank: int, do: str, folder: Path):
        self.name, self.rank = f"host{rank}", rank
        self.do, self.folder = do, folder
        self.unreachable: set[int] = set()
        self.refusal: Exception = HostError(self.name, "no route to host")
        self.silence_s = 20.0
        self.tries: list[tuple[float, bool]] = []  # when, and `again`
        self.processes = []
        self.wanted, self.unsendable = [], []
        self.send_errors: list[Exception | None] = []  # of the first files
        self.fetched, self.fetch = [], lambda folder: self.fetched.append(folder)

    @property
    def again(self) -> list[bool]:
        return [again for _, again in self.tries]

    def start(self, *, again: bool, may_replace=lambda _: True):
        self.tries.append((time.monotonic(), again))
        if len(self.tries) in self.unreachable:
            raise self.refusal
        if again and not may_replace(self.processes[-1].poll() is None):
            raise HostError(self.name, "heard again")
        process = LocalMachine(self.name).start(TOY, env=environment(PROJECT), cwd=str(self.folder))
        self.processes.append(process)
        process.write(spec_of(self.do, life=len(self.processes), silence_s=self.silence_s))
        return process

    def send(self, files, wanted):
        """One file at a time."""
        self.wanted.append(files)
        for name in files:
            if self.send_errors and (error := self.send_errors.pop(0)):
                raise error
            yield 1, [name] if name in self.unsendable else []


class Run:
    """A crew, what it said, and what is to happen meanwhile."""

    def __init__(self, folder: Path, bodies: tuple[str, ...], **settings):
        self.posts = [ToyPost(rank, do, folder) for rank, do in enumerate(bodies)]
        self.events, self.log, self.stopping = [], [], False
        self._script, self._count = {}, Counter()
        self.crew = Crew(self.posts, events=self._hear, log=self.log.append, **settings)

    def at(self, kind: str, number: int, act) -> None:
        """act() at the event of this type that is number so many."""
        self._script[kind, number] = act

    def stop(self) -> None:
        self.stopping = True

    def signal(self, rank: int, number: int):
        return lambda: os.kill(self.posts[rank].processes[-1].pid, number)

    def work(self) -> None:
        self.crew.work(lambda: self.stopping)
        assert not self._script, "this has not happened"

    def of(self, kind: str) -> list[dict]:
        return [event for event in self.events if event["type"] == kind]

    def generations(self) -> list[str]:
        """The numbers of the hosts of each."""
        return ["".join(host[-1] for host in event["hosts"]) for event in self.of("generation")]

    def _hear(self, event: dict) -> None:
        self.events.append(event)
        self._count[event["type"]] += 1
        self._script.pop((event["type"], self._count[event["type"]]), lambda: None)()


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    for name, value in {
        "BEAT_S": 0.1,
        "GRACE_S": 0.5,
        "BACK_OFF_S": (0.02, 0.1),
        "LISTEN_S": 0.3,
        "REACH_S": 0.1,
    }.items():
        monkeypatch.setattr(workers, name, value)
    monkeypatch.setattr(blame, "PATIENCE_S", 0.1)
    monkeypatch.setattr(coordinator, "APART_S", 0.3)


@pytest.fixture
def crew_of(tmp_path):
    made = []

    def build(*bodies: str, **settings) -> Run:
        made.append(Run(tmp_path, bodies, **settings))
        return made[-1]

    yield build
    for run in made:
        run.crew.end()
        for process in [process for post in run.posts for process in post.processes]:
            wait_until(lambda process=process: process.poll() is not None, tell=lambda process=process: process.pid)


# listening


def test_work_is_done_when_all_say_so_and_one_has_saved(crew_of):
    run = crew_of("train(all_rounds=3)", "train(all_rounds=3)")
    run.work()
    assert run.generations() == ["01"] and len(run.of("commit")) == 3 and not run.of("lost")
    assert [event["host"] for event in run.of("saved")] == ["host0"]
    assert (run.posts[0].fetched, run.posts[1].fetched) == (["final"], [])


def test_events_and_lines_carry_their_host(crew_of):
    run = crew_of(TRAIN, "print('hello'); send_event({'type': 'warning', 'what': 'hot'}); train(all_rounds=1)")
    run.work()
    assert {"type": "warning", "what": "hot", "host": "host1", "rank": 1} in run.events
    assert run.log == ["host1: hello"]
    assert not run.of("beat") and not run.of("vote")


def test_an_event_amid_a_line_is_neither_lost_nor_shown(crew_of):
    amid = "sys.stdout.write('hel'); sys.stdout.flush(); send_event({'type': 'warning'}); print('lo', flush=True)"
    run = crew_of(f"lifeline.BEAT_S = 60; time.sleep(0.2); {amid}; train(all_rounds=1)")
    run.work()
    assert run.log == ["host0: hel", "host0: lo"] and len(run.of("warning")) == 1


# losing, and starting again


def test_a_killed_worker_is_lost_and_another_one_joins(crew_of):
    run = crew_of(TRAIN, "print('last words', flush=True); train()")
    run.at("commit", 2, run.signal(1, signal.SIGKILL))
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"]
    [lost] = run.of("lost")
    assert (lost["host"], lost["rank"], lost["given_up"]) == ("host1", 1, False)
    reason = "the worker was killed by signal 9 (most often by a system that has run out of memory); its last lines:"
    assert lost["reason"] == f"{reason}\n  host1: last words"
    assert run.posts[1].again == [False, True] and run.posts[0].again == [False]


def test_the_reason_of_a_loss_is_what_the_worker_said_of_it(crew_of):
    error = "send_event({'type': 'error', 'kind': 'PeerLost', 'foreseen': True, 'message': 'host0 fell silent'})"
    run = crew_of(TRAIN, f"if life == 1: {error}; os._exit(6)\ntrain()")
    run.at("generation", 2, run.stop)
    run.work()  # though it was foreseen, and nothing may have been trained yet: another try may do
    assert run.generations() == ["0", "01"]
    assert [lost["reason"] for lost in run.of("lost")] == ["host0 fell silent"]


def test_a_frozen_worker_is_lost_and_heard_again_when_it_thaws(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.8, 0.8))
    run = crew_of(TRAIN, TRAIN)
    run.at("commit", 2, run.signal(1, signal.SIGSTOP))
    run.at("generation", 2, run.signal(1, signal.SIGCONT))
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"]
    assert "nothing heard for 1 s" in run.of("lost")[0]["reason"]
    assert [event["host"] for event in run.of("back")] == ["host1"]
    assert len(run.posts[1].processes) == 1


def test_one_that_is_heard_again_is_called_once_it_hears_too(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.8, 0.8))
    run = crew_of(TRAIN, TRAIN)
    mend, before = half_of_the_link(run), []

    def thaw():
        run.signal(1, signal.SIGCONT)()
        threading.Timer(0.7, lambda: (before.extend(run.generations()), mend())).start()

    run.at("generation", 2, thaw)
    run.at("generation", 3, run.stop)
    run.work()
    assert before == ["01", "0"] and run.generations() == ["01", "0", "01"]
    assert len(run.of("back")) == 1 and len(run.posts[1].processes) == 1


def test_one_that_is_heard_and_stays_deaf_is_replaced(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.8, 0.8))
    monkeypatch.setattr(workers, "DEAF_S", 0.5)
    monkeypatch.setattr(workers, "RECLAIM_S", 0.1)
    run = crew_of(TRAIN, TRAIN)
    half_of_the_link(run)
    run.at("generation", 2, run.signal(1, signal.SIGCONT))
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"]
    assert not run.of("back") and len(run.posts[1].processes) == 2


def test_one_that_is_heard_is_looked_for_at_once_over_another_connection(crew_of, monkeypatch):
    for name, seconds in {"SILENCE_S": (0.8, 0.8), "DEAF_S": 60.0, "REACH_S": 60.0, "RECLAIM_S": 60.0}.items():
        monkeypatch.setattr(workers, name, seconds)
    run = crew_of(TRAIN, TRAIN)
    mend, kept = half_of_the_link(run), []

    def reach(*, again, may_replace):
        mend()  # as lines go over the new connection
        kept.append(not may_replace(True))
        raise HostError("host1", "its worker is there, and has not answered yet")

    def thaw():
        run.posts[1].start = reach
        run.signal(1, signal.SIGCONT)()

    run.at("generation", 2, thaw)
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"] and len(run.of("back")) == 1
    assert kept and all(kept)


def test_a_silent_host_is_tried_again_as_soon_as_a_try_that_took_long_has_failed(crew_of, monkeypatch):
    for name, seconds in {"SILENCE_S": (0.8, 0.8), "REACH_S": 0.1, "LOOK_AGAIN_S": 1.0, "BACK_OFF_S": (60.0,)}.items():
        monkeypatch.setattr(workers, name, seconds)
    run = crew_of(TRAIN, TRAIN)
    times = []

    def knock(*, again, may_replace):
        times.append(time.monotonic())
        time.sleep(1.0)
        if len(times) == 3:
            run.signal(1, signal.SIGCONT)()
        raise HostError("host1", "port 22: no answer")

    def freeze():
        run.posts[1].start = knock
        run.signal(1, signal.SIGSTOP)()

    run.at("commit", 2, freeze)
    run.at("generation", 3, run.stop)
    run.work()
    assert all(later - sooner < 1.8 for sooner, later in itertools.pairwise(times[:3]))


def half_of_the_link(run: Run):
    """After the second commit worker 1 freezes, and nothing gets to it any more until the function returned here."""
    held = []

    def cut():
        process = run.posts[1].processes[0]
        process.write_all, process.write = process.write, held.append
        run.signal(1, signal.SIGSTOP)()

    def mend():
        process = run.posts[1].processes[0]
        process.write = process.write_all
        for data in held:
            process.write(data)

    run.at("commit", 2, cut)
    return mend


def test_one_whose_last_words_are_heard_is_started_anew_at_once(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.8, 0.8))
    monkeypatch.setattr(workers, "RECLAIM_S", 60.0)
    monkeypatch.setattr(workers, "DEAF_S", 60.0)
    monkeypatch.setattr(workers, "BACK_OFF_S", (60.0,))
    monkeypatch.setattr(workers, "LOOK_AGAIN_S", 60.0)
    ends = "import signal; signal.signal(signal.SIGCONT, lambda *_: (print('too late', flush=True), os._exit(75)))"
    run = crew_of(TRAIN, f"if life == 1: {ends}\n{TRAIN}")
    run.at("commit", 2, run.signal(1, signal.SIGSTOP))
    run.at("generation", 2, run.signal(1, signal.SIGCONT))
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"]


def test_one_that_is_heard_again_just_before_it_is_replaced_is_kept(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.8, 0.8))
    monkeypatch.setattr(workers, "RECLAIM_S", 0.1)
    monkeypatch.setattr(workers, "LISTEN_S", 3.0)
    run = crew_of(TRAIN, TRAIN)
    start, kept = run.posts[1].start, []

    def reach_and_start(*, again, may_replace):
        if again:  # the network is there again, for both
            run.signal(1, signal.SIGCONT)()
            kept.append(not may_replace(True))
        return start(again=again, may_replace=may_replace)

    run.posts[1].start = reach_and_start
    run.at("commit", 2, run.signal(1, signal.SIGSTOP))
    run.at("generation", 3, run.stop)
    run.work()
    wait_until(lambda: kept == [True])
    assert len(run.posts[1].processes) == 1
    assert run.generations() == ["01", "0", "01"]


def test_the_longer_rounds_are_the_longer_silence_is_borne(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.5, 2.0))
    monkeypatch.setattr(workers, "SILENT_PART", 2.0)
    short, long = TRAIN, "STEP_S = 0.6\ntrain()"
    for body, expected in ((short, 0.5), (long, 1.2)):
        run = crew_of(body, body)
        run.at("commit", 3, run.signal(1, signal.SIGSTOP))
        run.at("lost", 1, run.stop)
        run.work()
        [lost] = run.of("lost")
        assert lost["silent_for"] == pytest.approx(expected, rel=0.2)


def test_silence_is_borne_for_longer_while_the_link_is_full(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.3, 5.0))
    monkeypatch.setattr(workers, "LADEN_SILENCE_S", 1.0)
    stops = "import signal; os.kill(os.getpid(), signal.SIGSTOP)"
    for last, expected in (("alive", 0.3), ("exchange", 1.0)):
        run = crew_of(TRAIN, f"train(rounds=3); send_event({{'type': '{last}'}}); {stops}")
        run.at("lost", 1, run.stop)
        run.work()
        assert [event["silent_for"] for event in run.of("lost")] == [expected]


def test_one_that_still_loads_may_be_silent_for_longer(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.4, 0.4))
    thaw = "import subprocess; subprocess.Popen(['sh', '-c', f'sleep 1.2; kill -CONT {os.getpid()}'])"
    run = crew_of(TRAIN, f"{thaw}; os.kill(os.getpid(), 19); {TRAIN}")
    run.at("commit", 2, run.stop)
    run.work()
    assert run.generations() == ["01"] and not run.of("lost")


def test_a_frozen_worker_is_replaced_in_the_end(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.8, 0.8))
    monkeypatch.setattr(workers, "RECLAIM_S", 0.1)
    run = crew_of(TRAIN, TRAIN)
    start = run.posts[1].start

    def make_way_and_start(*, again, may_replace):
        if again:
            run.signal(1, signal.SIGKILL)()
            time.sleep(0.2)  # its end is noticed first
        return start(again=again, may_replace=may_replace)

    run.posts[1].start = make_way_and_start
    run.at("commit", 2, run.signal(1, signal.SIGSTOP))
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"]
    assert not run.of("back") and run.posts[1].again == [False, True]
    assert len(run.of("lost")) == 1


def test_one_that_is_still_there_beside_its_successor_is_killed(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.8, 0.8))
    monkeypatch.setattr(workers, "RECLAIM_S", 0.1)
    run = crew_of(TRAIN)
    run.at("commit", 2, run.signal(0, signal.SIGSTOP))
    run.at("generation", 2, run.stop)
    run.work()
    frozen, _ = run.posts[0].processes
    wait_until(lambda: frozen.poll() is not None, tell=lambda: "the frozen one is still there")


def test_three_failures_in_a_row_give_a_worker_up(crew_of):
    run = crew_of(TRAIN, "os._exit(3)")
    run.at("lost", 3, run.stop)
    run.work()
    assert [lost["given_up"] for lost in run.of("lost")] == [False, False, True]
    assert run.of("lost")[2]["reason"] == "the worker ended with status 3, and printed nothing"
    assert set(run.generations()) == {"0"} and run.posts[1].again == [False, True, True]


def test_failures_with_a_round_in_between_do_not_give_it_up(crew_of):
    run = crew_of(TRAIN, f"train(rounds=1); {DIE}")
    run.at("lost", 4, run.stop)
    run.work()
    assert not any(lost["given_up"] for lost in run.of("lost"))


def test_a_run_ends_when_every_worker_is_given_up(crew_of):
    run = crew_of("print('no disk', flush=True); os._exit(3)", "os._exit(3)")
    with pytest.raises(RunError, match=r"host0: the worker ended with status 3; its last lines:\n  host0: no disk"):
        run.work()


def test_a_run_ends_when_the_last_one_is_given_up_for_being_stuck(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "MOST_FAILURES", 1)
    run = crew_of("train(rounds=2); time.sleep(60)", "train(rounds=9); os._exit(3)", patience_s=0.3)
    with pytest.raises(RunError, match="host0: made no step"):
        run.work()


def test_below_min_hosts_it_waits_for_the_lost_one(crew_of):
    run = crew_of(TRAIN, TRAIN, min_hosts=2)
    run.posts[1].unreachable = {2}
    run.at("commit", 2, run.signal(1, signal.SIGKILL))
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"]  # in the second they only ended the round
    assert [(event["hosts"], event["min_hosts"]) for event in run.of("paused")] == [(["host0"], 2)]


def test_a_run_ends_when_too_few_are_left_for_min_hosts(crew_of):
    run = crew_of(TRAIN, "os._exit(3)", min_hosts=2)
    with pytest.raises(RunError, match="host1: the worker ended with status 3"):
        run.work()


@pytest.mark.parametrize("kind", ["NotFinite", "ZeroDivisionError"])
def test_an_error_before_anything_is_trained_ends_the_run(crew_of, kind):
    run = crew_of(TRAIN, f"send_event({{'type': 'error', 'kind': '{kind}', 'message': 'it is so'}}); os._exit(1)")
    with pytest.raises(RunError, match="host1: it is so"):
        run.work()


def test_later_a_foreseen_error_ends_the_run_and_another_one_does_not(crew_of):
    error = "send_event({'type': 'error', 'kind': 'X', 'foreseen': life == 2, 'message': f'error {life}'}); os._exit(1)"
    run = crew_of(TRAIN, f"train(rounds=1); {error}")
    with pytest.raises(RunError, match="host1: error 2"):
        run.work()
    assert [lost["reason"] for lost in run.of("lost")] == ["error 1"]


@pytest.mark.parametrize("event", ["{'type': 'step'}", "{'type': 'vote'}", "{'type': 'start'}"])
def test_a_worker_that_says_less_than_it_must_is_replaced(crew_of, event):
    run = crew_of(TRAIN, f"if life == 1: train(rounds=1); send_event({event}); time.sleep(60)\ntrain()")
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"]
    assert "is incomplete" in run.of("lost")[0]["reason"]


def test_a_worker_that_makes_no_step_while_others_wait_is_replaced(crew_of):
    run = crew_of(TRAIN, "if life == 1: train(rounds=2); time.sleep(60)\ntrain()", patience_s=0.3)
    run.at("generation", 3, run.stop)
    run.work()
    assert run.generations() == ["01", "0", "01"]
    assert [lost["host"] for lost in run.of("lost")] == ["host1"]
    assert "made no step" in run.of("lost")[0]["reason"]
    assert run.posts[1].again == [False, True]
    assert run.posts[1].processes[0].poll() is not None


def test_a_worker_that_says_why_it_makes_no_step_is_waited_for(crew_of):
    waits = "train(rounds=2)\nfor _ in range(10):\n    send_event({'type': 'alive'})\n    time.sleep(0.1)"
    run = crew_of(TRAIN, f"{waits}\nos._exit(3)", patience_s=0.5)
    run.at("lost", 1, run.stop)
    run.work()
    assert "ended with status 3" in run.of("lost")[0]["reason"]


def test_one_with_whom_no_group_forms_is_replaced(crew_of):
    never_enters = """
        send_event({"type": "ready"})
        number = 0
        while life == 1:
            number = line.coordinator.next_generation(after=number).number
            send_event({"type": "trouble", "generation": number, "message": "no route"})
        train()
    """
    run = crew_of(TRAIN, never_enters)
    run.at("generation", blame.FRUITLESS + 3, run.stop)
    run.work()
    assert run.generations() == ["01"] * (blame.FRUITLESS + 1) + ["0", "01"]
    assert [(lost["host"], lost["reason"]) for lost in run.of("lost")] == [
        ("host1", "the others cannot connect to it: another network, or a firewall? (host1: no route)")
    ]


# starting


def test_a_host_that_cannot_be_reached_at_first_ends_the_run(crew_of):
    run = crew_of(TRAIN, TRAIN)
    run.posts[1].unreachable = {1}
    with pytest.raises(HostError, match="host1: no route to host"):
        run.work()


def test_a_host_that_cannot_be_reached_later_is_tried_again_and_again(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "BACK_OFF_S", (0.1, 0.2))
    run = crew_of(TRAIN, TRAIN)
    run.posts[1].unreachable = {2, 3, 4}
    run.at("commit", 2, run.signal(1, signal.SIGKILL))
    run.at("generation", 3, run.stop)
    run.work()
    assert run.posts[1].again == [False, True, True, True, True]
    times = [when for when, _ in run.posts[1].tries]
    waits = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert waits[1] >= 0.1 and waits[2] >= 0.2 and waits[3] >= 0.2
    assert len(run.of("lost")) == 1 and len([line for line in run.log if "no route to host" in line]) == 1
    assert run.generations() == ["01", "0", "01"]


def test_a_host_whose_files_cannot_be_read_here_is_tried_again(crew_of):
    run = crew_of(TRAIN, TRAIN, min_hosts=2)
    run.posts[1].unreachable, run.posts[1].refusal = {2, 3}, DataError("model.safetensors: cannot be read")
    run.at("commit", 2, run.signal(1, signal.SIGKILL))
    run.at("generation", 3, run.stop)
    run.work()
    assert run.posts[1].again == [False, True, True, True]
    assert run.log == ["host1: model.safetensors: cannot be read"]


def test_the_first_stop_ends_a_run_whose_files_cannot_be_read_here(crew_of):
    run = crew_of(TRAIN)
    run.posts[0].unreachable, run.posts[0].refusal = set(range(2, 100)), DataError("train.csv: cannot be read")
    run.at("commit", 1, run.signal(0, signal.SIGKILL))
    run.at("lost", 1, lambda: threading.Timer(0.3, run.stop).start())
    with pytest.raises(RunError, match="stopped while no host was there"):
        run.work()


HELLO = "send_event({'type': 'hello', 'pid': 1, 'system': '%s', 'source': %s});"


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [(("Linux", "'a'"), ("Linux", "'b'"), "host[01] runs other code"), (("Darwin", "'a'"), ("Linux", "'a'"), "Macs")],
)
def test_ranks_that_cannot_train_together_are_refused(crew_of, first, second, words):
    run = crew_of(HELLO % first + TRAIN, HELLO % second + TRAIN)
    with pytest.raises(RunError, match=words):
        run.work()


def test_a_worker_that_comes_back_with_other_code_is_given_up(crew_of):
    run = crew_of(HELLO % ("Linux", "1") + TRAIN, HELLO % ("Linux", "life") + TRAIN)
    run.at("commit", 2, run.signal(1, signal.SIGKILL))
    run.at("lost", 2, run.stop)
    run.work()
    assert [(lost["host"], lost["given_up"]) for lost in run.of("lost")] == [("host1", False), ("host1", True)]
    assert run.of("lost")[1]["reason"] == "host1 runs other code than host0"


def test_the_first_host_that_comes_back_with_other_code_is_the_one_to_be_given_up(crew_of):
    run = crew_of(HELLO % ("Linux", "life") + TRAIN, *[HELLO % ("Linux", "1") + TRAIN] * 2)
    run.at("commit", 2, run.signal(0, signal.SIGKILL))
    run.at("lost", 2, run.stop)
    run.work()
    assert [(lost["host"], lost["given_up"]) for lost in run.of("lost")] == [("host0", False), ("host0", True)]


# audio


WANT = """
send_event({"type": "want", "files": ["a.wav", "b.wav"]})
while not line.unsent:
    time.sleep(0.02)
print("unsent", *sorted(line.unsent), flush=True)
"""


@pytest.mark.parametrize("first", [[], [HostError("host0", "the connection was lost")]], ids=["at once", "again"])
def test_files_that_a_worker_wants_are_sent_and_the_others_named(crew_of, monkeypatch, first):
    monkeypatch.setattr(supply, "DELIVERY_AGAIN_S", 0.1)
    run = crew_of(f"{WANT}\ntrain(all_rounds=1)")
    run.posts[0].send_errors, run.posts[0].unsendable = [*first], ["b.wav"]
    run.work()
    assert run.posts[0].wanted == [["a.wav", "b.wav"]] * (1 + len(first)) and run.log == ["host0: unsent b.wav"]
    assert not run.of("lost")


def test_what_has_arrived_before_the_connection_was_lost_is_not_sent_again(crew_of, monkeypatch):
    monkeypatch.setattr(supply, "DELIVERY_AGAIN_S", 0.1)
    run = crew_of(f"{WANT}\ntrain(all_rounds=1)")
    run.posts[0].send_errors, run.posts[0].unsendable = [None, HostError("host0", "lost")], ["b.wav"]
    run.work()
    assert run.posts[0].wanted == [["a.wav", "b.wav"], ["b.wav"]]


def test_a_host_that_takes_its_files_slowly_is_not_given_up(crew_of, monkeypatch):
    monkeypatch.setattr(supply, "DELIVERY_AGAIN_S", 0.3)
    monkeypatch.setattr(supply, "DELIVERY_S", 0.25)
    run = crew_of(f"{WANT}\ntrain(all_rounds=1)")
    lost = HostError("host0", "lost")
    run.posts[0].send_errors, run.posts[0].unsendable = [lost, None, lost], ["b.wav"]
    run.work()
    assert not run.of("lost")


def test_a_host_that_sleeps_is_sent_its_files_when_it_wakes_up(crew_of, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.8, 0.8))
    monkeypatch.setattr(supply, "DELIVERY_AGAIN_S", 0.05)
    monkeypatch.setattr(supply, "DELIVERY_S", 1.2)
    run = crew_of(TRAIN, f"train(rounds=1)\n{WANT}\ntrain()")
    send = run.posts[1].send

    def send_if_awake(files, wanted):
        if not run.of("back"):
            if not run.of("lost"):
                run.signal(1, signal.SIGSTOP)()
            raise HostError("host1", "no route to host")
        yield from send(files, wanted)

    run.posts[1].send, run.posts[1].unsendable = send_if_awake, ["b.wav"]
    run.at("lost", 1, lambda: threading.Timer(1.5, run.signal(1, signal.SIGCONT)).start())
    run.at("generation", 3, run.stop)
    run.work()
    assert len(run.of("lost")) == 1 and "host1: unsent b.wav" in run.log


def test_two_lists_are_sent_in_turns_and_never_side_by_side(crew_of):
    wants = "".join(f"send_event({{'type': 'want', 'files': [{name!r}] * 5}})\n" for name in "ab")
    run = crew_of(f"{wants}time.sleep(1)\ntrain(all_rounds=1)")
    order, busy = [], threading.Lock()

    def send(files, wanted):
        for name in files:
            assert busy.acquire(blocking=False)
            time.sleep(0.05)
            order.append(name)
            busy.release()
            yield 1, []

    run.posts[0].send = send
    run.work()
    assert sorted(order) == ["a"] * 5 + ["b"] * 5 and order not in ([*"aaaaabbbbb"], [*"bbbbbaaaaa"])


def test_nothing_more_is_sent_once_the_worker_has_ended(crew_of):
    run = crew_of(TRAIN, f"train(rounds=1)\nif life == 1:\n{textwrap.indent(WANT, '    ')}\ntrain()")
    ended = threading.Event()

    def send(files, wanted):
        run.signal(1, signal.SIGKILL)()
        while wanted():
            time.sleep(0.02)
            yield 0, []
        ended.set()

    run.posts[1].send = send
    run.at("lost", 1, run.stop)
    run.work()
    assert ended.wait(5)


def test_no_file_is_sent_of_a_run_that_does_not_know_them(crew_of):
    run = crew_of(f"{WANT}\ntrain(all_rounds=1)")
    run.posts[0].send_errors = [RunError("no list of audio")]
    run.work()
    assert run.log == ["host0: unsent a.wav b.wav"]


def test_a_host_that_does_not_take_its_files_is_given_up(crew_of, monkeypatch):
    """They would be left out otherwise: the others train them."""
    monkeypatch.setattr(supply, "DELIVERY_AGAIN_S", 0.05)
    monkeypatch.setattr(supply, "DELIVERY_S", 0.3)
    run = crew_of(TRAIN, f"train(rounds=1)\nif life == 1:\n{textwrap.indent(WANT, '    ')}\ntrain()")
    run.posts[1].send_errors = [HostError("host1", "the disk is full")] * 1000
    run.at("lost", 1, run.stop)
    run.work()
    assert run.of("lost")[0]["reason"] == "clips cannot be sent to it: host1: the disk is full"
    assert len(run.posts[1].wanted) > 2


# the end


def test_stop_reaches_every_worker(crew_of):
    seen = "train(); print('stopping', line.stopping.is_set(), flush=True)"
    run = crew_of(seen, seen, seen)
    run.at("commit", 1, run.stop)
    run.work()
    wait_until(lambda: run.crew._take(0.1) or len(run.log) == 3, tell=lambda: run.log)
    assert sorted(run.log) == [f"host{n}: stopping True" for n in range(3)]


def test_stop_reaches_a_worker_that_comes_later(crew_of):
    run = crew_of("line.stopping.wait(); print('heard', flush=True); train()")
    run.stop()
    run.work()
    assert run.log == ["host0: heard"]


def test_a_stop_does_not_wait_for_a_host_that_is_still_loading(crew_of):
    run = crew_of(TRAIN, "line.stopping.wait(); time.sleep(0.6); print('loaded', flush=True); train()")
    run.stop()
    run.work()
    assert run.log == []


def test_a_stop_while_no_host_is_there_ends_the_run(crew_of):
    run = crew_of(TRAIN)
    run.posts[0].unreachable = set(range(2, 100))
    run.at("commit", 1, run.signal(0, signal.SIGKILL))
    run.at("lost", 1, run.stop)
    with pytest.raises(RunError, match="stopped while no host was there"):
        run.work()


def test_saving_may_take_longer_than_a_round(crew_of):
    slow = "train(all_rounds=1); line.saving.wait(); time.sleep(1)"
    run = crew_of(slow, slow, patience_s=0.2)
    run.work()
    assert run.generations() == ["01"] and not run.of("lost")


@pytest.mark.parametrize("instead", ["os.kill(os.getpid(), 9)", "time.sleep(60)"])
def test_another_one_saves_when_the_first_is_lost_or_takes_too_long(crew_of, instead, monkeypatch):
    monkeypatch.setattr(workers, "SAVE_S", 0.5)
    run = crew_of(f"train(all_rounds=1); line.saving.wait(); {instead}", "train(all_rounds=1)")
    run.work()
    assert run.crew.saver.name == "host1"
    assert (run.posts[0].fetched, run.posts[1].fetched) == ([], ["final"])


def test_another_one_saves_when_the_model_cannot_be_fetched(crew_of):
    def cut(folder):
        raise HostError("host0", "the connection was lost")

    run = crew_of("train(all_rounds=1)", "train(all_rounds=1)")
    run.posts[0].fetch = cut
    run.work()
    assert run.crew.saver.name == "host1" and run.posts[1].fetched == ["final"]
    [warning] = run.of("warning")
    assert warning["what"] == "the model that it saved cannot be fetched: host0: the connection was lost"


def test_the_others_are_still_there_when_fetching_a_large_model_fails(crew_of):
    def cut(folder):
        time.sleep(1.2)
        raise HostError("host0", "the connection was lost")

    run = crew_of("train(all_rounds=1)", "train(all_rounds=1)")
    run.posts[0].fetch, run.posts[1].silence_s = cut, 0.7
    run.work()
    assert run.crew.saver.name == "host1"


def test_it_is_an_error_when_nobody_can_save(crew_of):
    run = crew_of(*["train(all_rounds=1); line.saving.wait(); os._exit(1)"] * 2)
    with pytest.raises(RunError, match="every host was lost before the model was saved"):
        run.work()


def test_the_reason_why_the_model_is_not_saved_is_told(crew_of):
    error = "send_event({'type': 'error', 'kind': 'ModelError', 'foreseen': True, 'message': 'the disk is full'})"
    run = crew_of(f"train(all_rounds=1); line.saving.wait(); {error}; os._exit(4)")
    with pytest.raises(RunError, match="host0: the disk is full"):
        run.work()


def test_the_end_leaves_no_process(crew_of):
    """Neither one that trains, nor a frozen one, nor one that is being started."""
    run = crew_of(TRAIN, TRAIN, "if life == 1: os._exit(3)\ntrain()")
    start, starting, may_start = run.posts[2].start, threading.Event(), threading.Event()

    def start_slowly(*, again, may_replace):
        if again:
            starting.set()
            assert may_replace(True)
            may_start.wait(10)
        return start(again=again)

    def interrupted():
        if starting.is_set() and run.of("commit"):
            raise KeyboardInterrupt

    run.posts[2].start = start_slowly
    with pytest.raises(KeyboardInterrupt):
        run.crew.work(interrupted)
    run.signal(1, signal.SIGSTOP)()
    run.crew.end()
    may_start.set()
    wait_until(lambda: len(run.posts[2].processes) == 2)
    for process in [process for post in run.posts for process in post.processes]:
        wait_until(lambda process=process: process.poll() is not None, tell=lambda process=process: process.name)


@pytest.mark.parametrize("breaks_off", [True, False])
def test_when_a_run_breaks_off_the_others_save_what_was_agreed(crew_of, tmp_path, breaks_off):
    saves = "line.rescue = lambda: Path('saved').touch()\ntrain()"
    fails = """
        train(rounds=2)
        send_event({"type": "error", "kind": "NotFinite", "foreseen": True, "message": "the loss is nan"})
        os._exit(1)
    """
    run = crew_of(fails, saves)
    with pytest.raises(RunError, match="the loss is nan"):
        run.work()
    run.crew.end(rescue=breaks_off)
    assert (tmp_path / "saved").exists() == breaks_off


def test_the_end_leaves_no_process_that_has_just_started(crew_of):
    run = crew_of(TRAIN)
    run.crew._start(run.crew.workers["host0"])
    wait_until(lambda: not run.crew._inbox.empty())
    run.crew.end()
    [process] = run.posts[0].processes
    try:
        wait_until(lambda: process.poll() is not None, 1)
    finally:
        process.kill()


# the lifeline


def lonely(do: str = "time.sleep(60)", *, first: str = "", silence_s: float = 20) -> subprocess.Popen:
    """A toy worker without a launcher, once it has done what it does first."""
    process = subprocess.Popen(
        TOY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ | environment(PROJECT)
    )
    process.stdin.write(spec_of(f"{first}\nprint('here', flush=True)\n{do}", silence_s=silence_s))
    process.stdin.flush()
    assert any(b"here" in line for line in process.stdout)
    return process


def touch_on_rescue(path: Path) -> str:
    return f"line.rescue = lambda: open({str(path)!r}, 'w').close()"


def test_a_worker_whose_launcher_is_gone_saves_and_ends(tmp_path):
    process = lonely(first=touch_on_rescue(tmp_path / "saved"))
    process.stdin.close()
    assert process.wait(10) == LAUNCHER_GONE
    assert (tmp_path / "saved").exists()


def test_a_worker_that_is_told_to_quit_ends_without(tmp_path):
    process = lonely(first=touch_on_rescue(tmp_path / "saved"))
    process.stdin.write(b"quit\n")
    process.stdin.flush()
    assert process.wait(10) == LAUNCHER_GONE
    assert not (tmp_path / "saved").exists()


def test_a_worker_that_hears_nothing_ends_though_nobody_reads_its_output():
    """As behind a pulled cable: no end of file, and a pipe that fills up and blocks whoever writes."""
    process = lonely("while True: send_event({'type': 'step', 'text': 'x' * 1000})", silence_s=1)
    assert process.wait(10) == LAUNCHER_GONE


def test_a_worker_that_hears_nothing_for_long_saves_before_it_ends(tmp_path):
    """It may be reached again, and then goes on."""
    process = lonely(first=touch_on_rescue(tmp_path / "saved"), silence_s=4)
    wait_until((tmp_path / "saved").exists)
    assert process.poll() is None
    process.stdin.write(b"beat\n")
    process.stdin.flush()
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(3)
    assert process.wait(10) == LAUNCHER_GONE


def test_a_rescue_that_hangs_does_not_keep_the_worker():
    process = lonely(first="lifeline.RESCUE_S = 0.5; line.rescue = lambda: time.sleep(60)")
    process.stdin.close()
    assert process.wait(10) == LAUNCHER_GONE


def test_a_worker_that_thaws_gives_the_launcher_its_time_to_speak():
    process = lonely(silence_s=0.8)
    process.send_signal(signal.SIGSTOP)
    time.sleep(1)
    process.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.3)
    assert process.wait(10) == LAUNCHER_GONE


# those who cannot reach each other

# Workers 1 and 2 can do nothing together while there is a file `cut`, and say so, as a probe of theirs would.
APART = """
me, go_on = {me}, _vote
send_event({{"type": "listens", "address": "127.0.0.1", "port": 4000 + me}})

def stuck():
    news = line.coordinator._generation
    return Path("cut").exists() and news is not None and {{"host1", "host2"}} <= set(news.members)

def _vote(number, vote, what):
    while stuck() and not line.coordinator.is_superseded(number):
        time.sleep(0.02)
    return go_on(number, vote, what)

def report():
    told = False
    while True:
        time.sleep(0.05)
        unreached = [["127.0.0.1", 4003 - me]] if me and Path("cut").exists() else []
        if (unreached or told) and (news := line.coordinator._generation):
            about = {{"generation": news.number, "waits": stuck(), "unreached": unreached}}
            send_event({{"type": "reach", **about}})
        told = bool(unreached)

if me:
    threading.Thread(target=report, daemon=True).start()
train()
"""


@pytest.fixture
def three(crew_of):
    return crew_of(*(f"import threading\n{APART.format(me=me)}" for me in range(3)))


def test_two_who_cannot_reach_each_other_are_parted_until_they_can(three, tmp_path):
    cut = tmp_path / "cut"
    three.at("commit", 3, cut.touch)
    three.at("generation", 2, lambda: three.at("commit", len(three.of("commit")) + 10, cut.unlink))
    three.at("generation", 3, three.stop)
    three.work()
    assert three.generations() == ["012", "01", "012"] and not three.of("lost")
    assert three.of("apart") == [{"type": "apart", "pairs": [["host1", "host2"]], "hosts": ["host2"]}]
    assert three.of("reached") == [{"type": "reached", "pairs": [["host1", "host2"]]}]


def test_one_that_is_lost_while_they_say_that_they_do_not_reach_it_is_just_lost(three, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "SILENCE_S", (0.2, 1.2))

    def freeze():
        three.signal(1, signal.SIGSTOP)()
        threading.Timer(0.5, (tmp_path / "cut").touch).start()

    three.at("commit", 3, freeze)
    three.at("generation", 2, lambda: ((tmp_path / "cut").unlink(missing_ok=True), three.signal(1, signal.SIGCONT)()))
    three.at("generation", 3, three.stop)
    three.work()
    assert three.generations() == ["012", "02", "012"] and not three.of("apart")
    assert "nothing heard" in three.of("lost")[0]["reason"]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "listens", "address": "127.0.0.1", "port": "4000"},
        {"type": "listens", "address": "host1", "port": 4000},
        {"type": "listens", "port": 4000},
        {"type": "reach", "generation": 1, "waits": True, "unreached": [["127.0.0.1", 0]]},
        {"type": "reach", "generation": 1, "waits": True, "unreached": [[[], {}]]},
        {"type": "reach", "generation": 1, "waits": True, "unreached": 7},
    ],
)
def test_nonsense_about_addresses_costs_a_worker_its_place_and_no_other(crew_of, event):
    run = crew_of(TRAIN, f"if life == 1: send_event({event!r}); time.sleep(9)\ntrain()")
    run.at("commit", 4, run.stop)
    run.work()
    assert {lost["host"] for lost in run.of("lost")} == {"host1"}
    assert "is incomplete" in run.of("lost")[0]["reason"]


def test_each_worker_hears_where_the_others_listen(crew_of, tmp_path):
    note = "line.meet = lambda peers: Path(f'met-{me}-{life}').write_text(json.dumps(peers))"
    listen = "send_event({'type': 'listens', 'address': '127.0.0.1', 'port': 4000 + 10 * me + life})"
    run = crew_of(*(f"me = {me}\n{note}\n{listen}\ntrain()" for me in range(2)))
    run.at("commit", 3, run.signal(1, signal.SIGKILL))
    run.at("generation", 3, run.stop)
    run.work()
    assert json.loads((tmp_path / "met-1-1").read_text()) == [["127.0.0.1", 4001]]
    assert json.loads((tmp_path / "met-0-1").read_text()) == [["127.0.0.1", 4012]]
    assert json.loads((tmp_path / "met-1-2").read_text()) == [["127.0.0.1", 4001]]
