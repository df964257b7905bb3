"""Serves the live page of a run on 127.0.0.1, to whoever has the token of its address."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import anyio
import uvicorn
from markupsafe import Markup
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from distributed.launcher.follow import Attached
from distributed.run_dir.away import set_away
from distributed.run_dir.folder import launcher_pid
from multimac.report.template import rendered
from whisper_tuner.errors import RunError, TunerError
from whisper_tuner.text import parse_json

from .live import PARTS, LiveRun

LOOK_S = 1.0
MOST_ASKED = 4096  # bytes of what a button sends
UNWATCHED_S = 120.0  # after the end of a run: a laptop may sleep that long, and a page be reloaded
RULES = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; media-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
}
REFUSED = "Open the whole address that `multimac watch` printed: it has a token."


class Page:
    """The page of one run. stays: also once the run has ended and nobody looks any more."""

    def __init__(self, run_dir: Path, port: int = 0, *, stays: bool = True):
        self.live, self.token, self._stays = LiveRun(run_dir), secrets.token_urlsafe(24), stays
        self.socket = socket.create_server(("127.0.0.1", port))
        self.host = f"127.0.0.1:{self.socket.getsockname()[1]}"
        self._watching, self._changed = 0, anyio.Condition()
        self._looks = 0

    @property
    def address(self) -> str:
        return f"http://{self.host}/?token={self.token}"

    def run(self) -> None:
        """Serve until Ctrl-C; where it does not stay, until the run is over and nobody has looked for UNWATCHED_S."""
        routes = [
            Route("/", self._page),
            Route("/page.js", self._script),
            Route("/parts", self._parts),
            Route("/do", self._do, methods=["POST"]),
        ]
        app = Starlette(routes=routes, lifespan=self._looking)
        self._server = uvicorn.Server(uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1))
        self._server.run(sockets=[self.socket])

    @contextlib.asynccontextmanager
    async def _looking(self, _app: Starlette) -> AsyncIterator[None]:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._look)
            yield
            self.live.is_over = True
            tasks.cancel_scope.cancel()

    async def _look(self) -> None:
        """Look at the run while somebody watches."""
        unwatched = 0.0
        while self._stays or unwatched < UNWATCHED_S or launcher_pid(self.live.run_dir):
            if self._watching or not self._looks:
                unwatched = 0.0
                try:
                    await anyio.to_thread.run_sync(self.live.look)
                except Exception as error:  # such as a disk that is gone for a while: the next look may do
                    self.live.tell(f"The run's folder cannot be read now: {error}")
                async with self._changed:
                    self._looks += 1
                    self._changed.notify_all()
            await anyio.sleep(LOOK_S)
            unwatched += LOOK_S
        self._server.should_exit = True

    def _refused(self, request: Request) -> Response | None:
        """Refuse whoever has no token, and pages of other origins, also one whose name was made to lead here."""
        token = request.query_params.get("token", "")
        is_ours = request.headers.get("host") == self.host and hmac.compare_digest(token.encode(), self.token.encode())
        origin = request.headers.get("origin")
        if is_ours and origin in (None, f"http://{self.host}"):
            return None
        return PlainTextResponse(REFUSED, status_code=403, headers=RULES)

    async def _page(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        is_current = self._watching or self.live.has_ended
        html = {part: Markup(text) for part, text in self.live.parts.items()} if is_current else {}
        page = rendered("watch.html", name=self.live.run_dir.name, parts=PARTS, html=html)
        return HTMLResponse(page, headers=RULES)

    async def _script(self, _request: Request) -> Response:
        script = (Path(__file__).parent / "page.js").read_text(encoding="utf-8")
        return Response(script, media_type="text/javascript", headers=RULES)

    async def _parts(self, request: Request) -> Response:
        return self._refused(request) or StreamingResponse(
            self._stream(), media_type="text/event-stream", headers=RULES
        )

    async def _stream(self) -> AsyncIterator[str]:
        """Yield all parts, and from then on those that differ from what was sent."""
        sent: dict[str, str] = {}
        self._watching += 1
        try:
            while True:
                parts = self.live.parts
                changed = {part: html for part, html in parts.items() if sent.get(part) != html}
                sent = parts
                yield f"data: {json.dumps(changed)}\n\n" if changed else ": nothing new\n\n"
                async with self._changed:
                    await self._changed.wait()
        finally:
            self._watching -= 1

    async def _do(self, request: Request) -> Response:
        if refused := self._refused(request):
            return refused
        if request.headers.get("origin") is None:  # a browser says where a POST comes from
            return PlainTextResponse(REFUSED, status_code=403, headers=RULES)
        try:
            body = b""
            async for part in request.stream():
                if len(body := body + part) > MOST_ASKED:
                    raise ValueError("too long")
            said = await anyio.to_thread.run_sync(self._act, parse_json(body))
        except OSError as error:
            return PlainTextResponse(f"{error.filename}: {error.strerror}", status_code=409, headers=RULES)
        except TunerError as error:
            return PlainTextResponse(error.told, status_code=409, headers=RULES)
        except (ValueError, KeyError, TypeError):
            return PlainTextResponse("This cannot be understood.", status_code=400, headers=RULES)
        return PlainTextResponse(said, headers=RULES)

    def _act(self, asked: dict) -> str:
        """Do what a button asks for; return what it says from then on. Raises TunerError, ValueError and the like."""
        run_dir = self.live.run_dir
        pid = launcher_pid(run_dir)
        if pid is None:
            raise RunError(f"run {run_dir.name} is not running")
        if asked["what"] == "stop":
            if self.live.stopped != pid:  # a second signal would end it at once
                self.live.stopped = pid
                Attached(run_dir, pid).send_signal(signal.SIGTERM)
            return "Stopping"
        if asked["what"] == "away" and isinstance(asked["away"], bool) and isinstance(asked["host"], str):
            set_away(run_dir, asked["host"], asked["away"])
            return "Leaves at the end of its round" if asked["away"] else "Comes back with the next round"
        raise ValueError(asked)
