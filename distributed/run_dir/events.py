"""What can happen in a run: the type of an event, and a table of all that readers know, with the fields they need.

exogym and the launcher emit events as dicts; a line of events.jsonl is one. Readers get an `Event`. A new type is a row
of TYPES, with what is printed of it; what a host's row shows of it while the run lasts is in run_view.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, get_type_hints

from exogym.config import kind_of
from whisper_tuner.errors import ExitStatus
from whisper_tuner.text import wer_told

MOST = 1e15  # of bytes, steps or seconds: no run comes near it, and sums of such numbers stay finite
UNNAMED = "Whisper's text normaliser, in an unknown version"  # of runs from before normalisers were named
APART = (
    "cannot reach each other, though this machine reaches them: perhaps a firewall, or a Wi-Fi that keeps clients apart"
)
Names = Sequence[str]
Pairs = Sequence[Sequence[str]]
Ends = Sequence[float]  # of an interval; or none


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event. A field that its type does not have, or that is null there, has the default.

    written: all its fields, as they stand in the file. kept: the set of Profile.keeps that was measured.
    score: the WER of validation clips, as a share. seconds_communicating: of a step with an exchange that is no round.
    found: one that is left out was lost before. From cpu on: of a machine, where it is known; cpu, gpu and battery in
    per cent, temperature in degrees Celsius, thermal as macOS calls it, from nominal over fair and serious to critical.
    """

    type: str
    written: dict[str, Any] = field(default_factory=dict, repr=False)
    time: float
    host: str | None = None
    step: int = 0
    hosts: Names = ()
    away: Names = ()
    phase: str = ""
    what: str = ""
    done: int = 0
    total: int = 0
    total_steps: int = 0
    device: str = ""
    epoch: int = 0
    samples: int = 0
    seconds: float = 0.0
    loss: float | None = None
    score: float | None = None
    lr: float | None = None
    bytes: int = 0
    memory: int = 0
    seconds_communicating: float | None = None
    seconds_waiting: float | None = None
    round: int = 0
    validations: int = 0
    best_step: int = 0
    reason: str = ""
    given_up: bool = False
    found: bool = False
    number: int = 0
    min_hosts: int = 0
    pairs: Pairs = ()
    path: str = ""
    model: str = ""
    when: str = ""
    kept: str = ""
    wer: float = 0.0
    before: float | None = None
    wer_difference: Ends = ()
    clips: int = 0
    said: int = 0
    recall: float | None = None
    precision: float | None = None
    difference: Ends = ()
    normalizer: str = UNNAMED
    status: ExitStatus = ExitStatus.OK
    message: str = ""
    cpu: float | None = None
    gpu: float | None = None
    memory_used: int | None = None
    memory_total: int | None = None
    temperature: float | None = None
    thermal: str = ""
    battery: float | None = None
    on_mains: bool | None = None

    @property
    def line(self) -> str:
        """Return what is printed of this event, whatever came before; "" for nothing."""
        return TYPES[self.type].line(self) if self.type in TYPES else ""

    @property
    def named(self) -> str:
        return ", ".join(f"{one} and {other}" for one, other in self.pairs)


@dataclass(frozen=True)
class Type:
    """needs: fields that readers rely on, beside COMMON; one with a question mark may be null or missing.

    every_host_tells: so its line is printed once.
    """

    needs: str = ""
    line: Callable[[Event], str] = lambda event: ""
    every_host_tells: bool = False


COMMON = "type time host? step?"
WARNING = Type("what", lambda e: f"{e.host}: {e.what}" if e.host else e.what)  # the coordinator's are about no host
TYPES = {
    "phase": Type("phase hosts?"),
    "preparing": Type("host done total"),
    "start": Type("total_steps device"),
    "plan": Type("total_steps"),
    "shares": Type("step what", lambda e: f"step {e.step}: {e.what}", every_host_tells=True),
    "step": Type("host step epoch samples seconds loss? lr? bytes? memory? seconds_communicating? seconds_waiting?"),
    "round": Type("round step bytes? seconds?"),
    "stop": Type("step bytes? seconds?"),
    "validation": Type(
        "step loss? score? seconds?",
        lambda e: "" if e.loss is None else f"step {e.step}: validation {_loss_or_wer(e)}",
        every_host_tells=True,
    ),
    "early_stop": Type(
        "step validations total_steps",
        lambda e: (
            f"training ends at step {e.step} of {e.total_steps}: "
            f"validations in a row that were no better: {e.validations} (early_stopping)"
        ),
        every_host_tells=True,
    ),
    "best": Type(
        "step best_step loss score?",
        lambda e: f"the model is that of step {e.best_step}, validation {_loss_or_wer(e)} (keep_best)",
        every_host_tells=True,
    ),
    "checkpoint": Type("step"),
    "resume": Type("host step round epoch"),
    "lost": Type(
        "host reason given_up",
        lambda e: f"{e.host} is lost{' and not tried again' if e.given_up else ''}: {e.reason}",
    ),
    "back": Type("host", lambda e: f"{e.host} is back"),
    "away": Type("host reason found?", lambda e: f"{e.host} is left out: {e.reason}"),
    "generation": Type("number hosts"),
    "paused": Type("hosts min_hosts away?", lambda e: _pause_line(e)),
    "orphaned": Type("hosts", lambda e: f"waiting for {', '.join(e.hosts)}, who may have the newest state"),
    "apart": Type(
        "pairs hosts",
        lambda e: f"{e.named} {APART}" + (f"; left out until then: {', '.join(e.hosts)}" if e.hosts else ""),
    ),
    "reached": Type("pairs", lambda e: f"{e.named} reach each other again"),
    "problem": Type("what", lambda e: f"{e.host or 'data'}: skipped: {e.what}"),
    "warning": WARNING,
    "notice": WARNING,
    "model": Type("path", lambda e: f"model: {e.path}"),
    "report": Type("path", lambda e: f"report: {e.path}"),
    "machine": Type("host cpu? gpu? memory_used? memory_total? temperature? thermal? battery? on_mains?"),
    "evaluating": Type("model done total kept?"),
    "evaluation": Type("when wer kept? normalizer? before? wer_difference? clips?", lambda e: _wer_line(e)),
    "terms": Type("when said before? recall? precision? difference?", lambda e: f"terms: {terms_told(e)}"),
    "end": Type("status message"),
}


