"""Unknown arguments and attributes: the error of each names ours, and signatures and other errors do not change."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import itertools
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

import jaxckpt
import jaxckpt.orbax

COMING_FROM_ORBAX = Path(__file__).parent.parent / "docs" / "coming-from-orbax.md"

RESULTS = {"Checkpoint", "LazyLeaf", "PendingSave", "SaveInfo", "Step"}
"""Classes whose instances jaxckpt creates: only their methods have arguments for programs."""


def public_callables() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every public function, class and method, by name."""
    modules: dict[Any, list[str]] = {
        jaxckpt: jaxckpt.__all__,
        jaxckpt.formats: dir(jaxckpt.formats),
        jaxckpt.orbax: ["handler_registry", "register_v1"],
        jaxckpt.rules: dir(jaxckpt.rules),
        jaxckpt.weights: ["Publisher", "subscribe"],
    }
    for module, names in modules.items():
        for name in names:
            value = getattr(module, name)
            if name.startswith("_") or not callable(value) or inspect.isabstract(value):
                continue
            if not isinstance(value, type):
                yield name, value
            elif not issubclass(value, BaseException):
                if name not in RESULTS:
                    yield name, value
                for method, member in inspect.getmembers(value, inspect.isfunction):
                    if not method.startswith("_") and member.__module__.startswith("jaxckpt"):
                        yield f"{name}.{method}", member


CALLABLES = dict(public_callables())


def arguments(function: Callable[..., Any]) -> list[None]:
    """As many arguments as the function needs."""
    return [
        None
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.KEYWORD_ONLY
    ]


