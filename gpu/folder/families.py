"""The per-architecture table: everything the engine must know that a config file does not say.

Who calls it: `gpu.folder.read` (limits, tasks, pooling defaults) and `gpu.model_runner` (how to call
the base model, which head recipe to run).
What must stay true: plain values, no torch; adding a family is adding one row; a model type without
a row is refused at load by name, never guessed. Rows were checked against transformers 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

HeadRecipe: TypeAlias = Literal[
    "pooler_classifier",  # classifier(pooler(first token))
    "classifier_on_first",  # classifier(first token as a sequence of one)
    "distilbert",  # classifier(relu(pre_classifier(first token)))
    "modernbert",  # classifier(head(first token or mean, as config.classifier_pooling says))
    "albert",  # classifier(tanh(pooler(first token)))
    "deberta",  # classifier(pooler(first token)), the pooler beside the base model
    "eurobert",  # classifier(gelu(dense(first token or mean))), or the mean of that per token
    "score_on_last",  # score(last token)
    "modernbert_decoder",  # classifier(head(last token))
    "layerwise",  # score(last token), which is the model's pad token too
    "score_on_pooled",  # score(mean, first or last token) / temperature
]

LAST_TOKEN_HEADS: tuple[HeadRecipe, ...] = ("score_on_last", "modernbert_decoder")

MlmRecipe: TypeAlias = Literal[
    "cls",  # cls(hidden)
    "lm_head",  # lm_head(hidden)
    "distilbert",  # vocab_projector(vocab_layer_norm(activation(vocab_transform(hidden))))
    "modernbert",  # decoder(head(hidden))
    "electra",  # generator_lm_head(generator_predictions(hidden))
]


Wrapper: TypeAlias = Literal["t5", "mpnet", "rembert", "deberta", "moe"]


@dataclass(frozen=True, slots=True)
class Family:
    """One row.

    model_type: `config.json`'s `model_type`.
    position_offset: "none", or "pad_token" where positions start at pad_token_id + 1 (RoBERTa and
        its kin: `max_position_embeddings` 514 means 512 usable tokens).
    learned_positions: the position table bounds the length; otherwise the config value is advice.
    default_pooling: used only when the folder names none; None: such a folder is refused.
    head: recipe of `*ForSequenceClassification`; None: such models are refused.
    causal: attention is causal unless the config says otherwise.
    mlm: recipe of the head of `*ForMaskedLM`, for SPLADE; None: such models are refused.
    padded_because: why this family cannot run packed; None: it can (and the self-check proves it).
    wrapper: what `gpu.forward.wrappers` changes so that it can; None: nothing has to be.
    remote: no row of this table: its class is code in the model folder.
    loads_as: transformers class of an embedding model where AutoModel would give another one, or none.
    task_adapters: folders in the model's own hold LoRA adapters, which a prompt's name picks.
    temperature: what a pooled score is divided by, where config.json names one.
    """

    model_type: str
    position_offset: Literal["none", "pad_token"] = "none"
    learned_positions: bool = True
    default_pooling: Literal["cls", "mean", "last_token"] | None = None
    head: HeadRecipe | None = "classifier_on_first"
    causal: bool = False
    padded_because: str | None = None
    mlm: MlmRecipe | None = None
    remote: bool = False
    wrapper: Wrapper | None = None
    loads_as: str | None = None
    task_adapters: bool = False
    temperature: float = 1.0


def _decoder(model_type: str, **changes: Any) -> Family:
    """A decoder used as an encoder: causal, rotary, pooled at its last token."""
    row: dict[str, Any] = {
        "learned_positions": False,
        "default_pooling": "last_token",
        "head": "score_on_last",
        "causal": True,
    }
    return Family(model_type, **(row | changes))


def _t5(model_type: str) -> Family:
    """The encoder half of an encoder-decoder: relative biases, no positions, no classifier of its own."""
    return Family(
        model_type,
        learned_positions=False,
        head=None,
        wrapper="t5",
        loads_as=f"{model_type.upper()}EncoderModel",
    )


_ROWS = (
    Family("bert", head="pooler_classifier", mlm="cls"),
    Family("roberta", position_offset="pad_token", mlm="lm_head"),
    Family("xlm-roberta", position_offset="pad_token", mlm="lm_head"),
    Family("camembert", position_offset="pad_token", mlm="lm_head"),
    Family("electra", mlm="electra"),
    Family("distilbert", head="distilbert", mlm="distilbert"),
    Family("modernbert", learned_positions=False, head="modernbert", mlm="modernbert"),
    Family("nomic_bert", learned_positions=False, head="pooler_classifier", mlm="cls"),
    _decoder("qwen2"),
    _decoder("qwen3"),
    _decoder("llama"),
    _decoder("llama_bidirec", head="score_on_pooled", loads_as="LlamaModel", default_pooling=None),
    _decoder("mistral"),
    _decoder("gemma3_text", default_pooling=None),
    _decoder("gemma"),
    _decoder("gemma2"),
    _decoder("phi3"),
    _decoder("gpt_neox"),
    _decoder("granite", head=None),
    _decoder("ministral"),
    _decoder("ministral3"),
    _decoder("modernbert-decoder", head="modernbert_decoder"),
    _decoder("nemotron"),
    _decoder("olmo2"),
    _decoder("phi"),
    _decoder("qwen3_moe", wrapper="moe"),
    _decoder("smollm3"),
    _decoder("minicpm", head="layerwise", default_pooling=None),
    _decoder("internlm2"),  # its classes come with the folder
    Family("ernie", head="pooler_classifier", mlm="cls"),
    Family("embedding_gemma2_text", learned_positions=False, default_pooling="mean", head=None),
    Family("mpnet", position_offset="pad_token", mlm="lm_head", wrapper="mpnet"),
    Family("albert", head="albert"),
    Family("gte", learned_positions=False, head="pooler_classifier"),
    Family("new", learned_positions=False, head="pooler_classifier", loads_as="GteModel"),
    Family("jina_embeddings_v3", learned_positions=False, task_adapters=True),
    Family("eurobert", learned_positions=False, head="eurobert"),
    Family("deberta-v2", head="deberta", wrapper="deberta"),
    Family("rembert", head="pooler_classifier", wrapper="rembert"),
    Family("nvembed", learned_positions=False, default_pooling="mean", head=None),
    _t5("t5"),
    _t5("mt5"),
    _t5("umt5"),
)

FAMILIES: dict[str, Family] = {row.model_type: row for row in _ROWS}

VISION_FAMILIES: dict[str, Family] = {
    row.model_type: row
    for row in (
        Family("clip", head=None, causal=True),  # the text tower is causal
        Family("siglip", head=None),
        _decoder("qwen2_vl", head=None),
    )
}
"""Models that take images, see `gpu.folder.vision`."""


def position_offset(family: Family, pad_token_id: int | None) -> int:
    """What to add to positions that start at 0. RoBERTa's rule: pad_token_id + 1 (pad 1 there)."""
    if family.position_offset == "none":
        return 0
    return (1 if pad_token_id is None else pad_token_id) + 1
