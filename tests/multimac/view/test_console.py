import contextlib
import io
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading

import pytest
from rich.console import Console
from waiting import wait_until

from distributed.launcher.follow import PlainScreen
from distributed.run_dir.events import UNNAMED, event_of
from distributed.run_dir.log import read_events
from distributed.run_dir.run_view import RunView
from multimac.commands.attach_stop import follow
from multimac.view.run_screen import DONE, TO_DO, screen
from whisper_tuner.errors import ExitStatus, RunError
from whisper_tuner.text import duration, size

STEP = {"type": "step", "epoch": 0, "lr": 1e-4, "tokens": 20, "grad_norm": 1.0, "bytes": 0, "memory": 0}
EVENTS = [
    {"type": "phase", "phase": "start", "hosts": ["h1", "h2"]},
    {"type": "start", "host": "h2", "rank": 1, "steps_per_epoch": 4, "total_steps": 4, "trainable": 9, "device": "cpu"},
    STEP | {"host": "h2", "rank": 1, "step": 1, "loss": 2.0, "samples": 4, "seconds": 8.0},
    {"type": "problem", "host": "h2", "rank": 1, "what": "clip.wav: damaged"},
    {"type": "validation", "host": "h1", "rank": 0, "epoch": 0, "step": 4, "loss": 1.5},
    {"type": "evaluation", "when": "before", "wer": 62.13},
    {
        "type": "evaluation",
        "when": "after",
        "wer": 20.4,
        "normalizer": "whisper-basic 0.1.15",
        "before": 62.13,
        "wer_difference": [-60.0, 2.0],
        "clips": 9,
    },
]


def show(tmp_path, events: list[dict], status: int = 0) -> tuple[ExitStatus, str]:
    (tmp_path / "events.jsonl").write_text("".join(json.dumps({"time": 1.0, **event}) + "\n" for event in events))
    launcher = subprocess.Popen([sys.executable, "-c", f"raise SystemExit({status})"])
    with contextlib.redirect_stdout(io.StringIO()) as said:
        return follow(tmp_path, lambda: launcher, Console()), said.getvalue()


def test_a_run_in_plain_lines(tmp_path):
    status, text = show(tmp_path, [*EVENTS, {"type": "end", "status": 0, "message": ""}])
    assert status == ExitStatus.OK
    assert "h2: epoch 1, step 1/4, loss 2.000, 0.5 clips/s, sent 0 B, 0:24 left" in text
    assert "h2: skipped: clip.wav: damaged" in text
    assert (
        f"step 4: validation loss 1.500\nWER before: 62.1 ({UNNAMED})\nWER after: 20.4 (whisper-basic 0.1.15)\n"
        "WER 62.1 -> 20.4: -41.7 points (95 %: -60.0 to +2.0, 9 clips): may be chance\n" in text
    )


def test_sigterm_is_passed_on_and_a_launcher_that_had_not_begun_was_stopped(tmp_path, capsys):
    (tmp_path / "events.jsonl").write_text("")
    launcher = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
    assert follow(tmp_path, lambda: launcher, Console()) == ExitStatus.INTERRUPTED
    assert launcher.wait() == -signal.SIGTERM
    assert "stopped at once; see what it has: multimac runs show" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_comes_as_the_launcher_is_started_reaches_it(tmp_path, number):
    (tmp_path / "events.jsonl").write_text("")
    started = []

    def launch() -> subprocess.Popen:
        started.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]))
        os.kill(os.getpid(), number)
        return started[0]

    assert follow(tmp_path, launch, Console()) == ExitStatus.INTERRUPTED
    assert started[0].wait() == -signal.SIGTERM


