"""The prompt that goes before each text: which one, and how much of it is ids already.

Who calls it: `text.TextEncoder`. Pure.
What must stay true: control tokens come only from the folder's and the settings' prompts, as ids; a
prompt that a request spells out is text like any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gpu.batch import Int32
from gpu.encode.control import ControlTokens
from gpu.folder.spec import ModelSpec
from schemas.errors import Unsupported
from schemas.requests import ClassifyRequest, EmbedRequest

NO_IDS = np.zeros(0, dtype=np.int32)


class Prompts:
    """Those of one model."""

    def __init__(self, spec: ModelSpec, control: ControlTokens) -> None:
        self._spec = spec
        written: Mapping[Any, str] = spec.prompts if spec.chat is None else spec.chat.before
        self._split = {name: control.split_prompt(name, text) for name, text in written.items()}

    def as_lists(self) -> Any:
        """Name -> ids that stand for its beginning; what the fingerprint must know."""
        if self._spec.chat is not None:
            return [[name, lead.tolist(), rest] for name, (lead, rest) in self._split.items()]
        return {name: lead.tolist() for name, (lead, _) in self._split.items()}

    def text(self, request: EmbedRequest | ClassifyRequest) -> str | None:
        """The prompt to put before each text; None when there is none. Raises `Unsupported`."""
        if request.prompt is not None and self._spec.chat is not None:
            raise Unsupported(
                "this model's prompts stand inside a chat template; name one in `prompt_name`",
                path="$.prompt",
            )
        if request.prompt is not None:
            return request.prompt
        known = self._spec.prompts
        name = request.prompt_name
        if name is None:
            name = self._spec.default_prompt_name
            return None if name is None else known[name]
        if name not in known:
            names = ", ".join(sorted(known)) or "none"
            raise Unsupported(
                f"the model has no prompt of that name; it has: {names}", path="$.prompt_name"
            )
        return known[name]

    def lead(self, name: str | None, prompt: str | None) -> tuple[Int32, str | None]:
        """The ids of a prompt up to its last control token, and the text that is left; of a ColBERT
        model also the token that stands for a prompt's beginning."""
        if self._spec.chat is not None:
            lead, rest = self._split[name]
            return lead, rest or None
        multivector = self._spec.multivector
        for known, token, text in () if multivector is None else multivector.prefix_ids:
            if known == name and prompt is not None and prompt.startswith(text):
                return np.array([token], dtype=np.int32), prompt[len(text) :] or None
        if name is None or prompt is None:
            return NO_IDS, prompt
        lead, rest = self._split[name]
        return lead, rest or None
