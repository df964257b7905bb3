"""Sentences that people say to the things in their home: a small grammar, a vocabulary of some 220 words."""

import random

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
    """`count` different sentences, none of them in `without`."""
    rng = random.Random(seed)
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        text = _fill(rng.choice(TEMPLATES), rng)
        if text not in without:
            chosen[text] = None
    return list(chosen)


def _fill(text: str, rng: random.Random) -> str:
    while "{" in text:
        start, end = text.index("{"), text.index("}")
        text = text[:start] + rng.choice(WORDS[text[start + 1 : end]].split("|")) + text[end + 1 :]
    return text
