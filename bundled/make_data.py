"""Speak the bundled data set: English read out by a voice that the bundled checkpoint has never heard.

Its sentences are what people say to the things in their home: a small grammar, a vocabulary of some 220 words.

    python -m bundled.make_data bundled/data

Needs espeak-ng; the same version of it gives the same speech again.
"""

import argparse
import csv
import io
import random
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import soxr

SAMPLE_RATE = 16_000

VOICE = "hu"
SPLITS = {"train": 240, "validation": 30, "test": 60}
SEED = 2024

WORDS = {
    "room": "kitchen|bedroom|bathroom|hallway|garden|garage|office|living room|cellar|nursery",
    "thing": "light|lamp|heater|radio|fan|television|camera|speaker|dishwasher|oven",
    "opening": "window|door|gate|curtains|shutters|blinds",
    "item": "milk|bread|butter|apples|coffee|cheese|sugar|onions|rice|potatoes|chicken|soap|flour|lemons",
    "name": "Anna|Peter|Martha|David|Oliver|Julia|Henry|Sophie|my sister|my brother|the doctor|grandmother",
    "city": "London|Paris|Berlin|Dublin|Madrid|Boston|Sydney|Vienna|Oslo|Chicago",
    "day": "Monday|Tuesday|Wednesday|Thursday|Friday|Saturday|Sunday",
    "when": "tomorrow|tonight|this evening|this morning|next week|on {day}|after lunch|before dinner",
    "music": "jazz|rock|classical music|folk songs|the news|my favourite album|something quiet|piano music",
    "colour": "red|green|blue|yellow|orange|purple|white",
    "task": "water the plants|feed the cat|pay the rent|clean the car|buy a present|walk the dog|take out the rubbish|"
    "book the tickets|charge the phone|wash the windows",
    "message": "I am running late|dinner is ready|the train is delayed|we are at home|the parcel has arrived|"
    "the keys are under the mat|the meeting is over",
    "number": "two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|fifteen|twenty|thirty|forty|fifty|sixty",
    "hour": "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve",
    "minute": "fifteen|twenty|thirty|forty five|o'clock|ten",
    "unit": "seconds|minutes|hours",
    "dish": "soup|pancakes|a cake|fish|pasta|scrambled eggs",
}

TEMPLATES = """
Turn on the {thing} in the {room}.
Turn off the {room} {thing}.
Switch the {thing} off {when}.
Is the {thing} in the {room} still on?
Open the {opening} in the {room}.
Close the {room} {opening} at {hour} {minute}.
Lock the {opening} {when}.
Make the {room} {thing} {colour}.
Set the {room} to {number} degrees.
Set a timer for {number} {unit}.
Wake me at {hour} {minute} {when}.
Remind me to {task} {when}.
Remind {name} to {task} in {number} {unit}.
Add {item} and {item} to the shopping list.
We need {number} bags of {item} and some {item}.
Remove the {item} from my list.
Call {name} {when}.
Tell {name} that {message}.
What will the weather be in {city} {when}?
How far is it from {city} to {city}?
What time is it in {city}?
When does the train to {city} leave on {day}?
Play {music} in the {room}.
Stop the {room} {thing} in {number} {unit}.
How do I cook {dish} with {item} and {item}?
Start the {thing} at {hour} {minute}.
Cancel the {hour} {minute} alarm on {day}.
Ask {name} to buy {number} bags of {item}.
Turn the volume of the {thing} down to {number}.
Did {name} {task} on {day}?
""".strip().splitlines()


def sentences(count: int, seed: int, without: frozenset[str] = frozenset()) -> list[str]:
    """Make `count` different sentences, none of them in `without`."""
    rng = random.Random(seed)
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        text = rng.choice(TEMPLATES)
        while "{" in text:
            start, end = text.index("{"), text.index("}")
            text = text[:start] + rng.choice(WORDS[text[start + 1 : end]].split("|")) + text[end + 1 :]
        if text not in without:
            chosen[text] = None
    return list(chosen)


@dataclass(frozen=True, kw_only=True)
class Speaker:
    voice: str  # espeak-ng voice, with an optional variant: "en-gb", "en-us+f2"
    words_per_minute: int = 170
    pitch: int = 50  # 0 to 99


def speak(text: str, speaker: Speaker) -> np.ndarray:
    """float32 [n] at 16 kHz, in -1..1."""
    command = ["espeak-ng", "--stdout", "-v", speaker.voice, "-s", str(speaker.words_per_minute)]
    command += ["-p", str(speaker.pitch), "--", text]
    wav = subprocess.run(command, check=True, capture_output=True).stdout
    audio, rate = soundfile.read(io.BytesIO(wav), dtype="float32")
    audio = soxr.resample(audio, rate, SAMPLE_RATE)
    return audio / max(np.abs(audio).max(), 1e-3) * 0.7


def dataset_sentences() -> dict[str, list[str]]:
    """Return the sentences of each split; no sentence is in two of them."""
    texts = iter(sentences(sum(SPLITS.values()), SEED))
    return {split: [next(texts) for _ in range(count)] for split, count in SPLITS.items()}


def make_split(folder: Path, split: str, texts: list[str], voice: str) -> float:
    """Write the clips and the manifest of one split, spoken by espeak-ng's `voice`; returns its seconds of speech."""
    rng = random.Random(f"{SEED} {split}")
    (folder / split).mkdir(parents=True, exist_ok=True)
    rows = []
    for number, text in enumerate(texts):
        audio = speak(text, Speaker(voice=voice, words_per_minute=rng.randint(150, 190), pitch=rng.randint(35, 65)))
        path = f"{split}/{number:03d}.ogg"
        soundfile.write(folder / path, audio, SAMPLE_RATE, format="OGG", subtype="VORBIS", compression_level=1.0)
        rows.append([f"{split}-{number:03d}", path, text, f"{len(audio) / SAMPLE_RATE:.3f}"])
    with (folder / f"{split}.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["id", "audio_path", "transcription", "duration_s"], *rows])
    return sum(float(row[-1]) for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--voice", default=VOICE, help="of espeak-ng, such as en-gb, which the checkpoint knows")
    args = parser.parse_args()
    version = subprocess.run(["espeak-ng", "--version"], check=True, capture_output=True, text=True).stdout
    print(version.split("  ")[0])
    for split, texts in dataset_sentences().items():
        print(f"{split}: {len(texts)} clips, {make_split(args.out, split, texts, args.voice) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
