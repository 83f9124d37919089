"""What each host feeds, how hosts agree, and where they meet."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest

from tests.support.coordination import Service, on_all
from tunix_core.distributed.hosts import ALONE, Hosts, Share, _share, whole_share
from tunix_core.distributed.parallel import Parallel
from tunix_core.errors import ConfigError, PeerLost
from tunix_core.meeting import Meeting, meeting_of


@pytest.fixture
def three() -> list[Hosts]:
    service = Service()
    return [Hosts(index, 3, service) for index in range(3)]


def test_host_0_decides_from_all_and_all_get_its_answer(three: list[Hosts]) -> None:
    for number in range(3):
        answers = on_all(three, lambda host, n=number: host.lead("a", [host.index, n], max))
        assert answers == [[2, number]] * 3
    assert len(three[0]._client.values) == 1, "what was read is deleted"
    assert on_all(three, lambda host: host.gather("b", host.index)) == [[0, 1, 2]] * 3


def test_a_failed_decision_fails_everywhere(three: list[Hosts]) -> None:
    def fail(_: list[Any]) -> None:
        raise ValueError("no")

    first, *others = on_all(three, lambda host: host.lead("a", None, fail))
    assert isinstance(first, ValueError)
    assert [type(error) for error in others] == [PeerLost, PeerLost]
    assert "ValueError: no" in str(others[0])


def test_who_waits_for_a_host_that_is_gone_can_be_told_to_give_up(three: list[Hosts]) -> None:
    threading.Timer(0.2, three[1].abandon).start()
    started = time.monotonic()
    with pytest.raises(PeerLost, match="gave up"):
        three[1].lead("a", None, lambda given: given)
    assert time.monotonic() - started < 5


def test_the_board_shows_the_last_post_of_those_who_posted(three: list[Hosts]) -> None:
    three[1].post("b", {"x": 1})
    three[1].post("b", {"x": 2})
    assert three[0].posted("b") == {1: {"x": 2}}
    assert three[1].posted("b") == {}


def test_alone_everything_is_decided_on_the_spot() -> None:
    assert ALONE.lead("a", 3, lambda given: given[0] + 1) == 4
    assert ALONE.posted("a") == {}


# ---- shares ---------------------------------------------------------------------------------------


def test_hosts_with_the_same_parts_are_one_feed() -> None:
    held = {0: {0, 1}, 1: {0, 1}, 2: {2, 3}, 3: {2, 3}}
    shares = [_share(held, host, 4) for host in range(4)]
    assert [share.feed for share in shares] == [0, 0, 1, 1]
    assert [share.leads for share in shares] == [True, False, True, False]
    assert {share.num_feeds for share in shares} == {2}
    assert shares[2].own == (2, 3)


@pytest.mark.parametrize("held", [{0: {0, 1}, 1: {1, 2}}, {0: {0}, 1: {1, 2}}])
def test_parts_that_overlap_or_are_unequally_many_are_refused(held: dict[int, set[int]]) -> None:
    with pytest.raises(ConfigError, match="mesh"):
        _share(held, 0, 3)


@pytest.mark.parametrize(
    "shares",
    [
        [whole_share(4)],
        [Share(num_shards=4, own=(0, 1), num_feeds=2), Share(num_shards=4, own=(2, 3), feed=1, num_feeds=2)],
        [Share(num_shards=4, own=(1, 3), num_feeds=2), Share(num_shards=4, own=(0, 2), feed=1, num_feeds=2)],
    ],
)
def test_windows_of_all_hosts_are_the_batch(shares: list[Share]) -> None:
    """Each window of the batch is one host's, lies on one of its parts, and numbers go both ways."""
    seen: list[int] = []
    for share in shares:
        local = np.arange(share.num_own(12))
        windows = share.global_windows(local)
        assert set((windows % 4).tolist()) <= set(share.own)
        assert share.local_windows(windows).tolist() == local.tolist()
        seen += windows.tolist()
        others = np.setdiff1d(np.arange(12), windows)
        assert (share.local_windows(others) == -1).all()
    assert sorted(seen) == list(range(12))


# ---- meeting --------------------------------------------------------------------------------------

LIST = {"TUNIX_NUM_HOSTS": "2", "TUNIX_COORDINATOR": "10.0.0.1:99", "TUNIX_HOST_INDEX": "1"}
JOB_SET = {"TUNIX_NUM_HOSTS": "4", "JOBSET_NAME": "run", "REPLICATED_JOB_NAME": "learner", "JOB_COMPLETION_INDEX": "3"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, None),
        ({"TUNIX_NUM_HOSTS": "1"}, None),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, None),
        (LIST, Meeting(coordinator="10.0.0.1:99", num_hosts=2, index=1)),
        (JOB_SET, Meeting(coordinator="run-learner-0-0.run:8476", num_hosts=4, index=3)),
        (
            {"TUNIX_NUM_HOSTS": "auto", "TUNIX_PEER_TIMEOUT_SECONDS": "7"},
            Meeting(detected=True, peer_timeout_seconds=7),
        ),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, Meeting(detected=True)),
    ],
)
def test_where_the_hosts_meet(environ: dict[str, str], expected: Meeting | None) -> None:
    assert meeting_of(environ) == expected


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"TUNIX_NUM_HOSTS": ""}, "TUNIX_NUM_HOSTS"),
        ({"TUNIX_NUM_HOSTS": "two"}, "TUNIX_NUM_HOSTS"),
        ({"TUNIX_COORDINATOR": "10.0.0.1"}, "TUNIX_COORDINATOR"),
        ({"TUNIX_HOST_INDEX": "2"}, "TUNIX_HOST_INDEX"),
        ({"TUNIX_HOST_INDEX": ""}, "TUNIX_HOST_INDEX"),
        ({"TUNIX_PEER_TIMEOUT_SECONDS": "0"}, "TUNIX_PEER_TIMEOUT_SECONDS"),
    ],
)
def test_half_a_description_is_refused(change: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as refused:
        meeting_of(LIST | change)
    assert refused.value.field == field


def test_the_order_of_mesh_axes_is_no_matter_of_hashes() -> None:
    """A set of names iterates in another order in every process; two hosts then wait for each other's collectives."""
    parallel = Parallel(data=2, fsdp=2, stage=2, tensor=2)
    for axes in itertools.permutations(("tensor", "stage", "data")):
        assert parallel.active(axes) == ("data", "stage", "tensor")
