"""What became of each fault, and whether a run was right as a whole, from its events alone: no lab, no torch.

A fault is a dict: kind, host, began and undone (Unix seconds), words (what was done). In events, hosts go by the lab's
names and times are this machine's (see faults.py). A *round* is one step with AllReduce.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Sequence

from distributed.control.timeouts import Timeouts

CRASH_S = 3.0  # from a crash to the next generation
LATE_S = 3.0  # the same for a host that just falls silent, once the launcher has waited as long as it meant to
SILENT_S = Timeouts().silence_max_s + LATE_S
HEARD_S = 3.0  # from the end of a fault until its host is heard again
BACK_S = 60.0  # from the end of a fault until its host is a member again: a worker needs its time to start
MASTER = "h1"
CUTTING, SILENT = {"cut", "blackhole", "sleep"}, {"cut", "blackhole", "sleep", "freeze"}
LOSING = {"kill", "damage", *SILENT}


def ledger(events: Iterable[dict]) -> tuple[list[dict], list[tuple[float, dict]]]:
    """Return the commits that hold in the end; and those that do not, with the time when another took their place."""
    kept, undone = [], []
    for event in (event for event in events if event["type"] == "commit"):
        while kept and kept[-1]["round"] >= event["round"]:
            undone.append((event["time"], kept.pop()))
        kept.append(event)
    return kept, undone


def inexact(kept: Sequence[dict], ids: Sequence[str], epochs: int) -> str:
    """Tell what is wrong with a ledger that should hold each sample once in each epoch; "" if nothing is."""
    trained = Counter(
        (int(epoch), name)
        for commit in kept
        for by_epoch in commit["samples"].values()
        for epoch, names in by_epoch.items()
        for name in names
    )
    wanted = set(itertools.product(range(epochs), ids))
    missing, strange = len(wanted - set(trained)), len(set(trained) - wanted)
    twice = sum(count > 1 for count in trained.values())
    if not (missing or twice or strange):
        return ""
    return f"of {len(wanted)} samples {missing} were not trained, {twice} more than once; {strange} are unknown"


def differing(events: Iterable[dict]) -> tuple[int, list[int]]:
    """Return the number of rounds whose weights were compared, and the rounds in which ranks differ."""
    seen: dict[tuple[int, int], set] = {}
    life, latest = 0, 0  # rounds may come again after everybody was lost, or after a resume
    for event in events:
        if event["type"] == "commit":
            life += event["round"] <= latest
            latest = event["round"]
        elif event["type"] == "round":
            seen.setdefault((life, event["round"]), set()).add(event["digest"])
    return len(seen), [number for (_, number), digests in seen.items() if len(digests) > 1]


def in_vain(events: Iterable[dict]) -> list[tuple[float, str, int]]:
    """Return (time, host, samples) that were trained and not committed, whenever that shows.

    Steps wait for their commit, that of a hidden round while the next one's are made. Lost are those that a host makes
    anew, those of one that comes back without them, and what is left in the end.
    """
    found, waiting, owed = [], defaultdict(deque), Counter()  # host: (step, samples); samples of commits before a step

    def lose(event: dict, host: str, first: int) -> None:
        lost = 0
        while waiting[host] and waiting[host][-1][0] >= first:
            lost += waiting[host].pop()[1]
        if lost:
            found.append((event["time"], host, lost))

    for event in events:
        kind, host = event["type"], event.get("host", "")
        if kind == "commit":
            for name, by_epoch in event["samples"].items():
                owed[name] = sum(map(len, by_epoch.values()))
                while owed[name] and waiting[name]:
                    step, samples = waiting[name].popleft()
                    taken = min(samples, owed[name])
                    owed[name] -= taken
                    if taken < samples:
                        waiting[name].appendleft((step, samples - taken))
        elif kind == "step":
            lose(event, host, event["step"])
            taken = min(event["samples"], owed[host])  # a round's last step is told of after its commit
            owed[host] -= taken
            if taken < event["samples"]:
                waiting[host].append((event["step"], event["samples"] - taken))
        elif kind == "resume" and not event.get("exactly", True):
            lose(event, host, 0)
        elif kind == "end":
            for name in list(waiting):
                lose(event, name, 0)
    return found


class Story:
    """One run: its events in the order of the log, and what was done to its hosts."""

    def __init__(self, events: Sequence[dict], faults: Sequence[dict], hosts: Sequence[str], strategy: str):
        self.events, self.hosts, self.strategy = events, hosts, strategy
        self.kept, self.undone = ledger(events)
        self.last_commit = max((event["time"] for event in self.of("commit")), default=0.0)
        ends = self.of("end")
        silent = {"time": events[-1]["time"] if events else 0.0, "status": None, "message": "no last word"}
        self.end = ends[-1] if ends else silent
        # One that came after the last round had nobody to hit any more.
        self.faults = [f for f in faults if f["began"] < self.last_commit or self.end["status"] != 0]
        self.blind = [f for f in self.faults if self._blinds(f)]
        # Meanwhile the launcher hears of nobody.
        self.cut_off = [*self.blind, *(f for f in self.faults if f["host"] == MASTER and f["kind"] in CUTTING)]
        lost = self.of("lost")
        self.unexplained = [e for e in lost if not any(self._explains(fault, e) for fault in self.faults)]

    def of(self, *kinds: str) -> list[dict]:
        return [event for event in self.events if event["type"] in kinds]

    def judge(self) -> list[dict]:
        """Return each fault with `outcome`, `problems` (none: as defined), `recovery`, `undone_rounds`, `in_vain`."""
        verdicts = [{**fault, **self._judge(fault)} for fault in self.faults]
        for verdict in verdicts:
            verdict |= {"undone_rounds": 0, "in_vain": 0}
        for time, _ in self.undone:
            self._blame(verdicts, time, "", lambda v: v.update(undone_rounds=v["undone_rounds"] + 1))
        for time, host, count in in_vain(self.events):
            self._blame(verdicts, time, host, lambda v, count=count: v.update(in_vain=v["in_vain"] + count))
        if self.end["status"] != 0:
            failed = f"the run ended with status {self.end['status']}: {self.end['message']}"
            self._blame(verdicts, self.end["time"], "", lambda v: v["problems"].append(failed))
        return verdicts

    def _blame(self, verdicts: list[dict], time: float, host: str, write) -> None:
        """Hand it to the latest fault before: of those that may lose a host, or this host, if there are any."""
        before = [verdict for verdict in verdicts if verdict["began"] <= time]
        losing = [verdict for verdict in before if verdict["kind"] in LOSING]
        felt = [verdict for verdict in losing if host in self.affected(verdict)]
        if before:
            write(max(felt or losing or before, key=lambda verdict: verdict["began"]))

    def _judge(self, fault: dict) -> dict:
        if fault["kind"] == "damage":
            return self._judge_damage(fault)
        if fault["kind"] not in LOSING:
            return self._judge_harmless(fault)
        return self._judge_blind(fault) if fault in self.blind else self._judge_losing(fault)

    def _judge_losing(self, fault: dict) -> dict:
        """Demand that its hosts leave in time and the run goes on without them; or that they come back before."""
        kill, members = fault["kind"] == "kill", self.members(fault["began"])
        gone = self.affected(fault) & members
        # A crash that the launcher cannot be told of is one more silence.
        unheard = any(other["began"] < fault["began"] < other["undone"] for other in self.cut_off)
        limit = CRASH_S if kill and not unheard else SILENT_S
        if not gone:
            return verdict("was not training just then")
        others = [other for other in self.faults if other is not fault]
        lost = [e for e in self.of("lost") if e["host"] in gone and self._explains(fault, e)]
        rivals = [[o for o in others if self._explains(o, e, HEARD_S)] for e in lost]
        if any(other["began"] < fault["began"] for rival in rivals for other in rival):
            return verdict("was being lost already", *self._not_back(fault, lost))
        lost = [e for e, rival in zip(lost, rivals, strict=True) if self._explains(fault, e, HEARD_S) or not rival]
        hears = max([fault["began"], *(d["undone"] for d in self.cut_off if d["began"] < fault["began"] + limit)])
        if not lost:
            stayed = min(fault["undone"], self.last_commit) - hears
            unseen = f"{sorted(gone)} not missed" if kill or stayed > SILENT_S else ""
            return verdict("" if kill else "was heard again", unseen)
        names = {event["host"] for event in lost}
        if limit == SILENT_S:
            limit = lost[0].get("silent_for", Timeouts().silence_max_s) + LATE_S
        without = self._generation_after(lost[0]["time"], lambda hosts: not names & hosts)
        if without is None or not members - names:
            again = self._generation_after(lost[0]["time"], lambda hosts: True)
            return verdict("nobody was left; went on with who came back", "" if again else "no generation without it")
        back, took = self._not_back(fault, lost), without["time"] - fault["began"]
        if took > limit >= without["time"] - hears:
            return verdict("went on without it, once the launcher heard anything", *back)
        late = f"{took:.1f} s to the next generation" if took > limit else ""
        return verdict("went on without it", late, *back, recovery=took)

    def _not_back(self, fault: dict, lost: Sequence[dict]) -> list[str]:
        over = max(fault["undone"], lost[-1]["time"])
        if self.last_commit < over + BACK_S:
            return []
        names = {event["host"] for event in lost}
        back = {name for name in names if self._generation_after(over, lambda hosts, name=name: name in hosts)}
        # Perhaps it was there again before the fault was over, or in a fault of its own since.
        felt = {host for f in self.faults if f["began"] > fault["began"] for host in self.affected(f)}
        missing = names - back - felt - self.members(over + BACK_S)
        return [f"{sorted(missing)} not back {BACK_S:.0f} s after the fault's end"] if missing else []

    def _judge_blind(self, fault: dict) -> dict:
        """Demand that the run goes on: no more can be asked where the launcher itself stood still."""
        stuck = self.last_commit <= fault["undone"] and self.end["status"] != 0
        return verdict("the launcher went on", "nothing was committed any more" if stuck else "")

    def _judge_harmless(self, fault: dict) -> dict:
        until = fault["undone"] + SILENT_S
        own = [e for e in self.unexplained if self._responsible(e) is fault]
        warned = [e for e in self.of("warning") if e["host"] == fault["host"] and fault["began"] <= e["time"] <= until]
        if own and not warned:
            return verdict("", *(f"{e['host']} was lost: {e['reason'].splitlines()[0]}" for e in own))
        return verdict("warned" if warned else "nobody was lost")

    def _judge_damage(self, fault: dict) -> dict:
        resumed = [e for e in self.of("resume") if e["time"] > fault["undone"]]
        if not resumed:
            return verdict("", "it was not resumed")
        committed = max((e["round"] for e in self.of("commit") if e["time"] < fault["undone"]), default=0)
        first = resumed[0]["step" if self.strategy == "allreduce" else "round"]
        problem = f"went on after round {first} of {committed}" if first < committed - 1 else ""
        took = resumed[0]["time"] - fault["undone"]
        return verdict(f"went on after round {first} of {committed}, {took:.0f} s after --resume", problem)

    def members(self, time: float) -> set[str]:
        """Return who trains, as far as the launcher knows."""
        members: set[str] = set()
        for event in self.events:
            if event["time"] > time:
                break
            if event["type"] == "phase" and "hosts" in event:
                members = set()
            elif event["type"] == "generation":
                members = set(event["hosts"])
            elif event["type"] == "lost":
                members.discard(event["host"])
        return members

    def away(self) -> float:
        """Return the part of hosts' time, from first generation to last commit, in which they were no members."""
        called = [event for event in self.of("generation") if event["time"] <= self.last_commit]
        times = [*(event["time"] for event in called), self.last_commit]
        missing = [len(self.hosts) - len(event["hosts"]) for event in called]
        gone = sum(
            count * (end - begin) for count, (begin, end) in zip(missing, itertools.pairwise(times), strict=True)
        )
        return gone / (len(self.hosts) * max(1.0, times[-1] - times[0]))

    def affected(self, fault: dict) -> set[str]:
        """Return the hosts that the launcher, which is on the master, may lose by it."""
        if fault["kind"] == "damage" or (fault["host"] == MASTER and fault["kind"] in CUTTING) or self._blinds(fault):
            return set(self.hosts) - {MASTER}
        return {fault["host"]}

    def _blinds(self, fault: dict) -> bool:
        whole = fault["kind"] == "sleep" or (fault["kind"] == "freeze" and fault["words"] == "the whole host")
        return fault["host"] == MASTER and whole

    def _explains(self, fault: dict, lost: dict, later: float = SILENT_S) -> bool:
        in_time = fault["began"] <= lost["time"] <= fault["undone"] + later
        who = set(self.hosts) if fault in self.blind else self.affected(fault)
        return fault["kind"] in LOSING and in_time and lost["host"] in who

    def _responsible(self, lost: dict) -> dict | None:
        """Return the latest fault that this host must have felt, of those that should lose nobody."""
        felt = [
            fault
            for fault in self.faults
            if fault["kind"] not in LOSING
            and fault["began"] <= lost["time"] <= fault["undone"] + SILENT_S
            and (fault["host"] == lost["host"] or (fault["host"] == MASTER and fault["kind"] != "clock"))
        ]
        return max(felt, key=lambda fault: fault["began"], default=None)

    def of_nobody(self) -> list[dict]:
        """List the losses of hosts to which nothing had been done."""
        return [event for event in self.unexplained if self._responsible(event) is None]

    def _generation_after(self, time: float, fits) -> dict | None:
        return next((e for e in self.of("generation") if e["time"] >= time and fits(set(e["hosts"]))), None)


def verdict(outcome: str, *problems: str, recovery: float | None = None) -> dict:
    return {"outcome": outcome, "problems": [problem for problem in problems if problem], "recovery": recovery}