def message(function: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """The message of the TypeError that a call raises."""
    with pytest.raises(TypeError) as error:
        function(*args, **kwargs)
    return str(error.value)


def test_the_callables_include_these() -> None:
    names = {"save", "restore", "open", "Run", "Checkpointer", "Checkpointer.save", "Run.fork", "Options", "convert"}
    names |= {"Publisher", "Publisher.publish", "subscribe", "rank_files", "Rule", "Checkpoint.plan", "Checkpoint.hold"}
    assert names | {"PendingSave.wait", "Step.restore", "LazyLeaf.slabs", "compose"} <= CALLABLES.keys()


@pytest.mark.parametrize("name", CALLABLES)
def test_every_public_callable_names_its_unknown_keyword(name: str) -> None:
    function = CALLABLES[name]
    text = message(function, *arguments(function), zzz=1)
    assert re.fullmatch(r"[\w.]+ has no argument zzz", text)
    if "." not in name:
        assert text.startswith(f"{name} ")


@pytest.mark.parametrize("name", CALLABLES)
def test_no_public_callable_takes_any_keyword(name: str) -> None:
    kinds = {parameter.kind for parameter in inspect.signature(CALLABLES[name]).parameters.values()}
    assert inspect.Parameter.VAR_KEYWORD not in kinds
    assert len(kinds & {inspect.Parameter.VAR_POSITIONAL}) == 0


@pytest.mark.parametrize(
    ("name", "unknown", "hint"),
    [
        ("load_numpy", "target", "it is an argument of jaxckpt.restore"),
        ("load_numpy", "mesh", "it is an argument of jaxckpt.restore"),
        ("open", "select", "it is an argument of jaxckpt.restore"),
        ("restore", "metadata", "it is an argument of jaxckpt.save"),
        ("restore", "shardings", "use target"),
        ("load_numpy", "sharding", "use target of jaxckpt.restore"),
        ("save", "exist_ok", "use overwrite"),
        ("restore", "abstract", "use target"),
        ("Run", "keep_last", "a Run only reads; it is an argument of jaxckpt.Checkpointer"),
        ("Run.follow", "poll", "did you mean poll_seconds?"),
        ("Run.follow", "timeout", "did you mean timeout_seconds?"),
        ("Options", "bandwidth", "use max_bytes_per_second"),
        ("Options", "retry_seconds", 'pass storage={"retry_seconds": …}'),
        ("Checkpointer", "every_minutes", "use every_seconds=60 * minutes of jaxckpt.Checkpointer"),
        ("save", "keep_last", "it is an argument of jaxckpt.Checkpointer"),
    ],
)
def test_an_argument_of_another_function_is_named(name: str, unknown: str, hint: str) -> None:
    function = CALLABLES[name]
    assert message(function, *arguments(function), **{unknown: 1}) == f"{name} has no argument {unknown}: {hint}"


@pytest.mark.parametrize(
    ("name", "unknown", "hint"),
    [
        *((name, "rules", "use rename") for name in ("load_numpy", "open", "restore", "convert", "diff")),
        ("save", "rules", "use rename"),
        ("restore", "metrics", "it is an argument of jaxckpt.Checkpointer.save"),
        ("Run.restore", "metric", "it is an argument of jaxckpt.Run.best_step"),
        ("Checkpoint.plan", "metrics", "it is an argument of jaxckpt.Checkpointer.save"),
        ("Run.best_step", "metrics", "did you mean metric?"),
        ("restore", "threads", ""),
        ("restore", "rate", ""),
        ("restore", "name", "it is an argument of jaxckpt.Run.pin"),
        ("restore", "poll_seconds", "it is an argument of jaxckpt.Run.follow"),
        ("Checkpointer", "poll_seconds", "it is an argument of jaxckpt.Run.follow"),
        ("Run.pin", "mode", "it is an argument of jaxckpt.Run.best_step"),
        ("Run.best_step", "move", "it is an argument of jaxckpt.Run.pin"),
        ("Run.follow", "rate", ""),
        ("convert", "rate", ""),
        ("save", "metrics", "it is an argument of jaxckpt.Checkpointer.save"),
        ("save", "step", "it is an argument of jaxckpt.Checkpointer.save"),
        ("restore", "step", "it is an argument of jaxckpt.Run.restore"),
        ("restore", "selct", "did you mean select?"),
        ("restore", "mash", ""),
    ],
)
def test_a_hint_is_right_or_absent(name: str, unknown: str, hint: str) -> None:
    function = CALLABLES[name]
    expected = f"{name} has no argument {unknown}" + (f": {hint}" if hint else "")
    assert message(function, *arguments(function), **{unknown: 1}).replace("Checkpoint.plan", name) == expected


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("max_to_keep", "Orbax's max_to_keep is keep_last here"),
        ("keep_period", "Orbax's keep_period is keep_every here"),
        ("save_interval_steps", "Orbax's save_interval_steps is every here"),
        ("enable_async_checkpointing", "Orbax's enable_async_checkpointing is background here"),
        ("best_fn", "keep_best="),
        ("best_mode", "keep_best="),
        ("keep_time_interval", "keep_every_seconds="),
        ("keep_checkpoints_without_metrics", "keep_if="),
        ("should_save_fn", "save_if="),
        ("save_on_steps", "save_if="),
        ("save_decision_policy", "every="),
        ("preservation_policy", "keep_last="),
        ("step_name_format", "8 digits"),
        ("step_prefix", "8 digits"),
        ("step_format_fixed_length", "8 digits"),
        ("cleanup_tmp_directories", "deletes half-written steps itself"),
        ("enable_background_delete", "always deleted in the background"),
        ("create", "created if it does not exist"),
        ("read_only", "jaxckpt.Run(directory)"),
        ("timeout_secs", "options=jaxckpt.Options(timeout_seconds=…)"),
        ("todelete_subdir", "is trash here"),
        ("file_options", "umask"),
        ("item_names", "save {name: tree}"),
        ("item_handlers", "save {name: tree}, and JSON values as metadata="),
        ("handler_registry", "save {name: tree}, and JSON values as metadata="),
        ("keep", "Flax's keep is keep_last here"),
        ("keep_lst", "did you mean keep_last?"),
        ("Every", "did you mean every?"),
        ("sync", "pass options=jaxckpt.Options(sync=…)"),
        ("compresion", "did you mean Options(compression=…)?"),
    ],
)
def test_the_checkpointer_names_ours(tmp_path: Path, theirs: str, ours: str) -> None:
    text = message(jaxckpt.Checkpointer, tmp_path / "run", **{theirs: 3})
    assert text.startswith(f"Checkpointer has no argument {theirs}: ")
    assert ours in text
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("function", "theirs", "ours"),
    [
        ("save", "force", "Orbax's force is overwrite here"),
        ("save", "force_overwrite", "use overwrite"),
        ("save", "item", "Orbax's item is tree here"),
        ("save", "state", "Orbax's state is tree here"),
        ("save", "custom_metadata", "Orbax's custom_metadata is metadata here"),
        ("save", "save_args", "dtype="),
        ("save", "max_to_keep", "Orbax's max_to_keep is keep_last of jaxckpt.Checkpointer"),
        ("save", "timeout_secs", "options=jaxckpt.Options(timeout_seconds=…)"),
        ("save", "state_dict", "PyTorch's state_dict is tree here"),
        ("save", "overwite", "did you mean overwrite?"),
        ("Checkpointer.save", "args", "pass the tree"),
        ("Checkpointer.save", "items", "Orbax's items is tree here"),
        ("Checkpointer.save", "keep_last", "it is an argument of Checkpointer"),
        ("Checkpointer.restore", "items", "Orbax's items is target here"),
        ("Checkpointer.restore", "options", "it is an argument of Checkpointer"),
        ("Checkpointer.restore_or_init", "abstract_state", "is init here"),
        ("restore", "restore_args", "Orbax's restore_args is target here"),
        ("restore", "abstract_pytree", "Orbax's abstract_pytree is target here"),
        ("restore", "like", "Equinox's like is target here"),
        ("restore", "transforms", "Orbax's transforms is rename here"),
        ("restore", "partial_restore", "strict=False"),
        ("load_numpy", "item", "Orbax's item is target of jaxckpt.restore"),
        ("Options", "timeout_secs", "Orbax's timeout_secs is timeout_seconds here"),
        ("Run", "read_only", "jaxckpt.Run(directory) only reads"),
    ],
)
def test_other_functions_name_ours(function: str, theirs: str, ours: str) -> None:
    called = CALLABLES[function]
    assert ours in message(called, *arguments(called), **{theirs: 3})


