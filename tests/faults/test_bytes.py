"""Stored bytes that differ from what was saved: flipped, missing, swapped or edited."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import hashlib
import itertools
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import damage
import pytest
from damage import KINDS, OrbaxReader, Subject
from reliability import Fault

import jaxckpt
from jaxckpt._model.file_names import COPY

COMPRESSIONS = (None, "zstd", "blosc")


class SubjectOf(Protocol):
    def __call__(self, compression: str | None = None, version: int = 0) -> Subject: ...


@pytest.fixture(scope="module")
def subject_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SubjectOf]:
    """Tests share their checkpoints, because each of them undoes its damage."""
    folder, made = tmp_path_factory.mktemp("subjects"), dict[tuple[str | None, int], Subject]()

    def subject(compression: str | None = None, version: int = 0) -> Subject:
        if (compression, version) not in made:
            made[compression, version] = Subject(folder / f"{compression}-{version}", compression, version)
        return made[compression, version]

    yield subject
    assert all(jaxckpt.verify(subject.path).ok for subject in made.values())


@pytest.mark.fault(
    7, "a bit flipped in a byte of any kind", "reads raise; verify names leaf and box", quick=21, full=4200
)
def test_a_flipped_bit(fault: Fault, subject_of: SubjectOf) -> None:
    subjects = [subject_of(compression) for compression in COMPRESSIONS]
    kinds = [collections.defaultdict[str, list[damage.Area]](list) for _ in subjects]
    for subject, found in zip(subjects, kinds, strict=True):
        for area in subject.areas:
            found[area.kind].append(area)
        assert set(found) == set(KINDS)
        assert sum(area.stop - area.start for area in subject.areas) == sum(
            file.stat().st_size for file in subject.path.rglob("*") if file.is_file() and file.name != COPY
        ), "every byte is of a kind"
    for number in fault.rounds():
        kind = KINDS[number // len(subjects) % len(KINDS)]
        subject = subjects[number % len(subjects)]
        area = fault.random.choice(kinds[number % len(subjects)][kind])
        place, bit = fault.random.randrange(area.start, area.stop), fault.random.randrange(8)
        content = bytearray((subject.path / area.file).read_bytes())
        content[place] ^= 1 << bit
        with subject.content({area.file: bytes(content)}):
            small = kind in ("zarr.json", "manifest", "process state")
            what = f"{kind}, {area.file} byte {place} bit {bit}"
            subject.judge(fault, what, {area.file: area.hit(place)}, quick=small)


@pytest.mark.child
@pytest.mark.filterwarnings("ignore")
@pytest.mark.fault(7, "a bit flipped in any file", "", system="orbax", quick=1, full=1200)
def test_orbax_with_a_flipped_bit(fault: Fault, tmp_path: Path) -> None:
    if not fault.campaign:
        pytest.skip("counted in the campaign")
    with contextlib.ExitStack() as entered:
        reader = entered.enter_context(OrbaxReader(tmp_path / "ckpt"))
        files = sorted(file for file in (tmp_path / "ckpt").rglob("*") if file.is_file() and file.stat().st_size)
        for number in fault.rounds():
            file = files[number % len(files)]
            whole = file.read_bytes()
            flipped = bytearray(whole)
            place, bit = fault.random.randrange(len(whole)), fault.random.randrange(8)
            flipped[place] ^= 1 << bit
            file.write_bytes(flipped)
            end = reader.read()
            file.write_bytes(whole)
            if end == "other values":
                fault.silent(f"{file.relative_to(tmp_path)} byte {place} bit {bit}")
            else:
                fault.saw(end)
            if reader.ended:
                reader = entered.enter_context(OrbaxReader(tmp_path / "ckpt"))


@pytest.mark.fault(8, "any file or folder deleted", "error that names it; never zeros", quick=12, full=None)
def test_a_deleted_file_or_folder(fault: Fault, subject_of: SubjectOf) -> None:
    subjects = [subject_of(compression) for compression in COMPRESSIONS]
    folders = [folder for folder in sorted(subjects[0].path.rglob("*")) if folder.is_dir()]
    cases = [
        *((subject, file) for subject in subjects for file in subject.files),
        *((subjects[0], str(folder.relative_to(subjects[0].path))) for folder in folders),
    ]
    for subject, file in fault.rounds(cases):
        with subject.aside(file):
            subject.judge(fault, f"{file} deleted", subject.held(file))
            if any(subject.held(file).values()):  # a zero-size array has no data to read
                with pytest.raises(jaxckpt.errors.DataError) as caught:
                    jaxckpt.load_numpy(subject.path)
                said = str(caught.value)
                assert any(f"{name} is missing" in said for name in subject.held(file))
                assert any(f"'{leaf}'" in said for hit in subject.held(file).values() for leaf in hit)


CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "cut by a byte": lambda content: content[:-1],
    "cut by half": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "a byte longer": lambda content: content + b"\0",
    "a page longer": lambda content: content + bytes(4096),
}


@pytest.mark.fault(9, "any file truncated, emptied, appended to, or replaced by a folder or a link", "error", quick=21)
def test_a_file_of_another_length_or_kind(fault: Fault, subject_of: SubjectOf) -> None:
    subjects = [subject_of(compression) for compression in COMPRESSIONS]
    hows = (*CHANGES, "a folder", "a link to its content")
    cases = [(subject, how, file) for subject in subjects for how in hows for file in subject.files]
    for subject, how, file in fault.rounds(cases):
        with subject.aside(file) as kept:
            match how:
                case "a folder":
                    (subject.path / file).mkdir()
                case "a link to its content":
                    (subject.path / file).symlink_to(kept)
                case _:
                    (subject.path / file).write_bytes(CHANGES[how](kept.read_bytes()))
            subject.judge(fault, f"{file}: {how}", subject.held(file))


@pytest.mark.fault(
    10,
    "objects swapped: within a stack, between stacks, between two checkpoints",
    "verify: error; restore: error if the whole object is read",
    quick=24,
    full=None,
)
def test_swapped_objects(fault: Fault, subject_of: SubjectOf) -> None:
    cases: list[tuple[Subject, dict[str, bytes]]] = []
    for compression in COMPRESSIONS:
        older, newer = (subject_of(compression, version) for version in (0, 1))
        for subject, other in ((newer, older), (older, newer)):
            cases += [(subject, contents) for contents in (*_swaps(subject), *_taken(subject, other))]
    for subject, contents in fault.rounds(cases):
        with subject.content(contents):
            hits = {file: hit for changed in contents for file, hit in subject.held(changed).items()}
            subject.judge(fault, f"swapped {', '.join(contents)}", hits, swapped=True, quick=False)


def _swaps(subject: Subject) -> Iterator[dict[str, bytes]]:
    """Pairs of files in one checkpoint with swapped contents: objects of one or two stacks, other files."""
    content = {file: (subject.path / file).read_bytes() for file in subject.files if file != "manifest.json"}
    for one, other in itertools.combinations(content, 2):
        (stack, _, place), (other_stack, _, other_place) = one.partition("/c/"), other.partition("/c/")
        alike = place == other_place or (place and other_place and stack == other_stack)
        if alike and content[one] != content[other]:
            yield {one: content[other], other: content[one]}


def _taken(subject: Subject, other: Subject) -> Iterator[dict[str, bytes]]:
    """Contents from another checkpoint of the same tree: single files, whole stacks, the whole data folder."""
    found: dict[str, bytes] = {}
    for file, other_file in zip(subject.files, other.files, strict=True):
        content = (other.path / other_file).read_bytes()
        if file != "manifest.json" and content != (subject.path / file).read_bytes():
            found[file] = content
    yield from ({file: content} for file, content in found.items())
    for stack in sorted({file.partition("/c/")[0] for file in found if "/c/" in file}):
        yield {file: content for file, content in found.items() if file.startswith(f"{stack}/")}
    yield found


@pytest.mark.fault(10, "a manifest replaced by that of another step", "error", quick=2, full=None)
def test_a_manifest_of_another_step(fault: Fault, subject_of: SubjectOf) -> None:
    cases: list[tuple[Subject, Subject]] = []
    for compression in COMPRESSIONS:
        one, other = (subject_of(compression, version) for version in (0, 1))
        cases += [(one, other), (other, one)]
    for subject, other in fault.rounds(cases):
        with subject.content({"manifest.json": (other.path / "manifest.json").read_bytes()}):
            for way, read in subject.ways.items():
                try:
                    read()
                    fault.silent(way)
                except jaxckpt.errors.DataError:
                    fault.saw("error")
            for quick in (False, True):
                report = jaxckpt.verify(subject.path, quick=quick)
                copy = f"data-{jaxckpt.open(subject.path).save_id}/manifest-copy.json"
                assert {problem.object for problem in report.problems} == {*other.files, copy} - {"manifest.json"}
                fault.saw("verify names every file")


# Metadata ------------------------------------------------------------------------------------------------


@pytest.mark.fault(11, "each field of each zarr.json edited", "error", quick=20, full=1500)
def test_an_edited_zarr_json(fault: Fault, subject_of: SubjectOf) -> None:
    subjects = [subject_of(compression) for compression in COMPRESSIONS]
    cases = [
        (subject, file, what, make)
        for subject in subjects
        for file in subject.files
        if file.endswith("zarr.json")
        for what, make in _edits((subject.path / file).read_bytes(), ZARR_VALUES)
    ]
    for subject, file, what, make in fault.rounds(cases):
        with subject.content({file: make()}):
            subject.judge(fault, f"{file}: {what}", {file: {}})


@pytest.mark.fault(11, "each member of the manifest edited", "error", quick=24, full=2000)
def test_an_edited_manifest(fault: Fault, subject_of: SubjectOf) -> None:
    subject = subject_of()
    for what, make in fault.rounds(list(_edits((subject.path / "manifest.json").read_bytes(), MANIFEST_VALUES))):
        with subject.content({"manifest.json": make()}):
            subject.judge(fault, what, {"manifest.json": {}})


@pytest.mark.fault(
    11,
    "each member of the manifest edited, with a valid checksum",
    "an error, or the same data; always an error with manifest_sha256=",
    quick=24,
    full=2000,
)
def test_an_edited_manifest_with_a_valid_seal(fault: Fault, subject_of: SubjectOf) -> None:
    subject = subject_of()
    digest = subject.info.manifest_sha256
    content = (subject.path / "manifest.json").read_bytes()
    body = content.rpartition(b',"sha256":')[0]
    for what, make in fault.rounds(list(_edits(body + b"}", MANIFEST_VALUES))):
        with subject.content({"manifest.json": _sealed(make())}):
            for read in (jaxckpt.restore, jaxckpt.load_numpy, jaxckpt.open):
                with pytest.raises(jaxckpt.errors.ManifestError, match="the file was changed"):
                    read(subject.path, manifest_sha256=digest)
            assert not jaxckpt.verify(subject.path, manifest_sha256=digest).ok
            fault.saw(_meaning(fault, subject, what))
    assert jaxckpt.verify(subject.path, manifest_sha256=digest).ok


def _meaning(fault: Fault, subject: Subject, what: str) -> str:
    """The outcome of reading a checkpoint whose manifest was edited and sealed again."""
    wrong = set[str]()
    for read in (jaxckpt.load_numpy, jaxckpt.restore):
        try:
            found = damage.bits_of(read(subject.path))
        except jaxckpt.JaxckptError:
            return "error"
        wrong |= {leaf for leaf in {*subject.wanted, *found} if found.get(leaf) != subject.wanted.get(leaf)}
    if wrong - IN_MANIFEST:
        fault.silent(f"{what}: {wrong}")
    return "another value of a leaf that is stored in the manifest" if wrong else "the same data"


IN_MANIFEST = {"number", "text"}
"""The leaves whose values are stored only in the manifest. An edited value cannot be distinguished from a saved one."""

ZARR_VALUES = ["int32", "float32", "big", ".", "start", "gzip", "transpose", "v2", "NaN", 1]
MANIFEST_VALUES = ["int32", "float64", "numpy", "jax", "tuple", "zstd", "../x", "", 2]


Edit = tuple[str, Callable[[], bytes]]
"""(description of an edit, function that returns the edited text). A function, because a test uses only a few of the
thousands of edits."""


def _edits(text: bytes, values: list[Any]) -> Iterator[Edit]:
    """JSON in which one member was changed, removed, extended or reordered."""
    whole = json.loads(text)

    def made(path: tuple[Any, ...], edit: Callable[[Any, Any], Any]) -> bytes:
        changed = copy.deepcopy(whole)
        edit(functools.reduce(operator.getitem, path[:-1], changed), path[-1])
        return json.dumps(changed, separators=(",", ":")).encode()

    def edited(path: tuple[Any, ...], edit: Callable[[Any, Any], Any], what: str) -> Iterator[Edit]:
        holder = functools.reduce(operator.getitem, path[:-1], whole)
        changed = copy.copy(holder)
        edit(changed, path[-1])
        if changed != holder or list(_order(changed)) != list(_order(holder)):
            yield f"{'/'.join(map(str, path))} {what}", functools.partial(made, path, edit)

    def put(value: Any) -> Callable[[Any, Any], Any]:
        return lambda holder, name: operator.setitem(holder, name, value)

    def walk(value: Any, path: tuple[Any, ...]) -> Iterator[Edit]:
        if path:
            yield from edited(path, operator.delitem, "left out")
            for other in _others(value, values):
                yield from edited(path, put(other), f"= {json.dumps(other)[:60]}")
        parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for name, inner in parts:
            yield from walk(inner, (*path, name))

    yield from walk(whole, ())


def _others(value: Any, values: list[Any]) -> list[Any]:
    """Plausible wrong values for a value."""
    match value:
        case bool():
            return [not value, None]
        case int() | float():
            return [value + 1, max(0, value - 1), -1, 2 * value, str(value), 1 << 40]
        case str():
            return [*values, value + "x", value.upper(), None]
        case list():
            return [[], value[::-1], value + value[-1:], None]
        case dict():
            return [{}, value | {"extra": 1}, dict(reversed(value.items())), None]
        case _:
            return [1, "x"]


def _order(value: Any) -> Iterator[str]:
    """All member names, in order."""
    if isinstance(value, dict):
        yield from value
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _order(inner)


def _sealed(text: bytes) -> bytes:
    """A manifest with the seal that docs/format.md specifies."""
    body = text[:-1]
    return body + b',"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'"}'
