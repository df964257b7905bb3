"""What does the live page cost: the browser, whoever looks at it, and the run?

    python benchmarks/live_page.py [--hosts 1,4,12] [--steps 20000] [--minutes 10] [--out DIR] [--quick]

Opens made-up runs of so many hosts and steps in a headless Chromium, at three widths, light and dark (pictures are left
in DIR). Then a run of four hosts is replayed at 60 times its speed, and at last a real one, of the bundled model on two
ranks, is watched: what the page takes beside what the run takes.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path[:0] = [str(Path(__file__).resolve().parent.parent / part) for part in ("", "gym", "tests")]

from chromium import Chromium  # noqa: E402

from benchmarks.base import PROJECT, current_commit, listed, parser_of, publish, table  # noqa: E402

STEP_S, FASTER = 0.5, 60
WIDTHS, SCHEMES = (390, 768, 1440), ("light", "dark")
MOST_PAINT_MS, MOST_UPDATE_MS, MOST_GROWTH, MOST_SHARE = 1000, 50, 1.2, 0.01
CARDS = "document.querySelectorAll('.cards li').length"


def made_up(folder: Path, hosts: int, steps: int) -> list[dict]:
    """Write run.json and the list of clips; return the events of a run that began at second 0."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    names, chance = [f"mac-{number}.local" for number in range(hosts)], random.Random(0)
    spec = {"profile": {"base_model": "openai/whisper-small", "method": "lora"}, "strategy": "diloco"}
    asked = {"name": "voice", "created": time.time(), "ranks": [{"label": name, "spec": spec} for name in names]}
    (folder / "run.json").write_text(json.dumps(asked | {"manifests": {"train": "train.csv"}}))
    rows = [f"{n},{n}.wav,text,{2 + n % 5}" for n in range(400)]
    (folder / "train.csv").write_text("\n".join(["id,audio_path,transcription,duration_s", *rows, ""]))
    events: list[dict] = [{"time": 0.0, "type": "phase", "phase": "start", "hosts": names}]
    events += [{"time": 0.1, "type": "start", "host": h, "total_steps": steps, "device": "mps"} for h in names]
    for step in range(1, steps + 1):
        for host in names:
            about = {"time": step * STEP_S, "host": host, "step": step}
            loss = 2.5 / math.sqrt(step) + 0.3 + chance.random() * 0.2
            told = {"epoch": step // 100, "samples": 4, "seconds": 0.45, "seconds_waiting": 0.01, "lr": 1e-4}
            events.append(about | told | {"type": "step", "loss": loss, "memory": 3_000_000_000})
            if step % 10 == 0:
                events.append(about | {"type": "round", "round": step // 10, "bytes": 20_000, "seconds": 0.1})
            if step % 20 == 0:
                events.append(
                    about | {"type": "machine", "cpu": 40.0, "memory_used": 11 << 30, "memory_total": 16 << 30}
                )
        if step % 50 == 0:
            events.append(
                {
                    "time": step * STEP_S,
                    "type": "validation",
                    "host": names[0],
                    "step": step,
                    "loss": 3 / math.sqrt(step),
                }
            )
    return events


@contextlib.contextmanager
def going_on(folder: Path) -> Iterator[None]:
    """Hold the lock of a run, as its launcher would."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def watched(run: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Serve the page of a run; gives its address and the server."""
    command = [sys.executable, str(PROJECT / "cli_typer.py"), "watch", str(run), "--no-browser"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            found = re.search(r"http://\S+", server.stdout.readline())
            yield found[0], psutil.Process(server.pid)
        finally:
            server.terminate()


def write(folder: Path, events: list[dict], begun: float) -> None:
    lines = [json.dumps(event | {"time": begun + event["time"]}) + "\n" for event in events]
    with (folder / "events.jsonl").open("a") as file:
        file.write("".join(lines))


def processor_s(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def metrics(browser: Chromium) -> dict[str, float]:
    browser.call("HeapProfiler.collectGarbage")
    return {one["name"]: one["value"] for one in browser.call("Performance.getMetrics")["metrics"]}


def opened(out: Path, hosts: int, steps: int) -> tuple[list[str], list[str]]:
    """Open a long run at all widths; return its row and its misses."""
    folder = out / f"20260101-000000-{hosts}-hosts"
    write(folder, made_up(folder, hosts, steps), time.time() - steps * STEP_S)
    paints, shown, misses = [], [], []
    with going_on(folder), watched(folder) as (address, server), Chromium(out / "browser") as browser:
        for scheme, width in itertools.product(SCHEMES, WIDTHS):
            began = time.monotonic()
            browser.go(address, width=width, scheme=scheme)
            browser.wait(f"{CARDS} == {hosts} && performance.getEntriesByType('paint').length", 600)
            shown.append(time.monotonic() - began)
            paints.append(browser.value("performance.getEntriesByType('paint')[0].startTime"))
            if browser.value("document.documentElement.scrollWidth") > width:
                misses.append(f"{hosts} hosts do not fit into {width} pixels, {scheme}")
            browser.screenshot(out / f"{hosts}-{width}-{scheme}.png")
        misses += browser.messages
        memory = server.memory_info().rss
    paint = max(paints)
    if paint > MOST_PAINT_MS:
        misses.append(f"{hosts} hosts: first paint after {paint:.0f} ms")
    return [str(hosts), f"{steps:,}", f"{paint:.0f} ms", f"{shown[0]:.1f} s", f"{memory / 1e6:.0f} MB"], misses


def replayed(out: Path, minutes: float) -> tuple[list[str], list[str]]:
    """Replay a run of four hosts; return a row and its misses."""
    folder, seconds = out / "20260101-000000-replay", minutes * 60
    events = made_up(folder, 4, int(seconds * FASTER / STEP_S))
    begun, position, heaps = time.time(), 0, []
    write(folder, events[:5], begun)
    with going_on(folder), watched(folder) as (address, server), Chromium(out / "browser") as browser:
        browser.call("Performance.enable")
        browser.go(address)
        browser.wait(f"{CARDS} == 4", 60)
        browser.value("updates = 0; stream.addEventListener('message', () => updates++); 0")
        before, spent = metrics(browser), processor_s(server)
        began, position = time.monotonic(), 5
        while (passed := time.monotonic() - began) < seconds:
            until = position
            while until < len(events) and events[until]["time"] <= passed * FASTER:
                until += 1
            write(folder, events[position:until], begun)
            position = until
            if passed > seconds / 4 * (len(heaps) + 1):  # the first is that of a page with full curves
                heaps.append(metrics(browser)["JSHeapUsedSize"])
            time.sleep(0.5)
        after, spent = metrics(browser), processor_s(server) - spent
        heaps.append(after["JSHeapUsedSize"])
        taken = sum(after[name] - before[name] for name in ("ScriptDuration", "LayoutDuration", "RecalcStyleDuration"))
        update_ms = 1000 * taken / browser.value("updates")
    growth = heaps[-1] / heaps[0]
    misses = [f"an update takes {update_ms:.0f} ms"] if update_ms > MOST_UPDATE_MS else []
    misses += [f"the page's memory grew {growth:.2f} times"] if growth > MOST_GROWTH else []
    heap = f"{heaps[0] / 1e6:.1f} to {heaps[-1] / 1e6:.1f} MB"
    return [
        f"{minutes:g} min, {position:,} events",
        f"{update_ms:.1f} ms",
        heap,
        f"{100 * spent / seconds:.1f} %",
    ], misses


def beside_a_run(out: Path, epochs: int) -> tuple[list[str], list[str]]:
    """Watch a real run; return what its processes and the page's server took of the processor, and the misses."""
    code = "import sys; from multimac.commands.train import train_here; from pathlib import Path; sys.exit("
    code += (
        f"train_here(Path(sys.argv[1]), 'demo-diloco', ranks=2, settings=['epochs={epochs}', 'test='], detach=True))"
    )
    folder = out / "real"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    text = (PROJECT / "config.ini").read_text().replace("bundled/", f"{PROJECT}/bundled/")
    (folder / "config.ini").write_text(text)
    subprocess.run([sys.executable, "-c", code, str(folder / "config.ini")], cwd=PROJECT, check=True)
    [run] = folder.glob("runs/*/")
    launcher = psutil.Process(int((run / "lock").read_text()))
    with watched(run) as (address, server), Chromium(out / "browser") as browser:
        browser.go(address)
        browser.wait(f"{CARDS} == 2", 60)
        tree = [launcher, *launcher.children(recursive=True)]
        before, spent = sum(map(processor_s, tree)), processor_s(server)
        with contextlib.suppress(psutil.NoSuchProcess):
            while True:
                of_run, page = sum(map(processor_s, tree)) - before, processor_s(server) - spent
                time.sleep(1)
    share = page / of_run
    misses = [f"the page's server took {100 * share:.1f} % of what the run took"] if share > MOST_SHARE else []
    return [f"{of_run:.0f} s", f"{page:.2f} s", f"{100 * share:.2f} %"], misses


def main() -> int:
    parser = parser_of(__doc__, "live-page", "shorter runs", more=False)
    parser.add_argument("--hosts", default="1,4,12", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=10.0)
    args = parser.parse_args()
    steps, minutes, epochs = (500, 0.5, 2) if args.quick else (args.steps, args.minutes, 16)
    args.out.mkdir(parents=True, exist_ok=True)
    found = [opened(args.out, hosts, steps) for hosts in args.hosts]
    again, real = replayed(args.out, minutes), beside_a_run(args.out, epochs)
    misses = [miss for _, some in (*found, again, real) for miss in some]
    body = [
        f"A run that goes on, in Chromium at {', '.join(map(str, WIDTHS))} pixels, light and dark:",
        "",
        *table(
            ("hosts", "steps", "first paint at most", "whole page, the first time", "server"), [row for row, _ in found]
        ),
        "",
        f"A run of four hosts, replayed at {FASTER} times its speed:",
        "",
        *table(("replayed", "an update: script, style and layout", "page's memory", "server, of a core"), [again[0]]),
        "",
        "The bundled model on two ranks, watched. Seconds of the processor:",
        "",
        *table(("the run", "the page's server", "share"), [real[0]]),
        *listed(misses),
    ]
    publish("live_page", body, [current_commit()], write=not args.quick)
    return 0


if __name__ == "__main__":
    sys.exit(main())
