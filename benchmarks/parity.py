"""docs/models.md: every model family beside its reference implementation, measured now.

Who calls it: `python -m benchmarks.parity` (a minute on one core); a unit test compares the page's
families with the registry.
What must stay true: families come from `gpu.folder.families` and `gpu.folder.static`, so that a new row appears
by itself and needs an example id here; a figure on the page was measured by this script; what was
only ever checked with seeded weights says so.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gpu.folder.families import FAMILIES, VISION_FAMILIES, Family
from gpu.folder.static import MODEL2VEC, STATIC_EMBEDDING, STATIC_TYPES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
TEXTS = (
    "the river of text",
    "kafka",
    "a queue is a topic and a vector in the stream of the broker model batch token",
    "paris is the capital",
    "one two three four five mountain hello world one two three",
)
# model type -> what people load. "" where no published embedding model of the type is known to us.
EXAMPLES: dict[str, str] = {
    "albert": "sentence-transformers/paraphrase-albert-small-v2",
    "bert": "BAAI/bge-large-en-v1.5, intfloat/e5-base-v2, all-MiniLM-L6-v2",
    "camembert": "dangvantuan/sentence-camembert-base",
    "clip": "openai/clip-vit-large-patch14-336",
    "deberta-v2": "mixedbread-ai/mxbai-rerank-base-v1",
    "distilbert": "sentence-transformers/msmarco-distilbert-base-v4",
    "electra": "cross-encoder/ms-marco-electra-base",
    "embedding_gemma2_text": "the text tower of google/embeddinggemma-2, saved on its own",
    "ernie": "nghuyong/ernie-2.0-base-en",
    "eurobert": "EuroBERT/EuroBERT-210m",
    "gemma": "BAAI/bge-reranker-v2-gemma",
    "gemma2": "BAAI/bge-multilingual-gemma2",
    "gemma3_text": "google/embeddinggemma-300m",
    "gpt_neox": "EleutherAI/pythia-160m",
    "granite": "ibm-granite/granite-3.3-2b-base",
    "gte": "Alibaba-NLP/gte-multilingual-base, in its native form",
    "internlm2": "internlm/internlm2-1_8b-reward",
    "jina_embeddings_v3": "jinaai/jina-embeddings-v3-hf",
    "llama": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "llama_bidirec": "nvidia/llama-nemotron-rerank-1b-v2, nvidia/llama-nemotron-embed-1b-v2",
    "minicpm": "BAAI/bge-reranker-v2-minicpm-layerwise",
    "ministral": "mistralai/Ministral-8B-Instruct-2410",
    "ministral3": "mistralai/Ministral-3-3B-Instruct-2512",
    "mistral": "intfloat/e5-mistral-7b-instruct",
    "modernbert": "Alibaba-NLP/gte-modernbert-base",
    "modernbert-decoder": "jhu-clsp/ettin-decoder-150m",
    "mpnet": "sentence-transformers/all-mpnet-base-v2",
    "mt5": "google/mt5-base",
    "nemotron": "nvidia/Minitron-4B-Base",
    "new": "Alibaba-NLP/gte-multilingual-base, gte-base-en-v1.5, as they were first published",
    "nomic_bert": "nomic-ai/nomic-embed-text-v1.5",
    "nvembed": "nvidia/NV-Embed-v2",
    "olmo2": "allenai/OLMo-2-0425-1B",
    "phi": "microsoft/phi-2",
    "phi3": "microsoft/Phi-3-mini-4k-instruct",
    "qwen2": "Alibaba-NLP/gte-Qwen2-7B-instruct",
    "qwen2_vl": "Alibaba-NLP/gme-Qwen2-VL-2B-Instruct",
    "qwen3": "Qwen/Qwen3-Embedding-4B, Qwen/Qwen3-Reranker-0.6B",
    "qwen3_moe": "Qwen/Qwen3-30B-A3B",
    "rembert": "google/rembert",
    "roberta": "sentence-transformers/all-distilroberta-v1",
    "siglip": "google/siglip2-base-patch16-224, google/siglip-so400m-patch14-384",
    "smollm3": "HuggingFaceTB/SmolLM3-3B",
    "t5": "sentence-transformers/sentence-t5-base, gtr-t5-base",
    "umt5": "google/umt5-base",
    "xlm-roberta": "BAAI/bge-m3, BAAI/bge-reranker-v2-m3, intfloat/multilingual-e5-base",
    MODEL2VEC: "minishlab/potion-base-8M",
    STATIC_EMBEDDING: "sentence-transformers/static-retrieval-mrl-en-v1",
}
REAL = ("all-MiniLM-L6-v2", "bge-small-en-v1.5", "e5-small-v2")
# What a reader of the row should know.
NOTES: dict[str, str] = {
    "deberta-v2": "attention item by item, everything else packed; with `conv_kernel_size` padded",
    "internlm2": "code of the folder, `trust_remote_code`; never loaded here, the path is tested with a "
    "Qwen2 reward model",
    "jina_embeddings_v3": "task adapters by `prompt_name`, equal to peft's",
    "qwen3_moe": "expert blocks item by item, everything else packed",
    "granite": "label tokens are read with its `logits_scaling`; no classifier in transformers",
    "modernbert-decoder": "label tokens are refused: its vocabulary head has a layer before it",
    "llama_bidirec": "NVIDIA's bidirectional Llama; its code is not run",
    "minicpm": "layerwise rerankers alone; `cutoff_layer` says which layer; its code is not run",
    "new": "GTE's first form, NTK rope included; its code is not run",
    "nvembed": "`trust_remote_code`; latent attention natively, the folder's code is not run",
    "siglip": "every text filled up to 64 tokens; SigLIP 2 of a fixed resolution too",
    "t5": "encoder half; the relative bias is as large as the longest item",
}


@dataclass(frozen=True, slots=True)
class Measured:
    """One folder against its reference. diff, cosine: worst over texts; logits: worst of a two-label
    classifier, None without a recipe."""

    pooling: str = ""
    packed: bool = True
    diff: float | None = None
    cosine: float | None = None
    same_bytes: bool | None = None
    logits: float | None = None


def outcomes(runner: Any, items: Sequence[Any]) -> list[np.ndarray]:
    """Vectors (or scores) of one batch, in order."""
    from gpu.batch import pack, scatter

    batch = pack(list(items))
    found: Any = scatter(batch, runner.forward(batch))
    return [one.dense if one.scores is None else one.scores for one in found]


def against(runner: Any, inputs: Sequence[Any], expected: Sequence[np.ndarray]) -> Measured:
    """One pack of all inputs against the reference, and against each input alone."""
    from schemas.requests import EmbedRequest

    items = runner.encoder.encode([EmbedRequest(id="r", input=tuple(inputs))])[0].items
    got = outcomes(runner, items)
    alone = [outcomes(runner, [item])[0] for item in items]
    backwards = outcomes(runner, items[::-1])[::-1]
    pairs = [
        (a.astype(np.float64), b.astype(np.float64)) for a, b in zip(got, expected, strict=True)
    ]
    cosines = [float(a @ b / np.linalg.norm(a) / np.linalg.norm(b)) for a, b in pairs]
    return Measured(
        pooling=runner.info.pooling or "",
        packed=runner.info.packed,
        diff=max(float(np.abs(a - b).max()) for a, b in pairs),
        cosine=min(cosines),
        same_bytes=all(
            np.array_equal(a, b) and np.array_equal(a, c)
            for a, b, c in zip(got, alone, backwards, strict=True)
        ),
    )


def sentence_transformers_of(folder: Path, texts: Sequence[str]) -> list[np.ndarray]:
    """Each text alone."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu", local_files_only=True)
    return [model.encode([text], show_progress_bar=False)[0] for text in texts]


