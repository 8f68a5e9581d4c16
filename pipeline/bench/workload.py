"""What is asked: texts of a file, or texts of given lengths. Pure.

Who calls it: `pipeline.bench.load`.
What must stay true: the same seed asks the same; texts of a mix are made of common words, one token
each in most vocabularies, and what is reported are the tokens that the model counted.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_COMMON = """
the of and to in a is that for it as was with be by on not he his but at are this have from or
had an they which one you were her all she there would their we him been has when who will more
no if out so said what up its about into than them can only other new some could time these two
may then do first any my now such like our over man me even most made after also did many before
must through back years where much your way well down should because each just those people
"""
WORDS = tuple(_COMMON.split())

DEFAULT_MIX = "16:4,64:4,256:1"
SPECIAL_TOKENS = 2
"""A text of so many fewer words has the tokens that were asked for, in models of BERT's kind."""


@dataclass(frozen=True, slots=True)
class Mix:
    """Token lengths and how often each is drawn."""

    lengths: tuple[int, ...]
    weights: tuple[float, ...]

    @staticmethod
    def parse(text: str) -> Mix:
        """``16:4,256:1``: four texts of 16 tokens to one of 256. Raises `ValueError`."""
        lengths: list[int] = []
        weights: list[float] = []
        for part in text.split(","):
            length, _, weight = part.strip().partition(":")
            try:
                lengths.append(int(length))
                weights.append(float(weight or 1))
            except ValueError:
                raise ValueError(f"{part!r} is no LENGTH:SHARE, as in {DEFAULT_MIX}") from None
            if not (3 <= lengths[-1] <= 1_000_000 and 0 < weights[-1] < 1e9):
                raise ValueError(f"{part!r}: a length of 3 and more, and a share above 0")
        return Mix(tuple(lengths), tuple(weights))

    def texts(self, seed: int) -> Iterator[str]:
        """Endless; no two are alike, but by chance."""
        rng = random.Random(seed)
        while True:
            (length,) = rng.choices(self.lengths, self.weights)
            yield " ".join(rng.choices(WORDS, k=length - SPECIAL_TOKENS))


def texts_of(path: Path) -> tuple[str, ...]:
    """The lines of a file: texts, or JSON objects with a text in `input` or `text`.

    Raises `ValueError` for a line that is neither, and for a file without texts.
    """
    found: list[str] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            line = line.strip()
            if not line:
                continue
            if line.startswith("{"):
                found.append(_text_in(line, number))
            else:
                found.append(line)
    if not found:
        raise ValueError(f"{path} holds no text")
    return tuple(found)


def _text_in(line: str, number: int) -> str:
    try:
        record = json.loads(line)
        text = record.get("input", record.get("text"))
    except (ValueError, AttributeError, RecursionError):
        text = None
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f"line {number} has no text in `input` or `text`")
    return text


def endless(texts: Sequence[str], seed: int) -> Iterator[str]:
    """A file's texts, over and over, in another order each time."""
    rng = random.Random(seed)
    order = list(texts)
    while True:
        rng.shuffle(order)
        yield from order
