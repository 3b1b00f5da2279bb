"""Models that transformers saved, read through the built-in rules: NumPy computes the same logits as transformers.

tests/programs/transformers_writer.py wrote the files: tiny models with random weights.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy_models
import pytest
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxckpt
from jaxckpt._model.dtypes import DTYPES

DATA = Path(__file__).parents[1] / "data" / "transformers"
FAMILIES = sorted(path.name for path in DATA.iterdir())
DECODERS = [name for name in FAMILIES if "tokens" in np.load(DATA / name / "expected.npz")]
EXPERTS = ("deepseek_v3", "gpt_oss", "gpt_oss_mxfp4", "llama4", "llama4_text", "mixtral", "qwen2_moe", "qwen3_moe")
"""Families with experts. Not the fused folders of the others: their tiny halves of a tensor are read in one call."""

FLOATS = [name for name in FAMILIES if name != "gpt_oss_mxfp4"]
"""Folders that can be written: jaxckpt does not quantize."""


def rotated(x: Any, theta: float) -> Any:
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * theta ** (-jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None], jnp.cos(angles)[:, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "model"))


def last_dimension_that_divides(path: str, leaf: Any) -> P:
    split = [dim for dim, side in enumerate(leaf.shape) if side % 4 == 0]
    return P(*("model" if dim == split[-1] else None for dim in range(len(leaf.shape)))) if split else P()


@pytest.mark.parametrize("family", DECODERS)
def test_logits_on_a_mesh_equal_those_of_transformers(family: str, mesh: Mesh) -> None:
    rules = jaxckpt.rules.huggingface_rules(DATA / family)
    tree = jaxckpt.restore(DATA / family, mesh=mesh, specs=last_dimension_that_divides, rename=rules)
    expected = np.load(DATA / family / "expected.npz")
    config = json.loads((DATA / family / "config.json").read_text())
    found = numpy_models.logits(jax.device_get(tree), expected["tokens"], config)
    np.testing.assert_allclose(found, expected["logits"], rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("family", EXPERTS)
def test_experts_are_read_once(family: str, scan: bool, bytes_read: Callable[[], int]) -> None:
    checkpoint = jaxckpt.open(DATA / family, rename=jaxckpt.rules.huggingface_rules(DATA / family, scan=scan))
    experts = {path: leaf for path, leaf in checkpoint.items() if re.search(r"moe/(gate|up|down|gate_up)/", path)}
    assert experts
    before = bytes_read()
    wanted = sum(leaf.value.nbytes for leaf in experts.values())
    assert bytes_read() - before <= 1.05 * wanted


@pytest.mark.parametrize("family", FLOATS)
@pytest.mark.parametrize("scan", [False, True])
def test_the_inverse_gives_the_same_bits(family: str, scan: bool, tmp_path: Path) -> None:
    rules = jaxckpt.rules.huggingface_rules(DATA / family, scan=scan)
    jaxckpt.convert(DATA / family, tmp_path / "ours", rename=rules)
    before, after = jaxckpt.load_numpy(DATA / family), jaxckpt.load_numpy(tmp_path / "ours", rename=rules.inverse())
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].tobytes() == tensor.tobytes(), name


LOADED = {"llama", "gemma3_text", "mixtral", "deepseek_v3", "bert", "whisper"}
"""One family of each kind. The campaign loads all: transformers takes up to a second for each."""


@pytest.mark.parametrize("family", FLOATS)
def test_transformers_loads_the_export(family: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if family not in LOADED and not request.config.getoption("--campaign"):
        pytest.skip("only with --campaign")
    transformers = pytest.importorskip("transformers", reason="transformers loads the export")
    torch = pytest.importorskip("torch")
    rules = jaxckpt.rules.huggingface_rules(DATA / family, scan=True)
    jaxckpt.convert(DATA / family, tmp_path / "ours", rename=rules)
    jaxckpt.convert(tmp_path / "ours", tmp_path / "model", format="safetensors", rename=rules.inverse())
    shutil.copy(DATA / family / "config.json", tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(tmp_path / "model").eval()
    expected = dict(np.load(DATA / family / "expected.npz"))
    inputs = {"input_ids" if name == "tokens" else name: torch.tensor(value) for name, value in expected.items()}
    inputs.pop("logits")
    with torch.no_grad():  # transformers 5.24 cannot run the whole Llama 4
        logits = (model.language_model if family == "llama4" else model)(**inputs)[0].numpy()
    np.testing.assert_allclose(logits, expected["logits"], rtol=1e-5, atol=1e-5)


def test_packed_values_have_no_inverse() -> None:
    rules = jaxckpt.rules.huggingface_rules(DATA / "gpt_oss_mxfp4")
    with pytest.raises(jaxckpt.errors.InputError, match=r"has no inverse.*config\.json has no quantization_config"):
        rules.inverse()


# Flax NNX ---------------------------------------------------------------------------------------------------


class Attention(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs) -> None:
        m, d = config["hidden_size"], config["head_dim"]
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        self.q = nnx.LinearGeneral(m, (heads, d), use_bias=False, rngs=rngs)
        self.k = nnx.LinearGeneral(m, (groups, d), use_bias=False, rngs=rngs)
        self.v = nnx.LinearGeneral(m, (groups, d), use_bias=False, rngs=rngs)
        self.o = nnx.LinearGeneral((heads, d), m, axis=(-2, -1), use_bias=False, rngs=rngs)

    def __call__(self, x: Any, theta: float) -> Any:
        q, k, v = rotated(self.q(x), theta), rotated(self.k(x), theta), self.v(x)
        k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], 2) for y in (k, v))
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
        return self.o(jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v))


class Mlp(nnx.Module):
    def __init__(self, m: int, f: int, rngs: nnx.Rngs) -> None:
        self.gate, self.up = (nnx.Linear(m, f, use_bias=False, rngs=rngs) for _ in range(2))
        self.down = nnx.Linear(f, m, use_bias=False, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.down(jax.nn.silu(self.gate(x)) * self.up(x))


class Layer(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs) -> None:
        m, epsilon = config["hidden_size"], config["rms_norm_eps"]
        self.attn_norm, self.mlp_norm = (nnx.RMSNorm(m, epsilon=epsilon, rngs=rngs) for _ in range(2))
        self.attn = Attention(config, rngs)
        self.mlp = Mlp(m, config["intermediate_size"], rngs)

    def __call__(self, x: Any, theta: float) -> Any:
        x = x + self.attn(self.attn_norm(x), theta)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nnx.Module):
    def __init__(self, config: dict[str, Any], rngs: nnx.Rngs) -> None:
        v, m = config["vocab_size"], config["hidden_size"]
        self.theta = config["rope_parameters"]["rope_theta"]
        self.embed = nnx.Embed(v, m, rngs=rngs)
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config["num_hidden_layers"])])
        self.norm = nnx.RMSNorm(m, epsilon=config["rms_norm_eps"], rngs=rngs)
        self.head = nnx.Linear(m, v, use_bias=False, rngs=rngs)

    def __call__(self, tokens: Any) -> Any:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.theta)
        return self.head(self.norm(x))


def test_a_flax_nnx_module_is_restored_from_the_plain_tree_and_exported(mesh: Mesh, tmp_path: Path) -> None:
    config = json.loads((DATA / "llama" / "config.json").read_text())
    rules = jaxckpt.rules.huggingface_rules(DATA / "llama")
    abstract = nnx.eval_shape(lambda: Llama(config, nnx.Rngs(0)))
    model = jaxckpt.restore(DATA / "llama", abstract, mesh=mesh, specs=last_dimension_that_divides, rename=rules)
    assert isinstance(model, Llama)
    assert len(model.layers[1].attn.k.kernel[...].sharding.device_set) == 8
    expected = np.load(DATA / "llama" / "expected.npz")
    with jax.default_matmul_precision("highest"):
        found = jax.device_get(model)(expected["tokens"])
    np.testing.assert_allclose(found, expected["logits"], rtol=2e-4, atol=2e-5)
    jaxckpt.save(tmp_path / "ours", model)
    delta = jaxckpt.diff(tmp_path / "ours", DATA / "llama", rename=rules.inverse(dtype="float32"))
    assert not [leaf.path for leaf in delta.leaves if leaf.differing]


# Quantized folders ------------------------------------------------------------------------------------------

FP8 = {"quant_method": "fp8", "weight_block_size": [8, 4], "activation_scheme": "dynamic"}


def compressed(**weights: Any) -> dict[str, Any]:
    """The quantization_config of compressed-tensors."""
    settings = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "group_size": None, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": settings, "input_activations": None}}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "config_groups": groups,
        "ignore": ["lm_head"],
    }


def quantize(folder: Path, quantized: dict[str, Any], family: str = "qwen3") -> dict[str, Any]:
    """Write a folder like Qwen3-FP8 or those of compressed-tensors, and return its tensors as floats."""
    dtype = "float8_e4m3fn" if quantized["quant_method"] == "fp8" else "int8"
    config = json.loads((DATA / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    tensors, floats = jaxckpt.load_numpy(DATA / family), {}
    stored: dict[str, Any] = {}
    for name, tensor in tensors.items():
        floats[name] = stored[name] = tensor
        if not re.search(r"layers\..*(_proj|_mqa|\.w[123]|dense\w*|query_key_value)\.weight$", name):
            continue
        most = 448.0 if dtype == "float8_e4m3fn" else 127.0
        rows, columns = FP8["weight_block_size"] if quantized is FP8 else (1, tensor.shape[1])
        grid = [(r, c) for r in range(0, tensor.shape[0], rows) for c in range(0, tensor.shape[1], columns)]
        scales = np.zeros((-(-tensor.shape[0] // rows), -(-tensor.shape[1] // columns)), "float32")
        values, back = np.zeros(tensor.shape, DTYPES[dtype]), np.zeros(tensor.shape, "float32")
        for r, c in grid:
            at = np.s_[r : r + rows, c : c + columns]
            scale = np.abs(tensor[at]).max() / most
            scales[r // rows, c // columns] = scale
            scaled = tensor[at] / scale
            values[at] = (np.round(scaled) if dtype == "int8" else scaled).astype(DTYPES[dtype])
            back[at] = values[at].astype("float32") * scale
        stored[name], floats[name] = values, back
        stored[f"{name}_scale_inv" if quantized is FP8 else f"{name}_scale"] = scales
        if quantized is not FP8:  # for activations and the cache, which are quantized too
            module = name.removesuffix(".weight")
            names = (f"{module}.input_scale", f"{module}.output_scale", f"{module.rpartition('.')[0]}.k_scale")
            stored |= dict.fromkeys(names, np.ones(1, "float32"))
    jaxckpt.save(folder / "checkpoint", stored)
    jaxckpt.convert(folder / "checkpoint", folder / "model.safetensors")
    shutil.rmtree(folder / "checkpoint")
    return floats


@pytest.mark.parametrize(
    ("family", "quantized", "layout"),
    [
        ("qwen3", FP8, "plain"),
        ("qwen3", FP8, "maxtext"),
        ("qwen3", compressed(), "plain"),
        ("qwen3", compressed(), "maxtext"),
        ("deepseek_v3", FP8, "plain"),
        ("mixtral", compressed(), "plain"),
        ("gpt_neox", compressed(), "plain"),
    ],
    ids=["fp8-plain", "fp8-maxtext", "int8-plain", "int8-maxtext", "experts", "mixtral", "other names"],
)
def test_quantized_folders_are_read_as_floats(
    family: str, quantized: dict[str, Any], layout: Any, mesh: Mesh, tmp_path: Path
) -> None:
    floats = quantize(tmp_path, quantized, family)
    rules = jaxckpt.rules.huggingface_rules(tmp_path, layout=layout)
    found = jaxckpt.restore(tmp_path, mesh=mesh, specs=last_dimension_that_divides, rename=rules)
    jaxckpt.save(tmp_path / "floats", floats)
    shutil.copy(DATA / family / "config.json", tmp_path / "floats")
    expected = jaxckpt.load_numpy(
        tmp_path / "floats", rename=jaxckpt.rules.huggingface_rules(tmp_path / "floats", layout=layout)
    )
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.parametrize(
    "quantized",
    [
        {"quant_method": "gptq", "bits": 4},
        {"quant_method": "fp8", "weight_block_size": None},
        compressed(num_bits=4),
        compressed(symmetric=False),
        {**compressed(), "format": "pack-quantized"},
    ],
)
def test_other_quantization_methods_are_an_error(quantized: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((DATA / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
    with pytest.raises(jaxckpt.errors.InputError, match="rules exist"):
        jaxckpt.rules.huggingface_rules(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b'{"model_type": "\xff"}', b"[" * 100_000, b"[]"])
def test_a_damaged_configuration_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(jaxckpt.errors.DataError, match=r"config\.json cannot be read as a model's configuration"):
        jaxckpt.rules.huggingface_rules(tmp_path)


def test_blocks_that_older_versions_of_compressed_tensors_wrote_as_text(tmp_path: Path) -> None:
    config = json.loads((DATA / "llama" / "config.json").read_text())
    for structure in ([8, 4], "8x4"):
        quantized = compressed(strategy="block", block_structure=structure)
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantized}))
        assert {rule.block for rule in jaxckpt.rules.huggingface_rules(tmp_path).rules} == {None, (8, 4)}


@pytest.mark.parametrize(
    "damage",
    [
        {"num_hidden_layers": "x"},
        {"hidden_size": None, "head_dim": None},
        {"num_attention_heads": 0, "head_dim": None},
        {"quantization_config": 3},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
        {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": None}}}},
    ],
)
def test_an_invalid_value_in_the_configuration_is_an_error(damage: dict[str, Any], tmp_path: Path) -> None:
    config = json.loads((DATA / "llama" / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **damage}))
    with pytest.raises(jaxckpt.errors.DataError, match=r"the config\.json of .* has a value that does not fit"):
        jaxckpt.rules.huggingface_rules(tmp_path)


def test_a_folder_that_is_no_path_is_an_error() -> None:
    with pytest.raises(jaxckpt.errors.InputError, match="str or PathLike, found 3"):
        jaxckpt.rules.huggingface_rules(3)  # pyright: ignore
    with pytest.raises(jaxckpt.errors.DataError, match="there is no folder memory://missing/model"):
        jaxckpt.rules.huggingface_rules("memory://missing/model")


def test_errors_name_the_family_and_the_file(tmp_path: Path) -> None:
    with pytest.raises(jaxckpt.errors.DataError, match=r"has no config\.json"):
        jaxckpt.rules.huggingface_rules(tmp_path)
    with pytest.raises(
        jaxckpt.errors.DataError,
        match=r"there is no folder .*org/model: .*huggingface_hub\.snapshot_download\(name, local_dir='org/model'\)",
    ):
        jaxckpt.rules.huggingface_rules("org/model")
    (tmp_path / "config.json").write_text('{"model_type": "lama"}')
    with pytest.raises(
        jaxckpt.errors.InputError, match=r"'lama', for which there are no rules: they exist for llama, mistral"
    ):
        jaxckpt.rules.huggingface_rules(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(jaxckpt.errors.DataError, match="num_attention_heads"):
        jaxckpt.rules.huggingface_rules(tmp_path)


def test_the_model_of_the_page_with_more_than_ten_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven layers, because JAX sorts their names as text. The flat and the stacked model stay in their dtype."""
    docs = Path(__file__).parents[2] / "docs"
    monkeypatch.syspath_prepend(docs)
    code = importlib.import_module("run_blocks").program_of(docs / "huggingface.md").code
    for old, new in (
        ('jax.config.update("jax_num_cpu_devices", 8)', ""),  # as conftest.py has done
        ("num_hidden_layers=2", "num_hidden_layers=11"),
        ('("layers.0", "layers.1")', '[f"layers.{i}" for i in range(11)]'),
        ("rng.random(", "0.1 * rng.standard_normal("),
        ("== (2, 32, 4, 8)", "== (11, 32, 4, 8)"),
        ("for _ in range(4):", "for _ in range(1):"),
    ):
        assert old in code
        code = code.replace(old, new)
    monkeypatch.chdir(tmp_path)
    page: dict[str, Any] = {}
    exec(compile(code, "docs/huggingface.md", "exec"), page)
    transformers = pytest.importorskip("transformers", reason="transformers computes the same model")
    torch = pytest.importorskip("torch")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "Llama-tiny").eval()
    expected = model(torch.tensor([page["tokens"]])).logits[0].detach().numpy()
    for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 1e-2)):
        for logits, params in ((page["logits"], page["params"]), (page["scan_logits"], page["stacked"])):
            computed = logits(jax.tree.map(lambda leaf, dtype=dtype: leaf.astype(dtype), params), page["prompt"])
            assert computed.dtype == dtype
            np.testing.assert_allclose(np.float32(computed), expected, atol=tolerance)