def test_each_unknown_keyword_has_a_line(tmp_path: Path) -> None:
    unknown: dict[str, Any] = {"max_to_keep": 3, "best_mode": "min"}
    lines = message(jaxckpt.Checkpointer, tmp_path, **unknown).splitlines()
    assert [line.split(":")[0] for line in lines] == [f"Checkpointer has no argument {name}" for name in unknown]


def test_every_name_that_is_proposed_exists() -> None:
    """So that a renamed argument does not leave a hint behind."""
    from jaxckpt._keywords import names_of_others

    tables = names_of_others()
    for names in tables["same"].values():
        for home, _, ours in (place.rpartition(".") for places in names.values() for place in places.split()):
            assert ours in inspect.signature(CALLABLES[home]).parameters, (home, ours)
    arguments_of_all = {name for function in CALLABLES.values() for name in inspect.signature(function).parameters}
    for hint in tables["other"]["Orbax"].values():
        assert set(re.findall(r"(\w+)=", hint)) <= arguments_of_all, hint
    for cls, hints in itertools.chain.from_iterable(of.items() for of in tables["attributes"].values()):
        for theirs, hint in hints.items():
            assert not hasattr(getattr(jaxckpt, cls), theirs)
            if used := re.match(r"use (the )?(\w+)", hint):
                owner = jaxckpt.Run if used[1] else getattr(jaxckpt, cls)
                assert used[2] == "jaxckpt" or hasattr(owner, used[2]), hint
    modules = {name: f"{module}.{name}" for module, names in tables["modules"].items() for name in names.split()}
    for theirs, ours in (tables["package"] | modules).items():
        assert theirs not in jaxckpt.__all__
        value: Any = jaxckpt
        for part in re.match(r"[\w.]+", ours)[0].split("."):  # pyright: ignore[reportOptionalSubscript]
            value = getattr(value, part)
        for method in re.findall(r"\)\.(\w+)", ours):
            assert hasattr(jaxckpt.Run, method) or hasattr(jaxckpt.Checkpoint, method)


def test_options_of_orbax_name_ours(tmp_path: Path) -> None:
    options: Any = ocp.CheckpointManagerOptions(max_to_keep=3)
    hint = "pass its arguments to jaxckpt.Checkpointer instead, such as keep_last= for max_to_keep"
    expected = f"Checkpointer accepts no positional CheckpointManagerOptions: {hint}"
    assert message(jaxckpt.Checkpointer, tmp_path / "run", options) == expected
    with pytest.raises(jaxckpt.errors.InputError, match=re.escape(hint)):
        jaxckpt.Checkpointer(tmp_path / "run", options=options)
    ordinary = "Checkpointer.__init__() takes 2 positional arguments but 3 were given"
    assert message(jaxckpt.Checkpointer, tmp_path / "run", jaxckpt.Options()) == ordinary


