"""LoRA adapters that PEFT saved: merged into their base, as leaves, and written back; weighted sums of checkpoints.

tests/programs/peft_writer.py wrote the adapters and the logits of PEFT's models.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import numpy_models
import pytest
import safetensors.numpy
import tensorstore as ts
from command_line import run
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model.tree import nested_dicts
from jaxckpt._store.tensors import ROOT_CONTEXT

DATA = Path(__file__).parents[1] / "data"
BASES = DATA / "transformers"
FAMILIES = sorted(path.name for path in (DATA / "peft").iterdir())


def logits(tree: Any, family: str) -> Any:
    config = json.loads((BASES / family / "config.json").read_text())
    return numpy_models.logits(tree, np.load(DATA / "peft" / family / "expected.npz")["tokens"], config)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_the_merged_model_equal_pefts(family: str) -> None:
    merged = jaxckpt.formats.merge_lora(BASES / family, DATA / "peft" / family)
    tree = jaxckpt.load_numpy(merged, rename=jaxckpt.rules.huggingface_rules(BASES / family))
    expected = np.load(DATA / "peft" / family / "expected.npz")["logits"]
    np.testing.assert_allclose(logits(tree, family), expected, rtol=1e-5, atol=3e-6)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft 0.21 with transformers 5
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("scan", [False, True])
def test_leaves_of_an_adapter_and_back(family: str, scan: bool, tmp_path: Path) -> None:
    adapter, base = DATA / "peft" / family, BASES / family
    rules = jaxckpt.rules.lora_rules(adapter, base=base, scan=scan)
    tree = jaxckpt.load_numpy(adapter / "adapter_model.safetensors", rename=rules)
    if not scan:  # the leaves are the parameters of nnx.LoRALinear: kernel + lora_a lora_b
        params = jaxckpt.load_numpy(base, rename=jaxckpt.rules.huggingface_rules(base))
        for layer, name in itertools.product(tree["layers"], ("attn", "mlp")):
            for module, leaves in tree["layers"][layer].get(name, {}).items():
                kernel = params["layers"][layer][name][module]["kernel"]
                delta = leaves["lora"]["lora_a"] @ leaves["lora"]["lora_b"]
                params["layers"][layer][name][module]["kernel"] = kernel + delta.reshape(kernel.shape)
        np.testing.assert_allclose(
            logits(params, family), np.load(adapter / "expected.npz")["logits"], rtol=1e-5, atol=3e-6
        )
    jaxckpt.save(tmp_path / "lora", tree)
    (tmp_path / "out").mkdir()
    shutil.copy(adapter / "adapter_config.json", tmp_path / "out")
    rules = jaxckpt.rules.lora_rules(tmp_path / "out", base=base, scan=scan)  # from the configuration alone
    written = tmp_path / "out" / "adapter_model.safetensors"
    jaxckpt.convert(tmp_path / "lora", written, rename=rules.inverse())
    before, after = jaxckpt.load_numpy(adapter / "adapter_model.safetensors"), jaxckpt.load_numpy(written)
    assert before.keys() == after.keys()
    for name in before:
        np.testing.assert_allclose(after[name], before[name], rtol=2e-7)
        if family != "qwen2":  # its scale is no power of two
            assert after[name].tobytes() == before[name].tobytes()
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="PEFT loads the adapter")
    import torch

    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(base), tmp_path / "out")
    expected = np.load(adapter / "expected.npz")
    with torch.no_grad():
        found = model.eval()(torch.tensor(expected["tokens"])).logits.numpy()
    np.testing.assert_allclose(found, expected["logits"], rtol=1e-5, atol=3e-6)


@pytest.mark.parametrize(("lost", "left"), [("lora_A", "lora_B"), ("lora_B", "lora_A")])
def test_an_adapter_that_lacks_a_half_is_an_error(lost: str, left: str, tmp_path: Path) -> None:
    shutil.copytree(DATA / "peft" / FAMILIES[0], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(file)
    name = next(name for name in tensors if lost in name)
    safetensors.numpy.save_file({other: value for other, value in tensors.items() if other != name}, file)
    with pytest.raises(jaxckpt.MismatchError, match=re.escape(name.replace(lost, left))):
        jaxckpt.formats.merge_lora(BASES / FAMILIES[0], tmp_path / "adapter")


def test_an_adapter_that_does_not_fit_is_an_error(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    shutil.copytree(DATA / "peft" / "llama", adapter)
    with pytest.raises(
        jaxckpt.MismatchError, match=r"(?s)lora_A.weight' and its lora_B do not fit.*of shape \[16, 16\]"
    ):
        jaxckpt.formats.merge_lora(BASES / "qwen2", adapter)
    tensors = jaxckpt.load_numpy(adapter / "adapter_model.safetensors")
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    tensors[f"{name}.lora_magnitude_vector"] = np.ones(24, np.float32)
    del tensors[f"{name}.lora_B.weight"]
    jaxckpt.save(tmp_path / "t", tensors)
    jaxckpt.convert(tmp_path / "t", adapter / "adapter_model.safetensors", overwrite=True)
    with pytest.raises(jaxckpt.MismatchError, match=r"(?s)magnitude_vector' is not a tensor.*has no lora_B"):
        jaxckpt.formats.merge_lora(BASES / "llama", adapter)
    config = json.loads((adapter / "adapter_config.json").read_text())
    for change, expected in (
        ({"use_dora": True, "bias": "all"}, "has use_dora, bias, which"),
        ({"peft_type": "IA3"}, "of peft_type 'IA3'"),
    ):
        (adapter / "adapter_config.json").write_text(json.dumps({**config, **change}))
        with pytest.raises(jaxckpt.errors.InputError, match=expected):
            jaxckpt.rules.lora_rules(adapter, base=BASES / "llama")
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(jaxckpt.errors.DataError, match=r"has no adapter_config\.json"):
        jaxckpt.formats.merge_lora(BASES / "llama", adapter)


@pytest.mark.parametrize(
    ("name", "value"),
    [("r", 0), ("r", "8"), ("r", None), ("lora_alpha", [1]), ("lora_alpha", 10**400), ("rank_pattern", ["q"]),
     ("alpha_pattern", {"q": None}), ("rank_pattern", {"(": 2}), ("target_modules", "(q"), ("target_modules", [1])],
)  # fmt: skip
def test_a_damaged_adapter_config_is_an_error(name: str, value: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "peft" / "llama", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, name: value}))
    base = DATA / "transformers" / "llama"
    calls = (lambda: jaxckpt.rules.lora_rules(folder, base=base), lambda: jaxckpt.formats.merge_lora(base, folder))
    for call in calls:
        with pytest.raises(jaxckpt.errors.DataError, match=r"adapter_config\.json (is damaged|has the regular)"):
            call()


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return shutil.copytree(DATA / "peft" / "llama", tmp_path / "adapter")


def change_config(folder: Path, **settings: Any) -> None:
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))


def change_tensors(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    safetensors.numpy.save_file(change(safetensors.numpy.load_file(file)), file)


PATTERNS = {
    "alpha_pattern": {"layers.1.self_attn.q_proj": 16, r"model\.layers\.0\.self_attn\.o_proj": 5, r"\d\.mlp\..*": 3}
}


def test_settings_of_a_layer_decide_its_scale(adapter: Path) -> None:
    change_config(adapter, **PATTERNS)
    base = BASES / "llama"
    tensors = safetensors.numpy.load_file(adapter / "adapter_model.safetensors")
    merged, plain = jaxckpt.load_numpy(jaxckpt.formats.merge_lora(base, adapter)), jaxckpt.load_numpy(base)
    lora = jaxckpt.load_numpy(
        adapter / "adapter_model.safetensors", rename=jaxckpt.rules.lora_rules(adapter, base=base)
    )["layers"]
    for layer, (part, name), alpha in (
        ("0", ("attn", "q"), 8), ("1", ("attn", "q"), 16), ("0", ("attn", "o"), 5), ("1", ("attn", "o"), 8),
        ("0", ("mlp", "down"), 3), ("1", ("mlp", "down"), 3), ("1", ("attn", "v"), 8),
    ):  # fmt: skip
        module = f"model.layers.{layer}.{'self_attn' if part == 'attn' else part}.{name}_proj"
        a, b = (tensors[f"base_model.model.{module}.lora_{letter}.weight"] for letter in "AB")
        expected = np.float32(alpha / 4) * (b @ a)
        weight = f"{module}.weight"
        np.testing.assert_allclose(merged[weight] - plain[weight], expected, atol=1e-6)
        leaves = lora[layer][part][name]["lora"]
        np.testing.assert_allclose((leaves["lora_a"] @ leaves["lora_b"]).T, expected, atol=1e-6)
    with pytest.raises(jaxckpt.errors.InputError, match=r"alpha_pattern in .* differs between the modules of .*q_proj"):
        jaxckpt.rules.lora_rules(adapter, base=base, scan=True)
    change_config(adapter, alpha_pattern={r"layers\.\d\.mlp\.down_proj": 3})
    jaxckpt.rules.lora_rules(adapter, base=base, scan=True)


@pytest.mark.parametrize("patterns", [{}, PATTERNS])
def test_an_adapter_of_some_layers_has_rules(patterns: dict[str, Any], adapter: Path, tmp_path: Path) -> None:
    """As layers_to_transform makes it."""
    change_config(adapter, layers_to_transform=[1], **patterns)
    file = adapter / "adapter_model.safetensors"
    change_tensors(file, lambda t: {name: value for name, value in t.items() if ".layers.1." in name})
    rules = jaxckpt.rules.lora_rules(adapter, base=BASES / "llama")
    tree = jaxckpt.load_numpy(file, rename=rules)
    assert tree["layers"].keys() == {"1"}
    merged, plain = (
        jaxckpt.load_numpy(source, rename=jaxckpt.rules.huggingface_rules(BASES / "llama"))["layers"]["1"]["attn"]
        for source in (jaxckpt.formats.merge_lora(BASES / "llama", adapter), BASES / "llama")
    )
    for name in "qo":
        lora, kernel = tree["layers"]["1"]["attn"][name]["lora"], plain[name]["kernel"]
        delta = (lora["lora_a"] @ lora["lora_b"]).reshape(kernel.shape)
        np.testing.assert_allclose(merged[name]["kernel"], kernel + delta, atol=1e-6)
    jaxckpt.save(tmp_path / "lora", tree)
    jaxckpt.convert(tmp_path / "lora", tmp_path / "back.safetensors", rename=rules.inverse())
    expected = jaxckpt.load_numpy(file)
    back = jaxckpt.load_numpy(tmp_path / "back.safetensors")
    assert back.keys() == expected.keys()
    for name in expected:
        np.testing.assert_allclose(back[name], expected[name], rtol=2e-7)
    scanned = jaxckpt.rules.lora_rules(adapter, base=BASES / "llama", scan=True) if not patterns else None
    if scanned:
        with pytest.raises(jaxckpt.MismatchError, match=r"\{i\} must be 0 to 1; missing: 0"):
            jaxckpt.load_numpy(file, rename=scanned)


def test_a_rank_that_the_configuration_does_not_have_is_an_error(adapter: Path) -> None:
    base = BASES / "llama"
    change_config(adapter, r=8)
    with pytest.raises(jaxckpt.MismatchError, match=r"do not fit .*, with rank 8 of adapter_config\.json"):
        jaxckpt.formats.merge_lora(base, adapter)
    rules = jaxckpt.rules.lora_rules(adapter, base=base)
    with pytest.raises(jaxckpt.MismatchError, match=r"r = 4|r.*8"):
        jaxckpt.load_numpy(adapter / "adapter_model.safetensors", rename=rules)


@pytest.mark.parametrize(
    "settings",
    [{"init_lora_weights": "pissa_niter_4"}, {"init_lora_weights": "OLoRA"}, {"layer_replication": [[1, 2], [0, 1]]},
     {"alora_invocation_tokens": [1]}, {"lora_bias": True}, {"kasa_config": {"beta": 0.1}}],
)  # fmt: skip
def test_an_adapter_for_another_base_or_computation_is_an_error(settings: dict[str, Any], adapter: Path) -> None:
    change_config(adapter, **settings)
    for call in (
        lambda: jaxckpt.rules.lora_rules(adapter, base=BASES / "llama"),
        lambda: jaxckpt.formats.merge_lora(BASES / "llama", adapter),
    ):
        with pytest.raises(jaxckpt.errors.InputError, match=f"has {next(iter(settings))}.*does not support"):
            call()


Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: {name: value[:0] if "lora_A" in name else value[:, :0].copy() for name, value in t.items()}, "fit"),
        (lambda t: {name: np.zeros((), np.float32) for name in t}, "do not fit"),
        (lambda t: {}, "has no tensors"),
        (lambda t: {**t, f"base_model.model.{Q}.weight": np.zeros((24, 16), np.float32)}, "replaces a tensor into"),
        (lambda t: {**t, "model.norm.weight": np.zeros(16, np.float32)}, "'model.norm.weight' has no tensor"),
        (
            lambda t: {
                **t,
                "base_model.model.lm_head.weight": np.zeros((24, 16), np.float32),
                "base_model.model.lm_head.modules_to_save.weight": np.ones((24, 16), np.float32),
            },
            "cannot replace 'lm_head.weight'",
        ),
    ],
)  # fmt: skip
def test_tensors_that_peft_would_not_use_are_an_error(change: Any, said: str, adapter: Path) -> None:
    change_tensors(adapter / "adapter_model.safetensors", change)
    with pytest.raises((jaxckpt.MismatchError, jaxckpt.errors.InputError), match=said):
        jaxckpt.formats.merge_lora(BASES / "llama", adapter)


def base_copy(folder: Path, family: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """A base with other tensors."""
    folder.mkdir()
    shutil.copy(BASES / family / "config.json", folder)
    safetensors.numpy.save_file(change(jaxckpt.load_numpy(BASES / family)), folder / "model.safetensors")
    return folder


def test_a_quantized_base_is_an_error(adapter: Path, tmp_path: Path) -> None:
    """Its scales would apply to the sum."""
    for number, dtype in enumerate((ml_dtypes.float8_e4m3fn, np.int8)):
        base = base_copy(
            tmp_path / str(number), "llama", lambda t, dtype=dtype: {**t, f"{Q}.weight": t[f"{Q}.weight"].astype(dtype)}
        )
        with pytest.raises(jaxckpt.MismatchError, match=rf"is for '{re.escape(Q)}.weight' of dtype .*8"):
            jaxckpt.formats.merge_lora(base, adapter)


def test_saved_modules_have_the_dtype_of_the_base_and_may_be_adapted(adapter: Path, tmp_path: Path) -> None:
    base = base_copy(tmp_path / "base", "llama", lambda t: {n: v.astype(ml_dtypes.bfloat16) for n, v in t.items()})
    rng = np.random.default_rng(0)
    norm, head = rng.standard_normal(16, np.float32), rng.standard_normal((24, 16), np.float32)
    a, b = rng.standard_normal((4, 16), np.float32), rng.standard_normal((24, 4), np.float32)
    new = {"model.layers.0.input_layernorm.weight": norm, "lm_head.base_layer.weight": head,
           "lm_head.lora_A.weight": a, "lm_head.lora_B.weight": b}  # fmt: skip
    change_tensors(
        adapter / "adapter_model.safetensors", lambda t: {**t, **{f"base_model.model.{n}": v for n, v in new.items()}}
    )
    merged = jaxckpt.formats.merge_lora(base, adapter)
    tree = jaxckpt.load_numpy(merged, rename=jaxckpt.rules.huggingface_rules(base, scan=True))
    assert {leaf.dtype for leaf in jax.tree.leaves(tree)} == {np.dtype(ml_dtypes.bfloat16)}
    np.testing.assert_array_equal(tree["layers"]["attn_norm"]["scale"][0], norm.astype(ml_dtypes.bfloat16))
    expected = head.astype(ml_dtypes.bfloat16).astype(np.float32) + np.float32(2) * (b @ a)
    np.testing.assert_allclose(tree["head"]["kernel"].astype(np.float32), expected.T, rtol=1e-2)


WTE, HEAD = "transformer.wte", "lm_head"


def embedding_adapter(folder: Path, tensors: dict[str, Any]) -> Path:
    adapter = shutil.copytree(DATA / "peft" / "gpt2", folder / "adapter")
    new = {f"base_model.model.{name}": value for name, value in tensors.items()}
    change_tensors(adapter / "adapter_model.safetensors", lambda t: {**t, **new})
    return adapter


@pytest.mark.parametrize("name", [f"{WTE}.weight", f"{WTE}.modules_to_save.weight", f"{HEAD}.weight"])
@pytest.mark.parametrize("is_said", [True, False])
def test_an_adapter_of_an_embedding_that_is_also_the_head_is_an_error(name: str, is_said: bool, tmp_path: Path) -> None:
    """PEFT trains one of the two, even if `ensure_weight_tying` is set and it does not know the embedding's name."""
    base = base_copy(tmp_path / "base", "gpt2", dict)
    config = json.loads((base / "config.json").read_text())
    if not is_said:  # as in the files of older versions of transformers, because it is the default
        assert config.pop("tie_word_embeddings")
        (base / "config.json").write_text(json.dumps(config))
    adapter = embedding_adapter(tmp_path, {name: np.ones((24, 16), np.float32)})
    for flag in (False, True):
        change_config(adapter, ensure_weight_tying=flag)
        with pytest.raises(jaxckpt.MismatchError, match=rf"{name}' is for an embedding or head that are one tensor"):
            jaxckpt.formats.merge_lora(base, adapter)
    (base / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    if name != f"{HEAD}.weight":
        merged = jaxckpt.load_numpy(jaxckpt.formats.merge_lora(base, adapter), select=f"{WTE}.weight")
        np.testing.assert_array_equal(merged[f"{WTE}.weight"], np.ones((24, 16)))


def test_an_embedding_that_peft_tied_to_the_head_is_merged(tmp_path: Path) -> None:
    """PEFT then saves both."""
    new = np.random.default_rng(0).standard_normal((24, 16), np.float32)
    adapter = embedding_adapter(tmp_path, {f"{WTE}.weight": new, f"{HEAD}.weight": new})
    merged = jaxckpt.formats.merge_lora(BASES / "gpt2", adapter)
    tree = jaxckpt.load_numpy(merged)
    assert tree.keys() == jaxckpt.load_numpy(BASES / "gpt2").keys()
    np.testing.assert_array_equal(tree[f"{WTE}.weight"], new)
    for other, said in ((new + 1, "one tensor in the base"), (new[:20], "one tensor in the base")):
        change_tensors(
            adapter / "adapter_model.safetensors",
            lambda t, other=other: {**t, f"base_model.model.{HEAD}.weight": other.copy()},
        )
        with pytest.raises(jaxckpt.MismatchError, match=said):
            jaxckpt.load_numpy(jaxckpt.formats.merge_lora(BASES / "gpt2", adapter))


def square_model(
    folder: Path, config: dict[str, Any] | None, modules: dict[str, tuple[int, int]]
) -> Callable[..., Any]:
    """A base with these weights and an adapter of all of them. Returns a function that merges them.

    It returns, for each module, whether the delta is B A, and not its transpose.
    """
    (folder / "base").mkdir()
    (folder / "adapter").mkdir()
    rng = np.random.default_rng(0)
    weights = {f"{name}.weight": np.zeros(shape, np.float32) for name, shape in modules.items()}
    safetensors.numpy.save_file(weights, folder / "base/model.safetensors")
    if config is not None:
        (folder / "base/config.json").write_text(json.dumps(config))
    sides = {
        name: shape if "conv" not in name and ".c_" not in name else shape[::-1] for name, shape in modules.items()
    }
    a = {name: rng.standard_normal((2, size), np.float32) for name, (_, size) in sides.items()}
    b = {name: rng.standard_normal((size, 2), np.float32) for name, (size, _) in sides.items()}
    adapter = {f"base_model.model.{name}.lora_{x}.weight": t[name] for x, t in (("A", a), ("B", b)) for name in modules}
    safetensors.numpy.save_file(adapter, folder / "adapter/adapter_model.safetensors")

    def merge(**settings: Any) -> dict[str, bool]:
        record = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, **settings}
        (folder / "adapter/adapter_config.json").write_text(json.dumps(record))
        merged = jaxckpt.load_numpy(jaxckpt.formats.merge_lora(folder / "base", folder / "adapter"))
        deltas = {name: (merged[f"{name}.weight"], b[name] @ a[name]) for name in modules}
        return {name: x.shape == y.shape and bool(np.allclose(x, y)) for name, (x, y) in deltas.items()}

    return merge


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("config", [
    {"model_type": "vision-encoder-decoder", "encoder": {"model_type": "vit"}, "decoder": {"model_type": "gpt2"}},
    {"model_type": "clvp", "decoder_config": {"model_type": "clvp_decoder"}},
    {"model_type": "gpt2", "tie_word_embeddings": False},
])  # fmt: skip
def test_each_module_decides_whether_its_square_weight_is_transposed(
    config: dict[str, Any], flag: bool, tmp_path: Path
) -> None:
    """GPT-2 may be a part of the base, and its heads are [out, in]."""
    config = {"tie_word_embeddings": False, **config}
    merge = square_model(
        tmp_path, config, {"encoder.query": (4, 4), "decoder.h.0.attn.c_proj": (4, 4), "score": (4, 4)}
    )
    assert merge(fan_in_fan_out=flag) == {"encoder.query": True, "decoder.h.0.attn.c_proj": False, "score": True}


