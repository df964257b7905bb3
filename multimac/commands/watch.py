"""`multimac watch`: a run as a live page in the browser of this machine."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import webbrowser
from typing import Annotated

from typer import Option

from distributed.run_dir.find import find_run
from distributed.run_dir.folder import is_running
from multimac.view.models import folders_of
from whisper_tuner.errors import ConfigError, ExitStatus
from whisper_tuner.files import write_atomically

from .options import CONFIG, Config, Run, RunsDir, command

WAY_IN = "live-page.html"  # leads to the page


@command("watch")
def watch(
    run: Run = "last",
    port: Annotated[
        int, Option(help="Port of 127.0.0.1. [default: a free one]", show_default=False, min=0, max=65535)
    ] = 0,
    browser: Annotated[bool, Option("--browser/--no-browser", help="Open the page.")] = True,
    stay: Annotated[
        bool, Option("--stay/--until-unwatched", help="Also when the run has ended, and nobody looks.")
    ] = True,
    runs_dir: RunsDir = None,
    config: Config = CONFIG,
) -> ExitStatus:
    """Show a run as a live page in the browser: curves, hosts, faults; stop it, or leave a host out."""
    run_dir = find_run(run, folders_of(config, runs_dir)).absolute()
    from multimac.watch.server import Page

    try:
        page = Page(run_dir, port, stays=stay)
    except OSError as error:
        raise ConfigError(f"port {port}: {error.strerror}", remedy="Leave --port out: a free one is taken.") from None
    print(f"{run_dir.name}: {page.address}", flush=True)
    later = "" if is_running(run_dir) else ", if it is resumed"
    print(f"Whoever has this address can stop the run{later}.", flush=True)
    print("Ctrl-C ends the page, and not the run.", flush=True)
    if browser and not can_open():
        print("No browser can be opened here.", flush=True)
    if "SSH_CONNECTION" in os.environ:
        place = page.host.partition(":")[2]
        print(f"From the machine you sit at: ssh -L {place}:{page.host} THIS_MACHINE, then open the address there.")
    way_in = run_dir / WAY_IN  # others may see what a browser is started with
    try:
        if browser and can_open():
            with contextlib.suppress(OSError):  # a run's folder that is only read: the address is printed
                write_atomically(way_in, f'<meta http-equiv="refresh" content="0;url={page.address}">\n')
                threading.Thread(target=webbrowser.open, args=[way_in.as_uri()], daemon=True).start()
        page.run()
    except KeyboardInterrupt:
        pass
    finally:
        with contextlib.suppress(OSError):
            way_in.unlink(missing_ok=True)
    return ExitStatus.OK


def can_open() -> bool:
    """Tell whether a browser can show a page here; over SSH, or without a display, it might take over the terminal."""
    has_display = sys.platform == "darwin" or bool({"DISPLAY", "WAYLAND_DISPLAY"} & set(os.environ))
    return has_display and "SSH_CONNECTION" not in os.environ
