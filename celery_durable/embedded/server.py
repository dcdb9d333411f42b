"""A server as a child process: the one shape that Postgres and Redis fill in.

Owns the process, its port and its folder. A subclass says how the data folder is prepared, what the command is, and
how to tell that the server answers.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import random
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, ClassVar, Self

from celery_durable.embedded import binaries
from celery_durable.embedded.errors import EmbeddedUnavailable, ServerFailed
from celery_durable.embedded.folder import Folder, unprivileged

if TYPE_CHECKING:
    import psutil

START_TIMEOUT = 60.0  # seconds, on a slow and busy machine
STOP_TIMEOUT = 30.0  # seconds, then SIGKILL
PORT_TAKEN = ("address already in use", "eaddrinuse")


class Server(ABC):
    """A server that this process owns.

    `port` and `password` stay the same for the object's whole life; `pid` is None while the server is down.
    """

    kind: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM

    def __init__(self, *, port: int | None = None) -> None:
        try:
            import psutil  # noqa: F401  (comes with the extra)
        except ImportError:
            raise EmbeddedUnavailable(
                'psutil is missing. Embedded servers come with an extra: pip install "celery-durable[embedded]"'
            ) from None
        self.password = secrets.token_hex(16)
        self.account = unprivileged()
        self._given_port = port
        self._port: int | None = port
        self._owner = os.getpid()
        self._folder: Folder | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._started_before = False
        _servers.add(self)

    # --- what a subclass says ---

    @abstractmethod
    def _prepare(self) -> None:
        """Fill the new data folder, once."""

    @abstractmethod
    def _command(self) -> list[str]:
        """The command, for the port as it is now."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether the server serves; False or any exception while it does not."""

    def _environment(self) -> dict[str, str]:
        return {"PATH": os.defpath, "HOME": str(self.folder.data), "LC_ALL": "C", "TZ": "UTC"}

    # --- what it is ---

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1, known after the first start."""
        if self._port is None:
            raise ServerFailed(f"{self.kind} was never started.")
        return self._port

    @property
    def pid(self) -> int | None:
        """The process id of the server's first process."""
        return self._process.pid if self._process is not None and self.running else None

    @property
    def running(self) -> bool:
        """Whether the first process lives (also when frozen)."""
        return self._process is not None and self._process.poll() is None

    @property
    def folder(self) -> Folder:
        """The folder with `log` and `data`."""
        if self._folder is None:
            raise ServerFailed(f"{self.kind} was never started, or is closed.")
        return self._folder

    @property
    def log(self) -> str:
        """All the server said so far."""
        return self.folder.log.read_text(errors="replace")

    # --- what it does ---

    def start(self) -> Self:
        """Start the server and return when it answers. Starting a running server does nothing.

        Raises:
            ServerFailed: it ended, or did not answer in time; the message holds the end of its log.
            EmbeddedUnavailable: this machine cannot run it.
        """
        if self.running:
            return self
        if self._folder is None:
            self._folder = Folder(self.kind, self.account)
            self._prepare()
        deadline = time.monotonic() + START_TIMEOUT
        while True:
            if not self._started_before and self._given_port is None:
                self._port = free_port()
            said = self._try_to_start(deadline)
            if said is None:
                self._started_before = True
                return self
            if not any(words in said.lower() for words in PORT_TAKEN) or time.monotonic() > deadline:
                raise ServerFailed(f"{self.kind} did not start on port {self.port}:\n{said}")
            time.sleep(0.1)  # somebody was quicker: another port, or the same once it is free again

    def stop(self) -> None:
        """Shut the server down in its clean way. The data stay."""
        if not self._mine():
            return
        assert self._process is not None  # noqa: S101
        self.thaw()
        self._process.send_signal(self.stop_signal)
        try:
            self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """SIGKILL to the server and all processes below it, as a crash would. The data stay."""
        if not self._mine():
            return
        assert self._process is not None  # noqa: S101
        below = self._freeze_tree()  # so that nothing new is born meanwhile
        for process in below:
            _signal(process, signal.SIGKILL)
        self._process.kill()
        self._process.wait()
        _await_end(below)

    def restart(self) -> Self:
        """Stop if it runs, then start, on the same port with the same data."""
        self.stop()
        return self.start()

    def freeze(self) -> None:
        """SIGSTOP to the server and all processes below it: connections stay open and silent."""
        if self._mine():
            self._freeze_tree()

    def thaw(self) -> None:
        """SIGCONT after `freeze`."""
        if self._mine():
            for process in reversed(self._tree()):
                _signal(process, signal.SIGCONT)

    def close(self) -> None:
        """Stop the server and remove its folder. A later `start` begins anew, with no data."""
        if os.getpid() != self._owner:
            return
        self.stop()
        if self._folder is not None:
            self._folder.remove()
        self._folder = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- how ---

    def _mine(self) -> bool:
        """Whether there is a process, and it is ours: a forked child must not touch its parent's servers."""
        return os.getpid() == self._owner and self.running

    def _try_to_start(self, deadline: float) -> str | None:
        """None when the server answers, else the end of its log."""
        with self.folder.log.open("ab") as log:
            log_start = log.tell()
            self._process = self.spawn(self._command(), log)
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._answers_now():
                return None
            time.sleep(0.01)
        self.kill()
        said = self.folder.log.read_bytes()[log_start:].decode(errors="replace")
        return said[-4000:] or "(it said nothing)"

    def _answers_now(self) -> bool:
        try:
            return self._answers()
        except Exception:  # noqa: BLE001  (whatever a client raises while a server comes up)
            return False

    def spawn(self, command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a process that runs as the server's account and dies with this one."""
        return spawn(
            command,
            account=f"{self.account.uid}:{self.account.gid}" if self.account else "-",
            cwd=self.folder.data,
            environment=self._environment(),
            output=output,
        )

    def run(self, command: list[str]) -> str:
        """Run a command as the server's account to its end; its output.

        Raises:
            ServerFailed: with the output, if it failed.
        """
        with self.folder.log.open("ab") as log:
            log_start = log.tell()
            code = self.spawn(command, log).wait(START_TIMEOUT)
        said = self.folder.log.read_bytes()[log_start:].decode(errors="replace")
        if code != 0:
            raise ServerFailed(f"{Path(command[0]).name} ended with {code}:\n{said[-4000:]}")
        return said

    def write(self, name: str, text: str) -> Path:
        """Write a file into the data folder, readable by the server's account alone."""
        path = self.folder.data / name
        path.touch(mode=0o600)
        path.write_text(text)
        if self.account is not None:
            os.chown(path, self.account.uid, self.account.gid)
        return path

    def _tree(self) -> list[psutil.Process]:
        """The first process and all below it."""
        import psutil

        if self._process is None:
            return []
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _freeze_tree(self) -> list[psutil.Process]:
        """Stop parents before children, until no process is new."""
        frozen: list[psutil.Process] = []
        while new := [process for process in self._tree() if process not in frozen]:
            for process in new:
                _signal(process, signal.SIGSTOP)
            frozen += new
        return frozen


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now, below the range from which the kernel takes ports for clients.

    In that range a client that keeps trying to reach a stopped server could connect to itself and hold the port.
    """
    for _ in range(200):
        port = random.randint(15_000, 32_000)  # noqa: S311
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return port
    raise EmbeddedUnavailable("No free TCP port on 127.0.0.1 between 15000 and 32000.")


def spawn(
    command: list[str], *, account: str, cwd: Path, environment: Mapping[str, str], output: IO[bytes]
) -> subprocess.Popen[bytes]:
    """Start a command through `launch`, from a thread that lives as long as this process.

    The kernel's "parent died" means the thread that forked.
    """
    launcher = [sys.executable, "-I", "-S", str(Path(__file__).with_name("launch.py"))]
    return _in_lasting_thread(
        lambda: subprocess.Popen(
            [*launcher, str(os.getpid()), account, *command],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=cwd if account == "-" else "/",
            env=dict(environment),
            start_new_session=True,  # Ctrl-C in a terminal is for the owner, who then stops its servers
        )
    )


_Job = Callable[[], "subprocess.Popen[bytes]"]
_Answer = queue.SimpleQueue["subprocess.Popen[bytes] | BaseException"]
_threads: dict[int, queue.SimpleQueue[tuple[_Job, _Answer]]] = {}  # by process: threads do not survive a fork


def _in_lasting_thread(job: _Job) -> subprocess.Popen[bytes]:
    jobs = _threads.get(os.getpid())
    if jobs is None:
        jobs = _threads[os.getpid()] = queue.SimpleQueue()
        threading.Thread(target=_work, args=(jobs,), name="embedded-launcher", daemon=True).start()
    answer: _Answer = queue.SimpleQueue()
    jobs.put((job, answer))
    result = answer.get()
    if isinstance(result, BaseException):
        raise result
    return result


def _work(jobs: queue.SimpleQueue[tuple[_Job, _Answer]]) -> None:
    while True:
        job, answer = jobs.get()
        try:
            answer.put(job())
        except BaseException as error:  # noqa: BLE001  (raised where it was asked for)
            answer.put(error)


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    import psutil

    with contextlib.suppress(psutil.Error):
        process.send_signal(number)


def _await_end(processes: list[psutil.Process]) -> None:
    """Wait until all are gone, or zombies that their new parent has not reaped."""
    import psutil

    deadline = time.monotonic() + 5
    for process in processes:
        with contextlib.suppress(psutil.Error):
            while process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
                time.sleep(0.005)


_servers: weakref.WeakSet[Server] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for server in list(_servers):
        with contextlib.suppress(Exception):
            server.close()
    binaries.remove_copies()