def text_family(family: Family, root: Path) -> Measured:
    """A seeded tiny folder of the family, with pooling, Dense and Normalize."""
    from gpu.load import make_runner_factory
    from schemas.requests import Text
    from tests.support.models import write_model

    pooling = "lasttoken" if family.default_pooling == "last_token" else "mean"
    folder = write_model(
        root / "embed", family.model_type, pooling=pooling, dense=24, max_seq_length=120
    )
    runner = make_runner_factory("m", folder, device="cpu")()
    expected = sentence_transformers_of(folder, TEXTS)
    measured = against(runner, list(map(Text, TEXTS)), expected)
    if family.head is None:
        return measured
    return Measured(
        **{name: getattr(measured, name) for name in measured.__slots__ if name != "logits"},
        logits=logits_of(family, root),
    )


def logits_of(family: Family, root: Path) -> float:
    """Worst logit of a two-label classifier against transformers."""
    import torch
    from transformers import AutoModelForSequenceClassification

    from gpu.load import make_runner_factory
    from schemas.requests import ClassifyRequest, Text
    from tests.support.models import write_model

    folder = write_model(root / "classify", family.model_type, labels=2)
    runner = make_runner_factory("m", folder, device="cpu")()
    request = ClassifyRequest(id="r", input=tuple(map(Text, TEXTS)), raw_scores=True)
    items: Any = runner.encoder.encode([request])[0]
    got = outcomes(runner, items.items)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    worst = 0.0
    with torch.no_grad():
        for item, row in zip(items.items, got, strict=True):
            ids = torch.from_numpy(item.input_ids.astype(np.int64))[None]
            worst = max(worst, float(np.abs(model(input_ids=ids).logits[0].numpy() - row).max()))
    return worst


