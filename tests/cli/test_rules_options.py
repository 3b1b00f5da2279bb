"""--rules and --back-to: a Hugging Face folder as another tree, and back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
import pytest
from command_line import run, run_json

import jaxckpt

LLAMA = str(Path(__file__).parents[1] / "data" / "transformers" / "llama")


def test_a_folder_is_shown_planned_and_compared_through_rules(tmp_path: Path) -> None:
    shown = run_json("show", LLAMA, "--rules", "scan", "--select", "layers/attn")
    assert [leaf["path"] for leaf in shown["leaves"]] == [f"layers/attn/{name}/kernel" for name in "koqv"]
    specs = 'params/**/query/kernel=P("x")'
    planned = run_json("plan", LLAMA, "--rules", "maxtext", "--mesh", "x=4", "--specs", specs)
    assert planned["over_read"] < 3
    rules = jaxckpt.rules.huggingface_rules(LLAMA)
    jaxckpt.convert(LLAMA, tmp_path / "plain", rename=rules)
    assert run_json("diff", LLAMA, str(tmp_path / "plain"), "--rules", "plain")["identical"]


def test_to_maxtext_and_back(tmp_path: Path) -> None:
    run("convert", LLAMA, str(tmp_path / "run"), "--rules", "maxtext", "--format", "orbax")
    # As MaxText's load_params_from_path restores it.
    rules = jaxckpt.rules.huggingface_rules(LLAMA, layout="maxtext")
    expected = jaxckpt.load_numpy(LLAMA, rename=rules)
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=8, save_concurrent_gb=8, use_ocdbt=True, use_zarr3=True)
    wanted = {"params": expected["params"]}
    restored = ocp.Checkpointer(handler).restore(
        tmp_path / "run", item=wanted, transforms={}, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
    )
    query = restored["params"]["params"]["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    assert query.shape == (16, 2, 4, 6)
    np.testing.assert_array_equal(
        query, expected["params"]["params"]["decoder"]["layers"]["self_attention"]["query"]["kernel"]
    )
    back = tmp_path / "model.safetensors"
    run("convert", str(tmp_path / "run"), str(back), "--rules", "maxtext", "--back-to", LLAMA)
    ours, theirs = jaxckpt.load_numpy(back), jaxckpt.load_numpy(LLAMA)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_allclose(ours[name], tensor, rtol=2e-7, err_msg=name)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("show", LLAMA, "--back-to", LLAMA), "--back-to needs --rules"),
        (("convert", LLAMA, "x", "--rules", "plain", "--rename", "a=b"), "cannot be used together with --rename"),
        (("show", LLAMA, "--rules", "maxtxt"), "'maxtxt' is not one of"),
        (("show", "s3://bucket/model", "--rules", "plain"), "a local folder, but s3://bucket/model is not one"),
    ],
)
def test_invalid_options_are_an_error(arguments: tuple[str, ...], expected: str) -> None:
    assert expected in run(*arguments, code=2).stderr
