"""Tiny seeded causal language models: rerankers, reward models, folders with code of their own.

Who calls it: unit and parity tests of decoders.
What must stay true: as in `tests.support.models`; the tokenizer splits text as Qwen's does and knows
"yes", "no" and "Yes" as one token each, so that prompts and label tokens are those of the real models.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.models import _DECODER, _FAMILIES, _dump, edit_json, write_tokenizer
from tests.support.models_more import MORE

END = "<|endoftext|>"
QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_MERGES = [
    "y e",
    "ye s",
    "n o",
    "Y e",
    "Ye s",
    "t h",
    "th e",
    "i n",
    "Ġ a",
    "> :",
    "c h",
    "i e",
    ". Ċ",
]


def chat_tokenizer(*, end: bool = False, bos: bool = False) -> tuple[Any, dict[str, str]]:
    """Byte-level BPE with Qwen's control tokens; `end` closes and `bos` opens every text."""
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors

    vocab = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    merges = [(a, b) for a, b in (merge.split(" ") for merge in _MERGES)]
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.add_special_tokens([END, "<|im_start|>", "<|im_end|>", "<bos>"])
    tokenizer.add_tokens([AddedToken(t, special=False) for t in ("<think>", "</think>")])
    start, close = ("<bos> " if bos else ""), (f" {END}" if end else "")
    if end or bos:
        used = [t for t, on in ((END, end), ("<bos>", bos)) if on]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{start}$A{close}",
            pair=f"{start}$A{close} $B{close}",
            special_tokens=[(t, tokenizer.token_to_id(t)) for t in used],
        )
    return tokenizer, {"pad_token": END, "eos_token": END, "bos_token": "<bos>"}


