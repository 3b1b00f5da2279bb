"""The fault campaign: each test injects one kind of damage many times and counts the outcomes.

    @pytest.mark.fault(8, "any file deleted", "error that names it; never zeros", quick=6)
    def test_a_deleted_file_is_an_error(fault: Fault, tmp_path: Path) -> None:
        for file in fault.rounds(files):        # all of them in the campaign, 6 of them in `make test`
            ...
            fault.saw("error that names it")    # or fault.silent("params/w: wrong values, and no error")

`make test` runs a few rounds of each test. `make faults` (pytest tests/faults --campaign) runs all of them, writes the
counts to results.json, and writes the tables of docs/reliability.md from that file.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

import pytest
import reliability
from reliability import Fault


@pytest.fixture
def fault(request: pytest.FixtureRequest) -> Iterable[Fault]:
    """The `fault` mark of the test."""
    marker = request.node.get_closest_marker("fault")
    number, title, promise = marker.args
    if "bucket" in request.fixturenames:
        title = f"{request.node.callspec.params['bucket']}://: {title}"
    campaign = request.config.getoption("--campaign")
    options = {"quick": 1, "full": None, "system": "jaxckpt", **marker.kwargs}
    found = Fault(number, title, promise, campaign=campaign, **options)
    begun = time.monotonic()
    yield found
    call = request.node.stash.get(_CALL, None)
    if campaign and call is not None and not call.skipped:
        failure = str(call.longrepr).splitlines()[-1] if call.failed else None
        reliability.record(
            reliability.Row(
                number,
                found.system,
                request.node.nodeid,
                title,
                promise,
                sum(found.outcomes.values()) + len(found.silents),
                dict(found.outcomes),
                found.silents[:20],
                len(found.silents),
                failure,
                round(time.monotonic() - begun, 1),
                found.seed,
            )
        )
    if found.system == "jaxckpt":
        assert not found.silents, f"{len(found.silents)} silent: {found.silents[:5]}"
        assert found.outcomes or call is None or not call.passed, "no round was counted"


_CALL = pytest.StashKey[pytest.TestReport]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[_CALL] = report
    return report


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--campaign"):
        reliability.circumstances()  # runs git, so it must not run in a test without the mark `child`


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.getoption("--campaign"):
        reliability.write()
