"""Keys of a folder that change ids: honoured as sentence-transformers honours them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from gpu.batch import pack, scatter
from gpu.faults import ModelLoadError
from gpu.load import make_runner_factory
from schemas.errors import Unsupported
from schemas.requests import Document, EmbedRequest, RerankRequest, Text
from tests.support.models import edit_json, write_model

TEXTS = ["Hello World", "the CAPITAL of China", "x", "A River " * 20]


@pytest.fixture(scope="module")
def xlmr(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cased tokenizer; 64 positions beside the two that hold no token."""
    return write_model(tmp_path_factory.mktemp("keys") / "m", "xlm-roberta", max_seq_length=60)


def copy_of(folder: Path, where: Path) -> Path:
    return Path(shutil.copytree(folder, where / "m"))


def ours(folder: Path, texts: list[str], truncate: str = "right") -> np.ndarray:
    runner = make_runner_factory("m", folder)()
    request = EmbedRequest(id="r", input=tuple(map(Text, texts)), truncate=truncate)  # type: ignore[arg-type]
    batch = pack(runner.encoder.encode([request])[0].items)  # type: ignore[union-attr]
    return np.stack([outcome.dense for outcome in scatter(batch, runner.forward(batch))])  # type: ignore[union-attr]


def theirs(folder: Path, texts: list[str]) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return np.asarray(SentenceTransformer(str(folder), device="cpu").encode(texts))


def close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got.astype(np.float64) - want.astype(np.float64)).max() <= 1e-5


NAMES = ["sentence_bert_config.json", "sentence_roberta_config.json", "sentence_xlm-roberta_config.json"]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_the_transformer_file_is_read_under_all_its_names(
    xlmr: Path, tmp_path: Path, name: str
) -> None:
    """K06, K07: lower case, and the limit at which long texts are cut."""
    folder = copy_of(xlmr, tmp_path)
    (folder / "sentence_bert_config.json").unlink()
    edit_json(folder / name, max_seq_length=12, do_lower_case=True)
    got = ours(folder, TEXTS)
    close(got, theirs(folder, TEXTS))
    assert np.abs(got - theirs(xlmr, TEXTS)).max() > 0.01, "the keys change nothing here"


@pytest.mark.parametrize(
    ("file", "tokenizer", "limit"),
    [(40, 16, 40), (16, 40, 16), (None, 24, 24), (None, None, 64), (900, 16, 64)],
)
def test_limits_have_the_librarys_own_precedence(
    xlmr: Path, tmp_path: Path, file: int | None, tokenizer: int | None, limit: int
) -> None:
    """K11: the file beats the tokenizer, whichever is smaller; positions bound both."""
    folder = copy_of(xlmr, tmp_path)
    (folder / "sentence_bert_config.json").unlink()
    if file is not None:
        edit_json(folder / "sentence_bert_config.json", max_seq_length=file)
    edit_json(folder / "tokenizer_config.json", model_max_length=tokenizer)
    assert make_runner_factory("m", folder)().info.max_tokens == limit
    if file == limit or (file is None and tokenizer is not None):
        close(ours(folder, ["a river " * 50]), theirs(folder, ["a river " * 50]))


def test_texts_without_special_tokens_where_the_folder_says_so(xlmr: Path, tmp_path: Path) -> None:
    """K22"""
    folder = copy_of(xlmr, tmp_path)
    edit_json(
        folder / "sentence_bert_config.json",
        processing_kwargs={"text": {"add_special_tokens": False}},
    )
    got = ours(folder, TEXTS)
    close(got, theirs(folder, TEXTS))
    assert np.abs(got - ours(xlmr, TEXTS)).max() > 0.01


CHAT = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' }}{% if m['role'] in ('query', 'document') %}"
    "{{ m['content'] }}{% endif %}{{ '<|endoftext|>' }}{% endfor %}"
)


EMBEDS = (
    "{% for m in messages %}{{ '<|endoftext|>' + m['role'] + '\n' }}{{ CONTENT }}{{ '<|endoftext|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|endoftext|>assistant:' }}{% endif %}"
)
CONTENTS = {
    "flat": "m['content']",
    "flat-trim": "m['content'] | trim",
    "structured": "m['content'][0]['text']",
}


def write_chat(folder: Path, form: str, pooling: str = "lasttoken", **config: object) -> Path:
    write_model(
        folder, "qwen3", pooling=pooling, prompts={"query": "Find it"}, include_prompt=False
    )
    (folder / "chat_template.jinja").write_text(EMBEDS.replace("CONTENT", CONTENTS[form]))
    method = {"method": "forward", "method_output_name": "last_hidden_state"}
    said = {
        "modality_config": {
            "text": method, "message": {**method, "format": form.split("-", maxsplit=1)[0]}
        },
        "module_output_name": "token_embeddings",
        "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        "max_seq_length": 60,
        **config,
    }  # fmt: skip
    edit_json(folder / "sentence_bert_config.json", **said)
    return folder


