"""A scratch directory for one program: fresh, its size looked at, its files copied out with checks, removed.

`work` is where the program runs and what is collected; `home` and `tmp` are its HOME and TMPDIR. Nothing here
follows a link that a program left. Blocking: async callers use a thread.
"""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

log = logging.getLogger(__name__)
ENTRY_BYTES = 4096  # what an empty file costs: a million of them are too many as well


class WorkspaceError(ValueError):
    """A file's name that leads out of the workspace, or names nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """Files by their path inside the workspace; `left_out` says what was not copied, and why."""

    files: Mapping[str, bytes]
    left_out: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """`root` and all in it belong to one program."""

    root: Path

    @property
    def work(self) -> Path:
        return self.root / "work"

    @property
    def home(self) -> Path:
        return self.root / "home"

    @property
    def tmp(self) -> Path:
        return self.root / "tmp"

    def used_bytes(self, enough: int) -> int:
        """The disk that it takes; stops counting once that is more than `enough`."""
        total = 0
        for entry in _entries(self.root):
            try:
                total += max(entry.stat(follow_symlinks=False).st_blocks * 512, ENTRY_BYTES)
            except FileNotFoundError:  # the program works while we look
                continue
            if total > enough:
                break
        return total

    def collect(
        self, *, max_bytes: int, max_files: int, keep: Callable[[str], bool] = lambda path: True
    ) -> Collected:
        """Copies the regular files under `work` that `keep` wants, in the order of their names.

        Only for a workspace where no program runs any more.
        """
        files: dict[str, bytes] = {}
        left_out: list[str] = []
        left = max_bytes
        for entry in sorted(_entries(self.work), key=lambda entry: entry.path):
            path = os.path.relpath(entry.path, self.work)
            if entry.is_dir(follow_symlinks=False) or not keep(path):
                continue
            reason = _flaw(path, entry)
            if reason is None and len(files) >= max_files:
                reason = f"more than {max_files} files"
            if reason is None:
                content = _read(entry.path, left)
                if content is None:
                    reason = f"more than {max_bytes} bytes in all"
                else:
                    files[path], left = content, left - len(content)
            if reason is not None:
                left_out.append(f"{path!a}: {reason}")
        return Collected(files=files, left_out=tuple(left_out))

    def remove(self) -> None:
        """Deletes it, whatever modes its directories were given."""
        shutil.rmtree(self.root, onerror=_open_up)
        if self.root.exists():
            log.warning("workspace=%s could not be removed", self.root)


def create_workspace(files: Mapping[str, str | bytes], *, parent: Path | None = None) -> Workspace:
    """A new workspace with these files under `work`; a file that begins with `#!` can be run.

    Raises: WorkspaceError naming a path that is absolute, empty or leads upwards.
    """
    for path in files:
        _check_path(path)
    workspace = Workspace(root=Path(tempfile.mkdtemp(prefix="megloom-program-", dir=parent)).resolve())
    try:
        for folder in (workspace.work, workspace.home, workspace.tmp):
            folder.mkdir()
        for path, content in files.items():
            target = workspace.work / path
            target.parent.mkdir(parents=True, exist_ok=True)
            data = content.encode() if isinstance(content, str) else content
            target.write_bytes(data)
            if data.startswith(b"#!"):
                target.chmod(0o755)
    except BaseException:
        workspace.remove()
        raise
    return workspace


def _check_path(path: str) -> None:
    parts = PurePosixPath(path).parts
    if not parts or parts[0] == "/" or ".." in parts or "\0" in path:
        raise WorkspaceError(f"file {path!r}: expected a path inside the workspace, such as 'src/main.py'")


def _entries(root: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below `root`; links are entries and never followed."""
    frontier = [str(root)]
    while frontier:
        try:
            with os.scandir(frontier.pop()) as entries:
                for entry in entries:
                    yield entry
                    if entry.is_dir(follow_symlinks=False):
                        frontier.append(entry.path)
        except (FileNotFoundError, PermissionError, NotADirectoryError):
            continue


def _flaw(path: str, entry: os.DirEntry[str]) -> str | None:
    """Why a file is not copied; None for one that is."""
    found = entry.stat(follow_symlinks=False)
    if not stat.S_ISREG(found.st_mode):
        return "a symbolic link" if stat.S_ISLNK(found.st_mode) else "no regular file"
    if found.st_nlink > 1:
        return "a hard link"  # the other name may lie outside
    try:
        path.encode()
    except UnicodeEncodeError:
        return "its name is no text"
    return None


def _read(path: str, max_bytes: int) -> bytes | None:
    """A regular file's content; None if it is longer than `max_bytes` or may not be read."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except PermissionError:
        return None
    with os.fdopen(handle, "rb") as file:
        if os.fstat(handle).st_size > max_bytes:
            return None
        content = file.read(max_bytes + 1)
    return content if len(content) <= max_bytes else None


def _open_up(remove: Callable[[str], Any], path: str, _: Any) -> None:
    """A directory without write permission is given it, and the removal tried once more."""
    try:
        Path(path).parent.chmod(0o700)
        if Path(path).is_dir() and not Path(path).is_symlink():
            Path(path).chmod(0o700)
            shutil.rmtree(path, ignore_errors=True)
        else:
            remove(path)
    except OSError as error:
        log.warning("workspace entry=%s: %s", path, error)
