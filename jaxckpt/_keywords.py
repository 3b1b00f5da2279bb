"""Unknown arguments and attributes: the error says what jaxckpt calls what another library's name stands for."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from jaxckpt import errors

F = TypeVar("F", bound=Callable[..., Any])
C = TypeVar("C", bound=type[Any])

_SAME_MEANING: dict[str, dict[str, str]] = {
    "Orbax": {
        "abstract_checkpointables": "restore.target Checkpointer.restore_or_init.init",
        "abstract_state": "restore.target Checkpointer.restore_or_init.init",
        "abstract_pytree": "restore.target Checkpointer.restore_or_init.init",
        "checkpointables": "save.tree",
        "context": "save.options",
        "custom_metadata": "save.metadata",
        "enable_async_checkpointing": "Checkpointer.background",
        "fallback_sharding": "restore.target",
        "force": "save.overwrite",
        "item": "restore.target save.tree Checkpointer.restore_or_init.init",
        "items": "restore.target save.tree Checkpointer.restore_or_init.init",
        "keep_period": "Checkpointer.keep_every",
        "max_to_keep": "Checkpointer.keep_last",
        "post_finalization_callback": "save_async.on_done",
        "pytree": "save.tree",
        "restore_args": "restore.target Checkpointer.restore_or_init.init",
        "save_interval_steps": "Checkpointer.every",
        "state": "save.tree restore.target",
        "timeout_secs": "Options.timeout_seconds",
        "todelete_subdir": "Checkpointer.trash",
        "transforms": "restore.rename",
    },
    "Flax": {
        "ckpt_dir": "restore.path save.path",
        "keep": "Checkpointer.keep_last",
        "keep_every_n_steps": "Checkpointer.keep_every",
    },
    "Equinox": {"like": "restore.target Checkpointer.restore_or_init.init"},
    "PyTorch": {
        "checkpoint_id": "save.path restore.path",
        "state_dict": "save.tree restore.target",
    },
    "": {
        "abstract": "restore.target Checkpointer.restore_or_init.init",
        "bandwidth": "Options.max_bytes_per_second",
        "exist_ok": "save.overwrite",
        "force_overwrite": "save.overwrite",
        "abstract_tree": "restore.target Checkpointer.restore_or_init.init",
        "pytree_like": "restore.target",
        "rules": "restore.rename",
        "template": "restore.target",
        **dict.fromkeys(("sharding", "shardings"), "restore.target save.specs"),
    },
}
"""For each library, its arguments that jaxckpt has under another name: <what has it>.<our name>, in any number."""

_OTHER_MEANING = {
    "args": "pass the tree or the target itself, without ocp.args",
    "async_options": "see Options(timeout_seconds=), and on_done= of save_async",
    "atomicity_options": "every step is published atomically, on file systems and in buckets",
    "best_fn": 'choose a metric by name: keep_best=("loss", "min", 3) of jaxckpt.Checkpointer, where 3 is max_to_keep',
    "best_mode": 'it is a part of keep_best=("loss", "min") of jaxckpt.Checkpointer',
    "checkpointable_name": "a checkpoint holds one tree: save {name: tree}, and restore a part with select=",
    "cleanup_tmp_directories": "a jaxckpt.Checkpointer deletes half-written steps itself",
    "create": "the directory is created if it does not exist",
    "enable_background_delete": "old steps are always deleted in the background",
    "keep_checkpoints_without_metrics": "keep_if= of jaxckpt.Checkpointer decides by step and metrics",
    "keep_time_interval": (
        "keep_every_seconds=interval.total_seconds() of jaxckpt.Checkpointer keeps a step of each interval"
    ),
    "multiprocessing_options": "all processes of jax.distributed take part in every call",
    "partial_restore": "strict=False restores the leaves that both have, and select= some of them",
    "preservation_policy": (
        "the rules are arguments of jaxckpt.Checkpointer: keep_last=, keep_last_seconds=, keep_every=,"
        " keep_every_seconds=, keep_best= and keep_if="
    ),
    "read_only": "jaxckpt.Run(directory) only reads",
    "restore_kwargs": "pass target=, mesh=, specs= or dtype= themselves",
    "save_args": "pass dtype= to cast the leaves",
    "save_decision_policy": (
        "the conditions are arguments of jaxckpt.Checkpointer: every=, every_seconds= and save_if="
    ),
    "save_kwargs": "pass dtype=, metadata= or overwrite= themselves",
    "save_on_steps": "save_if=lambda step, metrics: step in steps, of jaxckpt.Checkpointer",
    "should_save_fn": "save_if= of jaxckpt.Checkpointer is a function of (step, metrics)",
    "step_format_fixed_length": "the folder of a step is always its number in 8 digits",
    "step_name_format": "the folder of a step is always its number in 8 digits",
    "step_prefix": "the folder of a step is always its number in 8 digits",
    "todelete_full_path": "steps in buckets are deleted; trash= moves them only on file systems",
    "use_ocdbt": "small leaves are always packed together",
    "use_zarr3": "arrays are always stored as Zarr v3",
}
"""Arguments of Orbax that need another argument with another value, or none."""

_GUESSES = {
    "every_minutes": "use every_seconds=60 * minutes of jaxckpt.Checkpointer",
    "map_location": "mesh= or target= of jaxckpt.restore choose the devices; jaxckpt.load_numpy reads into host memory",
}
"""The same for arguments of PyTorch, and for those that no library has."""

_OF_FUNCTION = {
    ("Options", "retry_seconds"): 'pass storage={"retry_seconds": …}',
    ("convert", "dtype"): (
        "convert does not cast: use a jaxckpt.rules.Rule with dtype=, or convert a copy saved with save(dtype=)"
    ),
}
"""By function and name: what to do instead of passing an argument that only other functions have."""

_ATTRIBUTES = {
    "Run": {
        "all_steps": "use steps()",
        "checkpoints": "use steps()",
        "item_metadata": "use open(step): its leaves have shapes, dtypes and specs",
        "latest": "use latest_step()",
        "load": "use restore(step, target)",
        "reload": "it is not needed, because every call reads the directory",
        **dict.fromkeys(("save", "should_save"), "a Run only reads: use jaxckpt.Checkpointer(directory)"),
    },
    "Checkpointer": {
        "check_for_errors": "wait() raises the error of a background save, and so does the next save",
        "is_saving_in_progress": "use pending, which is None or a PendingSave with done",
        "reached_preemption": "save handles preemption; preempted is true afterwards",
        "save_async": "save already writes in the background: see Checkpointer(background=…)",
        "wait_until_finished": "use wait()",
    },
    "PendingSave": {
        "check_for_errors": "wait() raises the error of the save",
        "on_complete": "use jaxckpt.save_async(…, on_done=…)",
        "result": "use wait()",
        "wait_until_finished": "use wait()",
    },
}
"""Methods of Orbax, by the class of ours that a program would look for them in."""

_MISPLACED = {
    "Run": {
        "delete": "a Run only reads: use jaxckpt.Checkpointer(directory)",
        "restore_or_init": "a Run only reads: use jaxckpt.Checkpointer(directory)",
    },
    "Step": {
        "add_metrics": "use the add_metrics(step, metrics) of the Run",
        "load_numpy": "use jaxckpt.load_numpy(step.path)",
        "pin": "use the pin(step, name) of the Run",
        "step": "use number",
    },
}
"""Attributes that other classes of ours have, by the class that a program would look for them in."""

_CONSTRUCTED_BY = {"Checkpoint": "jaxckpt.open(path)"}
"""The public classes that a program does not create itself, and what creates them."""

_MODULE_ATTRIBUTES = {
    **dict.fromkeys(("all_steps", "steps"), "Run(directory).steps()"),
    **{name: f"Run(directory).{name}()" for name in ("latest_step", "best_step", "pins", "follow")},
    "fork": "Run(directory).fork(new_directory)",
    "pin": "Run(directory).pin(step, name)",
    "unpin": "Run(directory).unpin(name)",
    "add_metrics": "Run(directory).add_metrics(step, metrics)",
    "plan": "open(path).plan(target)",
    "load": "restore, or jaxckpt.load_numpy for NumPy arrays",
    "metadata": "open(path).metadata",
    "AsyncCheckpointer": "save_async",
    "CheckpointManager": "Checkpointer(directory)",
    "CheckpointManagerOptions": "Checkpointer(directory, …), which takes them as arguments",
    "PyTreeCheckpointer": "save and jaxckpt.restore",
    "StandardCheckpointer": "save and jaxckpt.restore",
    **{name: f"weights.{name}" for name in ("Publisher", "subscribe", "average")},
    **{
        name: f"formats.{name}"
        for name in ("eqx_file", "mindspore_ranks", "npz_file", "oneflow_ranks", "rank_files", "merge_lora")
    },
    **{name: f"rules.{name}" for name in ("Rule", "Rules", "huggingface_rules", "lora_rules", "stack")},
    "hf_rules": "rules.huggingface_rules",
    **{name: f"types.{name}" for name in ("Delta", "LeafDelta", "LocalBytes", "Progress", "RestorePlan")},
    "VerifyReport": "types.VerifyReport",
    "handler_registry": "orbax.handler_registry",
}
"""What to use in place of names that the package does not have: what follows "jaxckpt.". Errors are not listed."""

_public: dict[str, Callable[..., Any]] = {}
"""The functions below which `explain_keywords` decorates, by qualified name."""


def explain_keywords(function: F) -> F:
    """A public function whose TypeError for an unknown keyword argument says what jaxckpt calls it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError:
            parameters = inspect.signature(function).parameters
            problems = [_unknown_keyword(function, parameters, name) for name in kwargs if name not in parameters]
            called = function.__qualname__.removesuffix(".__init__")
            hints = filter(None, map(hint_for_options, args))
            problems += [f"{called} accepts no positional CheckpointManagerOptions{hint}" for hint in hints]
            if called in _CONSTRUCTED_BY and len(args) < sum(one.default is one.empty for one in parameters.values()):
                problems.append(f"use {_CONSTRUCTED_BY[called]}, which returns a {called}")
            if not problems:  # any other error, possibly from within the function
                raise
        raise TypeError("\n".join(problems))

    _public[function.__qualname__] = call
    return call  # pyright: ignore[reportReturnType]