@pytest.mark.parametrize("config", [None, {"model_type": "mine"}])
def test_square_weights_of_an_unknown_family_follow_fan_in_fan_out_unless_others_contradict(
    config: dict[str, Any] | None, tmp_path: Path
) -> None:
    (tmp_path / "linear").mkdir()
    (tmp_path / "conv").mkdir()
    assert all(square_model(tmp_path / "linear", config, {"a": (4, 4), "b": (4, 6)})().values())
    merge = square_model(tmp_path / "conv", config, {"conv1": (4, 4), "conv2": (4, 6)})
    assert not any(merge(fan_in_fan_out=True).values())
    with pytest.raises(jaxckpt.MismatchError, match=r"conv1.* is for a square weight, and fan_in_fan_out"):
        merge(fan_in_fan_out=False)


def test_a_name_that_is_no_regular_expression_of_itself_has_its_settings(tmp_path: Path) -> None:
    """PEFT looks it up."""
    merge = square_model(tmp_path, None, {"m.a+b": (4, 6), "m.c": (4, 6)})
    assert all(merge().values())
    assert merge(alpha_pattern={"m.a+b": 6}) == {"m.a+b": False, "m.c": True}
    with pytest.raises(jaxckpt.errors.DataError, match="has the regular expression"):
        merge(alpha_pattern={"(?i)C": 6})  # which PEFT writes behind others


