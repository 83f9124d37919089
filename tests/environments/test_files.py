import pytest

from tests.environments.support import made, play
from tunix_core.environment_config import FilesOptions
from tunix_core.environments import task_seed
from tunix_core.environments.file_tree import MAX_ENTRIES, FileTree
from tunix_core.tools.functions import ToolError


def tree() -> FileTree:
    return FileTree.of([("a.txt", "A"), ("docs/b.txt", "B"), ("docs/old/c.txt", "C")])


def test_a_tree_does_what_file_systems_do() -> None:
    t = tree()
    assert t.listing("") == "a.txt\ndocs/"
    assert t.listing("docs") == t.listing("docs/") == "b.txt\nold/"
    t.make_folder("x/y")
    assert t.listing("x/y") == "empty"
    t.move("docs/old", "x/y/new")
    assert t.read("x/y/new/c.txt") == "C"
    t.move("a.txt", "docs/a.txt")
    t.write("docs/a.txt", "AA")
    assert t.read("docs/a.txt") == "AA"
    t.delete("x")
    assert (t.files, t.folders) == ({"docs/a.txt": "AA", "docs/b.txt": "B"}, {"docs"})
    assert t.difference(tree()) == 4  # a.txt and docs/a.txt, docs/old and its file
    assert tree().difference(tree()) == 0


@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("read", ["b.txt"]),
        ("read", ["docs"]),
        ("read", ["/a.txt"]),
        ("read", ["docs/../a.txt"]),
        ("read", ["./a.txt"]),
        ("read", [""]),
        ("read", ["a\n"]),
        ("read", ["/".join("a" * 9)]),
        ("listing", ["nothing"]),
        ("listing", ["a.txt"]),
        ("write", ["docs", "x"]),
        ("write", ["new/x.txt", "x"]),
        ("write", ["a.txt/x", "x"]),
        ("write", ["a.txt", "é" * 8193]),
        ("move", ["b.txt", "c.txt"]),
        ("move", ["a.txt", "docs/b.txt"]),
        ("move", ["a.txt", "new/a.txt"]),
        ("move", ["docs", "docs/old/docs"]),
        ("move", ["docs", "docs"]),
        ("delete", ["b.txt"]),
        ("make_folder", ["a.txt"]),
        ("make_folder", ["a.txt/b"]),
    ],
)
def test_what_a_file_system_would_refuse_is_refused(method: str, arguments: list[str]) -> None:
    t = tree()
    with pytest.raises(ToolError, match="error: "):
        getattr(t, method)(*arguments)
    assert t == tree()


def test_a_tree_is_bounded() -> None:
    t = FileTree.of([(f"f{i}", "") for i in range(MAX_ENTRIES)])
    t.write("f0", "again")
    for method, arguments in (("write", ("more", "")), ("make_folder", ("more",))):
        with pytest.raises(ToolError, match="at most 256"):
            getattr(t, method)(*arguments)
    deep = FileTree.of([("a/b/c/d/e/f/g.txt", "")])
    deep.make_folder("x/y")
    with pytest.raises(ToolError, match="no relative path"):
        deep.move("a", "x/y/a")


def test_the_tree_decides_however_it_came_about() -> None:
    environment = made("files", tool_format="hermes")
    for index in range(20):
        seed = task_seed("train", index, 1)
        script = environment.demonstration(seed)
        calls = [text for role, text in script if role == "policy"][:-1]
        # All in one message: they run in its order.
        _, results = play(environment, seed, ["\n".join(calls), "Done."])
        assert results[-1].reward == 1, script
        _, results = play(environment, seed, ["\n".join(calls[:-1]) or "<tool_call>", "Done."])
        assert results[-1].reward == 0
        extra = '<tool_call>{"name": "mkdir", "arguments": {"path": "unasked"}}</tool_call>'
        _, results = play(environment, seed, ["\n".join([*calls, extra]), "Done."])
        assert results[-1].reward == 0


def test_calls_of_a_message_wait_for_each_other_however_slow() -> None:
    for index in range(6):
        environment = made("files", tool_format="hermes", latency_mean_seconds=0.002, latency_sigma=2.0)
        seed = next(
            seed
            for seed in (task_seed("train", i, index) for i in range(1000))
            if [change.kind for change in environment.task(seed).changes] == ["move", "move"]
        )
        calls = [text for role, text in environment.demonstration(seed) if role == "policy"][:-1]
        _, results = play(environment, seed, ["\n".join(calls), "Done."])
        assert results[-1].reward == 1
        assert results[-1].components["failed_calls"] == 0


def test_partial_credit_is_the_part_of_the_way() -> None:
    options = FilesOptions(num_files=4, num_changes=2, partial_credit=0.5)
    environment = made("files", options=options)
    seeds = [task_seed("train", i, 0) for i in range(1000)]
    seed = next(s for s in seeds if [c.kind for c in environment.task(s).changes] == ["delete", "append"])
    script = [text for role, text in environment.demonstration(seed) if role == "policy"]
    outcomes = [
        play(environment, seed, messages)[1][-1]
        for messages in (
            ["= done"],
            [script[0], "= done"],
            script,
            ["mkdir other", "mkdir more", "mkdir most", "= done"],
        )
    ]
    assert [result.reward for result in outcomes] == [0.0, 0.25, 1.0, 0.0]
    assert [result.components["progress"] for result in outcomes] == [0.0, 0.5, 1.0, 0.0]
    assert [result.components["tree"] for result in outcomes] == [0.0, 0.0, 1.0, 0.0]
    plain = made("files", options=FilesOptions(num_files=4, num_changes=2))
    assert play(plain, seed, [script[0], "= done"])[1][-1].reward == 0.0


def test_an_unknown_path_is_a_failed_call() -> None:
    _, (result,) = play(made("files"), 4, ["cat nothing.txt"])
    assert result.text == "error: no file nothing.txt"
    assert result.components["failed_calls"] == 1
