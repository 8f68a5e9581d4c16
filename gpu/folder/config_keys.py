"""Keys of config.json that transformers' class of a model type reads. Written by
`python -m tests.support.config_keys`; a test holds it to the installed transformers.

Who calls it: `gpu.folder.keys`.
What must stay true: generated, never edited by hand; a sub-config is named TYPE.KEY.
"""

from __future__ import annotations

READ_BY_ALL = """
architectures chunk_size_feed_forward dtype id2label is_encoder_decoder label2id
output_hidden_states problem_type return_dict transformers_version
"""

READ_BY_TYPE = {
    "albert": """
attention_probs_dropout_prob bos_token_id classifier_dropout_prob embedding_size eos_token_id
hidden_act hidden_dropout_prob hidden_size initializer_range inner_group_num intermediate_size
layer_norm_eps max_position_embeddings num_attention_heads num_hidden_groups num_hidden_layers
num_labels pad_token_id tie_word_embeddings type_vocab_size vocab_size
""",
    "bert": """
add_cross_attention attention_probs_dropout_prob bos_token_id classifier_dropout eos_token_id
hidden_act hidden_dropout_prob hidden_size initializer_range intermediate_size is_decoder
layer_norm_eps max_position_embeddings num_attention_heads num_hidden_layers num_labels
pad_token_id tie_word_embeddings type_vocab_size use_cache vocab_size
""",
    "camembert": """
add_cross_attention attention_probs_dropout_prob bos_token_id classifier_dropout eos_token_id
hidden_act hidden_dropout_prob hidden_size initializer_range intermediate_size is_decoder
layer_norm_eps max_position_embeddings num_attention_heads num_hidden_layers num_labels
pad_token_id tie_word_embeddings type_vocab_size use_cache vocab_size
""",
    "clip": """
attention_dropout eos_token_id hidden_act hidden_size image_size initializer_factor
initializer_range intermediate_size is_causal layer_norm_eps logit_scale_init_value
max_position_embeddings num_attention_heads num_channels num_hidden_layers num_labels patch_size
projection_dim text_config text_config_dict vision_config vision_config_dict vocab_size
""",
    "clip.vision_config": """
attention_dropout eos_token_id hidden_act hidden_size image_size initializer_factor
initializer_range intermediate_size is_causal layer_norm_eps logit_scale_init_value
max_position_embeddings num_attention_heads num_channels num_hidden_layers num_labels patch_size
projection_dim text_config text_config_dict vision_config vision_config_dict vocab_size
""",
    "clip.text_config": """
attention_dropout bos_token_id eos_token_id hidden_act hidden_size image_size initializer_factor
initializer_range intermediate_size is_causal layer_norm_eps logit_scale_init_value
max_position_embeddings num_attention_heads num_channels num_hidden_layers num_labels pad_token_id
patch_size projection_dim text_config text_config_dict vision_config vision_config_dict vocab_size
""",
    "deberta-v2": """
attention_head_size attention_probs_dropout_prob bos_token_id cls_dropout conv_act conv_groups
conv_kernel_size embedding_size eos_token_id hidden_act hidden_dropout_prob hidden_size
initializer_range intermediate_size layer_norm_eps legacy max_position_embeddings
max_relative_positions norm_rel_ebd num_attention_heads num_hidden_layers num_labels
output_attentions pad_token_id pooler_dropout pooler_hidden_act pooler_hidden_size pos_att_type
position_biased_input position_buckets relative_attention share_att_key tie_word_embeddings
type_vocab_size vocab_size
""",
    "distilbert": """
activation attention_dropout bos_token_id dim dropout eos_token_id hidden_dim hidden_size
initializer_range max_position_embeddings n_heads n_layers num_attention_heads num_hidden_layers
num_labels pad_token_id qa_dropout seq_classif_dropout sinusoidal_pos_embds tie_word_embeddings
vocab_size
""",
    "electra": """
add_cross_attention attention_probs_dropout_prob bos_token_id classifier_dropout embedding_size
eos_token_id hidden_act hidden_dropout_prob hidden_size initializer_range intermediate_size
is_decoder layer_norm_eps max_position_embeddings num_attention_heads num_hidden_layers num_labels
pad_token_id summary_activation summary_first_dropout summary_last_dropout summary_proj_to_labels
summary_type summary_use_proj tie_word_embeddings type_vocab_size use_cache vocab_size
""",
    "eurobert": """
attention_bias attention_dropout bos_token_id classifier_pooling eos_token_id head_dim hidden_act
hidden_size initializer_range intermediate_size mask_token_id max_position_embeddings mlp_bias
num_attention_heads num_hidden_layers num_key_value_heads num_labels
original_max_position_embeddings pad_token_id partial_rotary_factor pretraining_tp rms_norm_eps
rope_parameters rope_scaling rope_theta tie_word_embeddings use_cache vocab_size
""",
    "gemma": """
attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size
initializer_range intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
num_key_value_heads original_max_position_embeddings pad_token_id partial_rotary_factor
rms_norm_eps rope_parameters rope_scaling rope_theta tie_word_embeddings
use_bidirectional_attention use_cache vocab_size
""",
    "gemma2": """
attention_bias attention_dropout attn_logit_softcapping bos_token_id eos_token_id
final_logit_softcapping head_dim hidden_activation hidden_size initializer_range intermediate_size
layer_types max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads
original_max_position_embeddings pad_token_id partial_rotary_factor query_pre_attn_scalar
rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings
use_bidirectional_attention use_cache vocab_size
""",
    "gemma3_text": """
attention_bias attention_dropout attn_logit_softcapping bos_token_id eos_token_id
final_logit_softcapping head_dim hidden_activation hidden_size image_token_id initializer_range
intermediate_size layer_types max_position_embeddings mm_tokens_per_image num_attention_heads
num_hidden_layers num_key_value_heads original_max_position_embeddings pad_token_id
partial_rotary_factor query_pre_attn_scalar rms_norm_eps rope_local_base_freq rope_parameters
rope_scaling rope_theta sliding_window sliding_window_pattern text_config tie_word_embeddings
use_bidirectional_attention use_cache vision_config vocab_size
""",
    "gte": """
attention_probs_dropout_prob bos_token_id classifier_dropout eos_token_id head_dim hidden_act
hidden_dropout_prob hidden_size initializer_range intermediate_size layer_norm_eps
max_position_embeddings num_attention_heads num_hidden_layers num_labels
original_max_position_embeddings pad_token_id partial_rotary_factor rope_parameters rope_scaling
rope_theta tie_word_embeddings type_vocab_size vocab_size
""",
    "jina_embeddings_v3": """
attention_probs_dropout_prob bos_token_id classifier_dropout eos_token_id head_dim hidden_act
hidden_dropout_prob hidden_size initializer_range intermediate_size layer_norm_eps
max_position_embeddings num_attention_heads num_hidden_layers num_labels
original_max_position_embeddings pad_token_id partial_rotary_factor rope_parameters rope_scaling
rope_theta tie_word_embeddings type_vocab_size use_cache vocab_size
""",
    "llama": """
attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size
initializer_range intermediate_size max_position_embeddings mlp_bias num_attention_heads
num_hidden_layers num_key_value_heads original_max_position_embeddings pad_token_id
partial_rotary_factor pretraining_tp rms_norm_eps rope_parameters rope_scaling rope_theta
tie_word_embeddings use_cache vocab_size
""",
    "mistral": """
attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size initializer_range
intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
num_key_value_heads original_max_position_embeddings pad_token_id partial_rotary_factor
rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings use_cache
vocab_size
""",
    "modernbert": """
attention_bias attention_dropout bos_token_id classifier_activation classifier_bias
classifier_dropout classifier_pooling cls_token_id decoder_bias deterministic_flash_attn
embedding_dropout eos_token_id global_attn_every_n_layers global_rope_theta head_dim
hidden_activation hidden_size initializer_cutoff_factor initializer_range intermediate_size
layer_types local_attention local_rope_theta max_position_embeddings mlp_bias mlp_dropout
norm_bias norm_eps num_attention_heads num_hidden_layers num_labels
original_max_position_embeddings pad_token_id partial_rotary_factor rope_parameters rope_scaling
rope_theta sep_token_id sliding_window sparse_pred_ignore_index sparse_prediction
tie_word_embeddings vocab_size
""",
    "mpnet": """
attention_probs_dropout_prob bos_token_id eos_token_id hidden_act hidden_dropout_prob hidden_size
initializer_range intermediate_size layer_norm_eps max_position_embeddings num_attention_heads
num_hidden_layers num_labels output_attentions pad_token_id relative_attention_num_buckets
tie_word_embeddings vocab_size
""",
    "mt5": """
bos_token_id classifier_dropout d_ff d_kv d_model decoder_start_token_id dense_act_fn dropout_rate
eos_token_id feed_forward_proj head_dim hidden_size initializer_factor is_decoder is_gated_act
layer_norm_epsilon num_attention_heads num_decoder_layers num_heads num_hidden_layers num_labels
num_layers pad_token_id relative_attention_max_distance relative_attention_num_buckets
tie_word_embeddings use_cache vocab_size
""",
    "nomic_bert": """
attention_probs_dropout_prob bos_token_id classifier_dropout eos_token_id head_dim hidden_act
hidden_dropout_prob hidden_size initializer_range intermediate_size layer_norm_eps
max_position_embeddings num_attention_heads num_hidden_layers num_labels
original_max_position_embeddings pad_token_id partial_rotary_factor rope_parameters rope_scaling
rope_theta type_vocab_size vocab_size
""",
    "phi3": """
attention_dropout bos_token_id embd_pdrop eos_token_id head_dim hidden_act hidden_size
initializer_range intermediate_size max_position_embeddings num_attention_heads num_hidden_layers
num_key_value_heads original_max_position_embeddings pad_token_id partial_rotary_factor
resid_pdrop rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
tie_word_embeddings use_cache vocab_size
""",
    "qwen2": """
attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size initializer_range
intermediate_size layer_types max_position_embeddings max_window_layers num_attention_heads
num_hidden_layers num_key_value_heads original_max_position_embeddings pad_token_id
partial_rotary_factor rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
tie_word_embeddings use_cache use_sliding_window vocab_size
""",
    "qwen2_vl": """
attention_dropout depth embed_dim head_dim hidden_act hidden_size image_token_id in_channels
intermediate_size layer_types max_position_embeddings mlp_ratio num_attention_heads num_heads
num_hidden_layers num_key_value_heads original_max_position_embeddings pad_token_id
partial_rotary_factor patch_size rms_norm_eps rope_parameters rope_scaling rope_theta
sliding_window spatial_merge_size temporal_patch_size text_config tie_word_embeddings torch_dtype
use_sliding_window video_token_id vision_config vision_end_token_id vision_start_token_id
vocab_size
""",
    "qwen2_vl.vision_config": """
attention_dropout depth embed_dim head_dim hidden_act hidden_size image_token_id in_channels
initializer_range intermediate_size layer_types max_position_embeddings mlp_ratio
num_attention_heads num_heads num_hidden_layers num_key_value_heads
original_max_position_embeddings pad_token_id partial_rotary_factor patch_size rms_norm_eps
rope_parameters rope_scaling rope_theta sliding_window spatial_merge_size temporal_patch_size
text_config torch_dtype use_sliding_window video_token_id vision_config vocab_size
""",
    "qwen2_vl.text_config": """
attention_dropout bos_token_id depth embed_dim eos_token_id head_dim hidden_act hidden_size
image_token_id in_channels initializer_range intermediate_size layer_types max_position_embeddings
max_window_layers mlp_ratio num_attention_heads num_heads num_hidden_layers num_key_value_heads
original_max_position_embeddings pad_token_id partial_rotary_factor patch_size rms_norm_eps
rope_parameters rope_scaling rope_theta sliding_window spatial_merge_size temporal_patch_size
text_config torch_dtype use_cache use_sliding_window video_token_id vision_config vocab_size
""",
    "qwen3": """
attention_bias attention_dropout bos_token_id eos_token_id head_dim hidden_act hidden_size
initializer_range intermediate_size layer_types max_position_embeddings max_window_layers
num_attention_heads num_hidden_layers num_key_value_heads original_max_position_embeddings
pad_token_id partial_rotary_factor rms_norm_eps rope_parameters rope_scaling rope_theta
sliding_window tie_word_embeddings use_cache use_sliding_window vocab_size
""",
    "rembert": """
add_cross_attention attention_probs_dropout_prob bos_token_id classifier_dropout_prob eos_token_id
hidden_act hidden_dropout_prob hidden_size initializer_range input_embedding_size
intermediate_size is_decoder layer_norm_eps max_position_embeddings num_attention_heads
num_hidden_layers num_labels output_attentions output_embedding_size pad_token_id
tie_word_embeddings type_vocab_size use_cache vocab_size
""",
    "roberta": """
add_cross_attention attention_probs_dropout_prob bos_token_id classifier_dropout eos_token_id
hidden_act hidden_dropout_prob hidden_size initializer_range intermediate_size is_decoder
layer_norm_eps max_position_embeddings num_attention_heads num_hidden_layers num_labels
pad_token_id tie_word_embeddings type_vocab_size use_cache vocab_size
""",
    "t5": """
classifier_dropout d_ff d_kv d_model decoder_start_token_id dense_act_fn dropout_rate eos_token_id
feed_forward_proj head_dim hidden_size initializer_factor is_decoder is_gated_act
layer_norm_epsilon num_attention_heads num_decoder_layers num_heads num_hidden_layers num_labels
num_layers pad_token_id relative_attention_max_distance relative_attention_num_buckets
scale_decoder_outputs tie_word_embeddings use_cache vocab_size
""",
    "umt5": """
classifier_dropout d_ff d_kv d_model decoder_start_token_id dense_act_fn dropout_rate eos_token_id
feed_forward_proj head_dim hidden_size initializer_factor is_decoder is_gated_act
layer_norm_epsilon num_attention_heads num_decoder_layers num_heads num_hidden_layers num_labels
num_layers pad_token_id relative_attention_max_distance relative_attention_num_buckets
scale_decoder_outputs tie_word_embeddings use_cache vocab_size
""",
    "xlm-roberta": """
add_cross_attention attention_probs_dropout_prob bos_token_id classifier_dropout eos_token_id
hidden_act hidden_dropout_prob hidden_size initializer_range intermediate_size is_decoder
layer_norm_eps max_position_embeddings num_attention_heads num_hidden_layers num_labels
pad_token_id tie_word_embeddings type_vocab_size use_cache vocab_size
""",
}
