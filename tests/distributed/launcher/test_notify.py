"""Messages to the user: which there are and when, and the real commands that tell them."""

import subprocess
import time

import pytest
from waiting import wait_until

from distributed.launcher import notify
from distributed.launcher.notify import AWAY_S, DESKTOP, Notifier, Watch, command_of
from distributed.run_dir.log import EventLog, read_events

LOST = {"type": "lost", "host": "h2", "reason": "the SSH connection was lost", "given_up": False}
BACK = {"type": "back", "host": "h2"}
PAUSED = {"type": "paused", "hosts": ["h1"], "min_hosts": 2}
GENERATION = {"type": "generation", "number": 2, "hosts": ["h1", "h2"]}
AFTER = {"type": "evaluation", "when": "after", "wer": 14.3, "before": 26.2, "wer_difference": [-20, -4], "clips": 9}
END = {"type": "end", "status": 0, "message": ""}
NAME = """it's "$(touch made)" `touch made`"""


def told(*events: tuple[float, dict]) -> list[tuple[float, str, str]]:
    """When what was told of these events: at once, or each second after."""
    watch, found = Watch(), []
    for second in range(200):
        messages = [watch.take(event, second) for when, event in events if when == second] + [watch.due(second)]
        found += [(second, message.kind, message.text) for message in messages if message]
    return found


def test_a_short_outage_is_not_told_and_a_long_one_once():
    assert told((0, LOST), (0, PAUSED), (50, BACK), (50, GENERATION)) == []
    assert told((0, LOST), (70, LOST), (90, BACK)) == [(AWAY_S, "lost", "h2 is lost: the SSH connection was lost")]
    assert told((0, PAUSED), (30, GENERATION), (40, PAUSED))[0][:2] == (100, "problem")


def test_what_goes_together_is_one_message_and_a_host_given_up_is_told_at_once():
    [(when, kind, text)] = told((0, LOST), (10, {**LOST, "host": "h3"}), (11, PAUSED))
    assert (when, kind) == (AWAY_S, "lost") and text.count("is lost") == 2 and "; paused until 2 hosts" in text
    assert [each[:2] for each in told((5, LOST), (9, {**LOST, "given_up": True}))] == [(9, "lost")]


def test_the_end_says_what_came_of_it():
    assert told((1, AFTER), (2, END)) == [
        (2, "end", "has ended, WER 26.2 -> 14.3: -11.9 points (95 %: -20.0 to -4.0, 9 clips): better")
    ]
    assert told((1, LOST), (2, {**END, "status": 130, "message": "stopped as asked"})) == [(2, "end", "was stopped")]
    assert told((2, {**END, "status": 6, "message": "h2: no space"})) == [(2, "problem", "has failed: h2: no space")]


@pytest.fixture
def notified(tmp_path, monkeypatch):
    """Runs a command on the end of a run; gives the warnings that the run then has."""
    monkeypatch.setattr(notify, "LIMIT_S", 1.0)
    monkeypatch.chdir(tmp_path)

    def run(how: str, *events: dict, name: str = NAME) -> list[str]:
        notifier = Notifier(EventLog(tmp_path / "events.jsonl"), how, name)
        for event in events or (END,):
            notifier(event)
        notifier.close()
        return [event["what"] for event in read_events(tmp_path / "events.jsonl")[0] if event["type"] == "warning"]

    return run


def test_a_command_of_the_users_own_gets_the_message_as_it_is(notified, tmp_path):
    write = tmp_path / "write"
    write.write_text(
        '#!/bin/sh\nprintf "%s\\n" "$#" "$2" "$MULTIMAC_MESSAGE" "$MULTIMAC_EVENT" "$MULTIMAC_RUN" > told\n'
    )
    write.chmod(0o755)
    assert notified("./write --to=me", AFTER, END) == []
    message = f"{NAME}: has ended, WER 26.2 -> 14.3: -11.9 points (95 %: -20.0 to -4.0, 9 clips): better"
    assert (tmp_path / "told").read_text().splitlines() == ["2", message, message, "end", NAME]
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("exit 3 # token", "it ended with status 3; see launcher.log"),
        ("no-such-program --token=secret", "it ended with status 127; see launcher.log"),
        ("sleep 61.37; echo", "it took over 1 s"),
    ],
)
def test_a_command_that_fails_or_hangs_is_one_warning_without_its_token(notified, how, why):
    began = time.monotonic()
    assert notified(how, {**LOST, "given_up": True}, END) == [f"notify: {why}"]
    assert time.monotonic() - began < 10
    if how.startswith("sleep"):  # the other cases may run beside this one
        assert not subprocess.run(["pgrep", "-f", "^sleep 61.37"], capture_output=True).stdout


def test_a_desktop_that_cannot_show_it_is_warned_of_as_the_run_begins(notified, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    began = {"type": "phase", "phase": "start", "hosts": ["h1"]}
    assert notified(DESKTOP, began) == ["notify: notify-send is not on this machine"]


def test_the_text_is_no_part_of_a_script(monkeypatch):
    monkeypatch.setattr(notify, "is_macos", lambda: True)
    *script, title, text = command_of(DESKTOP, NAME)
    assert (title, text) == ("multimac", NAME)
    assert script == [
        "/usr/bin/osascript",
        *("-e", "on run argv"),
        *("-e", "display notification (item 2 of argv) with title (item 1 of argv)"),
        *("-e", "end run"),
    ]
    monkeypatch.setattr(notify, "is_macos", lambda: False)
    assert command_of(DESKTOP, "<b> & c")[-3:] == ["--", "multimac", "&lt;b&gt; &amp; c"]


def test_a_full_disk_is_told_once(tmp_path):
    class Full:
        was_full = True

        def __call__(self, event):
            assert event["type"] == "step"

    notifier = Notifier(Full(), f"cat > /dev/null; echo >> {tmp_path}/told", "run")
    for number in range(3):
        notifier({"type": "step", "step": number})
    wait_until((tmp_path / "told").exists)
    notifier.close()
    assert (tmp_path / "told").read_text().count("full") == 1
