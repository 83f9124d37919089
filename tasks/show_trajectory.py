"""One trajectory token by token: `python -m tasks.show_trajectory --run URI --id ID`."""

from __future__ import annotations

import argparse
import sys

from tunix_core.errors import TunixError, report_error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--id", required=True)
    arguments = parser.parse_args(argv)
    from tunix_core.console.trajectories import show_tokens
    from tunix_core.pretrained.loading import load_tokenizer
    from tunix_core.storage.run_directory import read_run
    from tunix_core.storage.store import open_store

    try:
        store = open_store(arguments.run)
        config, _ = read_run(store)
        show_tokens(store, arguments.id, load_tokenizer(config.model))
    except TunixError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
