"""Exit codes: each leaf of the error tree is either worth a retry or not, and never both."""

from tunix_core import errors


def test_every_leaf_has_one_verdict_per_exit_code() -> None:
    verdicts: dict[int, set[bool]] = {}
    for cls in errors._leaves(errors.TunixError):
        if cls.exit_code != errors.EXIT_UNEXPECTED:
            verdicts.setdefault(cls.exit_code, set()).add(cls.retryable)
    assert all(len(v) == 1 for v in verdicts.values()), verdicts


def test_signals_and_lost_processes_are_retryable() -> None:
    for code in (None, -9, 137, errors.EXIT_UNEXPECTED, errors.EXIT_FENCED, errors.EXIT_STORE, errors.EXIT_INTERRUPTED):
        assert errors.is_retryable(code)


def test_bad_configuration_data_and_divergence_are_fatal() -> None:
    for code in (errors.EXIT_CONFIG, errors.EXIT_DATA, errors.EXIT_DIVERGED, errors.EXIT_SUCCESS):
        assert not errors.is_retryable(code)


def test_config_error_says_field_value_range_and_remedy() -> None:
    text = str(errors.ConfigError("a.b", 3, "0 to 2", "Lower it."))
    assert text == "a.b: received 3, accepted 0 to 2. Lower it."


def test_missing_object_reads_like_a_sentence() -> None:
    assert str(errors.ObjectMissing("no object k")) == "no object k"