def test_two_signals_in_a_row_both_reach_the_launcher(tmp_path, capsys):
    """The second may come while the first is passed on."""
    words = json.dumps({"time": 1.0, "type": "end", "status": 130, "message": "stopped at once"})
    program = (
        "import signal, sys, time\n"
        "signals = []\n"
        "signal.signal(signal.SIGTERM, lambda *_: signals.append(1))\n"
        f"open({str(tmp_path / 'ready')!r}, 'w').close()\n"
        "while len(signals) < 2: time.sleep(0.01)\n"
        f"open({str(tmp_path / 'events.jsonl')!r}, 'a').write({words!r} + chr(10))\n"
    )
    (tmp_path / "events.jsonl").write_text("")

    def launch() -> subprocess.Popen:
        launcher = subprocess.Popen([sys.executable, "-c", program])
        wait_until((tmp_path / "ready").exists)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        return launcher

    assert follow(tmp_path, launch, Console()) == ExitStatus.INTERRUPTED
    assert "stopped at once" in capsys.readouterr().out


START = {"type": "start", "steps_per_epoch": 4, "total_steps": 4, "trainable": 9, "device": "cpu"}


def generation(number: int, *hosts: str) -> dict:
    return {"type": "generation", "number": number, "hosts": list(hosts)}


def lost(host: str, *, given_up: bool = False) -> dict:
    return {"type": "lost", "host": host, "rank": 1, "reason": "the SSH connection was lost", "given_up": given_up}


def resumed(host: str, step: int, *, anew: bool = True) -> dict:
    return {"type": "resume", "host": host, "rank": 1, "step": step, "epoch": 0, "round": 2, "anew": anew}


def take(view: RunView, event: dict) -> None:
    view.take(event_of({"time": 0.0, **event}))


def state(view: RunView, host: str) -> str:
    """A host's row of the screen, without its name and its bar."""
    [row] = [row for row in screen_of(view) if row.startswith(host)]
    return " ".join(word for word in row.split()[1:] if not {*word} <= {DONE, TO_DO})


def screen_of(view: RunView, *told: str, width: int = 100, height: int = 24, now: float = 0.0, name="run") -> list[str]:
    console = Console(width=width, height=height)
    rows = screen(view, told, name=name, console=console, hint="w: live page", now=now)
    assert len(rows) == height and all(row.cell_len <= width for row in rows), [row.plain for row in rows]
    return [row.plain for row in rows]


def test_a_hint_that_is_too_long_for_a_row_has_two():
    long = f"see the page with: multimac watch {'x' * 30}"
    rows = screen(RunView(), [], name="run", console=Console(width=72, height=12), hint=f"{long}   Ctrl-C: stop", now=0)
    assert [row.plain for row in rows[-2:]] == [long, "Ctrl-C: stop"] and len(rows) == 12


def test_who_is_lost_goes_on_and_joins_is_told_in_lines(tmp_path):
    events = [
        *EVENTS[:3],
        generation(1, "h1", "h2", "h3"),
        lost("h2"),
        generation(2, "h1", "h3"),
        {"type": "back", "host": "h2", "rank": 1},
        generation(3, "h1", "h2", "h3"),
        resumed("h2", 3),
        lost("h3"),
        lost("h3", given_up=True),
        {"type": "paused", "hosts": ["h1", "h2"], "min_hosts": 3},
        {"type": "paused", "hosts": [], "min_hosts": 3},
    ]
    _, text = show(tmp_path, [*events, {"type": "end", "status": 0, "message": ""}])
    told = [line for line in text.splitlines() if not line.startswith("h2: epoch")]
    assert told == [
        "h2 is lost: the SSH connection was lost",
        "training continues with h1, h3",
        "h2 is back",
        "training continues with h1, h2, h3",
        "h2 joins after step 3; its inner optimizer starts afresh",
        "h3 is lost: the SSH connection was lost",
        "h3 is lost and not tried again: the SSH connection was lost",
        "paused until 3 hosts are there (min_hosts); now: h1, h2",
        "paused until 3 hosts are there (min_hosts); now: none",
    ]


