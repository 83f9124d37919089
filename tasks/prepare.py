"""Opens a run without Airflow: writes `run.json`, from which every process of the run starts.

    python -m tasks.prepare --run URI --recipe lookup --set learner.num_steps=20

The same run again is fine; another configuration in the same directory is refused.
"""

from __future__ import annotations

import argparse
import sys

from tunix_core import paths
from tunix_core.config_loading import load_recipe, parse_overrides
from tunix_core.errors import TunixError, report_error
from tunix_core.storage.run_directory import create_run, name_from_uri
from tunix_core.storage.store import open_store


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks.prepare", description=__doc__)
    parser.add_argument("--run", required=True, help="URI of the run directory")
    parser.add_argument("--recipe", default="lookup", help="a shipped recipe or a .toml file (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="repeatable")
    parser.add_argument("--name", help="name of the run; by default the last part of its URI")
    arguments = parser.parse_args(argv)
    try:
        store = open_store(arguments.run)
        name = paths.name("--name", arguments.name or name_from_uri(store.uri))
        create_run(store, load_recipe(arguments.recipe, parse_overrides(arguments.set)), run_id=name)
    except TunixError as error:
        return report_error(error)
    print(f"{store.uri}: {paths.RUN} is there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
