"""The launcher's end of the way that audio takes during a run; the worker's is in audio_pull.py."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from whisper_tuner.errors import HostError, TunerError

from .background import Background
from .spawner import Spawner

GIVE_UP_S, AGAIN_S = 30.0, 3.0  # how long clips are tried to be brought to a host, and how often
TURN_S = 0.01  # in which another list's next group gets its turn


class AudioPush:
    """Audio for one process of a worker. A thread for each list; of several lists one group of files each in turn.

    `unsent` is told of files that cannot be sent, `failed` the error of a host that takes none.
    """

    def __init__(
        self,
        spawner: Spawner,
        background: Background,
        *,
        unsent: Callable[[Sequence[str]], None],
        failed: Callable[[HostError], None],
    ):
        self.over = threading.Event()  # nobody waits for the files any more
        self.silent = threading.Event()  # a host that sleeps is sent its files when it wakes up
        self._spawner, self._background, self._unsent, self._failed = spawner, background, unsent, failed
        self._turn = threading.Lock()

    @property
    def is_sending(self) -> bool:
        return self._turn.locked()

    def start(self, files: Sequence[str]) -> None:
        self._background.run(lambda: self.send(files), then=lambda error: error and self._failed(error))

    def send(self, files: Sequence[str]) -> HostError | None:
        """Again and again: clips that do not come would be left out. Returns the error of a host that takes none."""
        now = self._background.now
        deadline = now() + GIVE_UP_S
        while files and self._is_wanted():
            try:
                for count, unsent in self._in_turns(self._spawner.send(files, self._is_wanted)):
                    files, deadline = files[count:], now() + GIVE_UP_S
                    self._report_unsent(unsent)
            except HostError as error:
                if self.silent.is_set():
                    deadline = now() + GIVE_UP_S
                elif now() > deadline:
                    return error
                self._background.sleep(AGAIN_S)
            except TunerError:  # what is to be sent is not known
                self._report_unsent(files)
                return None
        return None

    def _is_wanted(self) -> bool:
        return not self.over.is_set()

    def _report_unsent(self, files: Sequence[str]) -> None:
        if files:
            self._background.put(partial(self._unsent, files))

    def _in_turns(self, steps: Iterator[tuple[int, list[str]]]) -> Iterator[tuple[int, list[str]]]:
        while True:
            with self._turn:
                step = next(steps, None)
            if step is None:
                return
            yield step
            self._background.sleep(TURN_S)
