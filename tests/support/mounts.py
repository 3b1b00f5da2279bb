"""Real FUSE file systems on this machine: bindfs, rclone, sshfs without a server, GlusterFS; hosts with own names.

A test takes a mount as a context manager. It skips with the reason if FUSE or the program is missing.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import processes
import pytest

SFTP_SERVER = "/usr/lib/openssh/sftp-server"
_MOUNT_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class Mount:
    """A mounted file system, and the daemon that serves it."""

    path: Path
    daemon: subprocess.Popen[bytes]

    def stop(self) -> None:
        """Stop the daemon, so that every access to the mount hangs."""
        self.daemon.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self.daemon.send_signal(signal.SIGCONT)


@contextlib.contextmanager
def bindfs(source: Path, at: Path, *options: str) -> Generator[Mount]:
    """A second view of the folder `source`, served by a FUSE daemon that can be stopped or killed."""
    with _mounted([_program("bindfs"), "-f", *options, str(source), str(at)], at) as mount:
        yield mount


@contextlib.contextmanager
def sshfs(source: Path, at: Path, *options: str) -> Generator[Mount]:
    """The folder `source` as one more host sees it over SFTP. sshfs starts the SFTP server itself: no network."""
    if not os.access(SFTP_SERVER, os.X_OK):
        pytest.skip("the SFTP server is not installed (apt-get install openssh-sftp-server)")
    at.mkdir(parents=True, exist_ok=True)
    command = at.with_name(f"{at.name}.sftp.sh")  # sshfs adds the arguments of ssh, which the server does not know
    command.write_text(f"#!/bin/sh\nexec {SFTP_SERVER}\n")
    command.chmod(0o755)
    arguments = ["-f", "-o", f"ssh_command={command}", *options, f"host:{source}", str(at)]
    with _mounted([_program("sshfs"), *arguments], at) as mount:
        yield mount


@contextlib.contextmanager
def glusterfs(folder: Path, *at: Path) -> Generator[list[Mount]]:
    """A GlusterFS volume with its files in `folder`, mounted at each path as another host sees it, with default caches.

    Its server listens on 127.0.0.1. It needs no glusterd.
    """
    server, client = (
        _program("glusterfsd", package="glusterfs-server"),
        _program("glusterfs", package="glusterfs-client"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    port = processes.free_port()
    listens = {"transport.socket.bind-address": "127.0.0.1", "transport.socket.listen-port": port}
    calls = {"remote-host": "127.0.0.1", "remote-port": port, "remote-subvolume": "locks"}
    caches = ("write-behind", "open-behind", "quick-read", "md-cache")
    volumes = {
        "server": [
            ("storage/posix", "posix", {"directory": folder}),
            ("features/locks", "locks", {}),
            ("protocol/server", "server", {"transport-type": "tcp", "auth.addr.locks.allow": "127.0.0.1", **listens}),
        ],
        "client": [
            ("protocol/client", "client", {"transport-type": "tcp", **calls}),
            ("cluster/distribute", "distribute", {}),
            *((f"performance/{name}", name, {}) for name in caches),
        ],
    }
    files = {name: folder.with_name(f"{folder.name}.{name}.vol") for name in volumes}
    for name, layers in volumes.items():
        files[name].write_text(_volume_file(layers))
    log = folder.with_name(f"{folder.name}.log")
    common = ["--no-daemon", "--log-file", str(log), "--volfile"]
    daemon = subprocess.Popen([server, *common, str(files["server"])], stdin=subprocess.DEVNULL)
    try:
        _await_server(daemon, port, log)
        with contextlib.ExitStack() as mounted:
            command = [client, *common, str(files["client"])]
            yield [mounted.enter_context(_mounted([*command, str(path)], path)) for path in at]
    finally:
        daemon.kill()
        daemon.wait()


def _volume_file(layers: Sequence[tuple[str, str, Mapping[str, object]]]) -> str:
    """A volume of GlusterFS as text: (type, name, options) of each layer, the lowest first."""
    text, below = "", ""
    for kind, name, options in layers:
        lines = [f"type {kind}", *(f"option {key} {value}" for key, value in options.items()), below]
        text += "\n  ".join([f"volume {name}", *filter(None, lines)]) + "\nend-volume\n"
        below = f"subvolumes {name}"
    return text


def _await_server(daemon: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + _MOUNT_SECONDS
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        if daemon.poll() is not None:
            pytest.skip(f"GlusterFS cannot serve a folder here: {log.read_text(errors='replace')[-500:]}")
        assert time.monotonic() < deadline, f"no server on port {port} within {_MOUNT_SECONDS:g} s"
        time.sleep(0.02)


@contextlib.contextmanager
def rclone(source: Path, at: Path, cache_mode: str) -> Generator[Mount]:
    """The folder `source` behind rclone's layer for object stores, which has no hard links."""
    cache = at.with_name(f"{at.name}.cache")
    options = ["--config", os.devnull, "--vfs-cache-mode", cache_mode, "--cache-dir", str(cache)]
    with _mounted([_program("rclone"), "mount", *options, str(source), str(at)], at) as mount:
        yield mount


def as_host(name: str) -> list[str]:
    """The beginning of a command that runs in a container with this host name."""
    unshare = _program("unshare", package="util-linux")
    if subprocess.run([unshare, "--uts", "true"], capture_output=True, check=False).returncode:
        pytest.skip("this process may not create a UTS namespace")
    return [unshare, "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', name]


def _program(name: str, *, package: str | None = None) -> str:
    path = shutil.which(name)
    if path is None:
        pytest.skip(f"{name} is not installed (apt-get install {package or name})")
    return path


@contextlib.contextmanager
def _mounted(command: Sequence[str], at: Path) -> Generator[Mount]:
    """Run a FUSE daemon in the foreground until the block ends, then unmount."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        pytest.skip("FUSE is not available (/dev/fuse)")
    at.mkdir(parents=True, exist_ok=True)
    daemon = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _await_mount(daemon, at)
        yield Mount(at, daemon)
    finally:
        with contextlib.suppress(ProcessLookupError):
            daemon.send_signal(signal.SIGCONT)
        subprocess.run(["umount", "--lazy", str(at)], capture_output=True, check=False)
        daemon.terminate()  # GlusterFS does not always end when it is unmounted
        try:
            daemon.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.communicate()


def _await_mount(daemon: subprocess.Popen[bytes], at: Path) -> None:
    deadline = time.monotonic() + _MOUNT_SECONDS
    while not os.path.ismount(at):
        if daemon.poll() is not None:
            pytest.skip(f"cannot mount with FUSE here: {daemon.communicate()[1].decode().strip()}")
        assert time.monotonic() < deadline, f"{at} was not mounted within {_MOUNT_SECONDS:g} s"
        time.sleep(0.02)
