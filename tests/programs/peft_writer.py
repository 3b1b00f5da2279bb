"""Writes LoRA adapters with random weights for the models of transformers_writer.py, as PEFT saves them.

python tests/programs/peft_writer.py tests/data/transformers tests/data/peft

The logits in expected.npz are those of PEFT's model. peft 0.21 wrote the files.
"""

import sys
from pathlib import Path

import numpy as np
import peft
import torch
import transformers

CASES = {
    "llama": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "down_proj"]},
    "qwen2": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear", "use_rslora": True},
    "gpt2": {"r": 2, "lora_alpha": 4, "target_modules": ["c_proj"], "fan_in_fan_out": True},
}


def main(bases: Path, folder: Path) -> None:
    tokens = torch.tensor([[3, 7, 1, 20, 11, 5, 9, 2]])
    for family, settings in CASES.items():
        torch.manual_seed(1)
        base = transformers.AutoModelForCausalLM.from_pretrained(bases / family)
        model = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", **settings)).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "lora_" in name:
                    parameter.normal_(std=0.3)
            logits = model(tokens).logits.numpy()
        model.save_pretrained(folder / family)
        (folder / family / "README.md").unlink()
        np.savez(folder / family / "expected.npz", tokens=tokens.numpy(), logits=logits)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