def test_other_type_errors_stay(tmp_path: Path) -> None:
    assert message(jaxckpt.save, tmp_path) == "save() missing 1 required positional argument: 'tree'"
    assert message(jaxckpt.save, tmp_path, {}, 1) == "save() takes 2 positional arguments but 3 were given"
    assert "multiple values for argument 'tree'" in message(jaxckpt.save, tmp_path, {}, tree={})

    def fail(step: int, metrics: object) -> bool:
        raise TypeError("mine")

    with jaxckpt.Checkpointer(tmp_path / "run", save_if=fail) as checkpointer:
        assert message(checkpointer.save, 1, {}, metrics={}) == "mine"


def test_the_traceback_shows_the_call_and_no_other_error(tmp_path: Path) -> None:
    with pytest.raises(TypeError) as error:
        jaxckpt.Checkpointer(tmp_path, max_to_keep=3)  # pyright: ignore[reportCallIssue]
    assert error.value.__cause__ is None
    assert error.value.__context__ is None
    assert [frame.name for frame in traceback.extract_tb(error.tb)][1:] == ["call"]


def test_signatures_and_names_are_those_of_the_functions() -> None:
    for name, function in CALLABLES.items():
        assert inspect.signature(function) == inspect.signature(inspect.unwrap(function)), name
        assert function.__doc__ == inspect.unwrap(function).__doc__
    assert str(inspect.signature(jaxckpt.open)).startswith("(path: 'Location', *, rename: 'Renaming | None' = None,")
    assert list(inspect.signature(jaxckpt.Run).parameters) == ["directory", "options"]
    assert list(inspect.signature(jaxckpt.Options).parameters) == [f.name for f in dataclasses.fields(jaxckpt.Options)]
    assert pickle.loads(pickle.dumps(jaxckpt.save)) is jaxckpt.save
    assert inspect.getsource(jaxckpt.save).startswith("@explain_keywords\ndef save(")


def test_a_call_leaves_no_reference_cycle(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(TypeError):
            jaxckpt.Checkpointer(tmp_path, max_to_keep=3)  # pyright: ignore[reportCallIssue]
        assert gc.collect() == 0
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("all_steps", "steps()"),
        ("item_metadata", "open(step)"),
        ("reload", "not needed"),
        ("wait_until_finished", "wait()"),
        ("reached_preemption", "preempted"),
        ("check_for_errors", "wait()"),
        ("is_saving_in_progress", "pending"),
        ("cancel", "runs to its end"),
        ("delete_async", "delete(step)"),
        ("save_checkpointables", "save(step, {name: tree})"),
        ("load_checkpointables", "restore(step, {name: target})"),
    ],
)
def test_methods_of_orbaxs_manager_name_ours(tmp_path: Path, theirs: str, ours: str) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(AttributeError, match=f"Checkpointer has no attribute {theirs}: ") as error:
            getattr(checkpointer, theirs)
        assert ours in str(error.value)
        assert error.value.name == theirs
        assert not hasattr(checkpointer, theirs)


def test_attributes_of_other_objects_name_ours(tmp_path: Path) -> None:
    run: Any = jaxckpt.Run(tmp_path)
    with pytest.raises(AttributeError, match=r"^Run has no attribute all_steps: use steps\(\)$"):
        run.all_steps()
    with pytest.raises(AttributeError, match=r"a Run only reads: use jaxckpt\.Checkpointer\(directory\)"):
        run.save(1, {})
    with pytest.raises(AttributeError, match=r"^'Run' object has no attribute 'nothing'$"):
        run.nothing  # noqa: B018
    pending: Any = jaxckpt.save_async(tmp_path / "a", {})
    with pytest.raises(AttributeError, match=r"^PendingSave has no attribute wait_until_finished: use wait\(\)$"):
        pending.wait_until_finished()
    pending.wait()


def test_attributes_of_another_class_say_whose(tmp_path: Path) -> None:
    run: Any = jaxckpt.Run(tmp_path)
    with pytest.raises(AttributeError, match=r"no attribute delete: a Run only reads: use jaxckpt\.Checkpointer"):
        run.delete(100)
    with jaxckpt.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"w": 1})
    step: Any
    for step in run.follow():
        assert copy.copy(step) == pickle.loads(pickle.dumps(step)) == step
        for name, hint in [
            ("step", "use number"),
            ("load_numpy", r"use jaxckpt\.load_numpy\(step\.path\)"),
            ("add_metrics", r"use the add_metrics\(step, metrics\) of the Run"),
        ]:
            with pytest.raises(AttributeError, match=f"^Step has no attribute {name}: {hint}$"):
                getattr(step, name)


def test_a_checkpoint_is_opened_and_not_constructed(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"^use jaxckpt\.open\(path\), which returns a Checkpoint$"):
        jaxckpt.Checkpoint(tmp_path)  # pyright: ignore


