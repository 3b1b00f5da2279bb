"""Records the output of MaxText's own conversion for tensors with the names and shapes of each family.

PYTHONPATH=tests/support python tests/programs/maxtext_writer.py PARAM_MAPPING tests/data/maxtext.json

PARAM_MAPPING is src/maxtext/checkpoint_conversion/utils/param_mapping.py of AI-Hypercomputer/maxtext. The recorded
file was made with the one of commit e591f30.
"""

import hashlib
import importlib.util
import json
import sys
from pathlib import Path

import named_tensors  # tests/support
import numpy as np

SIZES = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "hidden_size": 16, "intermediate_size": 20}
SIZES |= {"vocab_size": 24, "num_hidden_layers": 3}
LLAMA3 = {"rope_parameters": {"rope_type": "llama3"}}
CASES = [
    ("llama", "LLAMA31", True, {**SIZES, **LLAMA3}),
    ("llama", "LLAMA31", False, {**SIZES, **LLAMA3}),
    ("qwen2", "QWEN", True, {**SIZES, "tie_word_embeddings": False}),
    ("qwen3", "QWEN", True, {**SIZES, "tie_word_embeddings": True}),
    ("qwen3", "QWEN", False, {**SIZES, "tie_word_embeddings": False}),
    ("gemma2", "GEMMA2", True, {**SIZES, "num_hidden_layers": 4}),
    ("gemma2", "GEMMA2", False, {**SIZES, "num_hidden_layers": 4}),
    ("gemma3_text", "GEMMA3", True, {**SIZES, "num_hidden_layers": 14}),
    ("gemma3_text", "GEMMA3", False, SIZES),
]
PADDED = {"gemma2": 28, "gemma3_text": 22}


def shape_of(key: str, config: dict, vocabulary: int) -> tuple[int, ...]:
    """The shape that a parameter of one layer has in MaxText's models."""
    m, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    count = heads if "-query-" in key else groups
    shapes = {"query-kernel": (m, count, d), "key-kernel": (m, count, d), "value-kernel": (m, count, d)}
    shapes |= {"query-bias": (count, d), "key-bias": (count, d), "value-bias": (count, d), "out-kernel": (heads, d, m)}
    shapes |= {
        "wi_0-kernel": (m, f),
        "wi_1-kernel": (m, f),
        "wo-kernel": (f, m),
        "logits_dense-kernel": (m, vocabulary),
    }
    shapes |= {"query_norm-scale": (d,), "key_norm-scale": (d,), "embedding": (vocabulary, m)}
    return next((shape for end, shape in shapes.items() if key.endswith(end)), (m,))


def main(param_mapping: Path, output: Path) -> None:
    spec = importlib.util.spec_from_file_location("param_mapping", param_mapping)
    theirs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(theirs)
    cases = []
    for family, name, scan, config in CASES:
        tensors = named_tensors.tensors(family, config)
        theirs_config = {**config, "text_config": config, "vision_config": {"num_hidden_layers": 0}}
        mapping = getattr(theirs, f"{name}_MAXTEXT_TO_HF_PARAM_MAPPING")(theirs_config, None, scan)
        hooks = getattr(theirs, f"{name}_MAXTEXT_TO_HF_PARAM_HOOK_FN")(theirs_config, None, scan, saving_to_hf=False)
        vocabulary = PADDED.get(family, config["vocab_size"])
        leaves = {}
        for key, sources in mapping.items():
            several = isinstance(sources, list)
            names = [one.replace("language_model.", "") for one in (sources if several else [sources])]
            if not all(one in tensors for one in names):  # belongs to another variant of the family
                continue
            chain = hooks.get(key, [])
            parts = [tensors[one] for one in names]
            for hook in chain if isinstance(chain, list) else [chain]:
                parts = [np.asarray(hook(part, shape_of(key, config, vocabulary))) for part in parts]
            value = np.stack(parts, 1) if several else parts[0]
            digest = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:16]
            leaves["params/" + key.replace("-", "/")] = [value.dtype.name, *value.shape, digest]
        cases.append(
            {"config": {**config, "model_type": family}, "scan": scan, "vocab_size": vocabulary, "leaves": leaves}
        )
    lines = [json.dumps(case) for case in cases]
    output.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
