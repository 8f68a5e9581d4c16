"""Control tokens come from the owner and the operator, never from a sender.

Who calls it: `gpu.encode.text`, once at load; `spell` for every text that a sender wrote.
What must stay true: no text of a sender yields a control id, whatever the tokenizer's model (a
Unigram model holds `</s>` as a piece like any other, so it would); a prompt of the folder or of the
settings may hold control tokens, and gives the ids that its library gives. The tokenizer is not changed
after load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from gpu.batch import Int32
from gpu.faults import ModelLoadError

_NO_IDS = np.zeros(0, dtype=np.int32)
_PROBES = (("", ""), ("a", "b"), ("a ", " b"), ("", " hello"), ("hello\n", ""), (">", "<"))
_TEXTS = ("a", "hello world", "What is it?", " x", "1 river")


class ControlToken(NamedTuple):
    """One in a text of the owner's; strips: it takes the white space beside it."""

    id: int
    strips_left: bool
    strips_right: bool


class ControlTokens:
    """The control tokens of one tokenizer. Raises `ModelLoadError` for one that a text would yield.

    tokenizer: a `tokenizers.Tokenizer` whose `encode_special_tokens` is on, so that its *added* special
    tokens are text already. model: that part of its JSON. spelled: those that came through all the same and are written out instead.
    """

    def __init__(self, tokenizer: Any, model: Mapping[str, Any]) -> None:
        self._tokenizer = tokenizer
        self._added = {
            token.content: (int(i), token.lstrip, token.rstrip)
            for i, token in tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        unknown = _unknown(tokenizer, model)
        # A control token of one character is an ordinary character as well (a pad token "!").
        self._ids = {
            text: found[0]
            for text, found in self._added.items()
            if len(text) > 1 and text != unknown
        }
        self._replacements: dict[int, Int32] = {}
        self._leaky: npt.NDArray[np.bool_] | None = None
        leaks = [text for text in self._ids if self._comes_through(text)]
        self._replacements = {self._ids[text]: self._written_out(text) for text in leaks}
        if leaks:
            size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
            self._leaky = np.zeros(size, dtype=np.bool_)
            self._leaky[list(self._replacements)] = True
        left = [text for text in self._ids if self._comes_through(text)]
        if left:
            raise ModelLoadError(
                f"the tokenizer gives the control token {left[0]!r} for that text inside a sender's text, "
                "and it cannot be written out in smaller pieces"
            )
        self.spelled = tuple(leaks)

    def as_lists(self) -> list[Any]:
        """What is written out instead of which id, for the fingerprint."""
        return sorted([i, ids.tolist()] for i, ids in self._replacements.items())

    def spell(self, ids: Int32) -> Int32:
        """[n] -> [m] int32: ids of a sender's text, with pieces that are control tokens written out."""
        if self._leaky is None or not self._leaky[ids].any():
            return ids
        parts = [self._replacements.get(int(i), np.asarray([i], dtype=np.int32)) for i in ids]
        return np.concatenate(parts).astype(np.int32, copy=False)

    def places(self, ids: Int32) -> npt.NDArray[np.int64]:
        """[n] ids -> [n + 1]: where each stands in what `spell` makes of them, and where that ends."""
        lengths = [len(self._replacements.get(int(i), (0,))) for i in ids]
        return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))

    def constant(self, text: str) -> Int32:
        """Ids of the owner's text behind a sender's. It has to start with a control token that strips
        nothing, so that the two never join. Raises `ModelLoadError`."""
        first = re.match(self._pattern(), text) if self._added else None
        if text and (first is None or self._added[first.group()][1]):
            raise ModelLoadError(
                "the folder's chat template goes on behind a text without a control token, so the two would "
                "be tokenized as one; that is not supported"
            )
        return self.parsed(text)

    def split(self, text: str) -> list[str | ControlToken]:
        """The owner's text, its control tokens apart."""
        if not self._added:
            return [text]
        pieces = re.split(f"({self._pattern()})", text)
        return [
            ControlToken(*self._added[piece]) if place % 2 else piece
            for place, piece in enumerate(pieces)
        ]

    def split_prompt(self, name: str | None, prompt: str) -> tuple[Int32, str]:
        """(ids up to the last control token, the text behind it, which meets the sender's text).

        Raises `ModelLoadError` when tokenizing the two apart would give other ids than the library's.
        """
        place = self._end_of_last(prompt)
        if place == 0:
            return _NO_IDS, prompt
        lead, rest = self.parsed(prompt[:place]), prompt[place:]
        if self._strips_right(prompt[:place]):
            rest = rest.lstrip()
        for text in _TEXTS:
            apart = [*lead.tolist(), *self.text_ids(rest + text).tolist()]
            if apart != self.parsed(prompt + text).tolist():
                raise ModelLoadError(
                    f"the tokenizer joins texts across the control tokens of the prompt {name!r}; write "
                    "that prompt without them"
                )
        return lead, rest

    # -- at load ------------------------------------------------------------------------------

    def _end_of_last(self, prompt: str) -> int:
        found = (
            [match.end() for match in re.finditer(self._pattern(), prompt)] if self._added else []
        )
        return max(found, default=0)

    def _pattern(self) -> str:
        return "|".join(re.escape(text) for text in sorted(self._added, key=len, reverse=True))

    def _strips_right(self, lead: str) -> bool:
        last = next(
            text for text in sorted(self._added, key=len, reverse=True) if lead.endswith(text)
        )
        return bool(self._added[last][2])

    def parsed(self, text: str) -> Int32:
        """The owner's text, control tokens parsed. At load only: it switches the tokenizer."""
        self._tokenizer.encode_special_tokens = False
        try:
            return self._encode(text)
        finally:
            self._tokenizer.encode_special_tokens = True

    def text_ids(self, text: str) -> Int32:
        """A sender's text."""
        return self.spell(self._encode(text))

    def _encode(self, text: str) -> Int32:
        return np.asarray(
            self._tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32
        )

    def _comes_through(self, text: str) -> bool:
        control = self._ids[text]
        return any(
            control in self.text_ids(before + part + after).tolist()
            for before, after in _PROBES
            for part in (text, text + text)
        )

    def _written_out(self, text: str) -> Int32:
        """The shortest way to write the token in two pieces or more, by the tokenizer's own model."""
        model = self._tokenizer.model
        control = set(self._ids.values())
        ways = []
        for at in range(1, len(text)):
            ids = [*_written(model, text[:at]), *_written(model, text[at:])]
            if ids and not control.intersection(ids):
                ways.append(ids)
        if not ways:
            raise ModelLoadError(
                f"the tokenizer gives the control token {text!r} for that text inside a sender's text, "
                "and it cannot be written out in smaller pieces"
            )
        return np.asarray(min(ways, key=len), dtype=np.int32)


def _written(model: Any, text: str) -> list[int]:
    """Ids by the tokenizer's model alone; none where it has no unknown token to write the text with."""
    try:
        return [token.id for token in model.tokenize(text)]
    except Exception:  # noqa: BLE001 - the library raises plain Exception
        return []


def _unknown(tokenizer: Any, model: Mapping[str, Any]) -> str | None:
    """The token that stands for unknown text, which any text may yield."""
    if model.get("unk_token") is not None:
        return str(model["unk_token"])
    if isinstance(model.get("unk_id"), int):
        found: str | None = tokenizer.id_to_token(model["unk_id"])
        return found
    return None
