"""What a folder says about outputs beside one dense vector: sparse weights and token-level vectors.

Who calls it: `gpu.folder.read` while it reads a folder; `gpu.answer.sparse` and `gpu.answer.token_vectors` compute it.
What must stay true: JSON only (no torch); a module, a setting or a head that we do not compute as
its library does is refused by name; files named here go into the fingerprint.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from gpu.faults import ModelLoadError
from gpu.folder.latent import LatentSpec
from gpu.folder.modules import DenseSpec, Modules
from gpu.folder.sentence_bert import read_sentence_bert
from gpu.folder.stored import read_json, weight_files
from schemas.requests import Output

OUTPUTS: tuple[Output, ...] = ("dense", "sparse", "multivector")
SPARSE_LINEAR, COLBERT_LINEAR = "sparse_linear.pt", "colbert_linear.pt"
QUERY_PROMPT, DOCUMENT_PROMPT = "query", "document"
_PREFIXES = (("query_prefix", QUERY_PROMPT), ("document_prefix", DOCUMENT_PROMPT))
# Each says that the folder was written by PyLate, whose default is to expand queries.
_PYLATE_KEYS = (
    "query_length", "document_length", "do_query_expansion", "attend_to_expansion_tokens",
    "attend_to_mask_tokens", "query_prefix", "document_prefix", "skiplist_words",
)  # fmt: skip
_NEVER_LEXICAL = ("cls_token", "eos_token", "pad_token", "unk_token", "bos_token", "sep_token")


@dataclass(frozen=True, slots=True)
class SpladeSpec:
    """Weights over the vocabulary from the masked-LM head: ``pool(log1p(relu(logits)))`` per item.

    pooling: over the item's tokens, special ones included. twice: log1p is applied a second time
    (OpenSearch's ``log1p_relu``). Formulas: Sentence-Transformers' `SpladePooling`.
    query_table: folder of a weight for each token, which is all that a query is given (inference-free).
    """

    pooling: Literal["max", "sum"] = "max"
    twice: bool = False
    query_table: Path | None = None

    def files(self) -> list[Path]:
        """Weight files beside the model's own."""
        return [] if self.query_table is None else weight_files(self.query_table)

    def meaning(self) -> Any:
        """What gives the weights their meaning, as plain values, for the fingerprint."""
        return ["splade", self.pooling, self.twice]


@dataclass(frozen=True, slots=True)
class LexicalSpec:
    """BGE-M3's sparse head: ``relu(linear(h))`` per token, the largest weight of each token id.

    dropped_ids: special tokens, which get no weight. Formula: FlagEmbedding's `M3Embedder`.
    """

    linear: Path
    dropped_ids: tuple[int, ...]

    def files(self) -> list[Path]:
        """Weight files beside the model's own."""
        return [self.linear]

    def meaning(self) -> Any:
        """What gives the weights their meaning, as plain values, for the fingerprint."""
        return ["lexical", list(self.dropped_ids)]


@dataclass(frozen=True, slots=True)
class Expansion:
    """ColBERT's query expansion: a query is filled up to `length` tokens with `token`.

    cut: a longer query is cut to `length` too. attend: the model attends to the added tokens; they give
    vectors either way. Rules: PyLate's, as Sentence-Transformers' `QueryExpansionConfig` has them.
    """

    token: int
    length: int
    cut: bool = True
    attend: bool = False


@dataclass(frozen=True, slots=True)
class TokenVectorSpec:
    """One vector per token: a projection of its hidden state.

    dense: Dense modules in order; linear: BGE-M3's pickled one instead. skip_first: the first token
    gives no vector (BGE-M3). skip_ids: tokens of documents that give none (ColBERT's skip list).
    Items under the prompt name `QUERY_PROMPT` are queries, whose tokens all count.
    prefix_ids: (prompt name, token, text): the token stands for that beginning of the prompt, and
    goes right behind the tokenizer's own first token.
    expansion: of queries; query_length: the limit of a query's tokens, None: the model's own.
    """

    dimensions: int
    dense: tuple[DenseSpec, ...] = ()
    linear: Path | None = None
    skip_first: bool = False
    skip_ids: tuple[int, ...] = ()
    prefix_ids: tuple[tuple[str, int, str], ...] = ()
    expansion: Expansion | None = None
    query_length: int | None = None

    @property
    def unread_tokens(self) -> int | None:
        """Tokens of a query whose added ones are not attended to; None: all of every item are."""
        if self.expansion is None or self.expansion.attend:
            return None
        return self.expansion.length

    def files(self) -> list[Path]:
        """Weight files beside the model's own."""
        found = [path for dense in self.dense for path in weight_files(dense.folder)]
        return found if self.linear is None else [self.linear]

    def meaning(self) -> Any:
        """What gives the weights their meaning, as plain values, for the fingerprint."""
        activations = [
            [dense.activation, "residual"] if dense.residual else dense.activation
            for dense in self.dense
        ]
        found = [activations, self.skip_first, list(self.skip_ids), self.prefix_ids]
        queries = (self.expansion, self.query_length)
        return found if queries == (None, None) else [*found, repr(queries)]


SparseSpec: TypeAlias = SpladeSpec | LexicalSpec | LatentSpec


@dataclass(frozen=True, slots=True)
class ExtraOutputs:
    """Outputs of a folder beside (or, when `dense` is false, instead of) one dense vector.

    pooling, normalize: of the dense vector, where the folder itself does not say.
    """

    sparse: SparseSpec | None = None
    multivector: TokenVectorSpec | None = None
    dense: bool = True
    pooling: str | None = None
    normalize: bool = False
    notes: tuple[str, ...] = ()


def extra_outputs(
    folder: Path,
    config: Mapping[str, Any],
    modules: Modules,
    pooling: str | None,
    *,
    has_mlm_head: bool,
    hidden_size: int,
) -> ExtraOutputs:
    """Read them. Raises `ModelLoadError` for what would have to be guessed or cannot be computed."""
    st_config = read_json(folder / "config_sentence_transformers.json")
    architecture = str((config.get("architectures") or [""])[0])
    splade = splade_spec(folder, modules, pooling)
    if splade is None and pooling is None and st_config.get("model_type") == "SparseEncoder":
        splade = None if modules.described else SpladeSpec()
    if splade is not None:
        if not architecture.endswith("ForMaskedLM") or not has_mlm_head:
            raise ModelLoadError(
                f"{folder}: SPLADE pooling needs a *ForMaskedLM of a family whose head is known, this "
                f"is {architecture or 'a model without an architecture'}"
            )
        return ExtraOutputs(sparse=splade, dense=False)
    token_vectors = colbert_spec(folder, modules.transformer, modules, st_config)
    if token_vectors is not None:
        if pooling is not None:
            raise ModelLoadError(
                f"{folder}: pooling = {pooling!r} on a ColBERT model, which has one vector per token"
            )
        if token_vectors.dense[0].in_features != hidden_size:
            raise ModelLoadError(
                f"{folder}: Dense {token_vectors.dense[0].folder.name} takes "
                f"{token_vectors.dense[0].in_features} features, the model gives {hidden_size}"
            )
        return ExtraOutputs(multivector=token_vectors, dense=False)
    m3 = m3_specs(modules.transformer, config, hidden_size)
    if m3 is None:
        return ExtraOutputs()
    if modules.described:
        return ExtraOutputs(*m3)
    return ExtraOutputs(*m3, pooling="cls", normalize=True)  # M3Embedder's own defaults


def splade_spec(folder: Path, modules: Modules, pooling: str | None) -> SpladeSpec | None:
    """From a SpladePooling module, or from the setting ``pooling = "splade"``; None: not sparse."""
    if modules.splade is None:
        return SpladeSpec() if pooling == "splade" else None
    if pooling not in (None, "splade"):
        raise ModelLoadError(
            f"{folder}: pooling = {pooling!r} on a SPLADE model; leave it out, or name another folder"
        )
    strategy = modules.splade.get("pooling_strategy", "max")
    activation = modules.splade.get("activation_function", "relu")
    if strategy not in ("max", "sum") or activation not in ("relu", "log1p_relu"):
        raise ModelLoadError(
            f"{folder}: SpladePooling with {strategy!r} and {activation!r} is not supported; supported "
            "are max or sum, and relu or log1p_relu"
        )
    return SpladeSpec(
        pooling=strategy, twice=activation == "log1p_relu", query_table=modules.query_table
    )


def m3_specs(
    transformer: Path, config: Mapping[str, Any], hidden_size: int
) -> tuple[LexicalSpec, TokenVectorSpec] | None:
    """BGE-M3's two extra heads, when both files lie beside the weights; None: an ordinary folder."""
    sparse, colbert = transformer / SPARSE_LINEAR, transformer / COLBERT_LINEAR
    there = [path.name for path in (sparse, colbert) if path.is_file()]
    if not there:
        return None
    if len(there) == 1:
        raise ModelLoadError(
            f"{transformer}: {there[0]} without its other half; a BGE-M3 folder holds "
            f"{SPARSE_LINEAR} and {COLBERT_LINEAR}"
        )
    lexical = LexicalSpec(sparse, special_ids(transformer, config, _NEVER_LEXICAL))
    return lexical, TokenVectorSpec(dimensions=hidden_size, linear=colbert, skip_first=True)


def colbert_spec(
    folder: Path, transformer: Path, modules: Modules, st_config: Mapping[str, Any]
) -> TokenVectorSpec | None:
    """From a module list without pooling whose Dense modules work on tokens; None: not ColBERT."""
    if not modules.token_dense:
        return None
    for before, after in zip(modules.token_dense, modules.token_dense[1:], strict=False):
        if before.out_features != after.in_features:
            raise ModelLoadError(
                f"{folder}: Dense {after.folder.name} does not fit the one before it"
            )
    pylate = st_config.get("model_type") == "ColBERT"
    words: Sequence[str] = ()
    if modules.mask is not None:
        if modules.mask.get("keep_only_token_ids"):
            raise ModelLoadError(
                f"{folder}: MultiVectorMask with keep_only_token_ids is unsupported"
            )
        tasks = modules.mask.get("skiplist_tasks") or ["document"]
        if tasks not in ("document", ["document"]):
            raise ModelLoadError(
                f"{folder}: MultiVectorMask with skiplist_tasks {tasks!r}: unsupported"
            )
        words = modules.mask.get("skiplist_words") or ()
    elif pylate:
        named = st_config.get("skiplist_words")
        words = list(string.punctuation) if named is None else named
    prefixes = {name: str(st_config[key]) for key, name in _PREFIXES if st_config.get(key)}
    ids = vocabulary(transformer) if words or prefixes else {}
    prefix_ids = tuple(
        (name, ids[found], prefix)
        for name, prefix in prefixes.items()
        if (found := next((p for p in (prefix, prefix.strip()) if p in ids), None)) is not None
    )
    return TokenVectorSpec(
        dimensions=modules.token_dense[-1].out_features,
        dense=modules.token_dense,
        skip_ids=tuple(sorted(ids[word] for word in words if word in ids)),
        prefix_ids=prefix_ids,
        **_queries(transformer, st_config, pylate),
    )


def has_sides(sparse: SparseSpec | None, vectors: TokenVectorSpec | None, dense: bool) -> bool:
    """Whether texts are queries or documents to the model, which computes them apart."""
    free = isinstance(sparse, SpladeSpec) and sparse.query_table is not None
    return free or (vectors is not None and not dense)


def side_fields(
    folder: Path, common: Mapping[str, Any], vectors: TokenVectorSpec | None
) -> dict[str, Any]:
    """Fields of the `ModelSpec` of a model with sides: both names are prompts."""
    if (
        vectors is not None
        and vectors.expansion is not None
        and vectors.expansion.length > common["max_tokens"]
    ):
        raise ModelLoadError(
            f"{folder}: queries are filled up to {vectors.expansion.length} tokens, and the model takes "
            f"{common['max_tokens']}"
        )
    return {"prompts": {QUERY_PROMPT: "", DOCUMENT_PROMPT: "", **common["prompts"]}}


def prefixed_prompts(st_config: Mapping[str, Any]) -> dict[str, Any]:
    """The folder's prompts, with the prefixes that PyLate keeps beside them in front."""
    prompts: dict[str, Any] = dict(st_config.get("prompts") or {})
    for key, name in _PREFIXES:
        if prefix := st_config.get(key):
            prompts[name] = str(prefix) + str(prompts.get(name) or "").removeprefix(str(prefix))
    return prompts


def _queries(transformer: Path, st_config: Mapping[str, Any], pylate: bool) -> dict[str, Any]:
    """`expansion` and `query_length` of the `TokenVectorSpec`, in the library's own precedence: the
    transformer's file, then config_sentence_transformers.json, then PyLate's flat keys there."""
    own = read_sentence_bert(transformer)
    said = next((f["query_expansion"] for f in (own, st_config) if "query_expansion" in f), None)
    length = own.get("query_length") or st_config.get("query_length")
    explicit = "query_expansion" in own or "query_expansion" in st_config
    by_pylate = pylate or any(key in st_config for key in _PYLATE_KEYS)
    if not explicit and by_pylate and st_config.get("do_query_expansion") is not False:
        attend = st_config.get("attend_to_expansion_tokens", st_config.get("attend_to_mask_tokens"))
        size = st_config.get("query_length") or 32  # PyLate's default
        said = {"strategy": "fixed", "attend": bool(attend), "length": size}
        length = own.get("query_length")
    for name, value in (("query_length", length), ("length", (said or {}).get("length", 1))):
        if value is not None and (type(value) is not int or value < 1):
            raise ModelLoadError(f"{transformer}: {name} of queries is {value!r}, not 1 and more")
    if said is None:
        return {"query_length": length}
    odd = set(said) - {"strategy", "attend", "token", "length"}
    if odd or said.get("strategy") not in ("fixed", "min") or "length" not in said:
        raise ModelLoadError(
            f"{transformer}: query_expansion = {said!r} is not supported; supported are the strategies "
            "fixed and min with a length, attend and token"
        )
    if length is not None and length < said["length"]:
        raise ModelLoadError(
            f"{transformer}: query_length {length} is below the {said['length']} tokens that queries "
            "are filled up to"
        )
    cut = said["strategy"] == "fixed"
    expansion = Expansion(
        token=_expansion_token(transformer, said.get("token")),
        length=said["length"],
        cut=cut,
        attend=bool(said.get("attend", False)),
    )
    return {"expansion": expansion, "query_length": said["length"] if cut else length}


def _expansion_token(transformer: Path, named: str | None) -> int:
    """Id of the token that queries are filled with: the named one, else the tokenizer's mask or end token."""
    for token in ("mask_token", "eos_token"):  # PyLate's order: encoders have the first
        for file in ("tokenizer_config.json", "special_tokens_map.json"):
            if named is None:
                value = read_json(transformer / file).get(token)
                named = value.get("content") if isinstance(value, Mapping) else value
    found = vocabulary(transformer).get(str(named))
    if found is None:
        raise ModelLoadError(
            f"{transformer}: queries are filled up with mask tokens, and the tokenizer has none "
            f"({named!r}); name one in query_expansion.token, or set do_query_expansion to false if the "
            "model was trained without"
        )
    return found


def vocabulary(transformer: Path) -> dict[str, int]:
    """Token -> id from tokenizer.json, added tokens included. For models that name tokens by text."""
    tokenizer = read_json(transformer / "tokenizer.json")
    if not tokenizer:
        raise ModelLoadError(
            f"{transformer}: no tokenizer.json, from which the ids of named tokens are read"
        )
    vocab = (tokenizer.get("model") or {}).get("vocab") or {}
    ids = dict(vocab) if isinstance(vocab, dict) else {p[0]: i for i, p in enumerate(vocab)}
    return ids | {str(t["content"]): int(t["id"]) for t in tokenizer.get("added_tokens") or ()}


def special_ids(
    transformer: Path, config: Mapping[str, Any], names: Sequence[str]
) -> tuple[int, ...]:
    """Ids of the special tokens that the tokenizer's files or config.json name, ascending."""
    tokenizer = read_json(transformer / "tokenizer.json")
    by_text = vocabulary(transformer)
    found = {
        int(config[key])
        for key in ("bos_token_id", "eos_token_id", "pad_token_id")
        if isinstance(config.get(key), int)
    }
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        said = read_json(transformer / file)
        for name in names:
            value = said.get(name)
            text = value.get("content") if isinstance(value, Mapping) else value
            if isinstance(text, str) and text in by_text:
                found.add(by_text[text])
    model = tokenizer.get("model") or {}
    if isinstance(model.get("unk_id"), int):
        found.add(model["unk_id"])
    elif model.get("unk_token") in by_text:
        found.add(by_text[model["unk_token"]])
    return tuple(sorted(found))
