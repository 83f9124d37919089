"""Files and folders in memory, within bounds."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable

from tunix_core.tools.functions import ToolError

MAX_ENTRIES = 256
MAX_FILE_BYTES = 16_384
MAX_DEPTH = 8
_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")


@dataclasses.dataclass
class FileTree:
    """Every method that takes a path raises ToolError for what a file system would refuse."""

    files: dict[str, str] = dataclasses.field(default_factory=dict)
    folders: set[str] = dataclasses.field(default_factory=set)
    """Paths, the top excluded."""

    @classmethod
    def of(cls, files: Iterable[tuple[str, str]]) -> FileTree:
        """With the folders that the files are in."""
        tree = cls(dict(files))
        for path in tree.files:
            tree.folders.update(_above(path))
        return tree

    def difference(self, other: FileTree) -> int:
        """Paths at which the two differ."""
        paths = self.files.keys() | other.files.keys()
        changed = sum(self.files.get(path) != other.files.get(path) for path in paths)
        return changed + len(self.folders ^ other.folders)

    def listing(self, folder: str) -> str:
        folder = folder.strip("/")
        if folder not in ("", "."):
            _checked(folder)
            if folder not in self.folders:
                raise ToolError(f"error: no folder {folder}")
        start = "" if folder in ("", ".") else f"{folder}/"
        names = set(self.files) | {f"{path}/" for path in self.folders}
        inside = [name.removeprefix(start) for name in names if name.startswith(start) and name != start]
        return "\n".join(sorted(name for name in inside if "/" not in name.rstrip("/"))) or "empty"

    def read(self, path: str) -> str:
        if _checked(path) not in self.files:
            raise ToolError(f"error: no file {path}")
        return self.files[path]

    def write(self, path: str, text: str) -> None:
        if _checked(path) in self.folders:
            raise ToolError(f"error: {path} is a folder")
        self._needs_folder_above(path)
        if len(text.encode()) > MAX_FILE_BYTES:
            raise ToolError(f"error: a file has at most {MAX_FILE_BYTES} bytes")
        if path not in self.files:
            self._needs_room(1)
        self.files[path] = text

    def move(self, source: str, target: str) -> None:
        if _checked(source) not in self.files and source not in self.folders:
            raise ToolError(f"error: no file or folder {source}")
        if _checked(target) in self.files or target in self.folders:
            raise ToolError(f"error: {target} is there already")
        self._needs_folder_above(target)
        if target.startswith(f"{source}/"):
            raise ToolError(f"error: {target} is in {source}")

        def moved(path: str) -> str:
            return target + path[len(source) :] if path == source or path.startswith(f"{source}/") else path

        for path in [*self.files, *self.folders]:
            _checked(moved(path))
        self.files = {moved(path): text for path, text in self.files.items()}
        self.folders = {moved(path) for path in self.folders}

    def delete(self, path: str) -> None:
        if _checked(path) not in self.files and path not in self.folders:
            raise ToolError(f"error: no file or folder {path}")
        self.files = {p: text for p, text in self.files.items() if p != path and not p.startswith(f"{path}/")}
        self.folders = {p for p in self.folders if p != path and not p.startswith(f"{path}/")}

    def make_folder(self, path: str) -> None:
        wanted = {_checked(path), *_above(path)}
        for folder in wanted:
            if folder in self.files:
                raise ToolError(f"error: {folder} is a file")
        self._needs_room(len(wanted - self.folders))
        self.folders |= wanted

    def _needs_folder_above(self, path: str) -> None:
        above = path.rpartition("/")[0]
        if above and above not in self.folders:
            raise ToolError(f"error: no folder {above}")

    def _needs_room(self, num_entries: int) -> None:
        if len(self.files) + len(self.folders) + num_entries > MAX_ENTRIES:
            raise ToolError(f"error: at most {MAX_ENTRIES} files and folders")


def _above(path: str) -> list[str]:
    parts = path.split("/")[:-1]
    return ["/".join(parts[: i + 1]) for i in range(len(parts))]


def _checked(path: str) -> str:
    parts = path.split("/")
    if len(parts) > MAX_DEPTH or not all(_PART.fullmatch(part) for part in parts):
        raise ToolError(f"error: {path[:80]!r} is no relative path of letters, digits, . _ and -")
    return path
