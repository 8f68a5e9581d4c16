"""Decoder embedders, reward models, label tokens, folders with code of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.executor import ModelExecutor
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from schemas.requests import ClassifyRequest, EmbedRequest, Text, TokenIds
from tests.support.models import edit_json, write_model
from tests.support.models_decoders import (
    BYPASS_CODE,
    END,
    REWARD_CODE,
    chat_tokenizer,
    write_causal,
    write_remote,
)

TEXTS = ["hello world", "x", "the capital of china", "a river " * 7, "What is it?", "in the end"]


def run(runner: Any, texts: list[str], kind: Any = EmbedRequest, **fields: Any) -> list[Any]:
    encoded = runner.encoder.encode([kind(id="r", input=tuple(map(Text, texts)), **fields)])[0]
    batch = pack(encoded.items)
    return scatter(batch, runner.forward(batch))


def vectors(runner: Any, texts: list[str], **fields: Any) -> np.ndarray:
    return np.stack([outcome.dense for outcome in run(runner, texts, **fields)])


def close(got: np.ndarray, want: np.ndarray) -> None:
    """max abs 1e-5 and cosine >= 1 - 1e-6, in fp64."""
    a, b = got.astype(np.float64), np.asarray(want, dtype=np.float64)
    assert np.abs(a - b).max() <= 1e-5
    cosine = (a * b).sum(1) / (np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1))
    assert cosine.min() >= 1 - 1e-6


def st(folder: Path) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(folder), device="cpu")


def test_e5_mistral_closes_texts_and_equals_transformers(tmp_path: Path) -> None:
    """A01, A14, B16: `<s> text </s>`, last token, instruction as a prompt; cut texts keep the end."""
    prompt = "Instruct: find the passage\nQuery: "
    folder = write_model(
        tmp_path / "m", "mistral", pooling="lasttoken", prompts={"query": prompt}, sliding_window=None
    )  # fmt: skip
    tokenizer, names = chat_tokenizer(end=True, bos=True)
    _replace_tokenizer(folder, tokenizer, names)
    runner = make_runner_factory("m", folder, max_tokens=60)()
    reference = st(folder)
    close(vectors(runner, TEXTS), reference.encode(TEXTS))
    close(
        vectors(runner, TEXTS[:3], prompt_name="query"),
        reference.encode(TEXTS[:3], prompt_name="query"),
    )
    close(
        vectors(runner, TEXTS[:3], prompt_name="query"),
        vectors(runner, [prompt + t for t in TEXTS[:3]]),
    )
    long = "the capital " * 40
    encoded = runner.encoder.encode([EmbedRequest(id="r", input=(Text(long),), truncate="right")])[
        0
    ]
    ids = encoded.items[0].input_ids
    end = tokenizer.token_to_id(END)
    assert len(ids) == 60 and ids[-1] == end and list(ids).count(end) == 1
    spelled = runner.encoder.encode([EmbedRequest(id="r", input=(Text(f"hi {END}"),))])[0]
    assert list(spelled.items[0].input_ids).count(end) == 1  # written out by a sender: text


def _replace_tokenizer(folder: Path, tokenizer: Any, names: dict[str, str]) -> None:
    from tests.support.models import write_tokenizer

    config = folder / "config.json"
    write_tokenizer(folder, tokenizer, names)
    import json

    fields = json.loads(config.read_text())
    if fields["vocab_size"] < tokenizer.get_vocab_size():
        _grow_embeddings(folder, tokenizer.get_vocab_size())


def _grow_embeddings(folder: Path, size: int) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    state = load_file(path)
    old = state["embed_tokens.weight"]
    generator = torch.Generator().manual_seed(5)
    more = torch.randn(size - len(old), old.shape[1], generator=generator) * 0.3
    state["embed_tokens.weight"] = torch.cat([old, more])
    save_file(state, path, metadata={"format": "pt"})
    edit_json(folder / "config.json", vocab_size=size)


def test_add_eos_token_is_obeyed(tmp_path: Path) -> None:
    """A14: a folder that closes texts through `add_eos_token` alone, which transformers 5 drops."""
    import json

    folder = write_model(tmp_path / "m", "qwen2", pooling="lasttoken")
    raw = json.loads((folder / "tokenizer.json").read_text())
    assert raw["post_processor"] is not None
    closed = make_runner_factory("m", folder)()
    want = vectors(closed, TEXTS)
    raw["post_processor"] = None
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    opened = make_runner_factory("m", folder)()
    assert np.abs(vectors(opened, TEXTS) - want).max() > 1e-3
    edit_json(folder / "tokenizer_config.json", add_eos_token=True)
    runner = make_runner_factory("m", folder)()
    assert vectors(runner, TEXTS).tobytes() == want.tobytes()
    assert any("add_eos_token" in note for note in runner.info.notes)


@pytest.mark.parametrize("with_code", [False, True])
def test_gte_qwen2_is_bidirectional(tmp_path: Path, with_code: bool) -> None:
    """A11: `is_causal` false in config.json; the folder's own copy of the class is not run."""
    folder = write_model(tmp_path / "m", "qwen2", pooling="lasttoken")
    causal = vectors(make_runner_factory("m", folder)(), TEXTS)
    edit_json(folder / "config.json", is_causal=False)
    want = st(folder).encode(TEXTS)
    if with_code:
        edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_qwen.Qwen2Model"})
        (folder / "modeling_qwen.py").write_text("raise SystemExit('this code must not run')\n")
    runner = make_runner_factory("m", folder)()
    assert runner.info.packed and "attention is bidirectional" in runner.info.notes
    close(vectors(runner, TEXTS), want)
    assert np.abs(want - causal).max() > 1e-3
    fingerprint = runner.info.fingerprint
    edit_json(folder / "config.json", is_causal=None)
    if with_code:
        with pytest.raises(ModelLoadError, match="is_causal"):
            make_runner_factory("m", folder)()
    said = make_runner_factory("m", folder, causal=False)()
    close(vectors(said, TEXTS), want)
    assert said.info.fingerprint != fingerprint


