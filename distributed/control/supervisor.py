"""Keeps a worker while connections to it come and go: `python -m distributed.control.supervisor SOCKET`.

On hosts that are reached over SSH it stands between the launcher and the worker:

    launcher --SSH-- relay --SOCKET-- supervisor --stdin, stdout-- worker
                     |_ one for each connection  |_ as long as the worker lives

It starts the worker as its child, in its own process group, so that to kill the group ends both. It reads all that the
worker prints, numbers the lines and keeps the last of them; the launcher does the same with what it writes. So when a
connection dies, the next one repeats what has not arrived: no line is lost, and none comes twice.

    supervisor -> launcher   {"pid", "heard"}       its process group; how many of the launcher's lines it has heard
    launcher -> supervisor   {"arrived", "first"}   how many lines have arrived; the number of the first that follows

Then lines go both ways. The worker's end with a mark before their newline: what lacks it was cut, or comes from the
relay. The last one says how the worker ended: {"type": "exit", "status"}.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import deque
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from whisper_tuner.text import parse_json

from .messages import event_line
from .timeouts import Timeouts

KEPT = 8 << 20  # bytes of lines; half of it is more than the buffers of a dead connection hold
LONGEST_LINE = 64 << 20  # bytes, of the launcher's: a list of clips that cannot be sent may be long
BLOCK = 1 << 16
POLL_S = 0.1  # of the worker's status
EXIT = "exit"
WHOLE = "\x04"  # the mark
END = f"{WHOLE}\n".encode()


class KeptLines:
    """Lines with numbers from 0 on, the last of which are kept: they may have to be sent once more."""

    def __init__(self) -> None:
        self._kept: deque[bytes] = deque()
        self._size = 0
        self.count = 0

    def append(self, line: bytes, *, sent: int | None = None) -> None:
        """sent: the number of the first line that was not sent; none is dropped from there on, however long they are.

        A single line may be longer than what is kept: it is dropped once as much has followed.
        """
        self._kept.append(line)
        self.count += 1
        self._size += len(line)
        sent = self.count if sent is None else sent
        while self._size - len(self._kept[0]) >= KEPT and self.count - len(self._kept) < sent:
            self._size -= len(self._kept.popleft())

    def since(self, number: int) -> list[bytes]:
        """Return those from this number on. Raises ValueError if some are not kept any more, or were never there."""
        missing = self.count - number
        if not 0 <= missing <= len(self._kept):
            raise ValueError(f"line {number} is wanted, and of {self.count} lines the last {len(self._kept)} are kept")
        return list(islice(reversed(self._kept), missing))[::-1]


class Supervisor:
    """One worker, and the connection over which it is reached at present."""

    def __init__(self, timeouts: Timeouts):
        self._timeouts = timeouts
        self._output = KeptLines()
        self._sent = 0  # number of the first line that was not sent
        self._rest = b""  # of the worker's output, without a newline as yet
        self._heard = 0
        self._more = asyncio.Condition()  # lines of the worker
        self._ended = False
        self._is_reached = asyncio.Event()
        self._connection: asyncio.Task | None = None

    async def run(self, command: Sequence[str], path: Path) -> None:
        """Until the worker has ended, and all that it has said was sent if anybody listens.

        path: absolute, so that it names this supervisor in a list of processes. A socket's own may be 104 bytes long,
        so that the socket is bound by its name alone, from its folder. Raises OSError.
        """
        pipe = asyncio.subprocess.PIPE
        self._worker = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=asyncio.subprocess.STDOUT
        )
        assert self._worker.stdin and self._worker.stdout
        self._stdin = self._worker.stdin
        reading = asyncio.create_task(self._read(self._worker.stdout))
        self._expect_launcher()
        os.chdir(path.parent)  # the worker has been started in the project
        self._server = await asyncio.start_unix_server(self._accept, path.name, limit=LONGEST_LINE)
        path.chmod(0o600)
        socket = _identity(path)
        while self._worker.returncode is None:  # asyncio's `wait` waits for whatever holds its stdout open, too
            await asyncio.sleep(POLL_S)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reading, self._timeouts.last_lines_s)
        if self._rest:
            await self._append([self._rest])
        await self._append([event_line({"type": EXIT, "status": self._worker.returncode}).rstrip()], last=True)
        with contextlib.suppress(TimeoutError):
            await self._send_last_lines()
        with contextlib.suppress(FileNotFoundError):
            if _identity(path) == socket:  # and not that of another supervisor, which has taken the path meanwhile
                path.unlink()

    async def _send_last_lines(self) -> None:
        """Raises TimeoutError if the launcher does not come back in its time, or the connection is dead."""
        while self._sent < self._output.count or self._connection:
            if not self._connection:
                left = self._orphaned.when() - asyncio.get_running_loop().time()
                await asyncio.wait_for(self._is_reached.wait(), left)
                continue
            _, pending = await asyncio.wait([self._connection], timeout=self._timeouts.last_lines_s)
            if pending:
                raise TimeoutError

    async def _read(self, output: asyncio.StreamReader) -> None:
        while block := await output.read(BLOCK):
            *lines, self._rest = (self._rest + block).split(b"\n")
            await self._append(lines)
            async with self._more:
                while sum(map(len, self._output.since(self._sent))) > KEPT // 2:  # as with any pipe that is full
                    await self._more.wait()

    async def _append(self, lines: Sequence[bytes], *, last: bool = False) -> None:
        async with self._more:
            for line in lines:
                self._output.append(line + END, sent=self._sent)
            self._ended = last
            self._more.notify_all()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, from its first word to its end. It replaces the one before only once the launcher answers."""
        try:
            writer.write(json.dumps({"pid": os.getpid(), "heard": self._heard}).encode() + b"\n")
            answer = parse_json(await asyncio.wait_for(reader.readline(), self._timeouts.handshake_s))
            position, first = answer["arrived"], answer["first"]
            self._output.since(position)
            if not 0 <= first <= self._heard:
                raise ValueError("lines between are missing")
        except (OSError, ValueError, TypeError, KeyError, TimeoutError):
            writer.close()
            return
        before, self._connection = self._connection, asyncio.current_task()
        if before:
            before.cancel()
        self._is_reached.set()
        self._orphaned.cancel()
        sending = asyncio.create_task(self._send(writer, position))
        hearing = asyncio.create_task(self._hear(reader, self._heard - first))
        try:
            await asyncio.wait([sending, hearing], return_when=asyncio.FIRST_COMPLETED)
        finally:
            sending.cancel()
            hearing.cancel()
            writer.close()
            if self._connection is asyncio.current_task():
                self._connection = None
                self._is_reached.clear()
                self._expect_launcher()

    async def _send(self, writer: asyncio.StreamWriter, position: int) -> None:
        """The worker's lines from this number on. Raises OSError, ValueError if the connection is too far behind."""
        while True:
            async with self._more:
                while self._output.count == position:
                    await self._more.wait()
                lines, ended = self._output.since(position), self._ended
            position += len(lines)
            writer.writelines(lines)
            await writer.drain()
            async with self._more:
                self._sent = position
                self._more.notify_all()
            if ended:
                writer.close()
                await writer.wait_closed()
                return

    async def _hear(self, reader: asyncio.StreamReader, known: int) -> None:
        """Pass on the launcher's lines, but for the first so many, which came over the connection before."""
        while (line := await reader.readline()).endswith(b"\n"):
            if known:
                known -= 1
                continue
            self._heard += 1
            with contextlib.suppress(OSError):  # it has ended, and its status is on its way
                self._stdin.write(line)
                await self._stdin.drain()

    def _expect_launcher(self) -> None:
        """If it does not come, the worker is told by the end of its stdin, and killed if that does not end it."""
        loop, timeouts = asyncio.get_running_loop(), self._timeouts

        def kill_worker() -> None:  # one that is frozen, or hangs, does not hear that it is to end
            with contextlib.suppress(ProcessLookupError):
                self._worker.kill()

        def end_worker() -> None:
            self._stdin.close()
            loop.call_later(timeouts.rescue_s + timeouts.grace_s, kill_worker)

        self._orphaned = loop.call_later(timeouts.orphaned_s, end_worker)


def _identity(path: Path) -> tuple[int, int, int]:
    """The number of a file that was removed may be given to the next one: the time tells them apart."""
    found = path.stat()
    return found.st_dev, found.st_ino, found.st_mtime_ns


def main() -> None:
    """The command comes over stdin: with it in the arguments, this process would look like a worker to `ps`."""
    path, command = Path(sys.argv[1]), json.loads(sys.stdin.buffer.readline())
    try:
        asyncio.run(Supervisor(Timeouts()).run(command, path))
    except OSError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # the relay passes it on
    finally:
        os.killpg(0, signal.SIGKILL)  # and whatever the worker has left behind


if __name__ == "__main__":
    main()