# Folders as on the hub --------------------------------------------------------------------------------------


def hub_folder(folder: Path, family: str, change: Callable[[dict[str, Any]], dict[str, Any]], **settings: Any) -> Path:
    """A folder of a family with other tensors, and with these settings in config.json."""
    config = json.loads((DATA / family / "config.json").read_text())
    jaxckpt.save(folder / "checkpoint", change(jaxckpt.load_numpy(DATA / family)))
    jaxckpt.convert(folder / "checkpoint", folder / "model.safetensors")
    shutil.rmtree(folder / "checkpoint")
    (folder / "config.json").write_text(json.dumps({**config, **settings}))
    return folder


@pytest.mark.parametrize(
    ("family", "lost", "expected"),
    [
        ("mixtral", r"layers\.1\.block_sparse_moe\.experts\.2\.w1", r"w1\.weight → .*\{e\} must be 0 to 3; missing: 2"),
        ("mixtral", r"layers\.1\..*\.experts\.", r"w1\.weight → .*\{i\} must be 0 to 1; missing: 1"),
        ("mixtral", r"\.experts\.", r"w1\.weight → .* matches nothing"),
        (
            "deepseek_v3_fused",
            r"experts\.gate_up_proj",
            r"gate_proj.weight → layers/\{i\}/moe/gate/kernel matches nothing",
        ),
        ("deepseek_v3", r"e_score_correction", r"e_score_correction_bias → .* matches nothing"),
        ("qwen2_moe", r"q_proj\.bias", r"q_proj\.bias → layers/\{i\}/attn/q/bias matches nothing"),
    ],
)
def test_a_folder_without_some_experts_is_an_error(family: str, lost: str, expected: str, tmp_path: Path) -> None:
    folder = hub_folder(tmp_path, family, lambda all: {n: all[n] for n in all if not re.search(lost, n)})
    with pytest.raises(jaxckpt.MismatchError, match=expected):
        jaxckpt.open(folder, rename=jaxckpt.rules.huggingface_rules(folder))


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        more = {name.replace(".1.", ".2.", 1): t for name, t in tensors.items() if "layers.1." in name}
        return tensors | more | {"model.layers.2.eh_proj.weight": np.zeros((16, 32), np.float32)}

    folder = hub_folder(tmp_path, "deepseek_v3", change)
    rules = [jaxckpt.rules.huggingface_rules(path) for path in (folder, DATA / "deepseek_v3")]
    found, expected = (
        jaxckpt.load_numpy(path, rename=own) for path, own in zip((folder, DATA / "deepseek_v3"), rules, strict=True)
    )
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2"])
def test_base_models_and_models_inside_others_have_the_same_leaves(family: str, tmp_path: Path) -> None:
    start = "transformer." if family == "gpt2" else "model."
    expected = jaxckpt.load_numpy(DATA / family, rename=jaxckpt.rules.huggingface_rules(DATA / family))
    for number, prefix in enumerate(
        ("", "language_model.model.", "model.language_model.")[: 1 if family == "gpt2" else 3]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        names = {"lm_head.weight": "language_model.lm_head.weight"} if prefix else {}
        folder = hub_folder(
            folder,
            family,
            lambda all, prefix=prefix, names=names: {
                names.get(name, name.replace(start, prefix, 1)): value
                for name, value in all.items()
                if prefix or name != "lm_head.weight"
            },
        )
        found = jaxckpt.load_numpy(folder, rename=jaxckpt.rules.huggingface_rules(folder))
        wanted = {name: leaf for name, leaf in expected.items() if prefix or name != "head"}
        jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(("family", "field"), [("llama", "num_hidden_layers"), ("gpt2", "n_layer")])
@pytest.mark.parametrize("scan", [False, True])
@pytest.mark.parametrize("count", [1, 3])
def test_another_number_of_layers_than_in_the_configuration(
    tmp_path: Path, family: str, field: str, count: int, scan: bool
) -> None:
    folder = hub_folder(tmp_path, family, like_gpt2 if family == "gpt2" and scan else dict, **{field: count})
    with pytest.raises(
        jaxckpt.errors.DataError, match=rf"has {field} {count}, but the tensors .* are of 2 layers: correct"
    ):
        jaxckpt.rules.huggingface_rules(folder, scan=scan)


def like_gpt2(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names of the folders "gpt2" to "gpt2-xl": a GPT2Model with its masks."""
    masks = {f"h.{i}.attn.bias": np.tril(np.ones((1, 1, 32, 32), np.float32)) for i in range(2)}
    return {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()} | masks


def like_distilgpt2(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names of the folder "distilgpt2": a GPT2LMHeadModel with its masks and its head."""
    masks = {f"transformer.h.{i}.attn.bias": np.tril(np.ones((1, 1, 32, 32), bool)) for i in range(2)}
    masked = {f"transformer.h.{i}.attn.masked_bias": np.array(-10000.0, np.float32) for i in range(2)}
    return tensors | masks | masked | {"lm_head.weight": tensors["transformer.wte.weight"]}


def like_llama_2(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names of "Llama-2-7b-hf" before safetensors."""
    frequencies = 1e4 ** -(np.arange(3, dtype=np.float32) / 3)
    return tensors | {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": frequencies for i in range(2)}


def with_head(tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"]}


def like_t5_small(tensors: dict[str, Any]) -> dict[str, Any]:
    """The names of "t5-small" in pytorch_model.bin: with copies of the embedding, and a bias that is not used."""
    copies = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    bias = {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": np.ones((32, 2), np.float32)}
    return tensors | dict.fromkeys(copies, tensors["shared.weight"]) | bias


HUB = [
    ("gpt2", like_gpt2),
    ("gpt2", like_distilgpt2),
    ("llama", like_llama_2),
    ("gemma2", with_head),
    ("t5", like_t5_small),
]


@pytest.mark.parametrize(("family", "change"), HUB, ids=[change.__name__ for _, change in HUB])
def test_folders_as_on_the_hub_are_read(family: str, change: Any, mesh: Mesh, tmp_path: Path) -> None:
    folder = hub_folder(tmp_path, family, change)
    for layout in ("plain",) if family in ("gpt2", "t5") else ("plain", "maxtext"):
        rules = jaxckpt.rules.huggingface_rules(folder, layout=layout)
        found = jaxckpt.restore(folder, mesh=mesh, specs=last_dimension_that_divides, rename=rules)
        expected = jaxckpt.load_numpy(
            DATA / family, rename=jaxckpt.rules.huggingface_rules(DATA / family, layout=layout)
        )
        assert jax.tree.structure(found) == jax.tree.structure(expected)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)


@pytest.mark.parametrize(
    ("family", "constants"),
    [
        ("bert", {"embeddings.position_ids": np.arange(16)[None]}),  # all-MiniLM-L6-v2
        (
            "gpt_neox",
            {
                f"layers.{i}.attention.{name}": np.ones(2, np.float32)
                for name in ("bias", "masked_bias", "rotary_emb.inv_freq")
                for i in range(2)
            },
        ),
    ],
    ids=["bert", "gpt_neox"],
)
def test_base_models_with_constants(family: str, constants: dict[str, Any], tmp_path: Path) -> None:
    start = f"{family}."

    def base(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(start): t for name, t in tensors.items() if name.startswith(start)} | constants

    folder = hub_folder(tmp_path, family, base)
    found = jaxckpt.load_numpy(folder, rename=jaxckpt.rules.huggingface_rules(folder))
    expected = jaxckpt.load_numpy(DATA / family, rename=jaxckpt.rules.huggingface_rules(DATA / family))
    expected.pop("head")
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "t5"])
def test_a_tied_model_whose_embedding_is_stored_only_under_another_name(family: str, tmp_path: Path) -> None:
    """`save_model` of safetensors keeps the first name of a tensor in alphabetical order."""
    transformers = pytest.importorskip("transformers", reason="transformers loads the model")
    torch = pytest.importorskip("safetensors.torch")
    config = json.loads((DATA / family / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(DATA / family)
    torch.save_model(model, str(tmp_path / "model.safetensors"))
    shutil.copy(DATA / family / "config.json", tmp_path)
    rules = jaxckpt.rules.huggingface_rules(tmp_path)
    found = jaxckpt.load_numpy(tmp_path, rename=rules)
    expected = jaxckpt.load_numpy(DATA / family, rename=jaxckpt.rules.huggingface_rules(DATA / family))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    jaxckpt.save(tmp_path / "ours", found)
    back = jaxckpt.load_numpy(tmp_path / "ours", rename=rules.inverse())
    assert back.keys() == jaxckpt.load_numpy(tmp_path / "model.safetensors").keys()


def test_the_inverse_writes_the_names_of_the_folder_without_constants(tmp_path: Path) -> None:
    folder = hub_folder(tmp_path, "gpt2", like_gpt2)
    rules = jaxckpt.rules.huggingface_rules(folder)
    jaxckpt.convert(folder, tmp_path / "ours", rename=rules)
    back = jaxckpt.load_numpy(tmp_path / "ours", rename=rules.inverse(dtype="float32"))
    tensors = like_gpt2(jaxckpt.load_numpy(DATA / "gpt2"))
    wanted = {name: tensor for name, tensor in tensors.items() if not name.endswith(".attn.bias")}
    assert back.keys() == wanted.keys()
    assert all(back[name].tobytes() == tensor.tobytes() for name, tensor in wanted.items())


def test_a_stored_head_that_differs_from_a_tied_embedding_is_an_error(tmp_path: Path) -> None:
    def change(tensors: dict[str, Any]) -> dict[str, Any]:
        head = tensors["model.embed_tokens.weight"].copy()
        head[-1, -1] += 1
        return tensors | {"lm_head.weight": head}

    folder = hub_folder(tmp_path, "gemma2", change)
    rules = jaxckpt.rules.huggingface_rules(folder)
    expected = r"(?s)'embed/embedding'.*'lm_head.weight' differs from 'model.embed.*set tie_word_embeddings to false"
    with pytest.raises(jaxckpt.errors.DataError, match=expected):
        jaxckpt.load_numpy(folder, rename=rules)
    assert jaxckpt.load_numpy(folder, rename=rules, select="norm")["norm"]["weight"].shape == (16,)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    untied = jaxckpt.load_numpy(folder, rename=jaxckpt.rules.huggingface_rules(folder))
    assert untied["head"]["kernel"][-1, -1] == untied["embed"]["embedding"][-1, -1] + np.float32(1)


@pytest.mark.parametrize("family", ["falcon", "mamba"])
def test_other_families_get_the_list_of_supported_ones_and_no_guess(family: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    with pytest.raises(
        jaxckpt.errors.InputError, match=f"{family}.*llama, mistral, qwen2, qwen3, gemma, .*gpt_oss"
    ) as caught:
        jaxckpt.rules.huggingface_rules(tmp_path)
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gpt2", "gemma2"])
@pytest.mark.parametrize("bare", [True, False])
def test_embedding_models_and_classifiers(family: str, bare: bool, tmp_path: Path) -> None:
    """Without a head, names have no "model." (Qwen3-Embedding, e5-mistral); a classifier has its own head."""
    numpy = importlib.import_module("safetensors.numpy")
    folder = Path(shutil.copytree(DATA / family, tmp_path / "x"))
    wanted = jaxckpt.load_numpy(folder, rename=jaxckpt.rules.huggingface_rules(folder))
    wanted.pop("head", None)
    tensors = jaxckpt.load_numpy(folder)
    tensors.pop("lm_head.weight", None)
    if bare:
        tensors = {name.removeprefix("model.").removeprefix("transformer."): array for name, array in tensors.items()}
    else:
        tensors["score.weight"] = np.arange(2 * next(iter(wanted["norm"].values())).size, dtype=np.float32).reshape(
            2, -1
        )
        wanted["score"] = {"kernel": tensors["score.weight"].T}
    for file in folder.glob("*.safetensors*"):
        file.unlink()
    numpy.save_file(tensors, folder / "model.safetensors")
    if not bare and family != "gpt2":
        with pytest.raises(jaxckpt.errors.InputError, match="no leaf for score/kernel: MaxText has no classifiers"):
            jaxckpt.rules.huggingface_rules(folder, layout="maxtext")
    found = jaxckpt.load_numpy(folder, rename=jaxckpt.rules.huggingface_rules(folder))
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(wanted)))


def encoder(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(("encoder.", "shared."))}


def text_tower(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith("text_")}


def without_attention_biases(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: t for name, t in tensors.items() if not re.search(r"attention\.\w+\.bias", name)}


def with_own_head(tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors | {"cls.predictions.decoder.weight": tensors["bert.embeddings.word_embeddings.weight"] + 1}


def with_head_of_t5(tensors: dict[str, Any]) -> dict[str, Any]:
    return tensors | {"lm_head.weight": tensors["shared.weight"] + 1}


def with_head_of_gemma3(tensors: dict[str, Any]) -> dict[str, Any]:
    (embed,) = (tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
    return tensors | {"lm_head.weight": embed + 1}


def answers_questions(tensors: dict[str, Any]) -> dict[str, Any]:
    head = {"qa_outputs.weight": np.ones((2, 16), np.float32), "qa_outputs.bias": np.ones(2, np.float32)}
    return head | {name.replace("model.", "transformer.", 1): t for name, t in tensors.items() if "lm_head" not in name}


PARTS: list[tuple[str, Any, dict[str, Any], str]] = [
    ("t5", encoder, {"architectures": ["T5EncoderModel"]}, "embed encoder"),
    ("clip", text_tower, {"model_type": "clip_text_model", "num_hidden_layers": 2}, "text"),
    ("gpt_neox", without_attention_biases, {"attention_bias": False}, "embed head layers norm"),
    (
        "bert",
        with_own_head,
        {"tie_word_embeddings": False},
        "embed embed_norm head layers positions token_types",
    ),
    ("t5", with_head_of_t5, {"scale_decoder_outputs": False}, "decoder embed encoder head"),
    ("t5", dict, {"scale_decoder_outputs": False}, "decoder embed encoder"),
    ("gemma3", with_head_of_gemma3, {"tie_word_embeddings": False}, "embed head layers norm projector vision"),
    ("llama", answers_questions, {}, "embed layers norm qa_outputs"),
]


@pytest.mark.parametrize(
    ("family", "change", "settings", "parts"), PARTS, ids=[change.__name__ for _, change, *_ in PARTS]
)
def test_other_architectures_of_a_family(
    family: str, change: Any, settings: dict[str, Any], parts: str, tmp_path: Path
) -> None:
    if family == "clip":
        settings = json.loads((DATA / family / "config.json").read_text())["text_config"] | settings
    folder = hub_folder(tmp_path, family, change, **settings)
    rules = jaxckpt.rules.huggingface_rules(folder)
    tree = jaxckpt.load_numpy(folder, rename=rules)
    assert sorted(tree) == parts.split()
    jaxckpt.save(tmp_path / "ours", tree)
    back, tensors = jaxckpt.load_numpy(tmp_path / "ours", rename=rules.inverse()), jaxckpt.load_numpy(folder)
    assert back.keys() == tensors.keys()
    assert all(back[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("family", "name", "settings"),
    [
        ("clip", "CLIPForImageClassification", {}),
        ("siglip", "SiglipForImageClassification", {}),
        ("whisper", "WhisperForAudioClassification", {"use_weighted_layer_sum": True}),
    ],
)
def test_classifiers_of_images_and_sound(family: str, name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers writes the folder")
    model_class = getattr(transformers, name)
    model = model_class(model_class.config_class.from_pretrained(DATA / family, **settings))
    model.save_pretrained(tmp_path / "theirs")
    rules = jaxckpt.rules.huggingface_rules(tmp_path / "theirs")
    tree = jaxckpt.load_numpy(tmp_path / "theirs", rename=rules)
    assert np.array_equal(tree["classifier"]["kernel"], model.classifier.weight.detach().numpy().T)
    jaxckpt.save(tmp_path / "ours", tree)
    tensors = jaxckpt.load_numpy(tmp_path / "theirs")
    back = jaxckpt.load_numpy(tmp_path / "ours", rename=rules.inverse())
    assert back.keys() == tensors.keys()
    assert all(back[name].tobytes() == tensor.tobytes() for name, tensor in tensors.items())