def _pause_line(event: Event) -> str:
    missing = f"{event.min_hosts} hosts are there (min_hosts); now: {', '.join(event.hosts) or 'none'}"
    if event.min_hosts == 1:  # all who are there are left out: on one machine, the only one
        missing = f"{' or '.join(event.away or ()) or 'a host'} is back"
    elif event.away:
        missing += f"; left out: {', '.join(event.away)}"
    back = f"; if you left it out: multimac hosts yield {event.away[0]} --back" if event.away else ""
    return f"paused until {missing}{back}"


def _loss_or_wer(event: Event) -> str:
    heard = "" if event.score is None else f", WER {100 * event.score:.1f}"
    return f"loss {event.loss or 0:.3f}{heard}" + (f" ({event.seconds:.0f} s)" if event.seconds else "")


def _wer_line(event: Event) -> str:
    where = f"WER on {event.kept}" if event.kept else "WER"
    line = f"{where} {event.when}: {event.wer:.1f} ({event.normalizer})"
    if event.before is None:
        return line
    colon = ":" if event.kept else ""
    return f"{line}\n{where}{colon} {wer_told(event.before, event.wer, event.wer_difference, event.clips)}"


def terms_told(event: Event) -> str:
    """Tell how many of the terms that were said a model writes, before and after training."""
    if event.before is None or event.recall is None:
        return "none of them was said in the test clips"
    interval = "95 %: {:+.1f} to {:+.1f} points, ".format(*event.difference) if event.difference else ""
    precise = "" if event.precision is None else f"; {event.precision:.0f} % of those it writes were said"
    return (
        f"{event.before:.1f} -> {event.recall:.1f} % of those said are written ({interval}{event.said} said){precise}"
    )


def _is_names(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(name, str) for name in value)


HINTS = {name: kind_of(hint) for name, hint in get_type_hints(Event).items()}
# A line that a disk has damaged may still be JSON: values are checked by the type of their field.
CHECKS: dict[Any, Callable[[Any], bool]] = {
    str: lambda value: isinstance(value, str),
    bool: lambda value: isinstance(value, bool),
    int: lambda value: type(value) is int and 0 <= value < MOST,
    float: lambda value: type(value) in (int, float) and abs(value) < MOST,
    Names: _is_names,
    Pairs: lambda value: isinstance(value, list) and all(_is_names(pair) and len(pair) == 2 for pair in value),
    Ends: lambda value: isinstance(value, list) and len(value) == 2 and all(map(CHECKS[float], value)),
    ExitStatus: lambda value: type(value) is int and value in set(ExitStatus),
}


@cache
def fields_of(kind: str) -> tuple[tuple[str, bool, Callable[[Any], bool]], ...]:
    """Return name, whether it may be missing, and check of each field that readers need of a type."""
    needs = f"{COMMON} {TYPES[kind].needs if kind in TYPES else ''}".split()
    return tuple((name := need.rstrip("?"), need.endswith("?"), CHECKS[HINTS[name]]) for need in needs)


def event_of(written: Any) -> Event | None:
    """Return the event of a line's JSON; None if a field is missing, or is not as it should be."""
    if not isinstance(written, dict) or not isinstance(kind := written.get("type"), str):
        return None
    values: dict[str, Any] = {"written": written}
    for name, may_be_missing, check in fields_of(kind if kind in TYPES else ""):
        value: Any = written.get(name)
        if value is None and may_be_missing:
            continue
        if not check(value):
            return None
        values[name] = ExitStatus(value) if name == "status" else value
    return Event(**values)