def nvembed(root: Path) -> Measured:
    from gpu.load import make_runner_factory
    from schemas.requests import Text
    from tests.support.models_nvembed import nvembed_reference, write_nvembed

    folder = write_nvembed(root / "nvembed")
    runner = make_runner_factory("m", folder, device="cpu", trust_remote_code=True)()
    return against(runner, list(map(Text, TEXTS)), [nvembed_reference(folder, t) for t in TEXTS])


def llama_bidirec(root: Path) -> Measured:
    from gpu.load import make_runner_factory
    from schemas.requests import ClassifyRequest, Text
    from tests.support.models import write_bidirectional
    from tests.support.references import bidirectional_scores, bidirectional_states

    folder = write_bidirectional(root / "embed", pooling="avg")
    runner = make_runner_factory("m", folder, device="cpu")()
    ids = [runner.encoder._tokenizer.encode(text).ids for text in TEXTS]
    expected = [bidirectional_states(folder, np.array(one)).mean(0).numpy() for one in ids]
    measured = against(runner, list(map(Text, TEXTS)), expected)
    folder = write_bidirectional(root / "classify", pooling="avg", labels=2, temperature=0.5)
    runner = make_runner_factory("m", folder, device="cpu")()
    request = ClassifyRequest(id="r", input=tuple(map(Text, TEXTS)), raw_scores=True)
    got = outcomes(runner, runner.encoder.encode([request])[0].items)
    worst = max(
        float(np.abs(row - bidirectional_scores(folder, np.array(one), "avg", 0.5)).max())
        for row, one in zip(got, ids, strict=True)
    )
    return dataclasses.replace(measured, logits=worst)


def new_gte(root: Path) -> Measured:
    from gpu.load import make_runner_factory
    from schemas.requests import ClassifyRequest, Text
    from tests.support.models import write_new
    from tests.support.references import new_logits, new_states

    folder = write_new(root / "embed", pooling="cls", normalize=False)
    runner = make_runner_factory("m", folder, device="cpu")()
    ids = [np.array(runner.encoder._tokenizer.encode(text).ids) for text in TEXTS]
    expected = [new_states(folder, one)[0].numpy() for one in ids]
    measured = against(runner, list(map(Text, TEXTS)), expected)
    folder = write_new(root / "classify", labels=2)
    runner = make_runner_factory("m", folder, device="cpu")()
    request = ClassifyRequest(id="r", input=tuple(map(Text, TEXTS)), raw_scores=True)
    got = outcomes(runner, runner.encoder.encode([request])[0].items)
    pairs = zip(got, ids, strict=True)
    worst = max(float(np.abs(row - new_logits(folder, one)).max()) for row, one in pairs)
    return dataclasses.replace(measured, logits=worst)


