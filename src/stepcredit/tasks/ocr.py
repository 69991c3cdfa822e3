"""``ocr``: prompts that ask for words in the picture, quoted; ours to train on, flow_grpo's published ones held out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from stepcredit import noise
from stepcredit.tasks import data
from stepcredit.tasks.base import Prompt

COUNT = 4000
"""Training prompts."""

_PLACES = (
    "A wooden shop sign above a cobbled street",
    "A chalkboard at the door of a small bakery",
    "A neon sign in the window of a late-night diner",
    "The cover of an old clothbound book",
    "A hand-painted banner across a village square",
    "A cardboard box on a workshop bench",
    "A concert poster on a brick wall",
    "A brass plate beside a heavy oak door",
    "A ceramic mug on a kitchen table",
    "A cotton tote bag on a coat hook",
    "The label of a green glass bottle",
    "A road sign at the edge of a pine forest",
    "The side of a delivery van in morning traffic",
    "A birthday cake with icing letters",
    "A paper ticket held between two fingers",
    "A scoreboard in an empty stadium",
    "A postcard pinned to a cork board",
    "A lighthouse door after the rain",
    "A train station display in the evening",
    "A sticker on the lid of a laptop",
)
_VERBS = ("that reads", "that says", "with the words", "showing the text", "marked")
_LIGHT = (
    "soft daylight",
    "warm evening light",
    "a cloudy sky in the background",
    "shallow depth of field",
    "a realistic photograph",
    "a detailed watercolour",
    "seen from close up",
    "seen from across the street",
)
# fmt: off
_FIRST = (
    "Silver", "Golden", "Quiet", "Happy", "Fresh", "Little", "Northern", "Hidden", "Brave", "Open", "Lucky", "Royal",
    "Winter", "Summer", "Crystal", "Copper", "Velvet", "Wild", "Early", "Second", "Paper", "Urban", "Amber",
    "Scarlet", "Gentle", "Hollow", "Rapid", "Sunny", "Modern", "Distant",
)
# fmt: on
# fmt: off
_SECOND = (
    "Harbor", "Garden", "Coffee", "Market", "River", "Library", "Kitchen", "Museum", "Bridge", "Orchard", "Theater",
    "Station", "Bakery", "Meadow", "Workshop", "Lantern", "Compass", "Valley", "Studio", "Island", "Castle",
    "Record", "Letter", "Village", "Signal", "Travel", "Forest", "Mountain", "Window", "Planet",
)
# fmt: on
_THIRD = ("Club", "House", "Days", "Street", "Co", "Week", "Show", "Lane", "Tour", "Room", "No 7", "Est 1924")


def train_prompts() -> list[Prompt]:
    """``COUNT`` training prompts in a fixed order, one, two or three quoted words each."""
    return list(_train())


def test_prompts() -> list[Prompt]:
    """The 1,018 published test prompts. Raises UserError if the file is absent."""
    return data.get("ocr").read()


def apart(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> list[Prompt]:
    """Training prompts whose quoted words, in upper or lower case, no prompt of ``heldout`` asks for."""
    asked = {quoted(prompt.text) for prompt in heldout}
    return [prompt for prompt in train if quoted(prompt.text) not in asked]


def quoted(text: str) -> str:
    """The first text in straight double quotes, in lower case and single spaces; the whole prompt if there is none."""
    found = re.search(r'"([^"]*)"', text)
    return " ".join((found[1] if found else text).casefold().split())


@cache
def _train() -> tuple[Prompt, ...]:
    prompts: dict[str, Prompt] = {}
    number = 0
    while len(prompts) < COUNT:
        random = noise.generator("ocr", number)
        place, verb, light, first, second, third = (
            options[int(random.integers(len(options)))]
            for options in (_PLACES, _VERBS, _LIGHT, _FIRST, _SECOND, _THIRD)
        )
        words = (second, f"{first} {second}", f"{first} {second} {third}")[min(int(random.integers(5)), 2)]
        prompt = Prompt(f'{place} {verb} "{words}", {light}')
        prompts.setdefault(prompt.text, prompt)
        number += 1
    return tuple(prompts.values())
