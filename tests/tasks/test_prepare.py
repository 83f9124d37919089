from __future__ import annotations

from tasks.prepare import main
from tunix_core.errors import EXIT_CONFIG
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.store import open_store


def test_a_run_is_opened_once(tmp_path, capsys):
    uri = str(tmp_path / "first")
    arguments = ["--run", uri, "--recipe", "calculator", "--set", "learner.num_steps=3", "--set", "seed=5"]
    assert main(arguments) == 0
    config, extra = read_run(open_store(uri))
    assert (config.recipe, config.learner.num_steps, config.seed) == ("calculator", 3, 5)
    assert extra["run_id"] == "first"
    assert main(arguments) == 0, "the same again is fine"
    assert main(["--run", uri, "--recipe", "calculator"]) == EXIT_CONFIG
    assert "Choose another run URI" in capsys.readouterr().err
    assert read_run(open_store(uri))[0] == config


def test_mistakes_write_nothing(tmp_path, capsys):
    uri = str(tmp_path / "run")
    assert main(["--run", uri, "--set", "learner.num_stepz=3"]) == EXIT_CONFIG
    assert main(["--run", uri, "--recipe", "nope"]) == EXIT_CONFIG
    assert main(["--run", uri, "--name", "../up"]) == EXIT_CONFIG
    assert "--name: received '../up'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
