"""Cutting a document's text into chunks that a model takes whole, counted in its own tokens. Pure.

Who calls it: the intake of an indexing route, in a thread; `embedstream index`.
What must stay true: a chunk never has more tokens than asked for, special tokens and prompt aside;
the same text is cut the same way everywhere; nothing but white space is lost between chunks. Ends of
sentences and markdown headings are found by text-splitter (Rust); windows of tokens are ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pipeline.indexing.options import ChunkOptions

Split = Callable[[str], list[str]]


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
        self._tokenizer: Any = Tokenizer.from_str(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = True  # as the model's own encoder reads texts
        self._split: Split = self._windows if options.by == "tokens" else self._splitter(options.by)

    @property
    def described(self) -> str:
        """One line that stands beside the collection: collections cut alike compare alike."""
        return f"by={self.options.by} max_tokens={self.max_tokens} overlap={self.options.overlap}"

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return len(self._encode(text))

    def chunks(self, text: str) -> list[str]:
        """The chunks of a text, in order; none when no token comes of it."""
        text = text.strip()
        if not text:
            return []
        if self.options.by != "markdown" and (n := self.count(text)) <= self.max_tokens:
            return [text] if n else []
        fitting: list[str] = []
        for piece in self._split(text):
            fitting.extend(self._ensure(piece))
        return fitting

    def _encode(self, text: str) -> Any:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def _ensure(self, piece: str) -> list[str]:
        """The piece, or windows of it where it is longer than it may be (a word of a thousand
        letters; a splitter that counts a token off)."""
        piece = piece.strip()
        if not piece:
            return []
        n_tokens = self.count(piece)
        if n_tokens > self.max_tokens:
            return self._windows(piece)
        return [piece] if n_tokens else []

    def _windows(self, text: str) -> list[str]:
        """Windows of at most `max_tokens`, cut between words where one ends in the last half."""
        encoding = self._encode(text)
        offsets: Sequence[tuple[int, int]] = encoding.offsets
        words: Sequence[int | None] = encoding.word_ids
        windows: list[str] = []
        start, n_tokens = 0, len(offsets)
        while start < n_tokens:
            end = self._end(text, offsets, words, start)
            window = text[offsets[start][0] : offsets[end - 1][1]].strip()
            if window:
                windows.append(window)
            if end >= n_tokens:
                break
            start = max(self._word_start(words, end - self.options.overlap, end), start + 1)
        return windows

    def _end(
        self,
        text: str,
        offsets: Sequence[tuple[int, int]],
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
        return lambda text: list(splitter.chunks(text))
