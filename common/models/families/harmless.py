"""Keys of config.json and of GGUF metadata that change nothing in what a decoder computes from tokens to logits."""

from __future__ import annotations

JSON = frozenset(
    {
        # names and bookkeeping
        "_name_or_path",
        "architectures",
        "auto_map",
        "dtype",
        "finetuning_task",
        "id2label",
        "label2id",
        "model_type",
        "name",
        "num_labels",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "transformers.js_config",
        "transformers_version",
        "transformers_weights",
        "unsloth_fixed",
        "unsloth_version",
        "for_llm_compressor",
        # training
        "attention_dropout",
        "attn_pdrop",
        "embd_pdrop",
        "hidden_dropout",
        "hidden_dropout_prob",
        "initializer_range",
        "neftune_noise_alpha",
        "output_router_logits",
        "resid_pdrop",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "router_z_loss_coef",
        # generation and tokens, which other files and the requests decide
        "bad_words_ids",
        "begin_suppress_tokens",
        "bos_token_id",
        "decoder_start_token_id",
        "diversity_penalty",
        "do_sample",
        "early_stopping",
        "encoder_no_repeat_ngram_size",
        "eos_token_id",
        "forced_bos_token_id",
        "forced_eos_token_id",
        "image_token_id",
        "length_penalty",
        "max_length",
        "min_length",
        "no_repeat_ngram_size",
        "num_beam_groups",
        "num_beams",
        "num_return_sequences",
        "output_scores",
        "pad_token_id",
        "prefix",
        "remove_invalid_values",
        "repetition_penalty",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "temperature",
        "top_k",
        "top_p",
        "typical_p",
        # how transformers runs it
        "_attn_implementation",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "attn_implementation",
        "cache_implementation",
        "chunk_size_feed_forward",
        "output_attentions",
        "output_hidden_states",
        "use_cache",
        "use_flash_attn",
    }
)

JSON_DEFAULTS: dict[str, object] = {
    "pretraining_tp": 1,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "is_decoder": True,
    "is_llama_config": True,
    "num_nextn_predict_layers": 0,
}

GGUF = frozenset({"attention.layer_norm_epsilon", "attention.value_length", "rope.scaling.finetuned"})

GGUF_DEFAULTS: dict[str, object] = {
    "expert_group_count": 1,
    "expert_group_used_count": 1,
    "expert_weights_scale": 1.0,
    "expert_shared_count": 0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "use_parallel_residual": True,
}
