import csv
import io

import pytest
from rich.console import Console

from tests.support.run_factory import make_run
from tunix_core.console.cli import main
from tunix_core.console.trajectories import show_tokens
from tunix_core.errors import EXIT_CONFIG
from tunix_core.storage.store import ObjectStore, open_store
from tunix_core.tokenizer import ByteTokenizer


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ObjectStore:
    return make_run(open_store(str(tmp_path_factory.mktemp("console") / "run"))).store


def test_filters_narrow_the_list(store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    def listed(*arguments: str) -> int:
        assert main(["trajectories", "--run", store.uri, "--limit", "500", *arguments]) == 0
        return capsys.readouterr().out.count("lookup")

    everything = listed()
    assert 0 < listed("--solved") < everything
    assert listed("--solved") + listed("--failed") == everything
    assert listed("--environment", "sql") == 0
    assert listed("--since", "2099-01-01") == 0
    assert listed("--until", "2099-01-01T00:00+01:00") == everything
    assert 0 < listed("--max-version", "0") < everything


def test_tokens_are_shown_one_by_one(store: ObjectStore) -> None:
    out = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=200)
    show_tokens(store, "actor_0_0-0002-1", ByteTokenizer(), out)
    assert isinstance(out.file, io.StringIO)
    text = out.file.getvalue()
    assert "38;2;166;217;106" in text, "a log probability of -0.5 has the second color"
    plain = "".join(part.partition("m")[2] if i else part for i, part in enumerate(text.split("\x1b[")))
    assert "find c" in plain
    assert "[0]get c" in plain, "the version stands where it begins"
    assert "reward 1" in plain


def test_sql_as_table_and_as_csv(store: ObjectStore, capsys: pytest.CaptureFixture[str]) -> None:
    sql = "select environment, count(*) as num from trajectories group by all"
    assert main(["sql", "--run", store.uri, sql]) == 0
    assert "lookup" in capsys.readouterr().out
    assert main(["sql", "--run", store.uri, sql, "--csv"]) == 0
    (header, row) = csv.reader(io.StringIO(capsys.readouterr().out))
    assert header == ["environment", "num"]
    assert row[0] == "lookup"
    assert int(row[1]) > 0


def test_out_and_in_again(store: ObjectStore, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
    for to in (tmp_path / "out.jsonl", tmp_path / "folder"):
        assert main(["export-trajectories", "--run", store.uri, "--solved", "--to", str(to)]) == 0
        exported = capsys.readouterr().out.split()[0]
        target = make_run(open_store(str(tmp_path / f"run-{to.name}"))).store
        assert main(["import-trajectories", "--run", target.uri, "--from", str(to)]) == 0
        assert capsys.readouterr().out.split()[0] == exported


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["trajectories", "--since", "yesterday"], "--since"),
        (["trajectories", "--min-reward", "2", "--max-reward", "1"], "min_reward"),
        (["trajectories", "--limit", "0"], "--limit"),
        (["sql", "selct"], "sql"),
        (["import-trajectories", "--from", "/nowhere.jsonl"], "--from"),
        (["import-trajectories", "--from", "/nowhere"], "--from"),
        (["export-trajectories", "--to", "/etc"], "--to"),
    ],
)
def test_mistakes_are_explained(
    store: ObjectStore, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    command, *rest = arguments
    assert main([command, "--run", store.uri, *rest]) == EXIT_CONFIG
    assert named in capsys.readouterr().err
