"""A second opinion: the same texts through the model's own library and through us, compared.

Who calls it: `embedstream check --verify`, with a loaded runner; never `serve`.
What must stay true: the library reads the folder itself, and gets nothing from our reading of it; a model that
it cannot give an opinion on is said to have none, never called right.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu.batch import Float32, Runner, pack, scatter
from gpu.folder.latent import LatentSpec
from gpu.folder.outputs import SpladeSpec
from gpu.folder.spec import ModelSpec
from gpu.folder.static import MODEL2VEC
from gpu.folder.stored import read_json
from schemas.errors import EmbedstreamError, EmptyInput
from schemas.requests import ClassifyRequest, Document, EmbedRequest, RerankRequest, Text, Truncate

TEXTS = (
    " . ",
    "a",
    "What is the capital of France?",
    "THE QUICK BROWN FOX",
    "na\u00efve caf\u00e9 \u00fcber stra\u00dfe",
    "\u4e2d\u6587\u548c\u65e5\u672c\u8a9e\u306e\u6587\u7ae0",
    "emoji \U0001f600 and \U0001f1eb\U0001f1f7",
    "tabs\tand\nnew lines  and   spaces",
    "https://example.org/a?b=c&d=1 0x1F 3.14159",
    "query: passage: represent this sentence: instruct",
    "def f(x):\n    return x[0] + {1: 2}[x]",
    "a long text of many words " * 120,
)
"""Near-empty, long, upper case, accents, other scripts, emoji, white space, code, words of prompts."""
TOLERANCE = (
    1e-4  # of float32 on the CPU, absolute, for vectors of length 1; logits relative to their size
)


@dataclass(frozen=True, slots=True)
class Opinion:
    """library: whose; worst: the largest difference of any component, None without an opinion."""

    library: str
    worst: float | None = None
    why: str = ""

    @property
    def agrees(self) -> bool:
        return self.worst is not None and self.worst <= TOLERANCE

    def told(self) -> str:
        """One line for `check`."""
        if self.worst is None:
            return f"second opinion: none, {self.why}"
        verdict = "agrees" if self.agrees else "DIFFERS"
        return (
            f"second opinion: {self.library} {verdict}, worst difference {self.worst:.1e} "
            f"over {len(TEXTS)} texts"
        )


def second_opinion(runner: Runner) -> Opinion:
    """The worst difference to what the model's library gives for `TEXTS`; texts that are too long are
    cut on both sides, special tokens in texts are left out (the libraries parse them, we do not)."""
    spec: ModelSpec | None = getattr(runner, "spec", None)
    if spec is None:
        return Opinion("", why="the model has no folder")
    library = "model2vec" if spec.model_type == MODEL2VEC else "sentence-transformers"
    if importlib.util.find_spec(library.replace("-", "_")) is None:
        return Opinion("", why=f"{library} is not installed")
    compare = _comparison(spec)
    if isinstance(compare, str):
        return Opinion(library, why=compare)
    try:
        return Opinion(library, compare(runner, spec))
    except Exception as error:  # noqa: BLE001 - another library's failure is no verdict on us
        line = (str(error).strip().splitlines() or [""])[0][:200]
        return Opinion(library, why=f"it failed: {type(error).__name__}: {line}")


def _comparison(spec: ModelSpec) -> Callable[[Runner, ModelSpec], float] | str:
    """How to compare; a text: why not."""
    if spec.model_type == MODEL2VEC:
        return _static
    if spec.label_head is not None:
        return "label tokens are compared in the test suite alone"
    if spec.adapter is not None:
        return "its library loads adapters through peft, with which the test suite compares"
    if spec.multivector is not None:
        return _token_vectors if spec.dimensions is None else _vectors
    if isinstance(spec.sparse, SpladeSpec | LatentSpec):
        return _sparse
    if "rerank" in spec.tasks:
        return _scores
    if spec.head:
        return _labels
    if not (spec.folder / "modules.json").is_file():
        return "the folder names no modules, so its library would guess the pooling"
    return _vectors


def _vectors(runner: Runner, spec: ModelSpec) -> float:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(spec.folder), device="cpu", local_files_only=True)
    ours = np.stack([_one(outcome).dense for outcome in _embed(runner)])
    theirs = np.stack([np.asarray(model.encode(text)) for text in TEXTS])
    return _worst(ours, theirs)


def _static(runner: Runner, spec: ModelSpec) -> float:
    """model2vec, which cuts long texts by characters before it counts tokens (they are shorter here), and gives
    a text of unknown tokens zeros (an error here)."""
    short = [text[:1000] for text in TEXTS]
    request = EmbedRequest(id="verify", input=tuple(map(Text, short)))
    (encoded,) = runner.encoder.encode([request])
    empty = [isinstance(item, EmptyInput) for item in _one(encoded).items]
    texts = [text for text, left_out in zip(short, empty, strict=True) if not left_out]
    model = importlib.import_module("model2vec").StaticModel.from_pretrained(str(spec.folder))
    ours = np.stack([_one(outcome).dense for outcome in _embed(runner, texts)])
    return _worst(ours, np.asarray(model.encode(texts), np.float32))


def _sparse(runner: Runner, spec: ModelSpec) -> float:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(spec.folder), device="cpu", local_files_only=True)
    worst = 0.0
    sides: list[tuple[str | None, Any]] = [(None, model.encode)]
    if spec.free_queries:
        sides.append(("query", model.encode_query))
    for side, encode in sides:
        for text, outcome in zip(TEXTS, _embed(runner, prompt_name=side), strict=True):
            row = encode([text], convert_to_sparse_tensor=False)[0].numpy()
            ours = np.zeros_like(row)
            indices, weights = _one(outcome).sparse
            ours[indices] = weights
            worst = max(worst, _worst(ours, row))
    return worst


def _token_vectors(runner: Runner, spec: ModelSpec) -> float:
    """Queries and documents of a ColBERT folder."""
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(spec.folder), device="cpu", local_files_only=True)
    worst = 0.0
    for side, encode in (("query", model.encode_query), ("document", model.encode_document)):
        for text, outcome in zip(TEXTS, _embed(runner, prompt_name=side), strict=True):
            worst = max(worst, _worst(_one(outcome).multivector, encode([text])[0].numpy()))
    return worst


def _labels(runner: Runner, spec: ModelSpec) -> float:
    """Logits of a classifier, against transformers itself, each text alone."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    where = {"pretrained_model_name_or_path": str(spec.transformer), "local_files_only": True}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForSequenceClassification.from_pretrained(**where).eval().float()
    request = ClassifyRequest(
        id="verify", input=tuple(map(Text, TEXTS)), raw_scores=True, truncate=_cut_side(spec)
    )
    worst = 0.0
    for text, outcome in zip(TEXTS, _outcomes(runner, request), strict=True):
        encoded = tokenizer(text, truncation=True, max_length=spec.max_tokens, return_tensors="pt")
        with torch.inference_mode():
            logits = model(**encoded).logits[0].numpy()
        worst = max(worst, _worst(_one(outcome).scores, logits))
    return worst


