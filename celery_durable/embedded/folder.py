"""Folders of servers: where they lie, who may enter, and how those of dead owners are found and removed.

A folder belongs to a process as long as that process holds a lock (`flock`) on the file `lock` in it. The kernel lets
go of the lock when the process ends in any way, in whatever container; process ids would be guesses.

    <base>/.lock                      held for moments, while a folder is made and while old ones are swept
    <base>/<kind>-<pid>-<random>/     lock, log, data/ (data belongs to the account the server runs as)
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import os
import pwd
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from celery_durable.embedded.errors import EmbeddedUnavailable


@dataclass(frozen=True)
class Account:
    """The user a server runs as."""

    uid: int
    gid: int


def unprivileged() -> Account | None:
    """`nobody` when this process is root (PostgreSQL refuses to run as root), else None: run as we are.

    Raises:
        EmbeddedUnavailable: root on a machine without the user `nobody`.
    """
    if os.geteuid() != 0:
        return None
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise EmbeddedUnavailable(
            "Embedded servers do not run as root, and there is no user `nobody` to run them as."
        ) from None
    return Account(nobody.pw_uid, nobody.pw_gid)


def reachable(path: Path) -> bool:
    """Whether any other user may enter every folder above the path."""
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)


def base() -> Path:
    """The folder of all folders of this user, made if needed.

    Raises:
        EmbeddedUnavailable: it belongs to somebody else, or the servers' account could not enter it.
    """
    path = Path(os.environ.get("DURABLE_EMBEDDED_DIR") or _temporary() / f"celery-durable-{os.geteuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(parents=True)
        path.chmod(0o711)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise EmbeddedUnavailable(f"{path} is not a folder of this user; set DURABLE_EMBEDDED_DIR to one.")
    if os.geteuid() == 0 and not reachable(path / "any"):
        raise EmbeddedUnavailable(
            f"Servers of root run as `nobody`, who cannot enter {path}; set DURABLE_EMBEDDED_DIR to a folder he can."
        )
    return path


def _temporary() -> Path:
    chosen = Path(tempfile.gettempdir())
    return Path("/tmp") if os.geteuid() == 0 and not reachable(chosen / "any") else chosen  # noqa: S108


class Folder:
    """A folder held by this process."""

    def __init__(self, kind: str, account: Account | None) -> None:
        sweep()
        self._owner = os.getpid()
        with _base_locked() as parent:
            self.path = Path(tempfile.mkdtemp(prefix=f"{kind}-{os.getpid()}-", dir=parent))
            self._lock = _lock(self.path / "lock", wait=False)
        self.path.chmod(0o711)
        self.data = self.make("data", account)
        self.log = self.path / "log"

    def make(self, name: str, account: Account | None) -> Path:
        """A new folder inside, which only the account may enter."""
        made = self.path / name
        made.mkdir(mode=0o700)
        if account is not None:
            os.chown(made, account.uid, account.gid)
        return made

    def remove(self) -> None:
        """Remove the folder with all in it. Nothing happens in a forked child: the folder is its parent's."""
        if os.getpid() == self._owner and not self._lock.closed:
            _remove(self.path)
            self._lock.close()


def sweep() -> None:
    """Remove the folders whose owners are gone, and end what still runs in them (a frozen server, for one)."""
    with _base_locked() as parent:
        for path in parent.iterdir():
            if not path.is_dir():
                continue
            with contextlib.suppress(BlockingIOError, FileNotFoundError), _lock(path / "lock", wait=False):
                _end_processes_in(path)
                _remove(path)


@contextlib.contextmanager
def _base_locked() -> Iterator[Path]:
    path = base()
    with _lock(path / ".lock", wait=True):
        yield path


def _lock(path: Path, *, wait: bool) -> IO[bytes]:
    file = path.open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BaseException:
        file.close()
        raise
    return file


def _end_processes_in(path: Path) -> None:
    import psutil

    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if Path(process.cwd()).is_relative_to(path):
                process.send_signal(signal.SIGKILL)
                process.wait(timeout=5)


def _remove(path: Path) -> None:
    _remove_shared_memory(path / "data" / "postmaster.pid")
    shutil.rmtree(path, ignore_errors=True)


def _remove_shared_memory(pid_file: Path) -> None:
    """Remove the small System V segment that a killed PostgreSQL leaves: line 7 of its pid file is "key id"."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError, IndexError, ValueError):
            segment = int(pid_file.read_text().splitlines()[6].split()[1])
            ctypes.CDLL(None).shmctl(segment, 0, None)  # IPC_RMID
