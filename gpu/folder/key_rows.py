"""The rows of `gpu.folder.keys`, by file (those of one model type: `gpu.folder.type_rows`): names of keys, and values where not all are computed here.

Who calls it: `gpu.folder.keys` and `gpu.folder.type_rows`.
What must stay true: "honoured" means that this engine, or the library class that it loads, obeys the
key; "inert" that no value of it changes ids or vectors here; "only" lists what is computed, an empty
tuple means never. Names were taken from transformers 5.24, sentence-transformers 6.2, PyLate and
model2vec, and from what older versions of them wrote.
"""

from __future__ import annotations

from typing import Any

ST, TF = "sentence-transformers", "transformers"
NOT_YET = "this engine does not compute it"
OFF = (None, False)
_IMAGE_CLASSES = (
    "CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil", "CLIPFeatureExtractor",
    "Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil",
    "SiglipImageProcessor", "SiglipImageProcessorFast", "SiglipImageProcessorPil",
)  # fmt: skip
_MODULE_NAMES = (None, "sentence_embedding", "token_embeddings")

ROPE = """rope_type type rope_theta factor original_max_position_embeddings attention_factor beta_fast
    beta_slow short_factor long_factor low_freq_factor high_freq_factor mrope_section mscale
    mscale_all_dim truncate partial_rotary_factor llama_4_scaling_beta"""

# Keys that transformers' classes read for training, generation or loading, and no forward of ours does.
NO_EFFECT = (
    r".*(dropout|_pdrop).*|initializer_.*|use_cache|output_hidden_states|return_dict|dtype|"
    r"transformers_version|tie_word_embeddings|is_encoder_decoder|(bos|eos|sep|cls|mask|pad)_token_id|"
    r"decoder_start_token_id|sparse_pred.*|summary_.*|auto_map|model_type|"
    r"(matryoshka_dimensions|is_matryoshka)|label2id|deterministic_flash_attn|architectures|max_position_embeddings"
)
# Read by classification heads, or by us for one.
HEAD_ONLY = (
    r"id2label|num_labels|problem_type|classifier_.*|pooler_hidden_act|sentence_transformers|"
    r"sbert_ce_default_activation_function"
)