def write_causal(
    folder: Path,
    family: str = "qwen3",
    *,
    labels: int | None = None,
    end: bool = False,
    bos: bool = False,
    seed: int = 0,
    tie: bool = True,
    **config_fields: Any,
) -> Path:
    """A `*ForCausalLM` folder (or, with `labels`, a `*ForSequenceClassification`) without modules.json."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    config_class, _, fields = (_FAMILIES | MORE)[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, names = chat_tokenizer(end=end, bos=bos)
    write_tokenizer(folder, tokenizer, names)
    merged: dict[str, Any] = {
        **(_DECODER if family in _FAMILIES else {}),
        **fields,
        "max_position_embeddings": 512,
        "vocab_size": tokenizer.get_vocab_size(),
        "tie_word_embeddings": tie,
        **config_fields,
    }
    for name in ("pad_token_id", "eos_token_id", "bos_token_id"):
        merged.setdefault(name, tokenizer.token_to_id(END))
    if labels is not None:
        merged["num_labels"] = labels
    config = getattr(transformers, config_class)(**merged)
    auto = (
        transformers.AutoModelForCausalLM
        if labels is None
        else transformers.AutoModelForSequenceClassification
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config).eval()
        if getattr(getattr(model, "lm_head", None), "bias", None) is not None:
            torch.nn.init.normal_(model.lm_head.bias)
        model.save_pretrained(folder)
    return folder


QWEN3_CHAT = (
    "<|im_start|>system\n"
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    "<Instruct>: {% set s = messages | selectattr('role', 'eq', 'system') | map(attribute='content') "
    "| first %}{{ s if s else 'Given a web search query, retrieve relevant passages that answer the "
    "query' }}\n<Query>: {{ messages | selectattr('role', 'eq', 'query') | map(attribute='content') "
    "| first }}\n<Document>: {{ messages | selectattr('role', 'eq', 'document') | "
    "map(attribute='content') | first }}<|im_end|>\n"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n\n</think>\n\n{% endif %}"
)


def as_cross_encoder(
    folder: Path,
    *,
    true_id: int | None = None,
    false_id: int | None = None,
    activation: str = "torch.nn.modules.activation.Sigmoid",
    chat_template: str = QWEN3_CHAT,
) -> Path:
    """Add what sentence-transformers writes for a reranker that reads pairs through a chat template;
    with `true_id`, one that is a causal language model read by `LogitScore`."""
    causal = true_id is not None
    modules = [
        {
            "idx": 0,
            "name": "0",
            "path": "",
            "type": "sentence_transformers.base.modules.Transformer",
        }
    ]
    if causal:
        modules.append(
            {
                "idx": 1,
                "name": "1",
                "path": "1_LogitScore",
                "type": "sentence_transformers.cross_encoder.modules.logit_score.LogitScore",
            }
        )
        (folder / "1_LogitScore").mkdir()
        _dump(
            folder / "1_LogitScore" / "config.json",
            {
                "true_token_id": true_id,
                "false_token_id": false_id,
                "module_input_name": "causal_logits",
            },
        )
    method = {"method": "forward", "method_output_name": "logits"}
    _dump(folder / "modules.json", modules)
    _dump(
        folder / "sentence_bert_config.json",
        {
            "transformer_task": "text-generation" if causal else "sequence-classification",
            "modality_config": {"text": method, "message": {**method, "format": "flat"}},
            "module_output_name": "causal_logits" if causal else "scores",
            "processing_kwargs": {"chat_template": {"add_generation_prompt": True}},
        },
    )
    _dump(
        folder / "config_sentence_transformers.json",
        {
            "model_type": "CrossEncoder",
            "activation_fn": activation,
            "prompts": {},
            "default_prompt_name": None,
        },
    )
    (folder / "chat_template.jinja").write_text(chat_template)
    return folder


REWARD_CODE = '''
"""A reward model as Qwen2.5-Math-RM has it: the backbone and a head of two linears."""
import torch
from torch import nn
from transformers import Qwen2Model, Qwen2PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutputWithPast


class Qwen2ForRewardModel(Qwen2PreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.model = Qwen2Model(config)
        self.score = nn.Sequential(
            nn.Linear(config.hidden_size, config.hidden_size), nn.ReLU(), nn.Linear(config.hidden_size, 1)
        )
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, use_cache=None, **kwargs):
        hidden = self.model(input_ids, attention_mask=attention_mask, use_cache=use_cache).last_hidden_state
        scores = self.score(hidden)
        places = torch.arange(input_ids.shape[1])
        ends = (places * (input_ids != self.config.pad_token_id)).argmax(-1)
        return SequenceClassifierOutputWithPast(logits=scores[torch.arange(len(ends)), ends])
'''

BYPASS_CODE = '''
"""A backbone whose attention is its own: it never asks the attention interface."""
import torch
from torch import nn
from transformers import Qwen2Config, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class Qwen2Model(PreTrainedModel):
    config_class = Qwen2Config
    base_model_prefix = "model"
    _supports_sdpa = True

    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.q, self.k = (nn.Linear(config.hidden_size, config.hidden_size) for _ in range(2))
        self.post_init()

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **kwargs):
        x = self.embed_tokens(input_ids)
        weights = self.q(x) @ self.k(x).transpose(1, 2) / x.shape[-1] ** 0.5
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        weights = weights.masked_fill(~causal, torch.finfo(x.dtype).min)
        return BaseModelOutput(last_hidden_state=x + weights.softmax(-1) @ x)
'''


def write_remote(folder: Path, code: str, class_name: str, *, module: str) -> Path:
    """A folder of model type qwen2 whose weights belong to a class in its own Python file."""
    import importlib.util

    import torch
    import transformers

    write_causal(folder, "qwen2", end=True)
    for weights in folder.glob("*.safetensors"):
        weights.unlink()
    path = folder / f"{module}.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(f"tiny_{module}", path)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    config = transformers.AutoConfig.from_pretrained(str(folder))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        getattr(loaded, class_name)(config).eval().save_pretrained(folder)
    edit_json(
        folder / "config.json",
        architectures=[class_name],
        auto_map={"AutoModel": f"{module}.{class_name}"},
    )
    return folder


def write_layerwise(
    folder: Path,
    *,
    layers: int = 4,
    start: int = 2,
    multi: bool = True,
    seed: int = 0,
    **config: Any,
) -> Path:
    """A LayerWiseMiniCPMForCausalLM with a head behind each layer from `start` on, or one for all."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, names = chat_tokenizer()
    write_tokenizer(folder, tokenizer, names)
    hidden, inner, keys, vocab = 32, 64, 16, tokenizer.get_vocab_size()
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * scale

    state = {"model.embed_tokens.weight": noise(vocab, hidden, scale=0.1)}
    state["model.norm.weight"] = 1 + noise(hidden)
    for i in range(layers):
        at = f"model.layers.{i}."
        state[f"{at}input_layernorm.weight"] = 1 + noise(hidden)
        state[f"{at}post_attention_layernorm.weight"] = 1 + noise(hidden)
        for name, size in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden)):
            state[f"{at}self_attn.{name}_proj.weight"] = noise(size, hidden)
        for name, shape in (
            ("gate", (inner, hidden)),
            ("up", (inner, hidden)),
            ("down", (hidden, inner)),
        ):
            state[f"{at}mlp.{name}_proj.weight"] = noise(*shape, scale=0.2)
    for name in [f"{j}." for j in range(layers - start + 1)] if multi else [""]:
        state[f"lm_head.{name}linear_head.weight"] = noise(1, hidden)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    _dump(
        folder / "config.json",
        {
            "model_type": "minicpm",
            "architectures": ["LayerWiseMiniCPMForCausalLM"],
            "auto_map": {
                "AutoModelForCausalLM": "modeling_minicpm_reranker.LayerWiseMiniCPMForCausalLM"
            },
            "vocab_size": vocab,
            "hidden_size": hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "scale_emb": 12,
            "scale_depth": 1.4,
            "dim_model_base": 16,
            "start_layer": start,
            "head_multi": multi,
            "head_type": "simple",
            "pad_token_id": tokenizer.token_to_id(END),
            **config,
        },
    )
    return folder
