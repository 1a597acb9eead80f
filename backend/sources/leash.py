"""Runs a command that must not outlive who asked for it: stdlib only, run as a script.

    python -I leash.py SECONDS FOLDER COMMAND …

Who asked holds the other end of stdin. When it closes, however that process died, the command and everything that it
started are ended: asked to first, killed after so many seconds. Then the folder, where its sockets are, is removed.
When this process itself is killed, Linux ends the command.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time

POLL_S = 0.1
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def main(patience_s: float, folder: str, command: list[str]) -> int:
    """Exit status of the command; 128 + n after signal n."""
    libc = ctypes.CDLL(None, use_errno=True) if sys.platform == "linux" else None
    if libc:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # whose parent dies becomes our child, and is found below
    own = os.getpid()

    def tie() -> None:
        if libc:
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
            if os.getppid() != own:
                os._exit(1)

    for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(asked, lambda *_: released.set())
    released = threading.Event()
    try:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=tie)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror or error}", file=sys.stderr, flush=True)
        return 127
    while child.poll() is None and not released.is_set():
        readable, _, _ = select.select([0], [], [], POLL_S)
        if readable and not os.read(0, 1024):
            break
    _end(child, patience_s)
    shutil.rmtree(folder, ignore_errors=True)
    code = child.wait()
    return 128 - code if code < 0 else code


def _end(child: subprocess.Popen, patience_s: float) -> None:
    """The command, then what is left of all that it started."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(patience_s)
    end, asked = time.monotonic() + patience_s / 2, set()
    while left := _descendants():
        late = time.monotonic() > end
        for pid in left if late else left - asked:
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked |= left
        _reap(child)
        time.sleep(POLL_S)
    _reap(child)
    if child.poll() is None:
        child.kill()


def _descendants() -> set[int]:
    """All that come from this process, by /proc; empty where there is none. Zombies are gone already."""
    parents: dict[int, int] = {}
    for name in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{name}/stat", "rb") as stat:
                state, parent = stat.read().rpartition(b")")[2].split()[:2]
                if state != b"Z":
                    parents[int(name)] = int(parent)
    found, own = set(), os.getpid()
    for pid in parents:
        above: int | None = pid
        while above in parents and above != own:
            above = parents[above]
        if above == own and pid != own:
            found.add(pid)
    return found


def _reap(child: subprocess.Popen) -> None:
    """Whoever was left to us and has ended; the command itself is waited for by its own object."""
    child.poll()
    with contextlib.suppress(OSError):
        while child.returncode is not None and os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2], sys.argv[3:]))
