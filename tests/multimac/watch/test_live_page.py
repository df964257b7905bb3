"""The live page of a run: what it shows is what the report shows, and only its own page can tell it something."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
from chromium import PROGRAM, Chromium

from multimac.report.page import contents
from multimac.report.template import rendered
from multimac.watch.live import PARTS, LiveRun

sys.path.insert(0, str(Path(__file__).parents[1] / "report"))
from made_run import MadeRun

PROJECT = Path(__file__).parents[3]
HOSTS = ("a.local", "<b>b.local")


@pytest.fixture
def made(tmp_path) -> MadeRun:
    made = MadeRun(tmp_path)
    made.begin(HOSTS, total=40)
    made.steps(range(1, 11), HOSTS, validate=5)
    made.tell("lost", 10.5, host=HOSTS[1], reason="<script>alert(1)</script>", given_up=False)
    return made


class Running:
    """Holds a run's lock, as its launcher would; its pid is that of a process that can be stopped."""

    def __init__(self, path: Path):
        noted = f"trap 'echo 15 >> {path}/signals' TERM; while :; do sleep 0.1; done"
        self.launcher = subprocess.Popen(["sh", "-c", noted])
        self._handle = os.open(path / "lock", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        os.write(self._handle, f"{self.launcher.pid}\n".encode())

    def end(self) -> None:
        if self.launcher.poll() is None:
            os.close(self._handle)
            self.launcher.kill()
            self.launcher.wait()


@pytest.fixture
def running(made):
    running = Running(made.write(hosts=HOSTS))
    yield running
    running.end()


@pytest.fixture
def address(made, running):
    """Of a `multimac watch` on this run."""
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "watch", str(made.path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) as watch:
        yield re.search(r"http://\S+", watch.stdout.readline())[0]
        watch.terminate()
        watch.wait(timeout=10)


def write(made: MadeRun) -> None:
    (made.path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in made.events))


def ask(address: str, path: str = "", body: dict | None = None, **headers: str) -> tuple[int, str]:
    base, _, query = address.partition("/?")
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{base}/{path}?{query}", data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_at_the_end_it_is_the_report_whatever_was_shown_on_the_way(made, running):
    live = LiveRun(made.path)
    live.look()
    assert "Leave it out" in live.parts["now"] and "&lt;b&gt;b.local" in live.parts["now"]
    made.tell("back", 11, host=HOSTS[1])
    made.steps(range(11, 41), HOSTS, validate=10)
    write(made)
    live.look()
    assert "step 40 of 40" in live.parts["now"]
    made.end()
    write(made)
    running.end()
    live.look()
    found = contents(made.path) | {"live": True}
    for part in PARTS:
        assert live.parts[part].strip() == ("" if part == "now" else rendered("page.html", block=part, **found).strip())


def test_a_run_that_is_about_to_begin_is_not_called_broken(made):
    (made.write() / "events.jsonl").unlink()
    live = LiveRun(made.path)
    live.look()
    assert live.parts == {"now": '<p class="missing">The run is about to begin.</p>'}


def test_while_it_runs_its_figures_are_those_of_a_report_written_now(made, running):
    (made.path / "final").mkdir(exist_ok=True)
    (made.path / "final" / "model.safetensors").touch()  # of an earlier stop
    live = LiveRun(made.path)
    live.look()
    report = contents(made.path)
    assert "multimac evaluate" not in live.parts["wer"]
    assert live.parts["curves"] == rendered("page.html", block="curves", **report)
    assert live.parts["hosts"] == rendered("page.html", block="hosts", **report)


def test_a_folder_that_cannot_be_read_for_a_while_is_told_and_tried_again(made, running, address):
    events = made.path / "events.jsonl"
    events.rename(made.path / "away")
    events.mkdir()
    told = shown(address, "cannot be read now")
    assert "Is a directory" in told
    events.rmdir()
    (made.path / "away").rename(events)
    assert "Stop after this step" in shown(address, "Stop after this step")


def shown(address: str, words: str) -> str:
    """Follow the page until it shows these words."""
    base, _, query = address.partition("/?")
    with urllib.request.urlopen(f"{base}/parts?{query}", timeout=20) as stream:
        for line in stream:
            if words in (text := line.decode()):
                return text
    raise AssertionError(f"{words!r} was not shown")


def test_a_line_that_is_longer_than_a_piece_does_not_hold_up_the_page(made, running, monkeypatch):
    monkeypatch.setattr("multimac.watch.live.PIECE", 64)
    made.tell("warning", 11, what="x" * 5000)
    made.steps([11], HOSTS)
    write(made)
    live = LiveRun(made.path)
    live.look()
    assert "step 11 of 40" in live.parts["now"]


def test_who_has_no_token_or_comes_from_another_page_is_refused(made, address):
    base = address.split("/?")[0]
    ours, stop = {"Origin": base}, {"what": "stop"}
    assert ask(address)[0] == 200
    assert ask(f"{base}/?token=x")[0] == ask(f"{base}/?", "parts")[0] == 403
    assert ask(address, Host="evil.example")[0] == ask(address, Origin="http://[")[0] == 403
    assert ask(address, "do", stop, Origin="http://evil.example")[0] == ask(address, "do", stop)[0] == 403
    assert ask(f"{base}/?token=x", "do", stop, **ours)[0] == 403
    for body in ({}, {"what": "rm"}, {"what": "away", "host": 1, "away": True}, ["stop"], {"what": "x" * 9999}):
        assert ask(address, "do", body, **ours)[0] == 400, body
    assert ask(address, "do", {"what": "away", "host": "nobody", "away": True}, **ours)[0] == 409


def test_stop_reaches_the_launcher(made, running, address):
    base = address.split("/?")[0]
    for _ in range(3):  # a second signal would end the run at once
        assert ask(address, "do", {"what": "stop"}, Origin=base) == (200, "Stopping")
    time.sleep(0.3)
    assert (made.path / "signals").read_text() == "15\n"


@pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
def test_in_a_browser_it_moves_fits_outlives_sleep_and_says_when_nobody_serves_it(made, running, tmp_path):
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "watch", str(made.path), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch, Chromium(tmp_path / "b") as browser:
        address = re.search(r"http://\S+", watch.stdout.readline())[0]
        for width in (390, 768, 1440):
            browser.go(address, width=width)
            browser.wait("document.querySelectorAll('.cards li').length == 2")
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value("document.getElementById('reading')") is None
        assert browser.messages == []
        browser.value("document.querySelector('button[data-host=\"a.local\"]').focus()")
        made.steps(range(11, 13), HOSTS)
        write(made)
        browser.wait("document.querySelector('[data-part=now]').textContent.includes('step 12 of 40')")
        assert browser.value("document.activeElement.dataset.host") == "a.local"
        browser.value("document.activeElement.click()")
        browser.wait("document.querySelector('.cards .note')?.textContent == 'Leaves at the end of its round.'")
        browser.wait("document.querySelector('button[data-host=\"a.local\"]').textContent == 'Take it back'")
        assert json.loads((made.path / "away.json").read_text()) == {"hosts": ["a.local"]}
        asleep = [psutil.Process(watch.pid), browser.process, *browser.process.children(recursive=True)]
        for process in asleep:
            process.suspend()
        made.steps(range(13, 15), HOSTS)
        write(made)
        time.sleep(3)
        for process in asleep:
            process.resume()
        browser.wait("document.querySelector('[data-part=now]').textContent.includes('step 14 of 40')")
        assert browser.value("document.getElementById('cut-off').hidden")
        watch.kill()
        browser.wait("!document.getElementById('cut-off').hidden")
