"""Writes tiny models of each family with random weights, as transformers saves them, and the logits it computes.

python tests/programs/transformers_writer.py tests/data/transformers
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
FAMILIES = {
    "llama": ("Llama", COMMON),
    "mistral": ("Mistral", COMMON),
    "qwen2": ("Qwen2", {**COMMON, "head_dim": 4}),
    "qwen3": ("Qwen3", COMMON),
    "gemma2": ("Gemma2", {**COMMON, "query_pre_attn_scalar": 6}),
    "gemma3_text": ("Gemma3", {**COMMON, "query_pre_attn_scalar": 6}),
    "gpt2": ("GPT2", {**GPT2, "bos_token_id": 1, "eos_token_id": 2}),
}


def main(folder: Path) -> None:
    tokens = np.array([[3, 7, 1, 20, 11, 5, 9, 2]])
    for family, (name, settings) in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}TextConfig" if name == "Gemma3" else f"{name}Config")(**settings)
        model = getattr(transformers, f"{name}LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM")(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # larger than the initial values, so that every weight matters
                parameter += 0.2 * torch.randn_like(parameter)
            logits = model(torch.tensor(tokens)).logits.numpy()
        model.save_pretrained(folder / family, max_shard_size="10KB" if family == "llama" else "5GB")
        np.savez(folder / family / "expected.npz", tokens=tokens, logits=logits)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
