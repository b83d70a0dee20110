"""Keys of `quantization_config` that say nothing of what the weights are: how they were made, and how others run them.

Scales and zero points are read from the files, so what a key says of how they were chosen changes nothing. Activations and
the KV cache are quantised as this server's settings say, not as a checkpoint proposes.
"""

from __future__ import annotations

COMMON = frozenset({"quant_method", "dequantize", "kv_cache_scheme", "meta", "producer", "version"})

FP8 = COMMON | {"activation_scale_ub", "activation_scheme", "scale_fmt"}
MXFP4 = COMMON

GPTQ = COMMON | {
    # how it was quantised
    "act_group_aware",
    "batch_size",
    "block_name_to_quantize",
    "cache_block_outputs",
    "damp_auto_increment",
    "damp_percent",
    "dataset",
    "max_input_length",
    "model_seqlen",
    "module_name_preceding_first_block",
    "modules_in_block_to_quantize",
    "mse",
    "pad_token_id",
    "static_groups",
    "sym",  # zero points are in the files, of symmetric weights too
    "tokenizer",
    "true_sequential",
    # names, and modules that are quantised, which are seen by their tensors
    "lm_head",
    "model_file_base_name",
    "model_name_or_path",
    # kernels
    "backend",
    "disable_exllama",
    "exllama_config",
    "use_cuda_fp16",
    "use_exllama",
}

AWQ = GPTQ | {
    "do_fuse",
    "fuse_max_seq_len",
    "modules_to_fuse",
    "zero_point",  # AutoAWQ's GEMM layout has zero points whatever this says, and they are subtracted; the loader wants them
}

BITSANDBYTES = COMMON | {
    "_load_in_4bit",
    "bnb_4bit_compute_dtype",
    "bnb_4bit_quant_storage",
    "bnb_4bit_use_double_quant",
    "llm_int8_enable_fp32_cpu_offload",
    "llm_int8_has_fp16_weight",
    "llm_int8_threshold",
    "load_in_4bit",
}

MODELOPT = COMMON | {"kv_cache_quant_algo"}

COMPRESSED_TENSORS = COMMON | {"global_compression_ratio", "quantization_status", "run_compressed", "use_optimized_inference"}

GROUP = frozenset({"input_activations", "output_activations", "targets"})
"""Of a group in `config_groups`. Which modules are quantised is seen by their tensors."""

WEIGHTS = frozenset({"observer", "observer_kwargs", "scale_dtype", "symmetric", "zp_dtype"})
"""Of a group's `weights`."""

SPARSITY = frozenset({"global_sparsity", "ignore", "registry_requires_subclass", "sparsity_structure", "targets"})
"""Of a `sparsity_config` whose weights are stored in full."""
