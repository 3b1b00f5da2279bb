"""Batches of Grain's two iterators whose positions are saved: a Dataset's state is a dict, a DataLoader's is bytes."""

from __future__ import annotations

from typing import Any

import grain
import numpy as np

BATCH = 12


def dataset(process: int, count: int) -> Any:
    shuffled = grain.MapDataset.range(1000).seed(7).shuffle().repeat()
    return iter(shuffled[process::count].batch(BATCH // count).to_iter_dataset())


def loader(process: int, count: int) -> Any:
    shard = grain.sharding.ShardOptions(process, count, drop_remainder=True)
    sampler = grain.samplers.IndexSampler(1000, shard, shuffle=True, seed=3)
    source = grain.sources.RangeDataSource(0, 1000, 1)
    return iter(grain.DataLoader(data_source=source, sampler=sampler, operations=[grain.transforms.Batch(6)]))


def some(batches: Any, count: int) -> list[list[int]]:
    return [np.asarray(next(batches)).tolist() for _ in range(count)]
