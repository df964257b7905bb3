"""Faults of recordings, as their decoded audio shows them."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from whisper_tuner.data.audio import SAMPLE_RATE
from whisper_tuner.data.checks.finding import Finding, Kind, Needs, Severity, check, of_row
from whisper_tuner.data.checks.material import Material

MISSING_S = 0.05  # decoders differ by a frame at most

UNDECODABLE = Kind(
    name="undecodable audio",
    severity=Severity.ERROR,
    means="The header and both ends can be read, but what lies in between cannot be decoded.",
    remedy="Copy or convert it again, or remove the row.",
    unusable=True,
)
DAMAGED = Kind(
    name="damaged audio",
    severity=Severity.WARNING,
    means="The file is damaged inside: a part of what its header states is lost, and words with it.",
    remedy="Copy or convert it again, or listen whether its text still fits.",
)


@check(UNDECODABLE, DAMAGED, needs=Needs.AUDIO, place=2)
def find_undecodable(material: Material) -> Iterator[Finding]:
    for row in material.rows:
        if (facts := material.facts.get(row.sample.audio)) and facts.problem:
            yield of_row(UNDECODABLE, row, facts.problem)
        elif facts and facts.missing_s > MISSING_S:
            what = f"{facts.missing_s:.2f} s of what its header states are lost"
            yield of_row(DAMAGED, row, what, badness=facts.missing_s)


SILENT_PEAK = 10 ** (-66 / 20)  # 16 steps of 16 bits: less than the noise of any microphone that hears speech
QUIET_DB = -50.0  # level of a clip's loud frames; speech recorded from across a room has about -40

SILENT = Kind(
    name="silent",
    severity=Severity.ERROR,
    means="Nothing can be heard, but there is a text. The model learns to invent text in silence.",
    remedy="Record it again, or remove the row.",
)
QUIET = Kind(
    name="very quiet",
    severity=Severity.WARNING,
    means="The loudest parts are below -50 dB of full scale: speech drowns in the noise of recording and rounding.",
    remedy="Listen to it. Record closer to the microphone; making it louder afterwards does not help.",
)


@check(SILENT, QUIET, needs=Needs.AUDIO, place=5)
def find_silent(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if not row.text:
            continue
        if facts.peak <= SILENT_PEAK:
            yield of_row(SILENT, row, f"no sample is higher than {facts.peak:.5f} of full scale", badness=1)
        elif facts.level < QUIET_DB and facts.cancelled < 20:
            yield of_row(QUIET, row, f"its loudest parts have {facts.level:.0f} dB", badness=-facts.level)


DEAD_DB = 40.0  # between the loudest channel and the quietest
# The mean of two channels alike is as loud as they are, of two that have nothing in common 3 dB quieter, and if one of
# them is dead 6 dB.
CANCELLED_DB = 10.0

DEAD = Kind(
    name="dead channel",
    severity=Severity.INFO,
    means="One of the channels is silent. The model hears the mean of all, which is quieter but complete.",
    remedy="Nothing has to be done. To be tidy, convert the file to mono from the channel that has the speech.",
)
CANCELS = Kind(
    name="cancelling channels",
    severity=Severity.ERROR,
    means="One channel is the other one turned upside down: their mean, which the model hears, is nearly silent.",
    remedy="Convert it to mono from one of its channels (`ffmpeg -af pan=mono|c0=c0`).",
)


@check(DEAD, CANCELS, needs=Needs.AUDIO, place=6)
def find_bad_channels(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if facts.cancelled >= CANCELLED_DB:
            what = f"the mean of its channels is {facts.cancelled:.0f} dB quieter than they are"
            yield of_row(CANCELS, row, what, badness=facts.cancelled)
        elif facts.balance >= DEAD_DB:
            what = f"one of its {facts.channels} channels is {facts.balance:.0f} dB quieter than another"
            yield of_row(DEAD, row, what, badness=facts.balance)


CLIPPED_SHARE = 0.001  # of all samples: a few flat tops are not heard

CLIPPED = Kind(
    name="clipped",
    severity=Severity.WARNING,
    means="The recording was too loud: its tops are cut flat, which sounds harsh and blurs consonants.",
    remedy="Listen to it. Record again with less gain; a few such clips do no harm if you can understand them.",
)

# The level of the first or last 5 ms, compared with the clip's loud frames. The loudest edge of 1,046 recordings of a
# studio, trimmed by hand, has -26 dB, that of 330 clips of synthetic speech -12. If clips are cut at random, 6 in 10
# are above -10; the others are cut in a pause, or in a consonant.
CUT_OFF_DB = -10.0
LOUD_DB = -45.0  # level of the clip; below, what lies at its edges may be hum

CUT_OFF = Kind(
    name="cut off",
    severity=Severity.WARNING,
    means="The clip begins or ends at full loudness, so a word may be cut, though its text has it whole.",
    remedy="Listen to its ends. Cut it again with a tenth of a second more, or take the word from the text.",
)

OFFSET = 0.02  # of full scale; a sound card's own is below 0.005

DC_OFFSET = Kind(
    name="DC offset",
    severity=Severity.WARNING,
    means="The waveform does not swing around zero: a fault of the sound card, or samples read in the wrong format.",
    remedy="Listen to it. If it is speech, a high-pass filter mends it (`ffmpeg -af highpass=f=40`).",
)

# From quiet to loud frames of 20 ms. Noise has 3 dB, and a tone none; speech in a loud car still has 15.
SPREAD_DB = 8.0
SHORTEST_FLAT_S = 0.5

FLAT = Kind(
    name="no rise and fall",
    severity=Severity.WARNING,
    means="The sound is as loud all the time, as no speech is: noise, hum or a tone.",
    remedy="Listen to it. If nobody speaks, remove the row.",
)

EDGE_S = 3.0
SILENT_SHARE = 0.8
SHORTEST_SILENT_S = 2.0  # a single word in a second has as much silence around it

EDGES = Kind(
    name="long silence at an edge",
    severity=Severity.INFO,
    means="More than 3 s of silence stand before or after the speech: they are computed in each epoch for nothing.",
    remedy="Trim the clip. A little silence is good, and some clips with much of it do no harm.",
)
MOSTLY = Kind(
    name="mostly silence",
    severity=Severity.WARNING,
    means="Over 80 % of the clip is silent. The text may belong to another recording, or speech is missing.",
    remedy="Listen to it. Trim it if its text is right.",
)


@check(CLIPPED, CUT_OFF, DC_OFFSET, FLAT, EDGES, MOSTLY, place=24)
def find_bad_recordings(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if facts.clipped >= CLIPPED_SHARE:
            what = f"{100 * facts.clipped:.1f} % of its samples are in flat tops"
            yield of_row(CLIPPED, row, what, badness=facts.clipped)
        edges = {"begins": facts.first, "ends": facts.last}
        near = [f"{name} at {level:+.0f} dB" for name, level in edges.items() if level > CUT_OFF_DB]
        if near and facts.level > LOUD_DB:
            what = f"it {' and '.join(near)}, compared with its loudest parts"
            yield of_row(CUT_OFF, row, what, badness=max(edges.values()))
        if abs(facts.offset) >= OFFSET:
            what = f"its mean is {facts.offset:+.3f} of full scale"
            yield of_row(DC_OFFSET, row, what, badness=abs(facts.offset))
        if row.text and facts.spread < SPREAD_DB and facts.seconds >= SHORTEST_FLAT_S and facts.level > QUIET_DB:
            what = f"only {facts.spread:.0f} dB between its quiet and its loud parts"
            yield of_row(FLAT, row, what, badness=-facts.spread)
        if not row.text or facts.level < QUIET_DB:
            continue
        if facts.silent > SILENT_SHARE and facts.seconds > SHORTEST_SILENT_S:
            what = f"{100 * facts.silent:.0f} % of its {facts.seconds:.1f} s are silent"
            yield of_row(MOSTLY, row, what, badness=facts.silent)
        elif max(facts.begins_s, facts.ends_s) > EDGE_S:
            what = f"{facts.begins_s:.1f} s of silence before it, {facts.ends_s:.1f} s after it"
            yield of_row(EDGES, row, what, badness=facts.begins_s + facts.ends_s)


FEWEST_LEVELS = 10  # clips, for their median to mean something
# People who record themselves differ by 10 dB; the voices of one corpus seldom by more than 15.
APART_DB = 18.0
SPREADS = 5.0  # and at least so many median deviations, where all differ much

OUTLIER = Kind(
    name="loudness outlier",
    severity=Severity.INFO,
    means="The clip is far louder or quieter than most. The log-mel evens this out, but it may be another recording.",
    remedy="Listen to it.",
)


@check(OUTLIER, needs=Needs.AUDIO, place=29)
def find_loudness_outliers(material: Material) -> Iterator[Finding]:
    known = [(row, facts.level) for row, facts in material.with_facts() if facts.level > QUIET_DB]
    if len(known) < FEWEST_LEVELS:
        return
    usual = median(level for _, level in known)
    deviation = median(abs(level - usual) for _, level in known)
    for row, level in known:
        if abs(level - usual) > max(APART_DB, SPREADS * deviation):
            what = f"{level:.0f} dB, where most have about {usual:.0f} dB"
            yield of_row(OUTLIER, row, what, badness=abs(level - usual))


LOW_RATE = Kind(
    name="low sample rate",
    severity=Severity.INFO,
    means="The file has fewer than 16,000 samples a second, as from a telephone: it lacks the high sounds of s and f.",
    remedy="Fine, if the model is to hear such recordings later. Else prefer the originals, if there are any.",
)


@check(LOW_RATE, needs=Needs.AUDIO, place=30)
def find_low_rate(material: Material) -> Iterator[Finding]:
    for row, facts in material.with_facts():
        if facts.rate < SAMPLE_RATE:
            yield of_row(LOW_RATE, row, f"{facts.rate:,} samples a second", badness=-facts.rate)