@pytest.mark.parametrize(
    ("paused", "line"),
    [
        ({"hosts": [], "min_hosts": 1}, "paused until a host is back"),
        ({"hosts": [], "min_hosts": 1, "away": ["mac"]}, "paused until mac is back; if you left it out: {} mac --back"),
        (
            {"hosts": ["h1"], "min_hosts": 2, "away": ["h2"]},
            "paused until 2 hosts are there (min_hosts); now: h1; left out: h2; if you left it out: {} h2 --back",
        ),
    ],
)
def test_a_pause_says_who_ends_it_on_one_machine_as_on_several(paused, line):
    view = RunView()
    take(view, {"type": "paused", **paused})
    assert view.lines == [line.format("multimac hosts yield")]


def test_who_cannot_reach_whom_is_told_and_that_they_can_again(tmp_path):
    events = [
        *EVENTS[:3],
        {"type": "apart", "pairs": [["h2", "h3"]], "hosts": ["h3"]},
        generation(2, "h1", "h2"),
        {"type": "apart", "pairs": [["h1", "h2"], ["h2", "h3"]], "hosts": ["h1", "h3"]},
        {"type": "reached", "pairs": [["h1", "h2"], ["h2", "h3"]]},
        {"type": "end", "status": 0, "message": ""},
    ]
    _, text = show(tmp_path, events)
    told = [line for line in text.splitlines() if not line.startswith("h2: epoch")]
    why = "though this machine reaches them: perhaps a firewall, or a Wi-Fi that keeps clients apart"
    assert told == [
        f"h2 and h3 cannot reach each other, {why}; left out until then: h3",
        "training continues with h1, h2",
        f"h1 and h2, h2 and h3 cannot reach each other, {why}; left out until then: h1, h3",
        "h1 and h2, h2 and h3 reach each other again",
    ]


def test_a_run_that_goes_on_from_checkpoints_says_so_once():
    view = RunView()
    for event in (generation(1, "h1", "h2"), resumed("h1", 4, anew=False), resumed("h2", 4, anew=False)):
        take(view, event)
    assert view.lines == ["resumes after step 4"]
    take(view, {"type": "phase", "phase": "start", "hosts": ["h1", "h2"]})
    take(view, resumed("h1", 8) | {"exactly": False})
    assert view.lines[1:] == [
        "resumes after step 8, the last that hosts had agreed on",
        "h1: its inner optimizer starts afresh",
    ]
    view = RunView()
    for event in (generation(1, "h1", "h2"), resumed("h1", 0), resumed("h2", 0)):
        take(view, event)
    assert view.lines == ["starts from the beginning: no checkpoint"]


def test_new_shares_are_told_once():
    view, what = RunView(), "shares h1 60 %, h2 40 %: h1 is 1.5 times as fast as h2"
    for step, host in ((8, "h1"), (8, "h2"), (16, "h2"), (16, "h1")):
        take(view, {"type": "shares", "host": host, "step": step, "what": what})
    assert view.lines == [f"step 8: {what}", f"step 16: {what}"]


def test_a_lost_hosts_row_has_the_total_of_those_who_go_on():
    view = RunView()
    for host in ("h1", "h2"):
        take(view, START | {"host": host, "total_steps": 30})
    take(view, lost("h2"))
    take(view, {"type": "plan", "host": "h1", "total_steps": 44})
    assert (state(view, "h1"), state(view, "h2")) == ("0/44 cpu", "0/44 lost")


