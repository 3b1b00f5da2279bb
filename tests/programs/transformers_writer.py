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


def main(folder: Path, chosen: list[str]) -> None:
    tokens = np.array([[3, 7, 1, 20, 11, 5, 9, 2]])
    for family, (name, settings) in FAMILIES.items():
        if chosen and family not in chosen:
            continue
        torch.manual_seed(0)
        has_text = name in ("Gemma3", "Llama4")
        config = getattr(transformers, f"{name}TextConfig" if has_text else f"{name}Config")(**settings)
        model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # larger than the initial values, so that every weight matters
                parameter += 0.2 * torch.randn_like(parameter)
            for buffer_name, buffer in model.named_buffers():
                if buffer_name.endswith("e_score_correction_bias"):
                    buffer.normal_()
            logits = model(torch.tensor(tokens)).logits.numpy()
        for suffix in ("", "_fused") if family in FUSED else ("",):
            size = "10KB" if family == "llama" else "5GB"
            model.save_pretrained(folder / f"{family}{suffix}", max_shard_size=size, save_original_format=not suffix)
            np.savez(folder / f"{family}{suffix}" / "expected.npz", tokens=tokens, logits=logits)
            (folder / f"{family}{suffix}" / "generation_config.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
