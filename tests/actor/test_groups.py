import dataclasses

from tests.support.trajectories import make_trajectory
from tunix_core.actor.episodes import EpisodeFailed
from tunix_core.actor.groups import EPISODE_ATTEMPTS, MAX_KINDS, Group, GroupBook, Outgoing
from tunix_core.storage.task_blocks import TaskBlock

BLOCK = TaskBlock(epoch=2, block=1, start=4, stop=6)
FAILURE = EpisodeFailed("environment_timeout", "scripted")


EPISODE = [make_trajectory(1, reward=1.0, fork_index=fork) for fork in range(2)]
"""One that forked: it counts once."""


def book_with_group(task: int = 4) -> GroupBook:
    book = GroupBook(group_size=3, run_seed=0, group_seconds=10.0)
    book.open_group(BLOCK, task, 100.0)
    return book


def test_members_share_the_task_and_differ_in_id() -> None:
    specs = list(book_with_group().waiting)
    assert len({spec.task_seed for spec in specs}) == 1
    assert [spec.episode_id for spec in specs] == [f"00000002-00000004-{i:03d}" for i in range(3)]


def test_a_group_closes_with_its_last_member() -> None:
    book = book_with_group()
    specs = [book.waiting.popleft() for _ in range(3)]
    assert book.take(specs[1], EPISODE) is None
    assert book.take(specs[0], EPISODE) is None
    group = book.take(specs[2], EPISODE)
    assert group is not None
    assert len(group.episodes) == 3
    assert book.num_open == 0


def test_a_failed_attempt_is_repeated_with_another_attempt_number_and_counted() -> None:
    book = book_with_group()
    spec = book.waiting.popleft()
    assert book.take(spec, FAILURE) is None
    again = book.waiting[0]
    assert (again.episode_id, again.attempt) == (spec.episode_id, 1)
    assert book.failures == {"environment_timeout": 1}
    assert book.num_lost_episodes == 0


def test_a_member_given_up_leaves_its_group_smaller() -> None:
    book = book_with_group()
    for _ in range(EPISODE_ATTEMPTS):
        assert book.take(book.waiting.popleft(), FAILURE) is None
    book.take(book.waiting.popleft(), EPISODE)
    group = book.take(book.waiting.popleft(), EPISODE)
    assert group is not None
    assert len(group.episodes) == 2
    assert (group.size, book.num_lost_episodes, book.num_dropped_groups) == (3, 1, 0)


def test_a_group_without_a_baseline_is_dropped_and_counted() -> None:
    book = book_with_group()
    group = None
    while group is None:
        spec = book.waiting.popleft()
        group = book.take(spec, EPISODE if spec.member == 0 else FAILURE)
    assert len(group.episodes) == 1
    assert book.num_dropped_groups == 1


def test_a_block_is_done_with_its_last_group() -> None:
    book = book_with_group(4)
    book.open_group(BLOCK, 5, 100.0)
    groups = []
    while book.waiting:
        group = book.take(book.waiting.popleft(), EPISODE)
        if group:
            groups.append(group)
    assert [book.settle(group) for group in groups] == [False, True]


def test_a_failure_that_no_repetition_mends_is_not_repeated() -> None:
    book = book_with_group()
    book.take(book.waiting.popleft(), EpisodeFailed("prompt_too_long", "scripted", retryable=False))
    assert len(book.waiting) == 2
    assert book.num_lost_episodes == 1


def test_a_group_closes_at_its_deadline_with_what_it_has() -> None:
    book = book_with_group()
    specs = [book.waiting.popleft() for _ in range(2)]
    book.take(specs[0], EPISODE)
    book.take(specs[1], EPISODE)
    assert book.expire(109.9) == []
    (group,) = book.expire(110.0)
    assert (len(group.episodes), group.num_lost, group.is_worth_writing) == (2, 1, True)
    assert not book.waiting, "the member that never began is counted, not played"
    assert book.failures == {"group_timeout": 1}
    assert (book.num_open, book.num_lost_episodes, book.num_late_groups, book.num_dropped_groups) == (0, 1, 1, 0)
    assert book.num_episodes == 2
    assert len(group.trajectories) == 4
    # One that ended in the same moment changes nothing any more.
    assert book.take(dataclasses.replace(specs[0], member=2), EPISODE) is None
    assert book.num_episodes == 2


def test_a_late_group_without_a_baseline_is_dropped_and_others_play_on() -> None:
    book = book_with_group()
    book.open_group(BLOCK, 5, 105.0)
    book.take(book.waiting.popleft(), EPISODE)
    (group,) = book.expire(110.0)
    assert not group.is_worth_writing
    assert (book.num_dropped_groups, book.num_dropped_in_a_row) == (1, 1)
    assert {spec.task_id for spec in book.waiting} == {"5"}
    while book.waiting:
        book.take(book.waiting.popleft(), EPISODE)
    assert book.num_dropped_in_a_row == 0


def test_kinds_without_end_are_counted_together() -> None:
    book = book_with_group()
    spec = book.waiting[0]
    for number in range(MAX_KINDS + 5):
        book.take(spec, EpisodeFailed(f"kind {number}", "scripted"))
    assert len(book.failures) == MAX_KINDS + 1
    assert book.failures["other"] == 5


def group_of(num_bytes: int) -> Group:
    row = make_trajectory(0, num_tokens=12, messages="x" * (num_bytes - 12 * 13))
    return Group("g", BLOCK, 3, 0.0, [[row]])


def test_shards_are_cut_by_number_by_size_and_by_time() -> None:
    outgoing = Outgoing(max_groups=3, max_bytes=1000, flush_seconds=5.0)
    assert outgoing.take(0.0) == []
    for moment in range(4):
        outgoing.add(group_of(200), float(moment))
    assert len(outgoing.take(3.0)) == 3, "three groups are a shard"
    assert outgoing.take(7.9) == []
    assert len(outgoing.take(8.0)) == 1, "the rest has waited five seconds"
    for size in (600, 600, 5000, 200):
        outgoing.add(group_of(size), 10.0)
    assert [len(outgoing.take(10.0)) for _ in range(4)] == [1, 1, 1, 0], "over 1000 bytes a group is alone"
    assert len(outgoing.take_rest()) == 1
    assert outgoing.take_rest() == []