@pytest.mark.parametrize("flag", [False, True])
def test_the_base_decides_whether_square_weights_are_transposed(flag: bool, tmp_path: Path) -> None:
    adapter = shutil.copytree(DATA / "peft" / "gpt2", tmp_path / "adapter")
    change_config(adapter, fan_in_fan_out=flag)
    merged = jaxckpt.formats.merge_lora(BASES / "gpt2", adapter)
    tree = jaxckpt.load_numpy(merged, rename=jaxckpt.rules.huggingface_rules(BASES / "gpt2"))
    expected = np.load(adapter / "expected.npz")["logits"]
    np.testing.assert_allclose(logits(tree, "gpt2"), expected, rtol=1e-5, atol=3e-6)


def test_an_adapter_of_routers_has_rules(tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["router"]}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    rules = jaxckpt.rules.lora_rules(tmp_path / "adapter", base=BASES / "llama4_text").rules
    assert [rule.target for rule in rules] == [f"layers/{{i}}/moe/router/lora/lora_{letter}" for letter in "ab"]


@pytest.mark.parametrize("targets", [["fc1"], r".*\.fc1"])
def test_digits_of_a_modules_name_count(targets: Any, tmp_path: Path) -> None:
    (tmp_path / "adapter").mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": targets}
    (tmp_path / "adapter/adapter_config.json").write_text(json.dumps(config))
    rules = jaxckpt.rules.lora_rules(tmp_path / "adapter", base=BASES / "whisper").rules
    sources = {source for rule in rules for source in [str(rule.source)]}
    assert sources
    assert all(".fc1." in source for source in sources), sources