def minicpm(root: Path) -> Measured:
    from gpu.load import make_runner_factory
    from schemas.requests import Document, RerankRequest
    from tests.support.models_decoders import write_layerwise
    from tests.support.references import layerwise_score

    folder = write_layerwise(root / "rerank")
    worst, same = 0.0, True
    for layer in (2, 3, 4):
        runner = make_runner_factory("m", folder, device="cpu", cutoff_layer=layer)()
        documents = tuple(map(Document, TEXTS))
        request = RerankRequest(id="r", query="kafka?", documents=documents, raw_scores=True)
        items: Any = runner.encoder.encode([request])[0]
        got = outcomes(runner, items.items)
        for item, row in zip(items.items, got, strict=True):
            worst = max(worst, abs(float(row[0]) - layerwise_score(folder, item.input_ids, layer)))
            same = same and np.array_equal(outcomes(runner, [item])[0], row)
    return Measured(packed=runner.info.packed, same_bytes=same, logits=worst)


def clip(root: Path) -> Measured:
    from gpu.load import make_runner_factory
    from schemas.requests import Image, Text
    from tests.support.models_vision import encoded, picture, write_clip
    from tests.support.references import clip_reference

    folder = write_clip(root / "clip")
    pictures = [encoded(picture(50, 40, seed)) for seed in range(3)]
    expected = [clip_reference(folder, text, None) for text in TEXTS]
    expected += [clip_reference(folder, None, data) for data in pictures]
    runner = make_runner_factory("m", folder, device="cpu")()
    return against(runner, [*map(Text, TEXTS), *map(Image, pictures)], expected)


def siglip(root: Path) -> Measured:
    from gpu.load import make_runner_factory
    from schemas.requests import Image, Text
    from tests.support.models_vision import encoded, picture, write_siglip
    from tests.support.references import siglip_reference

    folder = write_siglip(root / "siglip")
    pictures = [encoded(picture(50, 40, seed)) for seed in range(3)]
    expected = [siglip_reference(folder, text, None) for text in TEXTS]
    expected += [siglip_reference(folder, None, data) for data in pictures]
    runner = make_runner_factory("m", folder, device="cpu")()
    return against(runner, [*map(Text, TEXTS), *map(Image, pictures)], expected)


def qwen2_vl(root: Path) -> Measured:
    from gpu.load import make_runner_factory
    from schemas.requests import Image, Text
    from tests.support.models_vision import encoded, picture, write_gme
    from tests.support.references import gme_reference

    folder = write_gme(root / "gme", gme=True)
    told = "You are a helpful assistant."
    data = encoded(picture(50, 40))
    inputs = [*map(Text, TEXTS), Image(data), Image(data, TEXTS[0])]
    expected = [gme_reference(folder, text, None, told, gme=True) for text in TEXTS]
    expected += [gme_reference(folder, text, data, told, gme=True) for text in (None, TEXTS[0])]
    return against(make_runner_factory("m", folder, device="cpu")(), inputs, expected)


