"""Cutting a document's text into chunks that a model takes whole, counted in its own tokens. Pure.

Who calls it: the intake of an indexing route, in a thread; `embedstream index`.
What must stay true: a chunk never has more tokens than asked for, special tokens and prompt aside;
the same text is cut the same way everywhere; nothing but white space is lost between chunks. Ends of
sentences and markdown headings are found by text-splitter (Rust); windows of tokens are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.indexing.late import Tokens, windows
from pipeline.indexing.options import ChunkOptions
from schemas.requests import Span, Text

Split = Callable[[str], list[Span]]


@dataclass(frozen=True, slots=True)
class Cut:
    """A document, cut. texts: its chunks; items: what the model reads, which has a vector for each
    chunk, in order."""

    texts: tuple[str, ...]
    items: tuple[Text, ...]


class Chunker:
    """Cuts texts for one model. Calls may come from any thread, one at a time.

    Args:
        tokenizer_json: the model's tokenizer, as `tokenizers` writes it.
        room: tokens that the model takes beside its special tokens and the prompt.

    Raises:
        ValueError: the options ask for more than the model takes, or need a package that is absent.
    """

    def __init__(self, options: ChunkOptions, *, tokenizer_json: str, room: int) -> None:
        from tokenizers import Tokenizer

        self.max_tokens = room if options.max_tokens is None else options.max_tokens
        if options.late and options.max_tokens is None:
            raise ValueError("chunk.late needs chunk.max_tokens: a chunk is a part of what is read")
        if self.max_tokens > room:
            raise ValueError(
                f"chunk.max_tokens is {self.max_tokens}, and the model takes {room} beside its "
                "special tokens and the prompt: ask for fewer"
            )
        if options.overlap * 2 > self.max_tokens:
            raise ValueError(
                f"chunk.overlap is {options.overlap}: at most half of a chunk, which has "
                f"{self.max_tokens} tokens"
            )
        self.options = options
        self._room = room
        self._tokenizer: Any = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # as the model's own encoder reads texts
        self._split: Split = self._windows if options.by == "tokens" else self._splitter(options.by)

    @property
    def described(self) -> str:
        """One line that stands beside the collection: collections cut alike compare alike."""
        options = self.options
        told = f"by={options.by} max_tokens={self.max_tokens} overlap={options.overlap}"
        return f"{told} late=true window={self._room}" if options.late else told

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return len(self._encode(text))

    def chunks(self, text: str) -> list[str]:
        """The chunks of a text, in order; none when no token comes of it."""
        text = text.strip()
        return [text[start:end] for start, end in self._spans(text)]

    def cut(self, text: str) -> Cut:
        """A document's chunks, and what the model reads to make their vectors."""
        text = text.strip()
        return self._cut_at(text, self._spans(text))

    def cut_again(self, texts: Sequence[str]) -> Cut:
        """The same of chunks that are cut already: each stays whole, unless it is longer than it may be."""
        text, spans = "", list[Span]()
        for one in texts:
            if text:
                text += "\n\n"
            fits = self.count(one) <= self.max_tokens
            spans += _moved([(0, len(one))] if fits else self._spans(one), len(text))
            text += one
        return self._cut_at(text, spans)

    def _cut_at(self, text: str, spans: list[Span]) -> Cut:
        if not self.options.late:
            texts = tuple(text[start:end] for start, end in spans)
            return Cut(texts, tuple(map(Text, texts)))
        encoding = self._encode(text)
        tokens = Tokens(encoding.offsets, encoding.word_ids)
        chunks = [(span, place) for span in spans if (place := tokens.holding(span)) is not None]
        items = windows(text, chunks, tokens, room=self._room, count=self.count)
        return Cut(tuple(text[start:end] for (start, end), _ in chunks), tuple(items))

    def _spans(self, text: str) -> list[Span]:
        """Where the chunks of a text lie in it; they begin and end with no white space."""
        if not text.strip():
            return []
        if self.options.by != "markdown" and (n := self.count(text)) <= self.max_tokens:
            return [_trimmed(text, 0, len(text))] if n else []
        fitting: list[Span] = []
        for start, end in self._split(text):
            fitting.extend(self._ensure(text, start, end))
        return fitting

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _ensure(self, text: str, start: int, end: int) -> list[Span]:
        """The piece, or windows of it where it is longer than it may be (a word of a thousand
        letters; a splitter that counts a token off)."""
        start, end = _trimmed(text, start, end)
        n_tokens = self.count(text[start:end])
        if n_tokens > self.max_tokens:
            return _moved(self._windows(text[start:end]), start)
        return [(start, end)] if n_tokens else []

    def _windows(self, text: str) -> list[Span]:
        """Windows of at most `max_tokens`, cut between words where one ends in the last half."""
        encoding = self._encode(text)
        offsets: Sequence[Span] = encoding.offsets
        words: Sequence[int | None] = encoding.word_ids
        found: list[Span] = []
        start, n_tokens = 0, len(offsets)
        while start < n_tokens:
            end = self._end(text, offsets, words, start)
            window = _trimmed(text, offsets[start][0], offsets[end - 1][1])
            if window[0] < window[1]:
                found.append(window)
            if end >= n_tokens:
                break
            start = max(self._word_start(words, end - self.options.overlap, end), start + 1)
        return found

    def _end(
        self,
        text: str,
        offsets: Sequence[Span],
        words: Sequence[int | None],
        start: int,
    ) -> int:
        """Where the window that starts at token `start` ends (exclusive)."""
        full = min(start + self.max_tokens, len(offsets))
        end = full
        if full < len(offsets):
            lowest = start + max(1, self.max_tokens // 2)
            while end > lowest and words[end] is not None and words[end] == words[end - 1]:
                end -= 1
            if end == lowest:
                end = full
        # A window alone may have more tokens than inside its text: half a word is spelled anew.
        while end - start > 1:
            window = text[offsets[start][0] : offsets[end - 1][1]].strip()
            excess = self.count(window) - self.max_tokens
            if excess <= 0:
                break
            end = max(start + 1, end - excess)
        return end

    @staticmethod
    def _word_start(words: Sequence[int | None], token: int, end: int) -> int:
        """The first token at or after `token` that begins a word, `token` itself when none does."""
        for at in range(token, end):
            if words[at] is None or words[at] != words[at - 1]:
                return at
        return token

    def _splitter(self, by: str) -> Split:
        try:
            import semantic_text_splitter as text_splitter
        except ImportError as error:
            raise ValueError(
                f"chunk.by is '{by}' and semantic-text-splitter is not installed: "
                "pip install 'embedstream[index]', or chunk.by = 'tokens'"
            ) from error
        kind: Any = (
            text_splitter.MarkdownSplitter if by == "markdown" else text_splitter.TextSplitter
        )
        splitter: Any = kind.from_huggingface_tokenizer(
            self._tokenizer, self.max_tokens, self.options.overlap
        )
        return lambda text: [
            (start, start + len(piece)) for start, piece in splitter.chunk_indices(text)
        ]


def _trimmed(text: str, start: int, end: int) -> Span:
    """Without the white space at both ends."""
    piece = text[start:end]
    return start + len(piece) - len(piece.lstrip()), max(start, start + len(piece.rstrip()))


def _moved(spans: Sequence[Span], by: int) -> list[Span]:
    return [(start + by, end + by) for start, end in spans]