def test_infinite_values_raise_no_warnings(adapter: Path, tmp_path: Path) -> None:
    """Warnings are errors in tests, and may be in programs."""
    change_tensors(adapter / "adapter_model.safetensors", lambda t: {n: np.full_like(v, 3e38) for n, v in t.items()})
    merged = jaxckpt.load_numpy(jaxckpt.formats.merge_lora(BASES / "llama", adapter))
    assert np.isposinf(merged[f"{Q}.weight"]).all()
    for name, value in (("a", np.inf), ("b", -np.inf), ("c", 3e38)):
        jaxckpt.save(tmp_path / name, {"w": np.full(2, value, np.float32)})
    assert np.isnan(jaxckpt.load_numpy(jaxckpt.weights.average([tmp_path / "a", tmp_path / "b"]))["w"]).all()
    assert np.isposinf(jaxckpt.load_numpy(jaxckpt.weights.average([tmp_path / "c"], weights=[2]))["w"]).all()
    double = jaxckpt.rules.Rules([jaxckpt.rules.Rule(source="w", target="w", scale=2.0)])
    assert np.isposinf(jaxckpt.load_numpy(tmp_path / "c", rename=double)["w"]).all()


def test_convert_merges_an_adapter(tmp_path: Path) -> None:
    adapter = DATA / "peft" / "llama"
    run("convert", str(BASES / "llama"), str(tmp_path / "m.safetensors"), "--merge-lora", str(adapter))
    expected = jaxckpt.load_numpy(jaxckpt.formats.merge_lora(BASES / "llama", adapter))
    jax.tree.map(np.testing.assert_array_equal, jaxckpt.load_numpy(tmp_path / "m.safetensors"), expected)