@pytest.mark.parametrize(
    "kind", [ocp.args.StandardSave, ocp.args.StandardRestore, ocp.args.PyTreeSave, lambda tree: ocp.args.Composite()]
)
def test_arguments_of_orbax_in_place_of_a_tree(tmp_path: Path, kind: Any) -> None:
    with jaxckpt.Checkpointer(tmp_path) as checkpointer:
        with pytest.raises(jaxckpt.errors.TreeError, match=r"pass the tree itself, without ocp\.args"):
            checkpointer.save(1, kind({"w": np.ones(3)}))
        checkpointer.save(1, {"w": np.ones(3)})
        with pytest.raises(jaxckpt.errors.TreeError, match=r"pass the tree itself, without ocp\.args"):
            checkpointer.restore(1, kind({"w": np.ones(3)}))


def test_an_attribute_error_of_a_property_stays(tmp_path: Path) -> None:
    class Broken(jaxckpt.Run):
        @property
        def directory(self) -> str:
            raise AttributeError("mine")

    with pytest.raises(AttributeError, match=r"^mine$"):
        _ = Broken(tmp_path).directory


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("steps", "jaxckpt.Run(directory).steps()"),
        ("latest_step", "jaxckpt.Run(directory).latest_step()"),
        ("follow", "jaxckpt.Run(directory).follow()"),
        ("pin", "jaxckpt.Run(directory).pin(step, name)"),
        ("unpin", "jaxckpt.Run(directory).unpin(name)"),
        ("fork", "jaxckpt.Run(directory).fork(new_directory)"),
        ("Publisher", "jaxckpt.weights.Publisher"),
        ("subscribe", "jaxckpt.weights.subscribe"),
        ("rank_files", "jaxckpt.formats.rank_files"),
        ("Rule", "jaxckpt.rules.Rule"),
        ("Rules", "jaxckpt.rules.Rules"),
        ("huggingface_rules", "jaxckpt.rules.huggingface_rules"),
        ("InputError", "jaxckpt.errors.InputError"),
        ("hf_rules", "jaxckpt.rules.huggingface_rules"),
        ("Problem", "jaxckpt.errors.Problem"),
        ("RestorePlan", "jaxckpt.types.RestorePlan"),
        ("CheckpointManager", "jaxckpt.Checkpointer(directory)"),
    ],
)
def test_a_name_that_lives_elsewhere_says_where(name: str, ours: str) -> None:
    with pytest.raises(AttributeError) as error:
        getattr(jaxckpt, name)
    assert str(error.value) == f"module 'jaxckpt' has no attribute {name!r}: use {ours}"
    assert not hasattr(jaxckpt, name)
    # Python would add the name of another attribute, such as Step for steps.
    assert "Did you mean" not in "".join(traceback.format_exception(error.value))


def test_a_misspelled_name_of_a_public_module() -> None:
    with pytest.raises(AttributeError, match=r"^module 'jaxckpt.rules' .*: did you mean huggingface_rules\?$"):
        jaxckpt.rules.hf_rules  # pyright: ignore  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'jaxckpt.formats' .* 'rank_file': did you mean rank_files\?$"):
        jaxckpt.formats.rank_file  # pyright: ignore  # noqa: B018
    with pytest.raises(AttributeError, match=r"^module 'jaxckpt.rules' has no attribute 'nothing'$"):
        jaxckpt.rules.nothing  # pyright: ignore  # noqa: B018
    assert not hasattr(jaxckpt.rules, "__path__")


def test_other_names_have_pythons_message() -> None:
    for name in ("nothing", "_nothing", "signal", "annotations"):
        with pytest.raises(AttributeError, match=f"^module 'jaxckpt' has no attribute '{name}'$"):
            getattr(jaxckpt, name)


def test_the_page_for_users_of_orbax_has_every_name() -> None:
    from jaxckpt._keywords import names_of_others

    tables = names_of_others()
    names = {*tables["same"]["Orbax"], *tables["other"]["Orbax"]}
    names |= {name for hints in tables["attributes"]["Orbax"].values() for name in hints}
    mapping = COMING_FROM_ORBAX.read_text().partition("## Replace Orbax")[2].partition("\n## ")[0]
    rows = "\n".join(line for line in mapping.splitlines() if line.startswith("|"))
    assert [name for name in sorted(names) if not re.search(rf"\b{name}\b", rows)] == []
