"""Figures for Weights & Biases."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from exogym.errors import SettingError

from .event import Event
from .logger import PROJECT, Logger
from .summary import Record

CONNECT_S = 5.0
INIT_S = 20.0  # for W&B's server to answer; then the run is kept offline
FINISH_S = 60.0  # for what is left to be sent; the rest stays on disk, for `wandb sync`
MODES = ("online", "offline", "shared", "disabled")


class WandbLogger(Logger):
    """A run of Weights & Biases with the figures of all records by step; those of the end are its summary.

    The run's settings are its config, and `config` besides. mode is one of MODES, unless WANDB_MODE is set. Without
    both it is online if you are logged in, else offline. A run whose server does not answer is kept offline, too.
    directory: where the folder wandb/ is put, here if not given.
    """

    _open = 0  # runs that use W&B's background process

    def __init__(
        self,
        project: str | None = None,
        experiment_name: str | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        mode: str | None = None,
        directory: str | Path | None = None,
        log_interval: int | None = None,
    ):
        super().__init__(log_interval=log_interval)
        if importlib.util.find_spec("wandb") is None:
            raise SettingError("WandbLogger needs a package: pip install 'wandb>=0.31,<1'")
        if mode is not None and mode not in MODES:
            raise SettingError(f"mode must be one of {', '.join(MODES)}, not {mode!r}")
        self._project, self._name = project or PROJECT, experiment_name
        self._config, self._mode, self._directory = dict(config or {}), mode, directory
        self.run: Any = None  # wandb's, once training has begun

    def started(self, event: Event) -> None:
        about = {key: value for key, value in event.items() if key not in ("type", "rank")}
        self._begin(about | self._config)

    def write(self, record: Record) -> None:
        if self.run is None:  # events of a run that had been started before
            self._begin(self._config)
        if record.kind == "end":
            self.run.summary.update({"step": record.step, **record.figures()})
        else:
            self.run.log({"step": record.step, **record.figures()})

    def ended(self) -> None:
        if self.run is None:
            return
        import wandb

        self.run.finish()
        WandbLogger._open -= 1
        if WandbLogger._open == 0 and wandb.run is None:  # the user may have a run of his own
            wandb.teardown()

    def _begin(self, config: dict[str, Any]) -> None:
        import wandb

        try:
            self.run = self._init(config, self._chosen_mode())
        except wandb.errors.CommError as error:
            self.run = self._init(config, _kept_offline(str(error).splitlines()[0]))
        WandbLogger._open += 1
        # A record may come later than one of a higher step, as its own ranks are at.
        self.run.define_metric("step")
        self.run.define_metric("*", step_metric="step")

    def _chosen_mode(self) -> str:
        import wandb

        settings = wandb.setup().settings
        wanted = os.environ.get("WANDB_MODE") or self._mode
        if (wanted or settings.mode) != "online":
            return wanted or settings.mode
        if trouble := _no_way_to(settings.base_url):  # wandb itself would try for half a minute
            return _kept_offline(trouble)
        return "online" if wanted or wandb.login(prompt=False, verify=False) else "offline"

    def _init(self, config: dict[str, Any], mode: str) -> Any:
        import wandb

        if self._directory is not None:
            Path(self._directory).mkdir(parents=True, exist_ok=True)
        settings = wandb.Settings(console="off", init_timeout=INIT_S, finish_timeout=FINISH_S)
        directory = None if self._directory is None else str(self._directory)
        return wandb.init(
            project=self._project,
            name=self._name,
            config=config,
            mode=mode,  # type: ignore[arg-type]  # checked by us, or by wandb where the environment has it
            dir=directory,
            reinit="create_new",
            settings=settings,
        )


def _no_way_to(url: str) -> str:
    """Say what is in the way of a connection; empty if nothing is, or if it is not known."""
    server = urlsplit(url)
    if getproxies().get(server.scheme):
        return ""
    try:
        port = server.port or (443 if server.scheme == "https" else 80)
        socket.create_connection((server.hostname, port), timeout=CONNECT_S).close()
    except OSError as error:
        return f"{server.hostname}: {error}"
    return ""


def _kept_offline(trouble: str) -> str:
    print(f"W&B does not answer ({trouble}): the run is kept offline, `wandb sync` sends it", file=sys.stderr)
    return "offline"
