"""A tree of files to be brought into a wanted state, step by step.

prompt  The files: a.txt, docs/plan.txt
        - move a.txt to docs/a.txt
policy  move a.txt docs/a.txt
tool    moved
policy  = done

The tree is a dictionary: nothing of it is on a disk. Empty folders belong to it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tunix_core.environment_config import FilesOptions
from tunix_core.environments.file_tree import FileTree
from tunix_core.environments.rubric import Component, Episode, Rubric
from tunix_core.environments.tool_environment import Script, ScriptedEnvironment
from tunix_core.tools.formats import Call

_STEMS = ("alpha", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "iris", "jade", "koala", "lotus", "maple", "north", "olive", "pearl", "quill", "river", "stone", "tulip")  # fmt: skip
_FOLDERS = ("archive", "docs", "drafts", "inbox", "photos", "src")
_ENDINGS = (".txt", ".md", ".csv")


class Change(NamedTuple):
    """One line of the request; `first` and `second` are what it is about."""

    kind: str
    path: str
    first: str = ""
    second: str = ""

    @property
    def text(self) -> str:
        return _REQUESTS[self.kind].format(self)


_REQUESTS = {
    "move": "- move {0.path} to {0.first}",
    "delete": "- delete {0.path}",
    "replace": "- in {0.path} write the line {0.second} in place of the line {0.first}",
    "append": "- add the line {0.first} at the end of {0.path}",
    "create": "- create {0.path} with the text {0.first}",
    "folder": "- make an empty folder {0.path}",
}


class FilesTask(NamedTuple):
    """One instance."""

    files: tuple[tuple[str, str], ...]
    """Path and text."""
    changes: tuple[Change, ...]


class Files(ScriptedEnvironment[FilesTask]):
    """Reward 1 for the wanted tree, when the policy says that it is done; see `FilesOptions.partial_credit`."""

    name = "files"
    options_type = FilesOptions
    options: FilesOptions
    task_instructions = (
        "You bring files into order with the tools, and change nothing that you were not asked to. Paths are relative. A "
        "folder has to be there before something is put into it. When all is done, answer: done"
    )

    def draw(self, rng: random.Random) -> FilesTask:
        stems = rng.sample(_STEMS, self.options.num_files)
        folder = rng.choice(_FOLDERS)
        others = [name for name in _FOLDERS if name != folder]
        names = [stem + rng.choice(_ENDINGS) for stem in stems]
        paths = [f"{folder}/{name}" if rng.random() < 0.4 else name for name in names]
        files = tuple((path, "\n".join(_line(rng) for _ in range(rng.randint(1, 3)))) for path in paths)
        touched = rng.sample(files, self.options.num_changes)
        changes = tuple(_change(rng, path, text, others) for path, text in touched)
        made = [change for change in changes if change.kind in ("create", "folder")]
        same = len({change.path for change in made}) < len(made)
        if same or any(change.kind == "replace" and change.first == change.second for change in changes):
            return self.draw(rng)  # two changes make the same thing, or one makes none
        return FilesTask(files, changes)

    def question(self, task: FilesTask) -> str:
        paths = ", ".join(path for path, _ in task.files)
        return "\n".join([f"The files: {paths}", *(change.text for change in task.changes)])

    async def begin(self) -> None:
        self._tree = FileTree.of(self.instance.files)

    def functions(self) -> Sequence[Callable[..., Any]]:
        return [self.ls, self.cat, self.write, self.move, self.delete, self.mkdir]

    runs_at_once = False  # what one call makes, the next one may need

    async def ls(self, folder: str = "") -> str:
        """Lists what is in a folder, folders with / at the end.

        Args:
            folder: its path; by default the top.
        """
        return self._tree.listing(folder)

    async def cat(self, path: str) -> str:
        """Shows a file."""
        return self._tree.read(path)

    async def write(self, path: str, text: str) -> str:
        """Writes a file, over what it held before.

        Args:
            path: of the file.
            text: all of the file's text.
        """
        self._tree.write(path, text)
        return "written"

    async def move(self, source: str, target: str) -> str:
        """Moves or renames a file or a folder.

        Args:
            source: its path.
            target: the path that it gets, which is free.
        """
        self._tree.move(source, target)
        return "moved"

    async def delete(self, path: str) -> str:
        """Deletes a file, or a folder with all that is in it."""
        self._tree.delete(path)
        return "deleted"

    async def mkdir(self, path: str) -> str:
        """Makes a folder, and those above it."""
        self._tree.make_folder(path)
        return "made"

    def rubric(self) -> Rubric:
        share = self.options.partial_credit
        return Rubric(
            Component("tree", lambda episode: self._tree == _wanted(episode.task), 1 - share),
            Component("progress", self._progress, share),
        )

    def _progress(self, episode: Episode) -> float:
        """How much of the way from the first tree to the wanted one is gone; 0 also for further away."""
        wanted = _wanted(episode.task)
        way = FileTree.of(episode.task.files).difference(wanted)
        return max(0.0, 1 - self._tree.difference(wanted) / way)

    def script(self, task: FilesTask) -> Script:
        tree = FileTree.of(task.files)
        return Script([step for change in task.changes for step in _steps(tree, change)], "done")


def _line(rng: random.Random) -> str:
    return f"{rng.choice(_STEMS)} {rng.randrange(1000)}"


def _change(rng: random.Random, path: str, text: str, folders: Sequence[str]) -> Change:
    kind = rng.choice(list(_REQUESTS))
    name = path.rpartition("/")[2]
    if kind == "move":
        return Change(kind, path, f"{rng.choice(folders)}/{name}")
    if kind == "replace":
        return Change(kind, path, rng.choice(text.splitlines()), _line(rng))
    if kind == "append":
        return Change(kind, path, _line(rng))
    if kind == "create":
        return Change(kind, f"new-{rng.randrange(1000)}.txt", _line(rng))
    if kind == "folder":
        return Change(kind, f"empty-{rng.randrange(1000)}")
    return Change(kind, path)


def _steps(tree: FileTree, change: Change) -> list[tuple[Call, str]]:
    """The calls that make a change, and what comes back; the tree is changed."""
    kind, path, first, second = change
    if kind == "delete":
        tree.delete(path)
        return [(Call("delete", {"path": path}), "deleted")]
    if kind == "folder":
        tree.make_folder(path)
        return [(Call("mkdir", {"path": path}), "made")]
    if kind == "move":
        folder = first.rpartition("/")[0]
        made = [] if folder in tree.folders else [(Call("mkdir", {"path": folder}), "made")]
        tree.make_folder(folder)
        tree.move(path, first)
        return [*made, (Call("move", {"source": path, "target": first}), "moved")]
    if kind == "create":
        tree.write(path, first)
        return [(Call("write", {"path": path, "text": first}), "written")]
    before = tree.read(path)
    lines = [second if kind == "replace" and line == first else line for line in before.splitlines()]
    after = "\n".join(lines if kind == "replace" else [*lines, first])
    tree.write(path, after)
    return [(Call("cat", {"path": path}), before), (Call("write", {"path": path, "text": after}), "written")]


def _wanted(task: FilesTask) -> FileTree:
    tree = FileTree.of(task.files)
    for change in task.changes:
        _steps(tree, change)
    return tree
