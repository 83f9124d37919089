"""`tunixctl environment`."""

from __future__ import annotations

import pytest

from tests.environments.support import config
from tunix_core.console import environment as shown
from tunix_core.console.cli import main
from tunix_core.environments.lookup import Lookup, LookupTask
from tunix_core.environments.tool_environment import Script
from tunix_core.errors import EXIT_CONFIG, EXIT_UNEXPECTED


def test_a_demonstration_is_shown_with_what_it_earns(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environment", "lookup", "--seed", "5"]) == 0
    text = capsys.readouterr().out
    script = Lookup(config("lookup")).demonstration(5)
    assert "lookup, seed 5 (held_out), calls in the form plain" in text
    for role, said in script:
        assert f"{role:13}{said}\n" in text
    assert '  reward 1    {"answer": 1.0' in text
    assert text.endswith("reward 1\n")


def test_tools_and_given_messages_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    call = '<tool_call>{"name": "query", "arguments": {"sql": "SELECT 1 AS one"}}</tool_call>'
    options = ["--set", "environment.tool_format=hermes", "--set", "environment.options.num_rows=12"]
    assert main(["environment", "sql", *options, "--say", call, "--say", "<tool_call>"]) == 0
    text = capsys.readouterr().out
    assert '{"type": "function", "function": {"name": "query"' in text
    assert "user         <tool_response>\none\n1\n</tool_response>" in text
    assert '"malformed_calls": 1.0' in text
    assert text.endswith("reward 0, the episode is not over\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chess"], "environment.name: received 'chess', accepted lookup"),
        (["lookup", "--set", "environment.options.num_rows=3"], "environment.options.num_rows"),
        (["lookup", "--set", "environment.name"], "section.field=value"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["environment", *arguments]) == EXIT_CONFIG
    assert message in capsys.readouterr().err


class Wrong(Lookup):
    """Says of itself what is not so."""

    def script(self, task: LookupTask) -> Script:
        calls, answer = super().script(task)
        return Script([(call, "h") for call, _ in calls], answer)


def test_a_demonstration_that_is_not_what_happens_is_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shown, "make_environment", lambda config, latency: Wrong(config, latency=latency))
    assert main(["environment", "lookup"]) == EXIT_UNEXPECTED
    assert "the demonstration has" in capsys.readouterr().err
    assert main(["environment", "lookup", "--say", "= 1", "--say", "= 2"]) == EXIT_UNEXPECTED
    assert "over before the message '= 2'" in capsys.readouterr().err


def test_one_without_demonstration_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Bare:
        name = "bare"

        def __init__(self, inner: Lookup) -> None:
            self.reset, self.step, self.close = inner.reset, inner.step, inner.close

    monkeypatch.setattr(shown, "make_environment", lambda config, latency: Bare(Lookup(config, latency=latency)))
    assert main(["environment", "lookup"]) == 0
    text = capsys.readouterr().out
    assert "prompt       find " in text
    assert text.endswith("no demonstration: say what the policy says with --say, once for each message\n")
