"""Becomes a server: `python -I -S launch.py OWNER UID:GID COMMAND…`, where UID:GID may be `-`.

Drops root's rights, asks the kernel for a SIGKILL when the owner dies, and replaces itself by the command. A script of
its own because code between fork and exec is not safe in a process with threads. Standard library only.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(owner: str, account: str, *command: str) -> None:
    """Replace this process by the command."""
    if account != "-":
        uid, gid = map(int, account.split(":"))
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    if sys.platform == "linux":  # after setuid, which clears it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != int(owner):  # the owner died before the kernel was asked
        sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main(*sys.argv[1:])
