"""Writes tiny models of each family with random weights, as transformers saves them, and the logits it computes.

python tests/programs/transformers_writer.py tests/data/transformers [family …]

The folders "…_fused" have the experts of a layer in one tensor, as transformers 5 holds them in memory; the others have
a tensor an expert, or the names that the family has on the hub. transformers 5.24 wrote all but
the first seven families, which 5.23 wrote.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

COMMON = {"vocab_size": 24, "hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "head_dim": 6}
COMMON |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32, "pad_token_id": 0}
COMMON |= {"bos_token_id": 1, "eos_token_id": 2}
GPT2 = {"vocab_size": 24, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32}
SMALL = {**COMMON, "intermediate_size": 12, "head_dim": 4, "num_attention_heads": 2, "num_key_value_heads": 1}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
MLA = {"kv_lora_rank": 6, "q_lora_rank": 5, "qk_rope_head_dim": 4, "qk_nope_head_dim": 3, "v_head_dim": 2}
ROUTED = {"n_routed_experts": 4, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1, "num_key_value_heads": 2}
FAMILIES = {
    "llama": ("Llama", COMMON),
    "mistral": ("Mistral", COMMON),
    "qwen2": ("Qwen2", {**COMMON, "head_dim": 4}),
    "qwen3": ("Qwen3", COMMON),
    "gemma2": ("Gemma2", {**COMMON, "query_pre_attn_scalar": 6}),
    "gemma3_text": ("Gemma3", {**COMMON, "query_pre_attn_scalar": 6}),
    "gpt2": ("GPT2", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
    "gemma": ("Gemma", SMALL),
    "qwen3_moe": ("Qwen3Moe", {**SMALL, **EXPERTS, "mlp_only_layers": [0], "norm_topk_prob": True}),
    "qwen2_moe": ("Qwen2Moe", {**SMALL, **EXPERTS, "shared_expert_intermediate_size": 4}),
    "mixtral": ("Mixtral", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "gpt_oss": (
        "GptOss",
        {
            **SMALL,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {key: value for key, value in {**SMALL, **EXPERTS, **MLA, **ROUTED}.items() if key != "head_dim"},
    ),
    "llama4_text": (
        "Llama4",
        {**SMALL, "intermediate_size_mlp": 28, "num_local_experts": 4, "interleave_moe_layer_step": 2},
    ),
    "phi3": ("Phi3", {**SMALL, "hidden_size": 8}),
    "olmo2": ("Olmo2", SMALL),
    "olmo3": ("Olmo3", SMALL),
    "gpt_neox": (
        "GPTNeoX",
        {key: value for key, value in SMALL.items() if key not in ("head_dim", "num_key_value_heads")},
    ),
}
FUSED = ("qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3")


TINY = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2, "num_attention_heads": 2}
TEXT = {**TINY, "vocab_size": 24, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
VISION = {**TINY, "image_size": 8, "patch_size": 4}
T5 = {"vocab_size": 24, "d_model": 8, "d_kv": 4, "d_ff": 12, "num_layers": 2, "num_heads": 2}
WHISPER = {"vocab_size": 24, "d_model": 8, "num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 8}
WHISPER |= {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
WHISPER |= {"encoder_ffn_dim": 12, "decoder_ffn_dim": 12, "decoder_start_token_id": 1}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OF_LLAMA4 = {"projector_input_dim": 8, "projector_output_dim": 8, "vision_output_dim": 8, "intermediate_size": 32}
PIXELS = np.random.default_rng(0).random((1, 3, 8, 8), np.float32)
TOKENS = np.array([[3, 7, 1, 20, 11, 5, 9, 2]])
CLIP = {"input_ids": TOKENS, "pixel_values": PIXELS}
OTHERS = {
    "bert": ("BertForMaskedLM", {**TEXT, "max_position_embeddings": 16}, {"input_ids": TOKENS}),
    "roberta": ("RobertaForMaskedLM", {**TEXT, "max_position_embeddings": 16}, {"input_ids": TOKENS}),
    "clip": ("CLIPModel", {"text_config": TEXT, "vision_config": VISION, "projection_dim": 4}, CLIP),
    "siglip": ("SiglipModel", {"text_config": TEXT, "vision_config": VISION}, CLIP),
    "t5": ("T5ForConditionalGeneration", T5, {"input_ids": TOKENS, "decoder_input_ids": TOKENS}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {**WHISPER, **SPECIAL},
        {"input_features": PIXELS[0, :1, :4].repeat(2, 2), "decoder_input_ids": TOKENS},
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        {
            "text_config": {**SMALL, "hidden_size": 8, "query_pre_attn_scalar": 4},
            "vision_config": {**VISION, "vision_use_head": False},
            "mm_tokens_per_image": 4,
            "image_token_index": 23,
        },
        {"input_ids": np.array([[3, 23, 23, 23, 23, 5]]), "pixel_values": PIXELS},
    ),
    "llama4": (
        "Llama4ForConditionalGeneration",
        {
            "text_config": {**SMALL, "hidden_size": 8, "intermediate_size_mlp": 16, "num_local_experts": 2},
            "vision_config": {**VISION, **OF_LLAMA4},
        },
        {"input_ids": TOKENS},
    ),
}


def write_decoders(folder: Path, chosen: list[str]) -> None:
    for family, (name, settings) in FAMILIES.items():
        if chosen and family not in chosen:
            continue
        torch.manual_seed(0)
        has_text = name in ("Gemma3", "Llama4")
        config = getattr(transformers, f"{name}TextConfig" if has_text else f"{name}Config")(**settings)
        model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).eval()
        enlarge(model)
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits.numpy()
        for suffix in ("", "_fused") if family in FUSED else ("",):
            size = "10KB" if family == "llama" else "5GB"
            model.save_pretrained(folder / f"{family}{suffix}", max_shard_size=size, save_original_format=not suffix)
            np.savez(folder / f"{family}{suffix}" / "expected.npz", tokens=TOKENS, logits=logits)
            (folder / f"{family}{suffix}" / "generation_config.json").unlink(missing_ok=True)


def write_others(folder: Path, chosen: list[str]) -> None:
    """Encoders and models of images and sound, with their inputs and their first output."""
    for family, (name, settings, inputs) in OTHERS.items():
        if chosen and family not in chosen:
            continue
        torch.manual_seed(0)
        model_class = getattr(transformers, name)
        model = model_class(model_class.config_class(**settings)).eval()
        enlarge(model)
        run = model.language_model if family == "llama4" else model  # the whole model fails in transformers 5.24
        with torch.no_grad():
            logits = run(**{key: torch.tensor(value) for key, value in inputs.items()})[0].numpy()
        model.save_pretrained(folder / family)
        np.savez(folder / family / "expected.npz", **inputs, logits=logits)
        (folder / family / "generation_config.json").unlink(missing_ok=True)


def write_mxfp4(folder: Path) -> None:
    """gpt_oss with packed experts, as on the hub. The logits are of the values that transformers unpacks."""
    settings = {**FAMILIES["gpt_oss"][1], "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32}
    settings |= {"num_local_experts": 2, "num_experts_per_tok": 1}
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**settings)).eval()
    enlarge(model)
    tensors = {name: value.bfloat16().contiguous() for name, value in model.state_dict().items()}
    for name, value in tensors.items():
        model.get_parameter(name).data.copy_(value)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        blocks = torch.randint(256, (experts, rows, columns // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 125, blocks.shape[:3], dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
        model.get_parameter(name).data.copy_(values)
    with torch.no_grad():
        logits = model(torch.tensor(TOKENS)).logits.numpy()
    model.config.dtype = "bfloat16"
    model.config.quantization_config = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    model.config.save_pretrained(folder / "gpt_oss_mxfp4")
    save_file(tensors, folder / "gpt_oss_mxfp4" / "model.safetensors")
    np.savez(folder / "gpt_oss_mxfp4" / "expected.npz", tokens=TOKENS, logits=logits)


def enlarge(model: torch.nn.Module) -> None:
    """Make the weights larger than the initial values, so that every one matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_()


if __name__ == "__main__":
    write_decoders(Path(sys.argv[1]), sys.argv[2:])
    write_others(Path(sys.argv[1]), sys.argv[2:])
    if not sys.argv[2:] or "gpt_oss_mxfp4" in sys.argv[2:]:
        write_mxfp4(Path(sys.argv[1]))