def explain_names(cls: C) -> C:
    """A public class whose errors for unknown keyword arguments and attributes say what jaxckpt calls them."""
    for name, member in [*vars(cls).items()]:
        if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
            setattr(cls, name, explain_keywords(member))
    if cls.__name__ in _ATTRIBUTES or cls.__name__ in _MISPLACED:
        cls.__getattr__ = _explain_attribute
    return cls


def hint_for_options(value: object) -> str:
    """What to pass instead of Orbax's options; empty for any other value."""
    if type(value).__name__ != "CheckpointManagerOptions":
        return ""
    return ": pass its arguments to jaxckpt.Checkpointer instead, such as keep_last= for max_to_keep"


def hint_for_args(value: object) -> str:
    """What to pass instead of Orbax's `ocp.args`; empty for any other value."""
    kind = type(value)
    if not any(base.__name__ == "CheckpointArgs" and base.__module__.startswith("orbax.") for base in kind.__mro__):
        return ""
    return (
        f"found Orbax's {kind.__name__} in place of a tree: pass the tree itself, without ocp.args, and several items"
        " as one dict"
    )


def _explain_attribute(self: object, name: str) -> Any:
    """Python calls this after it has found no attribute of that name."""
    for cls in type(self).__mro__:
        hints = _ATTRIBUTES.get(cls.__name__, {}) | _MISPLACED.get(cls.__name__, {})
        if (hint := hints.get(name)) is not None:
            raise AttributeError(f"{type(self).__name__} has no attribute {name}: {hint}", name=name)
    return object.__getattribute__(self, name)  # raises Python's own error, or the AttributeError of a property


