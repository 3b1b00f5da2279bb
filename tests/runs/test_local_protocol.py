"""The local tier's protocol gives its guarantees in every state of a small job, and needs each of its rules."""

from __future__ import annotations

from dataclasses import fields

import pytest
from local_protocol import Bounds, Rules, sample, search, without


@pytest.mark.parametrize(
    "bounds",
    [Bounds(hosts=3, crashes=1, saves=2), Bounds(hosts=2, crashes=2, saves=1), Bounds(hosts=2, crashes=1, saves=3)],
    ids=str,
)
def test_no_state_violates_a_guarantee(bounds: Bounds):
    found = search(bounds)
    assert found.violation is None, found.trace
    assert found.states > 1000


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [Bounds(hosts=3, crashes=2, saves=1), Bounds(hosts=2, crashes=2, saves=2)], ids=str)
def test_no_state_violates_a_guarantee_in_larger_jobs(bounds: Bounds):
    found = search(bounds)
    assert found.violation is None, found.trace


def test_sampled_runs_of_four_hosts():
    found = sample(Bounds(hosts=4, crashes=4, saves=3), walks=300)
    assert found.violation is None, found.trace
    assert found.restores > 1000


NEEDED = {
    "written_barrier": ("a torn object is restored", Bounds(hosts=3, crashes=1, saves=1)),
    "confirmed_barrier": ("a step that was given to the caller is lost", Bounds(hosts=2, crashes=1, saves=1)),
    "keep_confirmed": ("a step that was given to the caller is lost", Bounds(hosts=2, crashes=1, saves=2)),
    "adopt": ("a step that was given to the caller is lost", Bounds(hosts=2, crashes=2, saves=2)),
    "keep_by_id": ("three steps are held in one folder", Bounds(hosts=2, crashes=2, saves=2)),
    "skip_third": ("a flushed step reaches the storage torn", Bounds(hosts=2, crashes=1, saves=3)),
    "own_run_only": ("a foreign run's step is restored", Bounds(hosts=2, crashes=1, saves=1)),
    "match_ids": ("objects of two saves are mixed", Bounds(hosts=3, crashes=2, saves=1)),
    "storage_if_newer": ("the storage has a newer step", Bounds(hosts=2, crashes=2, saves=1)),
}
"""For each rule of the protocol: the violation that a search finds without the rule, and the search's bounds."""


@pytest.mark.parametrize("rule", [field.name for field in fields(Rules)])
def test_without_a_rule_a_guarantee_is_violated(rule: str):
    violation, bounds = NEEDED[rule]
    found = search(bounds, without(rule))
    assert found.violation == violation
    assert found.trace or rule == "own_run_only"