def test_the_table_tells_what_each_host_does():
    view = RunView()
    for host in ("h1", "h2"):
        take(view, START | {"host": host})
        take(view, STEP | {"host": host, "step": 1, "loss": 2.0, "samples": 4, "seconds": 8.0})
    take(view, generation(1, "h1", "h2"))
    assert state(view, "h2") == "1/4 2.000 0.5 0:24 cpu"
    for event, expected in [
        ({"type": "apart", "pairs": [["h1", "h2"]], "hosts": ["h2"]}, "1/4 2.000 0.5 not reached"),
        (lost("h2"), "1/4 lost"),
        (lost("h2", given_up=True), "1/4 given up"),
        ({"type": "back", "host": "h2"}, "1/4 waiting"),
        ({"type": "phase", "host": "h2", "phase": "load"}, "1/4 loading"),
        (generation(2, "h1"), "1/4 loading"),
        ({"type": "preparing", "host": "h2", "done": 3, "total": 5}, "1/4 preparing 3/5 clips"),
        ({"type": "preparing", "host": "h2", "done": 5, "total": 5}, "1/4 waiting"),
        ({"type": "phase", "host": "h2", "phase": "load"}, "1/4 loading"),
        (resumed("h2", 3), "3/4 2 loading"),
        ({"type": "paused", "hosts": ["h2"], "min_hosts": 3}, "3/4 2 paused"),
        (generation(3, "h1", "h2"), "3/4 2 cpu"),
        ({"type": "plan", "host": "h2", "total_steps": 9, "hosts": 2}, "3/9 2 cpu"),
    ]:
        take(view, event)
        assert state(view, "h2") == expected
    assert state(view, "h1") == "1/4 2.000 0.5 0:24 cpu"


MACHINE = {"type": "machine", "cpu": 93, "gpu": 88, "memory_used": 76, "memory_total": 100, "battery": 71, "time": 9.0}


def run_of(hosts: int) -> RunView:
    view = RunView()
    for number in range(hosts):
        host = {"host": f"mac-{number}.local"}
        take(view, START | host | {"total_steps": 2480})
        for step in (1238, 1239, 1240):
            about = {"step": step, "loss": 0.2941, "samples": 40, "seconds": 4.0, "bytes": 15_900_000}
            take(view, STEP | host | about)
        take(view, MACHINE | host | {"on_mains": bool(number), "thermal": "serious", "temperature": 71.0})
    return view


def test_the_time_left_is_not_told_before_each_host_knows_its_own_and_a_lost_host_is_not_read():
    view = run_of(2)
    take(view, START | {"host": "mac-2.local", "total_steps": 2480})
    assert screen_of(view, now=20.0)[0] == "run  training  epoch 1"
    take(view, lost("mac-1.local"))
    rows = [row for row in screen_of(view, width=140, now=20.0) if row.startswith("mac-")]
    assert ["71 °C" in row for row in rows] == [True, False, False]


def test_a_wide_screen_has_what_machines_tell_in_columns():
    head, _, names, first, *_ = screen_of(run_of(2), width=140, height=40, now=20.0)
    assert head == "run  training  1:22:40 left  epoch 1"
    assert names.split() == [
        "host",
        "step",
        "loss",
        "clips/s",
        "sent",
        "left",
        "cpu",
        "gpu",
        "memory",
        "heat",
        "battery",
    ]
    assert " ".join(first.split()) == (
        "mac-0 ━━━━━━────── 1240/2480 0.294 10.0 47.7 MB 1:22:40 cpu 93 % 88 % 76 % 71 °C serious 71 %, no mains"
    )


def test_at_80_columns_they_are_a_row_of_their_own_and_an_old_word_is_not_shown():
    told = [f"step {number}: validation loss 0.5" for number in range(50)]
    rows = screen_of(run_of(2), *told, width=80, now=20.0)
    assert rows[4] == "  cpu 93 %, gpu 88 %, memory 76 %, heat 71 °C serious, battery 71 %, no mains"
    assert rows[-2:] == [told[-1], "w: live page"] and rows[8] == told[-15]
    assert not any("cpu 93" in row for row in screen_of(run_of(2), width=80, now=60.0))


@pytest.mark.parametrize("hosts", [0, 1, 3, 12])
def test_what_does_not_fit_is_left_out_and_no_word_is_cut(hosts):
    line, rest = (
        "mac-1 is lost: the SSH connection was lost",
        ("w:", "live", "page", "and", "more", "host", "hosts", ""),
    )
    whole = screen_of(run_of(hosts), line, width=300, height=100, now=20.0)
    for width, height in itertools.product((30, 45, 60, 80, 140), (5, 10, 24, 40)):
        rows = screen_of(run_of(hosts), line, width=width, height=height, now=20.0)
        seen, known = ({word for row in found for word in re.split(r"[ ,]+", row)} for found in (rows, whole))
        assert {word for word in seen if not word.isdigit()} <= known | {*rest}, (width, height)
        if 0 < hosts < height - 4:
            assert sum(row.startswith("mac-") and " is lost" not in row for row in rows) == hosts, (width, height)