def missing_module_attribute(name: str) -> str:
    """The message for a name that the package does not have."""
    error = getattr(errors, name, None)
    if isinstance(error, type) and error.__module__ == errors.__name__:
        own_name = f"errors.{name}"
    else:
        own_name = _MODULE_ATTRIBUTES.get(name)
    return f"module 'jaxckpt' has no attribute {name!r}" + (f": use jaxckpt.{own_name}" if own_name else "")


def explain_missing_names(module: str) -> Callable[[str], Any]:
    """PEP 562's __getattr__ for a public module: its error suggests the closest name of the module."""

    def missing(name: str) -> Any:
        near: list[str] = []
        if not name.startswith("_"):  # Python looks for many of these
            public = [own for own in vars(sys.modules[module]) if not own.startswith("_")]
            known = _MODULE_ATTRIBUTES.get(name, "").rpartition(".")[2]
            near = [known] if known in public else difflib.get_close_matches(name, public, n=1)
        hint = f": did you mean {near[0]}?" if near else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}", name=name)

    return missing


def _unknown_keyword(function: Callable[..., Any], parameters: Mapping[str, Any], name: str) -> str:
    """The message for a keyword that a function does not have."""
    called = function.__qualname__.removesuffix(".__init__")
    owner = called.rpartition(".")[0]
    if "options" in parameters and name in _parameters("Options"):
        hint = f": pass options=jaxckpt.Options({name}=…)"
    elif name in _parameters(owner):
        hint = f": it is an argument of {owner}"
    elif (called, name) in _OF_FUNCTION:
        hint = f": {_OF_FUNCTION[called, name]}"
    else:
        hint = (
            _meaning(name, parameters)
            or _other_spelling(name, parameters)
            or _argument_of_other(called, name)
            or _typo(name, parameters)
        )
        if called == "Run" and "Checkpointer" in hint:
            hint = f": a Run only reads{hint.replace(':', ';', 1)}"
    return f"{called} has no argument {name}{hint}"


