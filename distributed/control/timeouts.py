"""Every time-out between the launcher and its workers, with the reason for its value."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """All in seconds, but for `silence_share`."""

    # Heartbeats go both ways. A slow link that is full delays one by up to two seconds.
    heartbeat_s: float = 0.5

    # Without a word for this share of a round, within these limits, a worker is lost to the others. The longer the
    # round, the more of its work is at stake, and the less it matters that the others wait.
    silence_share: float = 0.2
    silence_min_s: float = 3.0
    silence_max_s: float = 12.0
    # At least, while weights or clips travel: on a slow link heartbeats wait behind them.
    silence_busy_link_s: float = 6.0
    # Of the only worker of a run on this machine: nobody waits for it, and its end is noticed at once. To start another
    # would cost what it has trained since its last checkpoint, and a busy machine may hold it up for half a minute.
    silence_alone_s: float = 60.0
    # The first time, a Mac scans each library as it is loaded: a minute for torch and the rest (Canner/WrenAI #2354),
    # and the interpreter's lock is held meanwhile. The end of a process or of a connection is still noticed at once.
    silence_importing_s: float = 90.0
    # To read the model from a slow disk holds up the heartbeats of one that still loads.
    silence_loading_s: float = 15.0
    # The launcher's own turns count as no longer than this: if it slept, it was not the others who were silent.
    longest_turn_s: float = 1.0

    # The way back of a lost worker. By itself TCP tries to connect after 0, 1, 3 and 7 s; new tries come once a second.
    connect_timeout_s: float = 2.0
    reconnect_s: float = 1.0
    # For the supervisor's answer, with the start of Python for the relay on a slow machine.
    handshake_s: float = 8.0
    # The same for a first start: there Python starts three times, perhaps from a cold disk.
    start_s: float = 30.0
    # One that is heard again has so long to acknowledge a heartbeat. After an outage, TCP may need seconds more in one
    # direction than in the other.
    acknowledge_s: float = 6.0
    # A worker whose host answers, but that says nothing, has so long after the connection, and so long after its loss.
    # It keeps its model in memory; to start another one costs about as much as to wait.
    listen_s: float = 3.0
    replace_s: float = 12.0
    # Between starts. A second failure soon after the first is seldom cured by a third; a host may boot for a minute.
    back_off_s: tuple[float, ...] = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0)

    # The end of a run: for last words, and for one worker to write the model to a slow disk.
    grace_s: float = 2.0
    save_s: float = 300.0

    # In the worker. Nothing of a run may be left 25 s after its launcher is gone, and later is better: until then the
    # worker may be reached again. Halfway it saves what must not be lost, and goes on.
    launcher_silence_s: float = 23.0
    early_rescue_s: float = 11.5
    # For saving before the end: at once, and where it has been done halfway.
    rescue_s: float = 8.0
    late_rescue_s: float = 1.0

    # In the supervisor. Its launcher has had its connection closed under it, and comes back within seconds, or is gone.
    orphaned_s: float = 10.0
    # For the last lines to pass through a connection that may be dead.
    last_lines_s: float = 1.0