def test_a_run_is_paused_whatever_its_hosts_are_until_the_next_generation_or_start():
    view, began = RunView(), {"type": "phase", "phase": "start", "hosts": ["h1", "h2"]}
    paused = {"type": "paused", "hosts": [], "min_hosts": 1}
    for host in ("h1", "h2"):
        take(view, START | {"host": host})
    for event, expected in [
        (generation(1, "h1", "h2"), "training"),
        (lost("h1"), "training"),
        ({"type": "away", "host": "h2", "reason": "as asked"}, "starting"),
        (paused, "paused"),
        ({"type": "back", "host": "h2"}, "paused"),
        (generation(2, "h2"), "training"),
        (paused, "paused"),
        (began, "starting"),
    ]:
        take(view, event)
        assert screen_of(view)[0] == f"run  {expected}"
    assert view.hosts["h2"].state == "starting" and view.hosts["h2"].total_steps == 0


def test_one_that_is_lost_is_lost_until_it_is_found_also_if_it_is_left_out_then():
    view, away = RunView(), {"type": "away", "host": "h2", "reason": "as asked"}
    for event, expected in [
        (lost("h2"), "lost"),
        (away, "lost"),
        ({"type": "back", "host": "h2"}, "waiting"),
        (away, "away"),
    ]:
        take(view, event)
        assert view.hosts["h2"].state == expected


def test_one_that_is_left_out_while_it_is_lost_takes_no_part_when_it_is_found():
    """`hosts yield` goes by its state. It does not train before a generation has it."""
    view, away = RunView(), {"type": "away", "host": "h2", "reason": "as asked"}
    for event, expected in [
        (lost("h2"), "lost"),
        (away, "lost"),
        ({"type": "phase", "host": "h2", "phase": "load"}, "loading"),
        (away | {"found": True}, "away"),
        (START | {"host": "h2"}, "away"),
        ({"type": "plan", "host": "h1", "total_steps": 44}, "away"),
        ({"type": "back", "host": "h2"}, "waiting"),
        ({"type": "generation", "number": 2, "hosts": ["h1", "h2"]}, "training"),
    ]:
        take(view, event)
        assert view.hosts["h2"].state == expected
    assert view.hosts["h2"].total_steps == 44


def test_no_row_is_one_too_many_and_a_long_name_is_shortened():
    assert screen_of(run_of(12), height=16)[-1] == "w: live page"
    view = RunView()
    take(view, START | {"host": "the Mac of the marketing department"})
    assert any(row.startswith("the Mac of the mark…  ───") for row in screen_of(view, width=60))


def test_plain_lines_tell_of_long_preparations(capsys):
    view, screen = RunView(), PlainScreen()
    for done in (1, 2, 5):
        take(view, {"type": "preparing", "host": "h1", "done": done, "total": 5})
        screen.update(view)
    assert capsys.readouterr().out == "h1: preparing 1/5 clips\n"


def test_time_left_of_preparations_and_evaluations_is_by_the_rate_so_far():
    view = RunView()
    for second, done, left in ((0, 100, ""), (4, 140, ""), (10, 200, ", 0:20 left"), (20, 250, ", 0:20 left")):
        at = {"time": 1000.0 + second, "done": done, "total": 400}
        take(view, {"type": "preparing", "host": "h1", **at})
        assert view.hosts["h1"].state == f"preparing {done}/400 clips{left}"
        take(view, {"type": "evaluating", "model": "before", **at})
        assert view.progress == f"evaluating before: {done}/400 clips{left}"
    take(view, {"type": "evaluating", "model": "after", "done": 8, "total": 400, "time": 1021.0})
    assert view.progress == "evaluating after: 8/400 clips"


