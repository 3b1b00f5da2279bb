"""Trains, is killed at random moments, and resumes: `FOLDER KILLS STEPS SEED`.

Each run of the loop is a fork, so that Python and JAX are imported once. Checks run in forks too: the parent must not
read checkpoints, because a fork does not have its parent's threads."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import numpy as np

import jaxckpt

warnings.simplefilter("ignore", DeprecationWarning)  # Python warns about forks
folder, kills, steps, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(seed)
losses = [abs((step * 7919) % 1009 - 300.5) for step in range(10 * steps)]


def checkpointer():
    return jaxckpt.Checkpointer(
        folder, every=2, keep_last=3, keep_every=100, keep_best=("loss", "min"), keep_last_of={"opt": 2}
    )


def state(step):
    params = {"w": np.full((64, 64), step, np.float32), "b": np.full(999, step)}
    return {"params": params, "opt": {"m": np.full((64, 64), -step, np.float32)}, "step": step}


def check(tree, step):
    assert tree["step"] == step
    assert (tree["params"]["w"] == step).all()
    assert (tree["params"]["b"] == step).all()
    assert "opt" not in tree or (tree["opt"]["m"] == -step).all()


def train(until, writer):
    with checkpointer() as checkpoints:
        last, tree = checkpoints.restore_or_init(lambda: state(0))
        if last is not None:
            check(tree, last)
            assert "opt" in tree  # the newest step is complete
        for step in range(0 if last is None else last + 1, until):
            checkpoints.save(step, state(step), metrics={"loss": losses[step]})
            os.write(writer, b".")


def check_steps(tidy):
    there = sorted(name for name in os.listdir(folder) if os.path.exists(f"{folder}/{name}/manifest.json"))
    for name in there:  # each published step is complete, regardless of the moment of the kill
        check(jaxckpt.load_numpy(f"{folder}/{name}"), int(name))
    if not tidy:
        return int(there[-1]) if there else -1
    with checkpointer() as checkpoints:  # as at the next start
        checkpoints.restore_or_init(lambda: state(0))
    found = jaxckpt.Run(folder).steps()
    saved = range(0, found[-1] + 1, 2) if found else range(0)
    best = max(saved, key=lambda step: (-losses[step], step), default=None)
    assert set(found) == {*saved[-3:], *(step for step in saved if step % 100 == 0), best} - {None}, found
    assert sorted({*os.listdir(folder)} - {"_run"}) == [f"{step:08d}" for step in found]
    for step in found:
        manifest = json.loads(Path(f"{folder}/{step:08d}/manifest.json").read_text())
        data = f"data-{manifest['save_id']}"
        assert sorted(os.listdir(f"{folder}/{step:08d}")) == [data, "manifest.json"]
        names = sorted(stack["name"] for stack in manifest["stacks"])
        listed = sorted({*os.listdir(f"{folder}/{step:08d}/{data}")} - {"manifest-copy.json"})
        assert listed == names, (step, found, listed, names, os.listdir(f"{folder}/_run"))
        assert ("opt/m" in [leaf["path"] for leaf in manifest["leaves"]]) == (step in found[-2:])
    return found[-1] if found else -1


def fork(work, *args):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writer, str(work(*args, *([writer] if work is train else []))).encode())
        except BaseException:
            traceback.print_exc()
            os._exit(9)
        os._exit(0)
    os.close(writer)
    return child, reader


def newest_step(tidy):
    child, reader = fork(check_steps, tidy)
    assert os.waitpid(child, 0)[1] == 0
    found = int(os.read(reader, 100))
    os.close(reader)
    return found


os.makedirs(folder)
newest = -1
for kill in range(kills):
    child, reader = fork(train, 10 * steps)  # reaches about `steps` before the last kill
    for _ in range(rng.randint(1, steps // kills - 2)):
        assert os.read(reader, 1), "it ended before the kill"
    time.sleep(rng.random() * 0.02)
    os.kill(child, signal.SIGKILL)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    os.close(reader)
    found = newest_step(tidy=False)
    assert found >= newest, (found, newest)  # published steps stay
    newest = found
    if kill % 5 == 4:
        assert newest_step(tidy=True) == newest
child, reader = fork(train, steps)
while os.read(reader, 4096):
    pass
assert os.waitpid(child, 0)[1] == 0
print("killed", kills, "times; the newest step is", newest_step(tidy=True))
