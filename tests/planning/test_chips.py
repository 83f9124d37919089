"""Topologies as a person writes them."""

from __future__ import annotations

import pytest

from tunix_core.errors import ConfigError
from tunix_core.planning.chips import parse_topology


@pytest.mark.parametrize(
    ("text", "slices", "chips", "devices"),
    [
        ("v5p:4x4x8", 1, 128, 128),
        ("v5e:2x4", 2, 16, 16),
        ("tpu7x:2x2x1", 1, 4, 8),
        ("v4:2x2x1", 1, 4, 8),
        ("v6e:8x8", 1, 64, 64),
    ],
)
def test_a_topology_counts_its_chips(text: str, slices: int, chips: int, devices: int) -> None:
    topology = parse_topology(text, slices)
    assert (topology.name, topology.num_chips, topology.num_devices) == (text, chips, devices)


@pytest.mark.parametrize("text", ["v5p", "v5p:4x4", "v5e:2x2x2", "v9:2x2", "v5e:2x0", "v5e:2x4x", "h100:8"])
def test_a_wrong_topology_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--topology: received .*, accepted .*v5p:4x4x8"):
        parse_topology(text)


def test_no_slice_is_none() -> None:
    with pytest.raises(ConfigError, match="--slices: received 0, accepted 1"):
        parse_topology("v5e:2x4", 0)


def test_twice_a_slice_has_twice_the_chips() -> None:
    assert parse_topology("v5p:4x4x8").doubled().name == "v5p:4x8x8"
    assert parse_topology("v5e:2x4").doubled().name == "v5e:4x4"