# Averages -----------------------------------------------------------------------------------------------------


@pytest.fixture
def runs(tmp_path: Path) -> tuple[Path, list[dict[str, Any]]]:
    """A run of four steps, and their trees."""
    rng = np.random.default_rng(0)
    states = [
        {
            "params": {
                "w": rng.standard_normal((40, 50), np.float32),
                "b": rng.standard_normal(7),
                "h": jax.numpy.asarray(rng.standard_normal(33), jax.numpy.bfloat16),
            },
            "n": np.arange(4),
            "step": step,
        }
        for step in range(4)
    ]
    with jaxckpt.Checkpointer(tmp_path / "run") as checkpointer:
        for step, state in enumerate(states):
            checkpointer.save(step, state)
    return tmp_path / "run", states


@pytest.mark.parametrize("weights", [None, (0.5, 0.25, 0.25), (1, 1, -1)])
def test_a_weighted_sum_is_numpys_in_float32(runs: Any, weights: Any, tmp_path: Path) -> None:
    run, states = runs
    found = jaxckpt.weights.average([f"{run}@last3"], weights=weights, select=["params", "n"])
    tree = jaxckpt.load_numpy(found)
    factors = weights or (1 / 3,) * 3
    for name, leaf in tree["params"].items():
        wide = np.float64 if name == "b" else np.float32
        terms = [np.asarray(s["params"][name]).astype(wide) * wide(f) for s, f in zip(states[1:], factors, strict=True)]
        assert leaf.tobytes() == ((terms[0] + terms[1]) + terms[2]).astype(leaf.dtype).tobytes(), name
    np.testing.assert_array_equal(tree["n"], np.arange(4))
    places = [f"{run}@{step}" for step in (1, 2, 3)]
    for n, chunk_bytes in enumerate((64, 4096)):  # any chunks, formats and places
        again = jaxckpt.weights.average(places, weights=weights, select=["params", "n"])
        jaxckpt.convert(again, tmp_path / str(n), chunk_bytes=chunk_bytes)
        jax.tree.map(np.testing.assert_array_equal, jaxckpt.load_numpy(tmp_path / str(n)), tree)


