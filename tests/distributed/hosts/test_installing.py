"""How far an installation on a host is, with a real SSH server and real wheels."""

from __future__ import annotations

import io
import time
import zipfile

import pytest
from rich.console import Console

from distributed.hosts import environment
from distributed.hosts.environment import shown
from distributed.hosts.wheelhouse import BLOCK, reason, unpacked
from multimac.view import progress as bars
from multimac.view.transfers import transfers
from whisper_tuner.errors import HostError


def test_how_much_wheels_take_on_a_disk(tmp_path):
    for name in ("One_Two-1.0-py3-none-any.whl", "other-2.0-py3-none-any.whl"):
        with zipfile.ZipFile(tmp_path / name, "w") as wheel:
            wheel.writestr("a.py", "x" * (BLOCK + 1))
            wheel.writestr("empty.py", "")
    assert unpacked(tmp_path.iterdir(), ["one-two", "none"]) == 2 * BLOCK


@pytest.mark.parametrize("why", ["[Errno -3] Temporary failure in name resolution", "[Errno 111] Connection refused"])
def test_what_pip_says_is_told_without_its_tries(why):
    """As pip wrote it without a network; the object's address is left out."""
    tried = (
        f"WARNING: Retrying (Retry(total=0)) after connection broken by 'NewConnectionError('...: {why}')': /simple/a/"
    )
    error = "ERROR: No matching distribution found for a"
    expected = "a server's name was not resolved: is there internet here?" if "resolution" in why else error
    assert reason(f"{tried}\n{tried}\n{error}\n") == expected


def test_it_is_told_until_the_end(monkeypatch):
    monkeypatch.setattr(environment, "EVERY_S", 0.01)
    sizes, told = iter([0, 40, 120]), []

    def taken() -> int:
        try:
            return next(sizes)
        except StopIteration:
            raise HostError("h", "gone") from None

    with shown("h: installing", lambda *about: told.append(about), taken, 100):
        time.sleep(0.3)
    assert told == [("h: installing", done, 100, "") for done in (0, 40, 99, 100)]
    told.clear()
    with pytest.raises(ZeroDivisionError), shown("h: fetching", lambda *about: told.append(about)):
        time.sleep(0.05)
        _ = 1 / 0
    assert set(told[:-1]) == {("h: fetching", 0, None, "")} and told[-1] == ("h: fetching", 0, 0, "")


def test_plain_lines_tell_what_is_left_or_how_long_it_takes(monkeypatch):
    said, now = io.StringIO(), [0.0]
    monkeypatch.setattr(bars.PlainProgress.__init__, "__defaults__", (lambda: now[0],))
    with transfers(Console(file=said, width=200)) as show:
        for second in range(0, 31):
            now[0] = float(second)
            show("h: fetching", 0, None, "")
            show("h: installing", second * 1_000_000, 40_000_000, "")
        show("h: fetching", 0, 0, "")
    assert [line for line in said.getvalue().splitlines() if "fetching" in line] == [
        "h: fetching: 0:10 so far",
        "h: fetching: 0:20 so far",
        "h: fetching: 0:30 so far",
        "h: fetching: took 0:30",
    ]
    lines = [line for line in said.getvalue().splitlines() if "installing" in line]
    assert [line.rpartition(", ")[2] for line in lines] == ["0:30 left", "0:20 left", "0:10 left"]
    assert lines[0].startswith("h: installing: 10.0 MB of 40.0 MB, ")


@pytest.mark.slow
def test_bars_of_a_terminal_show_it_too():
    said = io.StringIO()
    console = Console(file=said, force_terminal=True, width=100, _environ={"TERM": "xterm"})
    with transfers(console) as show:
        show("10.77.0.12: installing", 0, 40_000_000, "")
        show("10.77.0.13: fetching wheels", 0, None, "")
        time.sleep(5.5)
        show("10.77.0.12: installing", 20_000_000, 40_000_000, "")
        time.sleep(0.3)
    text = said.getvalue()
    assert "0:06 left" in text or "0:05 left" in text
    assert "0:05 so far" in text  # of the one without a total
