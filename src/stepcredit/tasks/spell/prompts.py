"""Prompts of ``spell``: random letters to train on, English words held out, three or four letters each."""

from __future__ import annotations

import re
import string
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from stepcredit import noise
from stepcredit.tasks.base import Prompt

LENGTHS = (3, 4)
"""Letters of a word."""
COUNT = 20_000
"""Training prompts."""
PADDING = "<pad>"

_WORD = re.compile(r'"([A-Z]+)"')

_THREE = """
    ACE ADD AGE AIM AIR ANT APE ARC ARM ART ASH BAG BAR BAT BAY BEE BIG BOX BUD BUS CAB CAP CAR CAT COW CUP DAY DEW
    DIM DOG DOT DRY EAR EAT EGG ELF ELM EYE FAN FAR FIG FIN FIR FIX FLY FOG FOX FUN GAS GEM GUM HAT HAY HEN HOP HUB
    ICE INK INN IVY JAM JAR JET JOY JUG KEY KID KIT LAB LAP LAW LEG LID LIP LOG MAP MIX MUD MUG NAP NET NEW NOD NUT
    OAK OAR OIL OLD ONE OWL PAN PEA PEN PET PIE PIN POT RAY RED RIB ROW RUG RUN SAP SEA SKY SUN TAP TEA TEN TOE TOY
    TUB VAN VET WAX WEB WIG YAK YAM ZIP ZOO
"""
_FOUR = """
    ACID ALSO ARCH AUNT AXLE BABY BAKE BALL BARN BEAM BEAR BELL BIRD BLUE BOAT BOLD BOOK BULB CAKE CALM CAMP CARD CAVE
    CLAY COAL COAT COIN CORN CRAB CUBE DAWN DEER DESK DIAL DOVE DRUM DUCK DUNE DUSK EAST ECHO EDGE EXIT FACE FARM FERN
    FISH FLAG FOAM FORK FROG GATE GIFT GLOW GOAT GOLD GRID HAND HARP HAWK HERB HILL HOME HORN HUSH IDEA IRIS IRON ISLE
    JADE JAZZ JOKE JUMP KELP KING KITE KIWI KNOT LAKE LAMB LAMP LEAF LENS LIME LION LOFT LUNG MAST MILK MINT MOON MOSS
    MOTH NAVY NEST NINE NOON NOTE OATH OBOE OPAL OVAL OVEN PALM PARK PATH PEAR PINE PLUM POEM POND QUAY QUIZ RAFT RAIN
    REEF RICE ROAD ROCK ROOF ROPE ROSE RUBY SAIL SALT SAND SEED SHIP SILK SNOW SOAP SOIL SONG STAR SURF SWAN TENT TIDE
    TOAD TREE TUNA TWIG UNIT VASE VEIL VINE VOTE WAVE WEST WIND WOLF WOOD WREN YARD YARN YEAR ZERO ZONE
"""


@cache
def vocabulary() -> tuple[str, ...]:
    """The padding and the letters, in a fixed order. Saved weights depend on this order."""
    return (PADDING, *string.ascii_uppercase)


def tokenize(texts: Sequence[str], length: int = LENGTHS[-1]) -> Tensor:
    """Numbers of the letters between straight double quotes: B texts -> int64 ``[B, length]``, padded with 0.

    An empty text is all padding. Raises ValueError for a text without exactly one quoted word of A-Z, or with a longer
    one.
    """
    tokens = torch.zeros(len(texts), length, dtype=torch.long)
    for row, text in enumerate(texts):
        if not text:
            continue
        words = _WORD.findall(text)
        if len(words) != 1 or len(words[0]) > length:
            raise ValueError(f'prompt {text!r} must quote one word of at most {length} capital letters, as in "SUN"')
        tokens[row, : len(words[0])] = torch.tensor([ord(letter) - ord("A") + 1 for letter in words[0]])
    return tokens


def prompt_of(word: str) -> Prompt:
    """The prompt that asks for a word."""
    text = f'the word "{word}"'
    return Prompt(text, {"tag": f"{len(word)} letters", "text": word, "prompt": text})


def train_prompts() -> list[Prompt]:
    """``COUNT`` prompts for random letters, half of each length, none of them held out."""
    return list(_train())


def heldout_prompts() -> list[Prompt]:
    """Prompts for English words, which are never trained on."""
    return [prompt_of(word) for word in _heldout()]


def _heldout() -> tuple[str, ...]:
    return (*_THREE.split(), *_FOUR.split())


@cache
def _train() -> tuple[Prompt, ...]:
    out, chosen = set(_heldout()), dict.fromkeys(LENGTHS, 0)
    words: dict[str, None] = {}
    random = noise.generator("spell")
    for length in LENGTHS:
        while chosen[length] < COUNT // len(LENGTHS):
            word = "".join(string.ascii_uppercase[k] for k in random.integers(26, size=length))
            if word not in out and word not in words:
                words[word] = None
                chosen[length] += 1
    return tuple(prompt_of(word) for word in words)
