"""README and CONTRIBUTING name only links, make targets and modules that exist."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"]


@pytest.mark.parametrize("page", PAGES)
def test_relative_links_exist(page: str) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", (ROOT / page).read_text()):
        assert target.startswith("http") or (ROOT / target).exists(), target


@pytest.mark.parametrize("page", PAGES)
def test_make_targets_exist(page: str) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make (?:[A-Z]+=\S+ )*([a-z-]+)", (ROOT / page).read_text(), re.MULTILINE))
    assert named <= targets, named - targets


@pytest.mark.parametrize("page", PAGES)
def test_modules_exist(page: str) -> None:
    for module in re.findall(r"python -m ([a-z_.]+)", (ROOT / page).read_text()):
        assert importlib.util.find_spec(module) is not None, module
