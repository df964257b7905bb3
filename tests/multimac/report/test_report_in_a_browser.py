"""The page in a real browser: it fits, it plays, and nothing in it is refused."""

from __future__ import annotations

import pytest
from chromium import PROGRAM, Chromium
from made_run import DATA, MadeRun

from multimac.report.page import contents, write_report

pytestmark = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium: apt-get install chromium")
LONG = "donaudampfschifffahrtselektrizitätenhauptbetriebswerkbauunterbeamtengesellschaft"
PLAYED = """(async () => {
  const player = document.querySelector('audio');
  player.muted = true;
  await player.play();
  const until = Date.now() + 20000;
  while (player.currentTime < 0.2 && Date.now() < until) await new Promise(done => setTimeout(done, 50));
  return [player.duration, player.currentTime];
})()"""


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    made = MadeRun(tmp_path_factory.mktemp("run"))
    hosts = [f"a-rather-long-name-of-a-mac-{number}.local" for number in range(8)]
    made.begin(hosts)
    made.steps(range(1, 11), hosts, validate=5)
    made.tell("lost", 20, host=hosts[0], reason=f"{LONG} {LONG}", given_up=False)
    made.end()
    recordings = sorted((DATA / "test").glob("*.ogg"))[:2]
    made.manifest([{"id": f"clip-{n}", "audio": "x", "text": "x", "speaker": LONG} for n in range(2)])
    for model in ("base", "final"):
        made.measured(model, [(f"one {LONG}", LONG), ("שלום עולם", "שלום")], audio=recordings)
    return write_report(contents(made.write(hosts=hosts)))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Chromium(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def test_it_fits_on_a_telephone_and_on_a_desk_in_light_and_dark(page, browser):
    colours = set()
    for scheme in ("light", "dark"):
        for width in (390, 1280):
            browser.open(page, width=width, scheme=scheme)
            assert browser.value("document.documentElement.scrollWidth") <= width
            colours.add(browser.value("getComputedStyle(document.body).backgroundColor"))
    assert len(colours) == 2
    assert browser.messages == []


def test_a_recording_plays(page, browser):
    browser.open(page)
    length, played = browser.value(PLAYED)
    assert 1 < length < 10 and played >= 0.2


def test_words_of_a_text_from_right_to_left_stand_in_that_order(page, browser):
    browser.open(page)
    places = "[...document.querySelectorAll('.words')].map(w => [...w.children].map(p => p.getBoundingClientRect().x))"
    found = browser.value(places)
    assert sorted(each == sorted(each) for each in found) == [False, True]