ROWS: dict[str, dict[str, Any]] = {
    "config.json": {
        "library": TF,
        "honoured": """model_type auto_map num_labels sentence_transformers
            sbert_ce_default_activation_function matryoshka_dimensions is_matryoshka is_causal""",
        # Written by other versions of transformers, for generation, for training, or for a reader.
        "inert": """_name_or_path _model_name_or_path name_or_path _commit_hash transformers.js_config torch_dtype torchscript
            use_bfloat16 tf_legacy_loss tokenizer_class attn_implementation _attn_implementation
            _attn_implementation_autoset _attn_implementation_internal _experts_implementation_internal
            _flash_attn_2_enabled _output_attentions custom_pipelines task_specific_params prefix
            finetuning_task language name output_past output_attentions output_scores use_cache
            gradient_checkpointing is_composition cross_attention_hidden_size tie_encoder_decoder
            tie_word_embeddings tie_weights_ bad_words_ids begin_suppress_tokens suppress_tokens
            diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
            exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty
            max_length min_length max_new_tokens no_repeat_ngram_size num_beam_groups num_beams
            num_return_sequences remove_invalid_values repetition_penalty return_dict_in_generate
            temperature top_k top_p typical_p decoder_start_token_id sep_token_id cls_token_id
            mask_token_id unk_token_id bos_token_id eos_token_id bos_token eos_token pad_token unk_token
            cls_token sep_token mask_token xla_device generation_config cache_implementation
            unsloth_fixed unsloth_version use_flash_attn use_memory_efficient_attention
            reference_compile deterministic_flash_attn repad_logits_with_grad initializer_range
            initializer_factor classifier_dropout attention_dropout hidden_dropout embd_pdrop
            resid_pdrop attn_pdrop directionality pooler_fc_size pooler_num_attention_heads
            pooler_num_fc_layers pooler_size_per_head summary_type summary_use_proj summary_activation
            summary_first_dropout summary_last_dropout summary_proj_to_labels use_mems_eval
            _num_labels is_llama_config""",
        "only": {
            "position_embedding_type": (
                ("absolute",),
                "relative positions are gone from transformers 5",
            ),
            "pooler_type": (("first_token_transform",), NOT_YET),
            "pruned_heads": (({}, None), "pruned heads are gone from transformers 5"),
            "add_cross_attention": (OFF, "an encoder has nothing to attend across to"),
            "use_mrope": (OFF, "sections of positions are for images"),
            **dict.fromkeys(
                ("quantization_config", "quantization"),  # the second is MLX's
                (
                    (None,),
                    "quantized weights; save the model dequantized (float32, bfloat16 or float16)",
                ),
            ),
            "rope_interleaved": (OFF, NOT_YET),
            # Read by the classes of some model types alone; in the others the usual value is harmless.
            "attention_bias": (OFF, NOT_YET),
            "mlp_bias": (OFF, NOT_YET),
            "lm_head_bias": (OFF, NOT_YET),
            "pretraining_tp": ((1,), NOT_YET),
        },
    },
    "tokenizer_config.json": {
        "library": TF,
        # Read by transformers, which builds the tokenizer here too; and two that this engine reads.
        "honoured": """tokenizer_class model_max_length max_len add_bos_token add_eos_token do_lower_case
            do_basic_tokenize never_split strip_accents tokenize_chinese_chars keep_accents remove_space
            add_prefix_space trim_offsets legacy sp_model_kwargs from_slow use_fast vocab_file merges_file
            vocab_type split_by_punct added_tokens_decoder additional_special_tokens extra_special_tokens
            model_specific_special_tokens chat_template use_default_system_prompt model_input_names
            init_inputs extra_ids add_dummy_prefix_space unicode_normalizer wordpieces_prefix
            bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
            language_codes src_lang tgt_lang auto_map""",
        # Decoding, padding, and limits that every call sets anew; special tokens in a sender's text are
        # text here whatever split_special_tokens says.
        "inert": """clean_up_tokenization_spaces
            clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output
            spaces_between_special_tokens padding_side truncation_side padding truncation max_length stride
            truncation_strategy pad_to_multiple_of pad_token_type_id name_or_path special_tokens_map_file
            tokenizer_file processor_class backend is_local local_files_only files_loaded errors
            split_special_tokens verbose device_map return_tensors response_template response_schema
            chat_control_tokens return_token_type_ids transformers_version _commit_hash""",
        "only": {},
    },
    "sentence_bert_config.json": {
        "library": ST,
        "honoured": """max_seq_length do_lower_case query_length document_length query_expansion
            modality_config processing_kwargs model_args model_kwargs tokenizer_args processor_kwargs
            config_args config_kwargs""",
        "inert": "unpad_inputs backend",
        "only": {
            "transformer_task": (
                ("feature-extraction", "sequence-classification", "fill-mask", "text-generation"),
                NOT_YET,
            ),
            "module_output_name": (
                ("token_embeddings", "scores", "logits", "causal_logits", None),
                "another output of the model than its last hidden states",
            ),
            "tokenizer_name_or_path": (
                (None,),
                "the tokenizer has to lie in the folder: copy it there",
            ),
        },
    },
    "sentence_bert_config.json of two towers": {
        "library": ST,
        "honoured": "modality_config processing_kwargs",
        "inert": "unpad_inputs backend",
        "only": {
            "transformer_task": (("feature-extraction",), NOT_YET),
            "module_output_name": (
                ("sentence_embedding", None),
                "another output than both vectors",
            ),
            "max_seq_length": ((None,), "set `max_tokens` for this model instead"),
            "do_lower_case": (OFF, "put a Lowercase normalizer into the tokenizer instead"),
        },
    },
    "processing_kwargs of two towers": {"library": ST, "honoured": "text"},
    "model_kwargs": {
        "library": ST,
        "inert": """torch_dtype dtype attn_implementation device_map low_cpu_mem_usage trust_remote_code
            use_safetensors add_pooling_layer unpad_inputs use_memory_efficient_attention revision
            token cache_dir local_files_only subfolder""",
    },
    "processor_kwargs": {
        "library": ST,
        "honoured": "model_max_length",
        "inert": """padding_side truncation_side use_fast trust_remote_code revision token cache_dir
            local_files_only subfolder""",
    },
    "config_kwargs": {
        "library": ST,
        "inert": "trust_remote_code use_cache revision token cache_dir local_files_only subfolder",
    },
    "processing_kwargs": {
        "library": ST,
        "honoured": "text chat_template common",
        "inert": "image audio video",
    },
    "processing_kwargs.text": {
        "library": ST,
        "honoured": "add_special_tokens",
        "inert": """padding truncation return_tensors return_attention_mask return_token_type_ids
            pad_to_multiple_of padding_side verbose logits_to_keep""",
        "only": {"split_special_tokens": ((True, False, None), "")},
    },
    "config_sentence_transformers.json": {
        "library": ST,
        "honoured": """prompts default_prompt_name model_type activation_fn query_prefix document_prefix
            query_length document_length skiplist_words do_query_expansion query_expansion
            attend_to_expansion_tokens attend_to_mask_tokens""",
        "inert": "__version__ similarity_fn_name keep_in_fp32_modules",
        "only": {
            "truncate_dim": (
                (None,),
                "its library cuts every vector to that size; remove it, and ask for `dimensions` in "
                "requests or set `matryoshka_dimensions`",
            ),
            "max_active_dims": ((None,), "its library keeps the largest weights only; " + NOT_YET),
        },
    },
    "preprocessor_config.json": {
        "library": TF,
        "honoured": """do_resize size resample do_center_crop crop_size do_rescale rescale_factor
            do_normalize image_mean image_std do_convert_rgb default_to_square patch_size
            temporal_patch_size merge_size""",
        # The counts of image tokens, config.json's or GME's own, stand above the last two.
        "inert": """processor_class _valid_processor_keys auto_map image_seq_length disable_grouping
            return_tensors device min_pixels max_pixels""",
        "only": {
            **dict.fromkeys(
                ("image_processor_type", "feature_extractor_type"),
                (_IMAGE_CLASSES, "another class would prepare the images otherwise"),
            ),
            "do_pad": (OFF, NOT_YET),
            "pad_size": ((None,), NOT_YET),
            "data_format": ((None, "channels_first"), NOT_YET),
            "input_data_format": ((None,), NOT_YET),
        },
    },
    "modules.json": {
        "library": ST,
        "honoured": "type path",
        "inert": "idx name",
        "only": {"kwargs": (([], None), "its library passes arguments of a call on to the module")},
    },
    "Pooling": {
        "library": ST,
        "honoured": """word_embedding_dimension embedding_dimension pooling_mode include_prompt
            pooling_mode_cls_token pooling_mode_mean_tokens pooling_mode_max_tokens
            pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens pooling_mode_lasttoken""",
    },
    "Dense": {
        "library": ST,
        "honoured": "in_features out_features bias activation_function use_residual",
        "only": {
            "module_input_name": (_MODULE_NAMES, ""),
            "module_output_name": (_MODULE_NAMES, ""),
        },
    },
    "Normalize": {
        "library": ST,
        "only": {
            "module_input_name": (_MODULE_NAMES, ""),
            "module_output_name": (_MODULE_NAMES, ""),
        },
    },
    "Dropout": {"library": ST, "inert": "dropout"},
    "SpladePooling": {
        "library": ST,
        "honoured": "pooling_strategy activation_function",
        "inert": "word_embedding_dimension embedding_dimension chunk_size",
    },
    "SparseAutoEncoder": {
        "library": ST,
        "honoured": "input_dim hidden_dim k normalize",
        "inert": "k_aux dead_threshold",
    },
    "MultiVectorMask": {
        "library": ST,
        "honoured": "skiplist_words skiplist_tasks keep_only_token_ids",
    },
    "Router": {"library": ST, "honoured": "types structure parameters"},
    "Router parameters": {
        "library": ST,
        "honoured": "default_route",
        "inert": "allow_empty_key",
        "only": {"route_mappings": (({}, None), NOT_YET)},
    },
    "SparseStaticEmbedding": {
        "library": ST,
        "inert": "frozen",
        "only": {"path": ((None,), "save the weights as model.safetensors")},
    },
    "LogitScore": {
        "library": ST,
        "honoured": "true_token_id false_token_id",
        "only": {"module_input_name": ((None, "causal_logits"), "")},
    },
    "adapter_config.json": {
        "library": "peft",
        "honoured": """base_model_name_or_path r lora_alpha target_modules exclude_modules rank_pattern
            alpha_pattern use_rslora use_dora fan_in_fan_out layers_to_transform layers_pattern bias
            lora_bias""",
        "inert": """inference_mode lora_dropout peft_version revision auto_mapping task_type
            megatron_config megatron_core qalora_group_size runtime_config""",
        "only": {
            "peft_type": (("LORA",), "merge it with its own library, and serve the result"),
            "init_lora_weights": (
                (True, False, "gaussian", None),
                "that start changes the base model's weights too; merge it with its own library",
            ),
            **{
                name: (values, NOT_YET + "; merge it with peft, and serve the result")
                for values, names in (
                    (
                        (None,),
                        """layer_replication eva_config corda_config arrow_config kasa_config
                        lora_ga_config monteclora_config velora_config use_bdlora
                        alora_invocation_tokens trainable_token_indices target_parameters""",
                    ),
                    ((None, []), "modules_to_save"),
                    ((None, {}), "loftq_config"),
                    (OFF, "use_qalora ensure_weight_tying"),
                )
                for name in names.split()
            },
        },
    },
    "model2vec config.json": {
        "library": "model2vec",
        "honoured": "model_type normalize max_length architectures",
        # How the table was made, which is over when it lies in the folder.
        "inert": """tokenizer_name apply_pca apply_zipf sif_coefficient hidden_dim seq_length
            embedding_dtype vocabulary_quantization pca_dims token_remove_pattern device
            model_name base_model_name language license version quantize_to dim library_name""",
        "only": {"pooling": (("mean", None), NOT_YET)},
    },
}