@pytest.mark.parametrize("form", CONTENTS)
def test_texts_go_through_the_chat_template_as_the_library_puts_them(
    tmp_path: Path, form: str
) -> None:
    """K18: a user's message, a prompt as the system's; a cut text keeps the template's end."""
    from sentence_transformers import SentenceTransformer

    folder = write_chat(tmp_path / "m", form, "mean" if form == "flat" else "lasttoken")
    runner = make_runner_factory("m", folder)()
    library = SentenceTransformer(str(folder), device="cpu")
    texts = [*TEXTS, "  spaces around \n"]
    for prompt in (None, "query"):
        request = EmbedRequest(
            id="r", input=tuple(map(Text, texts)), truncate="right", prompt_name=prompt
        )
        items = runner.encoder.encode([request])[0].items  # type: ignore[union-attr]
        batch = pack(items)
        got = np.stack([outcome.dense for outcome in scatter(batch, runner.forward(batch))])  # type: ignore[union-attr]
        close(got, np.stack([library.encode([text], prompt_name=prompt)[0] for text in texts]))
        alone = runner.forward(pack([items[2]]))[0].dense  # type: ignore[union-attr]
        assert alone.tobytes() == got[2].tobytes()
    refused = runner.encoder.encode([EmbedRequest(id="r", input=(Text("x"),), prompt="Find")])[0]
    assert isinstance(refused, Unsupported) and refused.path == "$.prompt"


@pytest.mark.parametrize(
    ("template", "config", "what"),
    [
        ("{{ messages[0]['content'] | upper }}", {}, "once and as it is|as a system message"),
        ("{{ messages[-1]['content'] }} end", {}, "as a system message|without a control token"),
        (EMBEDS.replace("CONTENT", "m['content']") + "{{ task }}", {}, "reads the task"),
        ("{{ nothing.at.all }}", {}, "cannot be rendered"),
        (None, {"do_lower_case": True}, "do_lower_case beside a chat template"),
        (
            None,
            {"processing_kwargs": {"chat_template": {"max_length": 9}}},
            "max_length beside a chat",
        ),
    ],
)
def test_a_chat_template_that_cannot_be_taken_apart_is_refused(
    tmp_path: Path, template: str | None, config: dict[str, object], what: str
) -> None:
    """K18"""
    folder = write_chat(tmp_path / "m", "flat", **config)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(ModelLoadError, match=what):
        make_runner_factory("m", folder)()


@pytest.mark.parametrize("template", [None, CHAT])
def test_a_decoder_that_scores_pairs_uses_the_folders_own_form(
    tmp_path: Path, template: str | None
) -> None:
    """K26: the chat template where it has the roles of a pair, as CrossEncoder does; else joined, and
    said in a note."""
    from sentence_transformers import CrossEncoder

    folder = write_model(tmp_path / "m", "qwen3", pooling=None, labels=1)
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    runner = make_runner_factory("m", folder)()
    told = " ".join(runner.info.notes)
    pairs = [("what is a river", "a river is water"), ("what is a river", "the capital")]
    request = RerankRequest(
        id="r",
        query=pairs[0][0],
        documents=tuple(Document(text=d) for _, d in pairs),
        raw_scores=True,
    )
    batch = pack(runner.encoder.encode([request])[0].items)  # type: ignore[union-attr]
    got = [float(o.scores[0]) for o in scatter(batch, runner.forward(batch))]  # type: ignore[union-attr,index]
    assert ("no form for pairs" in told) is (template is None)
    import torch

    library = CrossEncoder(str(folder), device="cpu", activation_fn=torch.nn.Identity())
    want = [float(library.predict([pair])[0]) for pair in pairs]
    close(np.array(got), np.array(want))


@pytest.mark.parametrize(
    "prompt", ["<|endoftext|>\n", "<|endoftext|>ask <|endoftext|> query: ", "ask<|endoftext|>"]
)
@pytest.mark.parametrize("include_prompt", [True, False])
def test_prompts_with_control_tokens_give_the_librarys_vectors(
    tmp_path: Path, prompt: str, include_prompt: bool
) -> None:
    """K08, with and without the prompt in the mean."""
    folder = write_model(
        tmp_path / "m",
        "qwen3",
        pooling="mean",
        prompts={"q": prompt},
        include_prompt=include_prompt,
    )
    edit_json(folder / "config_sentence_transformers.json", default_prompt_name="q")
    close(ours(folder, TEXTS), theirs(folder, TEXTS))