def _scores(runner: Runner, spec: ModelSpec) -> float:
    import torch
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(
        str(spec.folder), device="cpu", local_files_only=True, activation_fn=torch.nn.Identity()
    )
    query = TEXTS[2]
    request = RerankRequest(
        id="verify",
        query=query,
        documents=tuple(Document(text=text) for text in TEXTS),
        raw_scores=True,
        truncate="right",
    )
    ours = np.array([float(_one(outcome).scores[0]) for outcome in _outcomes(runner, request)])
    theirs = np.array([float(model.predict([(query, text)])[0]) for text in TEXTS])
    return _worst(ours, theirs)


def _embed(runner: Runner, texts: Sequence[str] = TEXTS, **fields: Any) -> list[Any]:
    side = _cut_side(runner.spec)  # type: ignore[attr-defined]
    request = EmbedRequest(id="verify", input=tuple(map(Text, texts)), truncate=side, **fields)
    return _outcomes(runner, request)


def _cut_side(spec: ModelSpec) -> Truncate:
    """Where the folder's tokenizer cuts, which its library does not ask about: its files' word, else right."""
    named = read_json(spec.transformer / "tokenizer_config.json").get("truncation_side")
    cut = read_json(spec.transformer / "tokenizer.json").get("truncation") or {}
    return "left" if (named or str(cut.get("direction"))).lower() == "left" else "right"


def _outcomes(runner: Runner, request: Any) -> list[Any]:
    encoded = runner.encoder.encode([request])[0]
    if isinstance(encoded, EmbedstreamError):
        raise encoded
    for item in encoded.items:
        if isinstance(item, EmbedstreamError):
            raise item
    batch = pack(encoded.items)  # type: ignore[arg-type]
    return scatter(batch, runner.forward(batch))


def _one(outcome: Any) -> Any:
    if isinstance(outcome, EmbedstreamError):
        raise outcome
    return outcome


def _worst(ours: Float32, theirs: Float32) -> float:
    """Absolute where values are small, relative to the largest where they are not."""
    a, b = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    if a.shape != b.shape:
        raise ValueError(f"shapes {a.shape} and {b.shape}")
    return float(np.abs(a - b).max() / max(1.0, float(np.abs(b).max())))