def static(kind: str, root: Path) -> Measured:
    """model2vec is not a dependency: its published formula, in float64, over the folder's own table."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    from gpu.load import make_runner_factory
    from schemas.requests import Text
    from tests.support.models_outputs import write_static

    folder = write_static(root / kind, layout="st" if kind == STATIC_EMBEDDING else "model2vec")
    where = folder / "0_StaticEmbedding" if kind == STATIC_EMBEDDING else folder
    if kind == STATIC_EMBEDDING:
        expected = sentence_transformers_of(folder, TEXTS)
    else:
        (table,) = load_file(where / "model.safetensors").values()
        tokenizer = Tokenizer.from_file(str(where / "tokenizer.json"))
        unknown = tokenizer.token_to_id("[UNK]")
        expected = []
        for text in TEXTS:
            ids = [i for i in tokenizer.encode(text, add_special_tokens=False).ids if i != unknown]
            mean = table[ids].astype(np.float64).mean(axis=0)
            expected.append(mean / np.linalg.norm(mean))
    return against(
        make_runner_factory("m", folder, device="cpu")(), list(map(Text, TEXTS)), expected
    )


SPECIAL: dict[str, Callable[[Path], Measured]] = {
    "nvembed": nvembed,
    "clip": clip,
    "llama_bidirec": llama_bidirec,
    "minicpm": minicpm,
    "new": new_gte,
    "siglip": siglip,
    "qwen2_vl": qwen2_vl,
    **{kind: (lambda root, kind=kind: static(kind, root)) for kind in STATIC_TYPES},
}
SCORERS = ("minicpm",)  # no vectors
UNMEASURED = ("internlm2",)  # there is no class to seed without the folder's own code


def real_models() -> dict[str, Measured]:
    """Packaged models that are on this machine already; none is fetched."""
    from gpu.load import make_runner_factory
    from pipeline.demo.fetch import models_root
    from schemas.requests import Text

    found = {}
    for name in REAL:
        folder = models_root() / name
        if (folder / "config.json").is_file():
            runner = make_runner_factory(name, folder, device="cpu")()
            expected = sentence_transformers_of(folder, TEXTS)
            found[name] = against(runner, list(map(Text, TEXTS)), expected)
    return found


def measure() -> dict[str, Measured]:
    """Every family of the registry, in alphabetical order."""
    registry = {**FAMILIES, **VISION_FAMILIES}
    found = {}
    for name in sorted({*registry, *STATIC_TYPES}):
        with tempfile.TemporaryDirectory() as root:
            if name in UNMEASURED:
                found[name] = Measured(pooling=registry[name].default_pooling or "")
            elif name in SPECIAL:
                found[name] = SPECIAL[name](Path(root))
            else:
                found[name] = text_family(registry[name], Path(root))
    return found


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def _row(name: str, m: Measured) -> str:
    family = {**FAMILIES, **VISION_FAMILIES}.get(name)
    lost = None if m.cosine is None else max(0.0, 1 - m.cosine)
    run = "" if name in STATIC_TYPES else "packed" if m.packed else "padded"
    cells = (
        f"`{name}`", EXAMPLES[name], run if name not in UNMEASURED else "as its code allows",
        _number(m.diff), _number(lost),
        "" if m.same_bytes is None else "yes" if m.same_bytes else "no",
        _number(m.logits), "yes" if family is not None and family.mlm is not None else "",
        NOTES.get(name, ""),
    )  # fmt: skip
    return "| " + " | ".join(cells) + " |"


def page(found: dict[str, Measured], real: dict[str, Measured]) -> str:
    """docs/models.md."""
    import torch
    import transformers

    rows = "\n".join(_row(name, found[name]) for name in sorted(found))
    reals = "\n".join(
        f"| {name} | {m.pooling} | {_number(m.diff)} | {_number(max(0.0, 1 - (m.cosine or 0)))} | "
        f"{'yes' if m.same_bytes else 'no'} |"
        for name, m in real.items()
    )
    different = [name for name, m in found.items() if m.same_bytes is False]
    bits = (
        "Every family below gives the same bytes."
        if not different
        else f"Not so: {', '.join(different)}, which differ in the last digits."
    )
    template = (Path(__file__).parent / "models_page.md").read_text()
    return (
        template.replace("{versions}", f"torch {torch.__version__.split('+')[0]}, transformers "
                         f"{transformers.__version__}")
        .replace("{bits}", bits)
        .replace("{rows}", rows)
        .replace("{real}", reals)
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE)
    parser.add_argument("--no-real", action="store_true", help="seeded models only")
    options = parser.parse_args()
    import torch

    torch.set_num_threads(1)
    missing = sorted({*FAMILIES, *VISION_FAMILIES, *STATIC_TYPES} - set(EXAMPLES))
    if missing:
        raise SystemExit(f"EXAMPLES lacks {', '.join(missing)}")
    found = measure()
    options.out.write_text(page(found, {} if options.no_real else real_models()))
    print(f"wrote {options.out}: {len(found)} families")


if __name__ == "__main__":
    main()
