"""Where a tokenizer puts its special tokens, learnt once, so that content can be cut without them.

Who calls it: `gpu.encode.text`, which tokenizes content alone and assembles sequences itself.
What must stay true: `single(content)` and `pair(a, b)` give exactly the ids and segment ids of the
tokenizer's own post-processor; special tokens are never part of what is cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.batch import Int32
from gpu.faults import ModelLoadError

_SAMPLES = ("a", "the", "hello", "1", "x", "e")


@dataclass(frozen=True, slots=True, eq=False)
class Template:
    """Special tokens around one text, and around and between two. All [n] int32; may be empty.

    The `*_types` are segment ids; type_a / type_b are those of the two contents.
    """

    prefix: Int32
    suffix: Int32
    pair_prefix: Int32
    pair_middle: Int32
    pair_suffix: Int32
    pair_prefix_types: Int32
    pair_middle_types: Int32
    pair_suffix_types: Int32
    type_a: int
    type_b: int

    @property
    def n_single(self) -> int:
        """Special tokens of a single text."""
        return len(self.prefix) + len(self.suffix)

    @property
    def n_pair(self) -> int:
        """Special tokens of a pair."""
        return len(self.pair_prefix) + len(self.pair_middle) + len(self.pair_suffix)

    def as_lists(self, *, pairs: bool, types: bool) -> list[Any]:
        """Plain values, for the fingerprint. pairs: those of a pair too; types: and its segment ids."""
        fields = [name for name in self.__slots__ if pairs or not name.startswith(("pair", "type"))]
        fields = [name for name in fields if types or "type" not in name]
        return [
            value.tolist() if isinstance(value, np.ndarray) else value
            for value in (getattr(self, field) for field in fields)
        ]

    def single(self, content: Int32) -> Int32:
        """[n] int32 -> [n + n_single] int32."""
        return np.concatenate((self.prefix, content, self.suffix))

    def pair_head(self, a: Int32) -> tuple[Int32, Int32]:
        """Ids and segment ids up to where the second content starts."""
        ids = np.concatenate((self.pair_prefix, a, self.pair_middle))
        types = np.concatenate(
            (self.pair_prefix_types, np.full(len(a), self.type_a, np.int32), self.pair_middle_types)
        )
        return ids, types

    def pair(self, head: tuple[Int32, Int32], b: Int32) -> tuple[Int32, Int32]:
        """A whole pair from its head (see `pair_head`) and the second content."""
        ids, types = head
        return (
            np.concatenate((ids, b, self.pair_suffix)),
            np.concatenate((types, np.full(len(b), self.type_b, np.int32), self.pair_suffix_types)),
        )


def learn_template(tokenizer: Any, *, special_tokens: bool = True) -> Template:
    """Read the template off the tokenizer's own output for a sample, and check it on others.

    special_tokens: False for a folder whose library tokenizes without them. Raises `ModelLoadError` when the post-processor is not of the form "specials around content".
    """
    sample = _sample(tokenizer)
    single = tokenizer.encode(sample, add_special_tokens=special_tokens)
    pair = tokenizer.encode(sample, sample, add_special_tokens=special_tokens)
    first = _span(single, 0)
    a, b = _span(pair, 0), _span(pair, 1)
    template = Template(
        prefix=_array(single.ids[: first[0]]),
        suffix=_array(single.ids[first[1] :]),
        pair_prefix=_array(pair.ids[: a[0]]),
        pair_middle=_array(pair.ids[a[1] : b[0]]),
        pair_suffix=_array(pair.ids[b[1] :]),
        pair_prefix_types=_array(pair.type_ids[: a[0]]),
        pair_middle_types=_array(pair.type_ids[a[1] : b[0]]),
        pair_suffix_types=_array(pair.type_ids[b[1] :]),
        type_a=int(pair.type_ids[a[0]]),
        type_b=int(pair.type_ids[b[0]]),
    )
    _verify(tokenizer, template, sample, special_tokens)
    return template


def _sample(tokenizer: Any) -> str:
    candidates = [*_SAMPLES, *list(tokenizer.get_vocab())[:2000]]
    for text in candidates:
        if tokenizer.encode(text, add_special_tokens=False).ids:
            return str(text)
    raise ModelLoadError("the tokenizer gives no token for any text of its own vocabulary")


def _span(encoding: Any, sequence: int) -> tuple[int, int]:
    """[start, end) of one content, which must be in one piece."""
    places = [
        i
        for i, (owner, special) in enumerate(
            zip(encoding.sequence_ids, encoding.special_tokens_mask, strict=True)
        )
        if owner == sequence and not special
    ]
    if not places or places != list(range(places[0], places[-1] + 1)):
        raise ModelLoadError("the tokenizer's post-processor is no template around whole texts")
    return places[0], places[-1] + 1


def _verify(tokenizer: Any, template: Template, sample: str, special_tokens: bool) -> None:
    longer = f"{sample} {sample} {sample}"
    a, b = (
        _array(tokenizer.encode(text, add_special_tokens=False).ids) for text in (longer, sample)
    )
    ids, types = template.pair(template.pair_head(a), b)
    pair = tokenizer.encode(longer, sample, add_special_tokens=special_tokens)
    single = tokenizer.encode(longer, add_special_tokens=special_tokens)
    if (
        template.single(a).tolist() != single.ids
        or ids.tolist() != pair.ids
        or types.tolist() != pair.type_ids
    ):
        raise ModelLoadError("the tokenizer's post-processor is no template around whole texts")


def _array(values: list[int]) -> Int32:
    return np.asarray(values, dtype=np.int32)
