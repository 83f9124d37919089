from tunix_core.actor.groups import EPISODE_ATTEMPTS, GroupBook
from tunix_core.actor.session import EpisodeFailed
from tunix_core.storage.task_blocks import TaskBlock

BLOCK = TaskBlock(epoch=2, block=1, start=4, stop=6)
FAILURE = EpisodeFailed("environment_timeout", "scripted")


class Outcome:
    """Stands for a trajectory: the book looks at the reward only."""

    reward = 1.0


def book_with_group(task: int = 4) -> GroupBook:
    book = GroupBook(group_size=3, run_seed=0)
    book.open_group(BLOCK, task)
    return book


def test_members_share_the_task_and_differ_in_id() -> None:
    specs = list(book_with_group().waiting)
    assert len({spec.task_seed for spec in specs}) == 1
    assert [spec.episode_id for spec in specs] == [f"00000002-00000004-{i:03d}" for i in range(3)]


def test_a_group_closes_with_its_last_member() -> None:
    book = book_with_group()
    specs = [book.waiting.popleft() for _ in range(3)]
    assert book.take(specs[1], Outcome()) is None
    assert book.take(specs[0], Outcome()) is None
    group = book.take(specs[2], Outcome())
    assert group is not None
    assert len(group.trajectories) == 3
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
    book.take(book.waiting.popleft(), Outcome())
    group = book.take(book.waiting.popleft(), Outcome())
    assert group is not None
    assert len(group.trajectories) == 2
    assert (group.size, book.num_lost_episodes, book.num_dropped_groups) == (3, 1, 0)


def test_a_group_without_a_baseline_is_dropped_and_counted() -> None:
    book = book_with_group()
    group = None
    while group is None:
        spec = book.waiting.popleft()
        group = book.take(spec, Outcome() if spec.member == 0 else FAILURE)
    assert len(group.trajectories) == 1
    assert book.num_dropped_groups == 1


def test_a_block_is_done_with_its_last_group() -> None:
    book = book_with_group(4)
    book.open_group(BLOCK, 5)
    groups = []
    while book.waiting:
        group = book.take(book.waiting.popleft(), Outcome())
        if group:
            groups.append(group)
    assert [book.settle(group) for group in groups] == [False, True]
