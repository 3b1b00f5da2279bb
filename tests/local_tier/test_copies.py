"""Which processes hold copies of which objects, and the data that they exchange."""

from __future__ import annotations

import collections
import functools
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxckpt._local_tier.copies import CopiedPlan, Domains, Incoming, Outgoing, plan_channels, plan_copies, plan_rounds
from jaxckpt._model.grid import Layout
from jaxckpt._options import Options
from jaxckpt._save.write_plan import ArrayLeaf, SavePlan, plan_save
from jaxckpt.errors import InputError

OPTIONS = Options(object_bytes=1 << 12, chunk_bytes=1 << 10)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[Domains, list[ArrayLeaf]]:
    count = draw(st.integers(1, 9))
    labels = draw(
        st.lists(st.sampled_from("abcdefghi"), min_size=count, max_size=count) | st.just(list("abcdefghi")[:count])
    )
    copies = draw(st.integers(0, len(set(labels)) - 1))
    leaves: list[ArrayLeaf] = []
    for number in range(draw(st.integers(1, 6))):
        cells = draw(st.sampled_from([1, 2, 4]))
        holders = st.sets(st.integers(0, count - 1), min_size=1).map(lambda found: tuple(sorted(found)))
        layout = Layout((cells,), tuple(draw(st.lists(holders, min_size=cells, max_size=cells))))
        leaves.append(ArrayLeaf(number, "float32", (cells * draw(st.integers(1, 3000)),), layout))
    return Domains(tuple(labels), copies), leaves


def planned(domains: Domains, leaves: list[ArrayLeaf]) -> list[tuple[SavePlan, CopiedPlan]]:
    count = len(domains.by_process)
    plans = [plan_save(leaves, OPTIONS, process, count) for process in range(count)]
    return [(plans[p], plan_copies(plans.__getitem__, domains, p)) for p in range(count)]


@given(jobs())
def test_every_object_is_in_as_many_domains_as_requested(job: tuple[Domains, list[ArrayLeaf]]) -> None:
    domains, leaves = job
    held = collections.defaultdict(list)
    for process, (own, copied) in enumerate(planned(domains, leaves)):
        assert copied.own == [*own.objects]
        assert {*copied.objects} == {*own.objects, *copied.replicas}
        for obj in (*copied.objects, *(obj for received in copied.received for obj in received)):
            held[obj].append(process)
    everything = {obj for own, _ in planned(domains, leaves) for obj in own.objects}
    assert held.keys() == everything
    for processes in held.values():
        labels = [domains.by_process[process] for process in processes]
        assert len(labels) == len(set(labels)) == domains.copies + 1


@given(jobs())
def test_both_ends_of_a_channel_agree(job: tuple[Domains, list[ArrayLeaf]]) -> None:
    domains, leaves = job
    plans = [copied for _, copied in planned(domains, leaves)]
    for copied in plans:
        assert copied.channels == plans[0].channels
    for number, pairs in enumerate(plans[0].channels):
        assert len({giver for giver, _ in pairs}) == len({getter for _, getter in pairs}) == len(pairs)
        for giver, getter in pairs:
            assert plans[giver].sent[number] == plans[getter].received[number]


@given(jobs())
def test_only_data_that_no_other_domain_holds_is_sent(job: tuple[Domains, list[ArrayLeaf]]) -> None:
    domains, leaves = job
    replicated = [
        leaf
        for leaf in leaves
        if all(
            len({domains.by_process[process] for process in holders}) > domains.copies
            for holders in leaf.layout.holders
        )
        # Cells that share some holders may form one object, which only the common holders have completely.
        and all(a == b or set(a).isdisjoint(b) for a, b in itertools.combinations(leaf.layout.holders, 2))
    ]
    for _, copied in planned(domains, replicated):
        assert copied.sent_bytes == 0


@pytest.mark.parametrize(("labels", "copies"), [("abcd", 1), ("abcdefgh", 3), ("aabbccdd", 2), ("aaabbbc", 1)])
def test_peers_share_the_copies_evenly(labels: str, copies: int) -> None:
    count = len(labels)
    leaf = ArrayLeaf(0, "float32", (count * 1000,), Layout((count,), tuple((p,) for p in range(count))))
    plans = planned(Domains(tuple(labels), copies), [leaf])
    assert {copied.copied_bytes for _, copied in plans} == {copies * 4000}
    assert {copied.sent_bytes for _, copied in plans} == {copies * 4000}


def test_domains_of_unequal_size() -> None:
    leaf = ArrayLeaf(0, "float32", (4000,), Layout((4,), tuple((p,) for p in range(4))))
    plans = planned(Domains(("a", "a", "a", "b"), 1), [leaf])
    assert [copied.copied_bytes for _, copied in plans] == [4000, 0, 0, 12000]


def test_too_few_domains_are_an_error() -> None:
    Domains(("a", "a", "b"), 1).require_enough()
    with pytest.raises(
        InputError, match=r"copies=2 puts each object into 3 failure domains.* are in only 2: pass copies=1"
    ):
        Domains(("a", "a", "b"), 2).require_enough()


@given(
    st.lists(st.integers(0, 10_000), min_size=3, max_size=3),
    st.integers(1, 5000),
)
def test_rounds_carry_all_streams(streams: list[int], max_bytes: int) -> None:
    channel = (0, 1), (1, 2), (2, 0)
    rounds = plan_rounds([channel], dict(zip(channel, streams, strict=True)), max_bytes)
    for giver, n_bytes in enumerate(streams):
        room = sum(one.n_bytes for one in rounds if giver in one.senders)
        assert n_bytes <= room
        assert all(one.senders for one in rounds)


def test_a_round_is_filled_up_by_a_few_percent_at_most() -> None:
    total = 100_000_003
    rounds = plan_rounds([((0, 1), (1, 0))], {(0, 1): total, (1, 0): total - 9}, 32 << 20)
    assert sum(one.n_bytes for one in rounds) / total < 1.01
    assert functools.reduce(max, (one.n_bytes for one in rounds)) == 32 << 20


@given(st.sets(st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda pair: pair[0] != pair[1])))
def test_channels_have_every_pair_once(pairs: set[tuple[int, int]]) -> None:
    channels = plan_channels(sorted(pairs))
    assert sorted(itertools.chain(*channels)) == sorted(pairs)
    for channel in channels:
        assert len({sender for sender, _ in channel}) == len({receiver for _, receiver in channel}) == len(channel)


@given(st.lists(st.binary(max_size=50), max_size=9), st.integers(1, 60))
def test_a_stream_arrives_in_its_parts(parts: list[bytes], round_bytes: int) -> None:
    outgoing, incoming = Outgoing(), Incoming(map(len, parts))
    for part in parts:
        outgoing.add(np.frombuffer(part, np.uint8))
    received = [*incoming.add(outgoing.take(0))]
    while outgoing.waiting_bytes:
        received += incoming.add(outgoing.take(round_bytes))
    assert [part.tobytes() for part in received] == parts
