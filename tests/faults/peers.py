"""Programs for the processes of one job, in which faults are inflicted on some of them."""

from __future__ import annotations

# `phase` of an operation → the call of a function in which it begins; all of them in the victim's own process.
PHASES = {
    "plan agreement": ("save", "_save.prepare.agreement"),
    "folder check": ("save", "_save.save.require_shared"),
    "writing": ("save", "_storage.files.FileWriter.write"),
    "before the barrier": ("save", "_save.save.publish"),
    "publishing": ("save", "_runtime.processes.Meeting.share"),  # the last of the save: process 0 has just published
    "writing in the background": ("save_async", "_storage.files.FileWriter.write"),
    "before the barrier in the background": ("save_async", "_save.save.publish"),
    "opening": ("restore", "_restore.source.load_manifest"),
    "reading": ("restore", "_storage.files.FileReader.read"),
}

BEGIN = (
    f"PHASES = {PHASES!r}"
    + """
import contextlib, operator, os, signal, subprocess, time
import json
import numpy as np
import jaxckpt
from jaxckpt._runtime import processes as _coord
from jaxckpt._storage import files as _files
from jaxckpt._format import manifest as _manifest
from jaxckpt._save import save as _save
from jax._src import distributed
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

path, folder, count = args["path"], args["folder"], jax.process_count()
mesh = Mesh(np.array(jax.devices()), ("data",))

def make(version):
    # Sharded leaves of which every process writes its rows, and a replicated one.
    def one(shape, spec):
        return jax.make_array_from_callback(
            shape, NamedSharding(mesh, spec), lambda index: np.full(shape, version, np.int32)[index]
        )
    leaves = {f"w{i}": one((4 * count, 64 + i), P("data")) for i in range(3)}
    return leaves | {"replicated": one((count, 7), P()), "version": np.full((), version)}

def versions(tree):
    found = set()
    for leaf in jax.tree.leaves(tree):
        for data in [shard.data for shard in leaf.addressable_shards] if isinstance(leaf, jax.Array) else [leaf]:
            found.update(map(int, np.unique(data)))
    return sorted(found)

def operate(kind, version, timeout):
    options = jaxckpt.Options(timeout_seconds=timeout)
    if kind == "restore":
        found = versions(jaxckpt.restore(path, mesh=mesh, options=options))
        assert len(found) == 1, found
    elif kind == "save":
        jaxckpt.save(path, make(version), overwrite=True, options=options)
    else:
        jaxckpt.save_async(path, make(version), overwrite=True, options=options).wait(100)

def attempt(kind, version, timeout):
    # (what it raised or "", how long it took)
    begun = time.monotonic()
    try:
        operate(kind, version, timeout)
        said = ""
    except jaxckpt.JaxckptError as error:
        said = f"{type(error).__name__}: {error}"
    return said, round(time.monotonic() - begun, 2)

def at(phase, strike):
    # Have something done once, when this process comes to a phase; returns what takes that back.
    owner, _, name = PHASES[phase][1].rpartition(".")
    owner = operator.attrgetter(owner)(jaxckpt)
    original = getattr(owner, name)
    def struck(*arguments, **named):
        if phase == "publishing" and arguments[0].what != "saving":
            return original(*arguments, **named)
        setattr(owner, name, original)
        strike()
        return original(*arguments, **named)
    setattr(owner, name, struck)
    return lambda: setattr(owner, name, original)

def signal_self(number):
    os.kill(os.getpid(), number)
    time.sleep(0.2)  # from a thread, it takes effect a little later

def sleep_until(files, then):
    # Stop this process; another sends it the signal `then` once the files are there.
    def strike():
        waiting = " && ".join(f"[ -e {os.path.join(folder, file)} ]" for file in files)
        waker = f"for i in $(seq 900); do {waiting} && break; sleep 0.1; done; kill -{then} {os.getpid()}"
        subprocess.Popen(["sh", "-c", waker])
        signal_self(signal.SIGSTOP)
    return strike

def note(name):
    open(os.path.join(folder, f"{name}-{process_id}"), "w").close()

def await_notes(name, processes, seconds=60):
    deadline = time.monotonic() + seconds
    while not all(os.path.exists(os.path.join(folder, f"{name}-{process}")) for process in processes):
        assert time.monotonic() < deadline, f"no {name} of {processes}"
        time.sleep(0.02)

def meet(name):
    note(name)
    await_notes(name, range(count))

def tell(**said):
    print("told", json.dumps(said), flush=True)
"""
)

