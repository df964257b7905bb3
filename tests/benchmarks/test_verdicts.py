"""What the benchmark of faults says of runs, from events made by hand."""

from __future__ import annotations

from benchmarks.verdicts import Story, differing, in_vain, inexact, ledger

HOSTS = ("h1", "h2", "h3")


def generation(time: float, *hosts: str) -> dict:
    return {"time": time, "type": "generation", "hosts": list(hosts)}


def commit(time: float, round: int, **samples: str) -> dict:
    by_host = {host: {"0": names.split()} for host, names in samples.items()}
    return {"time": time, "type": "commit", "round": round, "samples": by_host}


def of(kind: str, time: float, host: str, **more: object) -> dict:
    return {"time": time, "type": kind, "host": host, **more}


def fault(kind: str, host: str, began: float, undone: float | None = None, words: str = "") -> dict:
    return {"kind": kind, "host": host, "began": began, "undone": undone or began, "words": words}


def judged(events: list[dict], *faults: dict) -> list[dict]:
    start = {"time": 0.0, "type": "phase", "phase": "start", "hosts": list(HOSTS)}
    end = {"time": 200.0, "type": "end", "status": 0, "message": ""}
    return Story([start, generation(1, *HOSTS), *events, end], faults, HOSTS, "diloco").judge()


def test_a_round_that_comes_again_takes_the_place_of_the_first():
    kept, undone = ledger([commit(1, 1, h1="a"), commit(2, 2, h1="b"), commit(9, 2, h2="b")])
    assert [c["round"] for c in kept] == [1, 2] and inexact(kept, ["a", "b"], 1) == ""
    assert [(time, c["time"]) for time, c in undone] == [(9, 2)]
    assert inexact(kept, ["a", "b", "c"], 1).startswith("of 3 samples 1 were not trained, 0 more than once")
    assert "1 more than once" in inexact([commit(1, 1, h1="a", h2="a")], ["a"], 1)


def test_ranks_that_differ_are_told_from_rounds_that_come_again():
    def told(digest: int) -> dict:
        return of("round", 1, "h1", round=1, digest=digest)

    assert differing([commit(1, 1), told(5), told(5), commit(2, 1), told(6)]) == (2, [])
    assert differing([commit(1, 1), told(5), told(6)]) == (1, [1])


def test_in_vain_is_what_no_commit_took():
    def step(number: int) -> dict:
        return of("step", number, "h1", step=number, samples=4)

    counted = [step(1), commit(1.5, 1, h1="a b c d e f g h"), step(2)]  # the last step is told of after it
    assert in_vain(counted) == []
    back = of("resume", 9, "h1", exactly=False)
    assert in_vain([*counted, step(3), back, of("step", 10, "h1", step=7, samples=4)]) == [(9, "h1", 4)]
    hidden = [
        step(1),
        step(2),
        step(3),
        commit(3.5, 1, h1="a b c d e f g h"),
        step(4),
        commit(4.5, 2, h1="i j k l m n o p"),
    ]
    assert in_vain([*hidden, step(5)]) == []
    assert in_vain([*hidden, step(5), step(6), step(5)]) == [(5, "h1", 8)]
    assert in_vain([*hidden, step(5), of("end", 6, "")]) == [(6, "h1", 4)]


def test_a_kill_is_as_defined_if_the_others_go_on_in_time():
    lost, rest = of("lost", 10.4, "h2", reason="killed"), [commit(12, 3, h1="a"), generation(30, *HOSTS)]
    [fine] = judged([lost, generation(10.5, "h1", "h3"), *rest], fault("kill", "h2", 10))
    assert fine["problems"] == [] and fine["recovery"] == 0.5
    [late] = judged([lost, generation(14, "h1", "h3"), *rest], fault("kill", "h2", 10))
    assert late["problems"] == ["4.0 s to the next generation"]
    [unseen] = judged(rest, fault("kill", "h2", 10))
    assert unseen["problems"] == ["['h2'] not missed"]


def test_who_falls_silent_is_missed_or_comes_back():
    going_on = [commit(time, time, h1="a") for time in range(11, 150)]
    [short] = judged(going_on, fault("freeze", "h2", 10, 15))
    assert short["outcome"] == "was heard again" and short["problems"] == []
    [unseen] = judged(going_on, fault("cut", "h2", 10, 40))
    assert unseen["problems"] == ["['h2'] not missed"]
    lost = [of("lost", 22, "h2", reason="silent"), generation(22, "h1", "h3")]
    [gone] = judged([*lost, *going_on], fault("cut", "h2", 10, 40))
    assert gone["problems"] == ["['h2'] not back 60 s after the fault's end"] and gone["recovery"] == 12


def test_a_cut_master_loses_all_the_others():
    lost = [of("lost", 22, "h2", reason=""), generation(22, "h1", "h3"), of("lost", 23, "h3", reason="")]
    events = [*lost, generation(23, "h1"), commit(30, 1, h1="a")]
    [verdict] = judged(events, fault("cut", "h1", 10, 30))
    assert verdict["problems"] == [] and verdict["recovery"] == 13
    _, kill = judged(events, fault("cut", "h1", 10, 30), fault("kill", "h2", 11))
    assert kill["problems"] == [] and kill["recovery"] is None  # nobody could tell it from the cut


def test_what_should_lose_nobody_is_blamed_for_who_is_lost():
    lost = [of("lost", 12, "h2", reason="silent"), commit(40, 1, h1="a")]
    [slow] = judged(lost, fault("slow", "h2", 10, 20))
    assert slow["problems"] == ["h2 was lost: silent"]
    [slow, _] = judged(lost, fault("slow", "h2", 10, 20), fault("kill", "h2", 11.5))
    assert slow["problems"] == []
    events = [of("warning", 11, "h2", what="no space"), *lost]
    [disk] = judged(events, fault("disk", "h2", 10, 20))
    assert disk["outcome"] == "warned" and disk["problems"] == []