def _parameters(cls: str) -> Mapping[str, inspect.Parameter]:
    """The parameters of a public class."""
    init = _public.get(f"{cls}.__init__")
    return {} if init is None else inspect.signature(init).parameters


def _meaning(name: str, parameters: Mapping[str, Any]) -> str:
    """What another library's argument is called here; empty if no library has it."""
    if hint := _OTHER_MEANING.get(name) or _GUESSES.get(name):
        return f": {hint}"
    for library, names in _SAME_MEANING.items():
        if name in names:
            theirs = f"{library}'s {name} is" if library else "use"
            homes = [home.rpartition(".") for home in names[name].split()]
            own_name = next((ours for _, _, ours in homes if ours in parameters), None)
            if own_name is not None:
                return f": {theirs} {own_name}" + (" here" if library else "")
            home, _, ours = homes[0]
            if home == "Options" and "options" in parameters:
                return f": {theirs} options=jaxckpt.Options({ours}=…) here"
            return f": {theirs} {ours} of jaxckpt.{home}"
    return ""


def _argument_of_other(called: str, name: str) -> str:
    """The public function or method that has this argument; empty if none has.

    First the method of a run with the same name, then the functions that most programs call.
    """
    package = importlib.import_module("jaxckpt")
    function = called.rpartition(".")[2]
    places = [f"Run.{function}", f"Checkpointer.{function}", "restore", "save", "save_async", "convert", "Checkpointer"]
    for place in [*places, "Checkpointer.save", *_public_names(package)]:
        value = functools.reduce(lambda owner, part: getattr(owner, part, None), place.split("."), package)
        if callable(value) and name != "self" and name in inspect.signature(value).parameters:
            return f": it is an argument of jaxckpt.{place}"
    return ""


def _public_names(package: Any) -> Iterator[str]:
    """The names below "jaxckpt." of the public functions, classes and methods that a program calls."""
    for module in ("", "rules", "weights"):
        content = importlib.import_module(f"jaxckpt.{module}") if module else package
        # A Run first, because a Checkpointer has its methods too.
        for name in sorted(content.__all__ if content is package else dir(content), key=lambda name: name != "Run"):
            value = getattr(content, name)
            place = f"{module}.{name}" if module else name
            if inspect.isfunction(value) and value.__qualname__ in _public:
                yield place
            elif isinstance(value, type) and f"{value.__name__}.__init__" in _public:
                if name not in _CONSTRUCTED_BY:
                    yield place
                yield from (f"{place}.{method}" for method in vars(value) if f"{value.__name__}.{method}" in _public)


def _other_spelling(name: str, parameters: Mapping[str, Any]) -> str:
    """The argument that differs from a keyword only by case or a plural; empty if there is none."""
    forms = {name.lower(), f"{name.lower()}s", name.lower().removesuffix("s")}
    own_name = next((ours for ours in parameters if ours in forms), None)
    return f": did you mean {own_name}?" if own_name is not None else ""


_CLOSE = 0.85
"""The least similarity of a misspelled name: of 6 letters one may be missing, as in "selct", and none be wrong."""


def _typo(name: str, parameters: Mapping[str, Any]) -> str:
    """The name that a misspelled or incomplete keyword resembles; empty if there is none."""
    options = _parameters("Options") if "options" in parameters else ()
    names = [ours for ours in (*parameters, *options) if ours != "self"]
    without_unit = [ours for ours in names if ours.startswith(f"{name}_")]
    near = without_unit if len(without_unit) == 1 else difflib.get_close_matches(name, names, n=1, cutoff=_CLOSE)
    if not near:
        return ""
    return f": did you mean {near[0]}?" if near[0] in parameters else f": did you mean Options({near[0]}=…)?"