# One process is killed at a phase, or stopped for good; the others tell what they raised, and stay until all have.
KILLED = (
    BEGIN
    + """
operate("save", 1, 60)
victim, phase = args["victim"], args["phase"]
meet("ready")
others = sorted(set(range(count)) - {victim})
if process_id == victim:
    stop = sleep_until([f"told-{process}" for process in others], "KILL")
    at(phase, stop if args["stop"] else lambda: signal_self(signal.SIGKILL))
said, seconds = attempt(PHASES[phase][0], 2, args["timeout"])
tell(said=said, seconds=seconds)
note("told")
with contextlib.suppress(AssertionError):  # where process 0 is the victim, JAX aborts some of them
    await_notes("told", others, 15)
os._exit(0)
"""
)

# Round after round some processes stop at a phase, and are woken once the others have ended their calls.
STOPPED = (
    BEGIN
    + """
operate("save", 0, 60)

for round_, (phase, victims) in enumerate(args["rounds"], 1):
    others = sorted(set(range(count)) - set(victims))
    told = [f"told{round_}-{process}" for process in others]
    back = at(phase, sleep_until(told, "CONT")) if process_id in victims else lambda: None
    meet(f"ready{round_}")
    said, seconds = attempt(PHASES[phase][0], round_, args["timeout"])
    note(f"told{round_}")
    back()
    meet(f"over{round_}")
    there = versions(jaxckpt.load_numpy(path))
    after, _ = attempt("save", round_, 60)
    tell(said=said, seconds=seconds, there=there, after=after)
"""
)

# Round after round the file system refuses one process's system calls, by strace.
REFUSED = (
    BEGIN
    + """
operate("save", 0, 60)

def strace(call, nth):
    tracer = subprocess.Popen(["strace", "-f", "-qq", "-o", os.devnull, "-p", str(os.getpid()), "-e", f"trace={call}",
        "-e", f"inject={call}:error=ENOSPC:when={nth}+"])
    deadline = time.monotonic() + 30
    while "TracerPid:\\t0" in open("/proc/self/status").read():
        assert time.monotonic() < deadline and tracer.poll() is None, "strace does not attach"
        time.sleep(0.02)
    time.sleep(0.3)  # to the other threads too
    return tracer

for round_, (call, nth, victim) in enumerate(args["rounds"], 1):
    tracer = strace(call, nth) if process_id == victim else None
    meet(f"ready{round_}")
    said, seconds = attempt("save", round_, 60)
    if tracer is not None:
        tracer.terminate()
        tracer.wait(30)
    meet(f"over{round_}")
    there = versions(jaxckpt.load_numpy(path))
    folders = len([name for name in os.listdir(path) if name.startswith("data-")])
    after, _ = attempt("save", round_, 60)
    tell(said=said, there=there, after=after, folders=folders)
"""
)

# Round after round one process fills the file system that all write to, but for some bytes.
FULL = (
    BEGIN
    + """
operate("save", 0, 60)
ballast = os.path.join(os.path.dirname(path), "ballast")
for round_, room in enumerate(args["rounds"], 1):
    meet(f"begun{round_}")
    if process_id == 1:
        found = os.statvfs(path)
        with open(ballast, "wb") as file:
            file.write(bytes(max(0, found.f_bavail * found.f_frsize - room)))
    meet(f"ready{round_}")
    said, seconds = attempt("save", round_, 60)
    meet(f"said{round_}")
    if process_id == 1:
        os.unlink(ballast)
    there = versions(jaxckpt.load_numpy(path))
    folders = len([name for name in os.listdir(path) if name.startswith("data-")])
    meet(f"over{round_}")
    after, _ = attempt("save", round_, 60)
    tell(said=said, there=there, after=after, folders=folders)
"""
)

# Slow peers, peers that make no call, and peers that raise in their own code: all live, in one job.
LIVE = (
    BEGIN
    + """
operate("save", 0, 60)
for round_, (what, victim) in enumerate(args["rounds"], 1):
    meet(f"ready{round_}")
    back, timeout, said = lambda: None, args["timeout"], None
    slow = what.startswith("slow")
    kind = "restore" if "restore" in what else "save"
    if process_id == victim:
        if slow:
            phase = "reading" if kind == "restore" else "writing"
            back = at(phase, lambda: time.sleep(3 * timeout))
        elif what == "makes no call":
            await_notes(f"told{round_}", set(range(count)) - {victim})
            _coord.Group.current(None, _coord.Call.of('save', path))  # as if it had called and raised
            said = "none"
        else:
            broken = make(round_)
            broken["w0"].delete()
            try:
                jaxckpt.save(path, broken, overwrite=True)
                said = ""
            except jaxckpt.TreeError as error:
                said = f"{type(error).__name__}: {error}"
    if said is None:
        said, seconds = attempt(kind, round_, timeout)
    note(f"told{round_}")
    back()
    meet(f"over{round_}")
    there = versions(jaxckpt.load_numpy(path))
    after, _ = attempt("save", round_, 60)
    tell(said=said, there=there, after=after)
"""
)