class Pair(NamedTuple):
    left: Any
    right: Any


def test_an_average_has_the_tree_of_the_first_checkpoint(tmp_path: Path) -> None:
    for value in (1, 3):
        tree = {
            "layers": [np.full(2, value * n, np.float32) for n in range(12)],
            "pair": Pair(np.full(1, value, np.float32), (None, [], {})),
            "by_number": {11: np.full(2, value, np.float32), 2: np.ones(1)},
            "nan": float("nan"),
        }
        jaxckpt.save(tmp_path / str(value), tree)
    averaged = jaxckpt.weights.average([tmp_path / "1", tmp_path / "3"])
    jaxckpt.convert(averaged, tmp_path / "out")
    for found in (jaxckpt.load_numpy(averaged), jaxckpt.load_numpy(tmp_path / "out")):
        np.testing.assert_array_equal(found["layers"], [np.full(2, 2 * n, np.float32) for n in range(12)])
        assert isinstance(found["layers"], list)
        assert found["pair"] == (np.full(1, 2), (None, [], {}))
        assert found["pair"]._fields == ("left", "right")
        np.testing.assert_array_equal(found["by_number"][11], [2, 2])
        assert np.isnan(found["nan"])


def test_arrays_of_numpy_and_jax_are_averaged_and_values_of_other_types_are_not(tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "numpy", {"w": np.ones(2, np.float32), "flag": True})
    jaxckpt.save(tmp_path / "jax", {"w": 3 * jax.numpy.ones(2), "flag": 1})
    places = [tmp_path / "numpy", tmp_path / "jax"]
    averaged = jaxckpt.weights.average(places, select="w")
    np.testing.assert_array_equal(jaxckpt.load_numpy(averaged)["w"], [2, 2])
    with pytest.raises(jaxckpt.MismatchError, match="'flag' is True, and 1 in"):
        jaxckpt.weights.average(places)


def test_the_last_steps_of_runs_of_any_kind(runs: Any, tmp_path: Path) -> None:
    run, states = runs
    jaxckpt.convert(run, tmp_path / "orbax", format="orbax", select="params")
    jaxckpt.save(tmp_path / "best@last2", {"params": {"w": states[0]["params"]["w"]}})
    for place, expected in ((run, 2.5), (tmp_path / "orbax", 2.5), (tmp_path / "best", None)):
        averaged = jaxckpt.weights.average([Path(f"{place}@last2")], select="params/w")
        w = [state["params"]["w"] for state in states]
        sought = w[0] if expected is None else w[2] * np.float32(0.5) + w[3] * np.float32(0.5)
        np.testing.assert_array_equal(jaxckpt.load_numpy(averaged)["params"]["w"], sought)