def test_a_first_step_alone_tells_no_time_left():
    view = RunView()
    take(view, EVENTS[1])
    for step, left in ((1, None), (2, None), (3, 1.0)):
        take(view, STEP | {"host": "h2", "step": step, "loss": 2.0, "samples": 4, "seconds": 1.0})
        assert view.hosts["h2"].remaining == left


def test_how_far_an_evaluation_is_is_told_before_its_result_alone(capsys, monkeypatch):
    now = iter(range(0, 1000, 100))
    monkeypatch.setattr("distributed.launcher.follow.time.monotonic", lambda: float(next(now)))
    view, screen = RunView(), PlainScreen()
    for event in (
        {"type": "evaluating", "model": "after", "done": 4, "total": 60},
        {"type": "evaluating", "model": "after", "done": 60, "total": 60},
        {"type": "evaluation", "when": "after", "wer": 15.0},
    ):
        take(view, event)
        if event.get("done") != 60:  # the last two come at once
            screen.update(view)
    screen.update(view)
    assert capsys.readouterr().out == "evaluating after: 4/60 clips\n"


def test_a_failed_run_is_an_error_with_the_launchers_message_and_status(tmp_path):
    with pytest.raises(RunError, match="h2: asleep") as raised:
        show(tmp_path, [*EVENTS, {"type": "end", "status": 6, "message": "h2: asleep"}])
    assert raised.value.exit_status == ExitStatus.RUN


def test_a_launcher_that_vanishes_is_noticed(tmp_path):
    with pytest.raises(RunError, match="without saying why"):
        show(tmp_path, EVENTS, status=1)


def test_a_half_written_line_waits_for_its_end(tmp_path):
    path = tmp_path / "events.jsonl"
    one, other = {"time": 1.0, "type": "a"}, {"time": 2.0, "type": "b"}
    path.write_text(f"{json.dumps(one)}\n{json.dumps(other)[:9]}")
    first, position = read_events(path)
    path.write_text(f"{json.dumps(one)}\n{json.dumps(other)}\n")
    assert [first, read_events(path, position)[0]] == [[one], [other]]


def test_a_warning_about_no_host_names_none():
    view = RunView()
    told = ({"type": "warning", "what": "votes differ"}, {"type": "warning", "what": "slow", "host": "h1"})
    for event in (*told, {"type": "notice", "what": "Time Machine leaves out", "host": "h1"}):
        take(view, event)
    assert view.lines == ["votes differ", "h1: slow", "h1: Time Machine leaves out"]


@pytest.mark.parametrize(("seconds", "text"), [(None, ""), (0, "0:00"), (61, "1:01"), (3661, "1:01:01")])
def test_durations(seconds, text):
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1500, "2 kB"), (2_340_000, "2.3 MB"), (5e12, "5000.0 GB")])
def test_sizes(count, text):
    assert size(count) == text


def test_one_that_is_left_out_is_told_once_until_it_is_back_or_the_reason_is_another():
    view = RunView()
    told = [("away", "as asked"), ("away", "as asked"), ("away", "on battery"), ("back", ""), ("away", "on battery")]
    for kind, reason in told:
        take(view, {"type": kind, "host": "h2", "reason": reason})
        take(view, {"type": "phase", "host": "h2", "phase": "load"})
    out = [f"h2 is left out: {reason}" for reason in ("as asked", "on battery", "on battery")]
    assert view.lines == [*out[:2], "h2 is back", out[2]]


def test_one_that_is_left_out_only_gives_its_state():
    view = RunView()
    for kind, about in (
        ("generation", {"number": 1, "hosts": ["h1", "h2"]}),
        ("away", {"host": "h1", "reason": "as asked"}),
        ("generation", {"number": 2, "hosts": ["h1", "h2"]}),
        ("generation", {"number": 3, "hosts": ["h2"]}),
    ):
        take(view, {"type": kind, **about})
    assert view.lines[1:] == ["training continues with h2, from the state of h1", "training continues with h2"]
