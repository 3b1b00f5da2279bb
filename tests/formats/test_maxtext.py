"""Rules to MaxText's tree make the leaves that MaxText's own conversion makes, bit for bit.

tests/programs/maxtext_writer.py recorded these in tests/data/maxtext.json.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import jax
import named_tensors
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxckpt

CASES = json.loads((Path(__file__).parents[1] / "data" / "maxtext.json").read_text())
NAMES = [f"{case['config']['model_type']}-{'scanned' if case['scan'] else 'unscanned'}" for case in CASES]


@pytest.fixture(params=CASES, ids=NAMES)
def case(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """The recorded leaves; the model is in tmp_path."""
    (tmp_path / "config.json").write_text(json.dumps(request.param["config"]))
    return request.param


def rules_of(case: dict[str, Any], folder: Path) -> jaxckpt.rules.Rules:
    return jaxckpt.rules.huggingface_rules(folder, layout="maxtext", scan=case["scan"], vocab_size=case["vocab_size"])


def test_leaves_equal_maxtexts(case: dict[str, Any], tmp_path: Path) -> None:
    config = case["config"]
    jaxckpt.save(tmp_path / "theirs", named_tensors.tensors(config["model_type"], config))
    seen = jaxckpt.open(tmp_path / "theirs", rename=rules_of(case, tmp_path))
    found = {
        path: [leaf.dtype.name, *leaf.shape, hashlib.sha256(np.ascontiguousarray(leaf[...]).tobytes()).hexdigest()[:16]]
        for path, leaf in seen.items()
    }
    assert found == case["leaves"]


def test_the_inverse_gives_the_same_tensors(case: dict[str, Any], tmp_path: Path) -> None:
    config, rules = case["config"], rules_of(case, tmp_path)
    tensors = named_tensors.tensors(config["model_type"], config)
    jaxckpt.save(tmp_path / "theirs", tensors)
    jaxckpt.convert(tmp_path / "theirs", tmp_path / "ours", rename=rules)
    back = jaxckpt.load_numpy(tmp_path / "ours", rename=rules.inverse(dtype="float32"))
    assert back.keys() == tensors.keys()
    for name, tensor in tensors.items():
        expected = tensor.copy()
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            expected[case["vocab_size"] :] = 0
        assert back[name].dtype == tensor.dtype
        np.testing.assert_allclose(back[name], expected, rtol=3e-7, atol=2e-7, err_msg=name)


def test_the_queries_of_gemma_2_have_the_scale_of_its_model(tmp_path: Path) -> None:
    (case,) = (case for case in CASES if case["config"]["model_type"] == "gemma2" and case["scan"])
    for scalar in (None, 9):  # as in 27B, whose heads have another size
        (tmp_path / "config.json").write_text(json.dumps(case["config"] | {"query_pre_attn_scalar": scalar}))
        scales = {rule.scale for rule in rules_of(case, tmp_path).rules if "query" in str(rule.target)}
        assert scales == {1 / (scalar or case["config"]["head_dim"]) ** 0.5}


def test_on_a_mesh_the_leaves_are_equal(tmp_path: Path) -> None:
    case = CASES[NAMES.index("llama-scanned")]
    (tmp_path / "config.json").write_text(json.dumps(case["config"]))
    jaxckpt.save(tmp_path / "theirs", named_tensors.tensors("llama", case["config"]))
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))

    def spec(path: str, leaf: Any) -> P:
        return P("fsdp", None, "tensor") if path.endswith("query/kernel") else P()

    rules = rules_of(case, tmp_path)
    restored = jaxckpt.restore(tmp_path / "theirs", mesh=mesh, specs=spec, rename=rules)
    whole = jaxckpt.load_numpy(tmp_path / "theirs", rename=rules)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), restored, whole))


def test_what_maxtext_does_not_support_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "n_head": 2, "n_layer": 1, "n_embd": 4}))
    with pytest.raises(jaxckpt.errors.InputError, match="and the model is gpt2"):
        jaxckpt.rules.huggingface_rules(tmp_path, layout="maxtext")
    with pytest.raises(jaxckpt.errors.InputError, match='layout must be "plain" or "maxtext"'):
        jaxckpt.rules.huggingface_rules(tmp_path, layout="scan")  # type: ignore[arg-type]


def test_fewer_layers_than_a_pattern_has() -> None:
    gemma = Path(__file__).parents[1] / "data" / "transformers" / "gemma3_text"
    found = jaxckpt.open(gemma, rename=jaxckpt.rules.huggingface_rules(gemma, layout="maxtext"))
    assert "params/params/decoder/layers_remainder/layers_1/mlp/wo/kernel" in found
    assert not [path for path in found if path.startswith("params/params/decoder/layers/")]
    with pytest.raises(jaxckpt.errors.InputError, match=r"Rule\.source must be"):
        jaxckpt.rules.Rule(source=(), target="a")