def test_quantized_weights_are_not_averaged_without_their_scales(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        weight = np.ones((2, 2), ml_dtypes.float8_e4m3fn)
        tree = {"w": weight, "w_scale_inv": np.full((1, 1), value, np.float32)}
        jaxckpt.save(tmp_path / str(value), tree)
    places = [tmp_path / "1.0", tmp_path / "2.0"]
    with pytest.raises(jaxckpt.MismatchError, match=r"(?s)'w' is quantized.*rename=huggingface_rules"):
        jaxckpt.weights.average(places)
    rule = jaxckpt.rules.Rule(source="w", target="w", scales="w_scale_inv", block=(2, 2))
    averaged = jaxckpt.weights.average(places, rename=jaxckpt.rules.Rules([rule]))
    np.testing.assert_array_equal(jaxckpt.load_numpy(averaged)["w"], np.full((2, 2), 1.5))


@pytest.mark.parametrize("step", [-1, True, 1 << 70])
def test_user_metadata_that_is_no_step_is_kept_as_it_is(step: int, tmp_path: Path) -> None:
    jaxckpt.save(tmp_path / "a", {"w": np.ones(2)}, metadata={"step": step})
    jaxckpt.convert(jaxckpt.weights.average([tmp_path / "a"]), tmp_path / "out")
    assert jaxckpt.open(tmp_path / "out").metadata == {"step": step}


@pytest.mark.parametrize("executor", [False, True])
def test_output_never_replaces_a_folder_with_an_input(executor: bool, adapter: Path, tmp_path: Path) -> None:
    group = tmp_path / "group"
    jaxckpt.save(tmp_path / "tree", {"a": {"w": np.ones(2)}, "b": {"w": np.zeros(2)}})
    jaxckpt.convert(tmp_path / "tree", group, format="zarr")
    averaged = jaxckpt.weights.average([group / "a", group / "b"])
    shutil.copytree(DATA / "peft" / "llama", adapter / "sub")
    merged = jaxckpt.formats.merge_lora(BASES / "llama", adapter / "sub")
    for source, folder in ((averaged, group), (merged, adapter)):
        said = f"is in {folder}, which would be deleted"
        with ThreadPoolExecutor(1) as threads:
            arguments: dict[str, Any] = {"format": "safetensors", "executor": threads if executor else None}
            with pytest.raises(jaxckpt.errors.CheckpointExistsError, match=said):
                jaxckpt.convert(source, folder, overwrite=True, **arguments)
    np.testing.assert_array_equal(jaxckpt.load_numpy(group)["b"]["w"], np.zeros(2))


def test_what_is_replaced_after_an_average_was_opened_is_not_mixed_into_it(tmp_path: Path) -> None:
    def write(name: str, value: float) -> None:
        tree = {name: np.full(4, value, np.float32) for name in ("w", "u")}
        jaxckpt.save(tmp_path / "tree", tree, overwrite=True)
        jaxckpt.convert(tmp_path / "tree", tmp_path / name, format="zarr", overwrite=True)

    write("a", 1)
    write("b", 3)
    averaged = jaxckpt.weights.average([tmp_path / "a", tmp_path / "b"])
    opened = jaxckpt.open(averaged)
    assert opened["u"][0] == 2
    write("b", 99)
    for read in (lambda: opened["w"][...], lambda: jaxckpt.convert(averaged, tmp_path / "out")):
        with pytest.raises(jaxckpt.errors.StorageError, match="was replaced after it was opened"):
            read()


@pytest.mark.parametrize("change", ["deleted", "saved again"])
def test_a_step_that_is_deleted_while_an_average_is_read_is_not_called_damaged(
    runs: Any, change: str, tmp_path: Path
) -> None:
    run, states = runs
    averaged = jaxckpt.weights.average([f"{run}@last2"], select="params")
    with jaxckpt.Checkpointer(run) as checkpointer:
        checkpointer.delete(3)
        if change == "saved again":
            checkpointer.save(3, states[0])
    said = (
        r"checkpoint at \S*/run/00000003 was (deleted|replaced by another) while it was being read"  # not all of them
    )
    with pytest.raises(jaxckpt.errors.NotACheckpointError, match=said):
        jaxckpt.load_numpy(averaged)


def test_checkpoints_in_one_folder_are_compared(tmp_path: Path) -> None:
    """They have one URL."""
    places = []
    for name, step in (("a", 10), ("b", 20)):
        for rank in (0, 1):
            np.savez(tmp_path / f"{name}{rank}.npz", w=np.ones(4, np.float32), step=np.full(2, step))
        places.append(jaxckpt.formats.rank_files({r: tmp_path / f"{name}{r}.npz" for r in (0, 1)}, specs=P("rank")))
    averaged = jaxckpt.weights.average(places)
    what = r"'step' is not a float, but int64\[4\], and differs between .* \(number 1\) and .* \(number 2\)"
    with pytest.raises(jaxckpt.MismatchError, match=what):
        jaxckpt.load_numpy(averaged)
    (problem,) = jaxckpt.verify(averaged).problems
    assert "differs between" in problem.reason


def test_an_average_of_files_in_several_places(tmp_path: Path) -> None:
    for number in (1, 2):
        jaxckpt.save(tmp_path / str(number), {"w": np.full(4, number, np.float32)})
        jaxckpt.convert(tmp_path / str(number), tmp_path / f"{number}.zarr", format="zarr")
    for file in (tmp_path / "2.zarr").rglob("*"):
        if file.is_file():
            key = f"memory://average/{file.relative_to(tmp_path)}"
            ts.KvStore.open(key, context=ROOT_CONTEXT).result().write("", file.read_bytes()).result()
    averaged = jaxckpt.weights.average([tmp_path / "1.zarr", "memory://average/2.zarr"])
    np.testing.assert_array_equal(jaxckpt.load_numpy(averaged)["w"], np.full(4, 1.5))


def test_leaves_that_cannot_be_read_do_not_hide_those_that_differ(tmp_path: Path) -> None:
    for number in (1, 2):
        np.savez(tmp_path / f"{number}.npz", w=np.ones(number), o=np.array([object()]))
    with pytest.raises(
        jaxckpt.MismatchError, match=r"(?s)'w' is float64\[1\], and float64\[2\] in .*'o' cannot be read: "
    ):
        jaxckpt.weights.average([tmp_path / "1.npz", tmp_path / "2.npz"])


def test_checkpoints_that_cannot_be_averaged(runs: Any, tmp_path: Path) -> None:
    run, _ = runs
    average = jaxckpt.weights.average
    with pytest.raises(jaxckpt.MismatchError, match=r"(?s)'step' is 0, and 1 in .*choose the leaves to average"):
        average([f"{run}@0", f"{run}@1"])
    jaxckpt.save(tmp_path / "other", {"params": {"w": np.ones((4, 5), np.float32), "x": 1.0}})
    with pytest.raises(jaxckpt.MismatchError, match=r"(?s)'params/b' is only in .*run.*'params/x' is only in .*other"):
        average([f"{run}@0", tmp_path / "other"], select="params")
    with pytest.raises(jaxckpt.MismatchError, match=r"'params/w' is float32\[40, 50\], and float32\[4, 5\] in"):
        average([f"{run}@0", tmp_path / "other"], select="params/w")
    jaxckpt.save(tmp_path / "n", {"n": np.arange(4) * 2})
    with pytest.raises(jaxckpt.MismatchError, match=r"'n' is not a float, but int64\[4\], and differs between"):
        jaxckpt.load_numpy(average([f"{run}@0", tmp_path / "n"], select="n"))
    for wrong in ((1,), (1, float("nan")), (1, 1e39)):
        with pytest.raises(jaxckpt.errors.InputError, match="one finite float32 for each of 2 checkpoints"):
            average([f"{run}@0", f"{run}@1"], weights=wrong)
    for unusable, why in (
        (("x", 1), "'x'"),
        ((10**400, 1), "too large"),
        ({1.0, 2.0}, "a set"),
        ("12", "a str"),
        ({0.5: 1, 1: 2}, "a dict"),
    ):
        with pytest.raises(jaxckpt.errors.InputError, match=f"weights= must be a sequence of numbers: .*{why}"):
            average([f"{run}@0", f"{run}@1"], weights=unusable)  # pyright: ignore
    with pytest.raises(jaxckpt.errors.InputError, match="at least one checkpoint, found none"):
        average([])
    with pytest.raises(jaxckpt.errors.InputError, match=r"run@last9: .* has 4 steps"):
        average([f"{run}@last9"])
    for unusable in (str(run), 5, {f"{run}@0", f"{run}@1"}, {f"{run}@0": 1}):
        with pytest.raises(jaxckpt.errors.InputError, match="takes a list of checkpoints"):
            average(unusable)  # pyright: ignore


@pytest.mark.parametrize("step", [np.int32, int], ids=["array", "int"])
def test_a_training_state_names_all_leaves_that_cannot_be_averaged(step: Any, tmp_path: Path) -> None:
    directory = str(tmp_path / "run")
    with jaxckpt.Checkpointer(directory) as checkpointer:
        for n in (1, 2):
            state = {"params": np.full(3, n, np.float32), "key": jax.random.key(n), "n": np.arange(4), "step": step(n)}
            checkpointer.save(n, state)
    said = run("average", f"{directory}@last2", "-o", str(tmp_path / "x"), code=2).stderr
    assert "2 leaves cannot be averaged" in said
    assert "'key' is not a float, but uint32[2], and differs between" in said
    assert "'step' is" in said
    assert "choose the leaves to average with --select, such as params" in said
    assert not (tmp_path / "x").exists()
    run("average", f"{directory}@last2", "--select", "params", "-o", str(tmp_path / "x"))
    for command in (("diff", f"{directory}@last2", directory), ("show", f"{directory}@last2")):
        said = run(*command, code=2).stderr
        assert "@lastN, the newest N steps, is only for average" in said
        assert "did you mean" not in said


def test_the_command_average(runs: Any, tmp_path: Path) -> None:
    run_directory, _ = runs
    run("average", f"{run_directory}@last2", "--select", "params", "-o", str(tmp_path / "a.safetensors"))
    run(
        "average",
        f"{run_directory}@2",
        f"{run_directory}@3",
        "--weights",
        "0.5,0.5",
        "--select",
        "params",
        "-o",
        str(tmp_path / "b"),
    )
    a, b = jaxckpt.load_numpy(tmp_path / "a.safetensors"), jaxckpt.load_numpy(tmp_path / "b")
    jax.tree.map(np.testing.assert_array_equal, nested_dicts(a), b)