def test_an_unknown_class_in_the_folder_is_refused_by_name(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", "mistral", pooling="lasttoken")
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling.BiMistralModel"})
    with pytest.raises(ModelLoadError, match=r"BiMistralModel.*trust_remote_code"):
        make_runner_factory("m", folder)()


def test_the_bare_qwen3_backbone_is_an_embedding_model(tmp_path: Path) -> None:
    """`Qwen3Model` without modules.json: last token, and the notes say where that comes from."""
    folder = write_model(tmp_path / "m", "qwen3", pooling=None)
    runner = make_runner_factory("m", folder)()
    assert runner.info.pooling == "last_token" and runner.info.tasks == {"embed"}
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(str(folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    with torch.no_grad():
        want = [
            model(**tokenizer(t, return_tensors="pt")).last_hidden_state[0, -1].numpy()
            for t in TEXTS
        ]
    close(vectors(runner, TEXTS), np.stack(want))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2", "phi3"])
def test_a_causal_lm_with_a_module_list_is_an_embedding_model(tmp_path: Path, family: str) -> None:
    """Qwen3-Embedding is saved as `Qwen3ForCausalLM`; its vocabulary head is left out."""
    modules = write_model(tmp_path / "modules", family, pooling="lasttoken")
    folder = write_causal(tmp_path / "m", family, end=True, tie=False)
    for name in ("modules.json", "1_Pooling"):
        (modules / name).rename(folder / name)
    runner = make_runner_factory("m", folder)()
    assert runner.info.tasks == {"embed"} and runner.info.packed
    close(vectors(runner, TEXTS), st(folder).encode(TEXTS))


@pytest.mark.parametrize("bidirectional", [True, False])
def test_embedding_gemma_equals_sentence_transformers(tmp_path: Path, bidirectional: bool) -> None:
    """A11: Gemma3 both ways across its window, two Dense modules, prompts by name; nothing is set."""
    folder = write_model(
        tmp_path / "m", "gemma3_text", pooling="mean", dense=12,
        prompts={"query": "task: search result | query: ", "document": "title: none | text: "},
        use_bidirectional_attention=bidirectional,
    )  # fmt: skip
    runner = make_runner_factory("m", folder)()
    assert runner.info.packed
    assert ("attention is bidirectional" in runner.info.notes) == bidirectional
    texts = [*TEXTS, "a river and the sea " * 5]
    for name in (None, "query", "document"):
        close(vectors(runner, texts, prompt_name=name), st(folder).encode(texts, prompt_name=name))


@pytest.mark.parametrize("family", ["qwen2", "mistral", "phi3", "gemma2"])
def test_sliding_windows(tmp_path: Path, family: str) -> None:
    """Texts of several windows, against sentence-transformers."""
    fields = {"use_sliding_window": True, "max_window_layers": 0} if family == "qwen2" else {}
    folder = write_model(tmp_path / "m", family, pooling="lasttoken", sliding_window=8, **fields)
    runner = make_runner_factory("m", folder)()
    assert runner.info.packed
    texts = [*TEXTS, "a river and the sea " * 8]
    close(vectors(runner, texts), st(folder).encode(texts))


@pytest.mark.parametrize(
    ("family", "rope"),
    [
        (
            "llama",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
        ),
        ("qwen2", {"rope_type": "yarn", "factor": 4.0}),
        ("qwen3", {"rope_type": "linear", "factor": 2.0}),
    ],
)
def test_scaled_rope_that_does_not_depend_on_length(
    tmp_path: Path, family: str, rope: dict[str, Any]
) -> None:
    """Llama 3.2's, and YaRN: one set of frequencies for all lengths; packs are not split."""
    folder = write_model(tmp_path / "m", family, pooling="lasttoken")
    rope = {**rope, "rope_theta": 1e4, "original_max_position_embeddings": 32}
    edit_json(folder / "config.json", rope_parameters=rope)
    runner = make_runner_factory("m", folder)()
    assert runner.info.packed
    texts = [*TEXTS, "a river and the sea " * 8]
    close(vectors(runner, texts), st(folder).encode(texts))


def test_bidirectional_windows_follow_transformers(tmp_path: Path) -> None:
    """A11: Qwen2 both ways with a window: transformers' masks reach one token farther than its window
    argument says; the self-check sees it, and the model runs padded, as transformers computes it."""
    folder = write_model(
        tmp_path / "m", "qwen2", pooling="lasttoken", sliding_window=8,
        use_sliding_window=True, max_window_layers=0,
    )  # fmt: skip
    edit_json(folder / "config.json", is_causal=False)
    runner = make_runner_factory("m", folder)()
    texts = [*TEXTS, "a river and the sea " * 8]
    close(vectors(runner, texts), st(folder).encode(texts))


# -- reward models and classifiers ------------------------------------------------------------


def test_a_reward_model_needs_its_code(tmp_path: Path) -> None:
    """A16: Two linears over the last token; refused by name without `trust_remote_code`."""
    folder = write_remote(tmp_path / "m", REWARD_CODE, "Qwen2ForRewardModel", module="modeling_rm")
    with pytest.raises(ModelLoadError, match=r"Qwen2ForRewardModel.*trust_remote_code"):
        make_runner_factory("m", folder)()
    runner = make_runner_factory("m", folder, trust_remote_code=True)()
    assert runner.info.packed and runner.info.labels == ("reward",)
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(str(folder), trust_remote_code=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    with torch.no_grad():
        want = [float(model(**tokenizer(t, return_tensors="pt")).logits[0, 0]) for t in TEXTS]
    for raw in (False, True):
        got = [float(o.scores[0]) for o in run(runner, TEXTS, ClassifyRequest, raw_scores=raw)]
        assert np.abs(np.array(got) - want).max() <= 1e-5  # a reward is never squashed
    assert runner.spec.label_activation == "identity"


@pytest.mark.parametrize("problem", ["single_label_classification", "multi_label_classification"])
@pytest.mark.parametrize("family", ["qwen2", "llama", "gemma2"])
def test_decoder_classifiers_equal_transformers(tmp_path: Path, family: str, problem: str) -> None:
    """A16, A18: labels by name, softmax or sigmoid as the config says, raw on request."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = write_causal(tmp_path / "m", family, labels=3, end=True)
    edit_json(
        folder / "config.json",
        problem_type=problem,
        id2label={"0": "no", "1": "yes", "2": "maybe"},
    )
    runner = make_runner_factory("m", folder)()
    assert runner.info.labels == ("no", "yes", "maybe") and runner.info.tasks == {"classify"}
    model = AutoModelForSequenceClassification.from_pretrained(str(folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    with torch.no_grad():
        logits = torch.cat([model(**tokenizer(t, return_tensors="pt")).logits for t in TEXTS])
    squashed = logits.softmax(-1) if problem.startswith("single") else logits.sigmoid()
    for raw, want in ((True, logits), (False, squashed)):
        got = np.stack([o.scores for o in run(runner, TEXTS, ClassifyRequest, raw_scores=raw)])
        assert np.abs(got - want.numpy()).max() <= 1e-5


def test_large_logits_stay_probabilities(tmp_path: Path) -> None:
    """A16, trap 6: logits of tens of thousands give finite probabilities that sum to one."""
    from safetensors.torch import load_file, save_file

    folder = write_causal(tmp_path / "m", "qwen2", labels=3)
    state = load_file(folder / "model.safetensors")
    state["score.weight"] *= 2e4
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    runner = make_runner_factory("m", folder)()
    raw = np.stack([o.scores for o in run(runner, TEXTS, ClassifyRequest, raw_scores=True)])
    got = np.stack([o.scores for o in run(runner, TEXTS, ClassifyRequest)])
    assert np.abs(raw).max() > 1e4 and np.isfinite(got).all()
    assert np.abs(got.sum(1) - 1).max() <= 1e-6 and (got.argmax(1) == raw.argmax(1)).all()


@pytest.mark.parametrize("family", ["llama", "phi", "granite", "gpt_neox"])
def test_label_tokens_classify(tmp_path: Path, family: str) -> None:
    """A causal language model as a classifier over vocabulary tokens, by their names; Phi's head has a
    bias, Granite divides its logits."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = write_causal(tmp_path / "m", family, tie=False)
    runner = make_runner_factory("m", folder, label_tokens=("yes", "no", "x"))()
    assert runner.info.labels == ("yes", "no", "x") and runner.info.tasks == {"classify"}
    model = AutoModelForCausalLM.from_pretrained(str(folder)).eval()
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    ids = tokenizer.convert_tokens_to_ids(["yes", "no", "x"])
    with torch.no_grad():
        rows = [model(**tokenizer(t, return_tensors="pt")).logits[0, -1, ids] for t in TEXTS]
    logits = torch.stack(rows)
    for raw, want in ((True, logits), (False, logits.softmax(-1))):
        got = np.stack([o.scores for o in run(runner, TEXTS, ClassifyRequest, raw_scores=raw)])
        assert np.abs(got - want.numpy()).max() <= 1e-5


def test_a_label_that_is_not_one_token_is_refused(tmp_path: Path) -> None:
    folder = write_causal(tmp_path / "m")
    with pytest.raises(ModelLoadError, match="'maybe' is not one token"):
        make_runner_factory("m", folder, label_tokens=("yes", "maybe"))()


# -- the self-check ---------------------------------------------------------------------------


def test_remote_code_that_bypasses_the_interface_is_caught(tmp_path: Path) -> None:
    """Attention of its own, which would look across items of a pack: it runs padded, and says so."""
    folder = write_remote(tmp_path / "m", BYPASS_CODE, "Qwen2Model", module="modeling_own")
    with pytest.raises(ModelLoadError):  # its weights are not those of transformers' class
        make_runner_factory("m", folder, causal=True)()
    runner = make_runner_factory("m", folder, trust_remote_code=True)()
    assert runner.info.packed is False
    assert "attention was reached 0 times" in " ".join(runner.info.notes)
    crowd = vectors(runner, TEXTS)
    for text, vector in zip(TEXTS, crowd, strict=True):
        assert np.abs(vectors(runner, [text])[0] - vector).max() <= 1e-6


@pytest.mark.parametrize(
    ("family", "kind"), [("phi3", "longrope"), ("llama", "longrope"), ("llama", "dynamic")]
)
def test_rope_by_length(tmp_path: Path, family: str, kind: str) -> None:
    """Items past the trained length beside short ones, in any order, after any history: as if alone."""
    fields: dict[str, Any] = {"sliding_window": None} if family == "phi3" else {}
    folder = write_model(tmp_path / "m", family, pooling="lasttoken", **fields)
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 4, "long_factor": [6.0, 3.0, 2.0, 5.0]}
        rope |= {"original_max_position_embeddings": 24}
        edit_json(
            folder / "config.json",
            rope_parameters=rope,
            original_max_position_embeddings=24,
            max_position_embeddings=96,
        )
    else:
        edit_json(folder / "config.json", rope_parameters=rope, max_position_embeddings=24)
    runner = make_runner_factory("m", folder)()
    assert runner.info.max_tokens == 96 and runner.info.packed, runner.info.notes
    import torch
    from transformers import AutoModel

    items = [
        np.random.default_rng(n).integers(0, 200, n).tolist() for n in (90, 3, 24, 25, 60, 11, 61)
    ]
    want = []
    for ids in items:  # a fresh model each: "dynamic" remembers
        model = AutoModel.from_pretrained(str(folder)).eval()
        with torch.no_grad():
            hidden = model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state
        want.append(torch.nn.functional.normalize(hidden[0, -1], dim=0).numpy())
    for order in (range(7), (1, 5, 0), (4, 6), (3,), (2, 1), (0, 1)):
        picked = tuple(TokenIds(tuple(items[i])) for i in order)
        batch = pack(runner.encoder.encode([EmbedRequest(id="r", input=picked)])[0].items)
        got = np.stack([o.dense for o in scatter(batch, runner.forward(batch))])
        close(got, np.stack([want[i] for i in order]))
    assert any("crossed no window" in n for n in runner.info.notes) is False


@pytest.mark.parametrize("width", [1, 4])
def test_rope_by_length_from_several_executor_threads(tmp_path: Path, width: int) -> None:
    """K51: executor threads share the rotary module; short and long items at once, each as if alone,
    whatever the intra-op threads of the thread that made the executor."""
    import torch

    folder = write_model(tmp_path / "m", "llama", pooling="lasttoken")
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
    edit_json(folder / "config.json", rope_parameters=rope, max_position_embeddings=24)
    factory = make_runner_factory("m", folder)
    runner = factory()
    requests = [
        EmbedRequest(id="r", input=(TokenIds(tuple((7 * i + n) % 200 for i in range(n))),))
        for n in (90, 5, 50, 24, 70, 25)
    ]
    packs = [pack(one.items) for one in runner.encoder.encode(requests)]
    want = [runner.forward(batch)[0].dense.tobytes() for batch in packs]
    torch.set_num_threads(3)  # an executor thread that took this over would differ at 25 tokens
    executor = ModelExecutor({"m": factory}, width)
    try:
        executor.load("m").result()
        for _ in range(12):
            futures = [executor.submit("m", batch) for batch in packs]
            assert [f.result()[0].dense.tobytes() for f in futures] == want
    finally:
        torch.set_num_threads(1)
        assert executor.close(10)
