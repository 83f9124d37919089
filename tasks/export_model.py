"""Exports a policy version as a Hugging Face folder: `python -m tasks.export_model --run URI --to FOLDER`.

Adapters are merged into the weights here. The folder loads in `transformers` and in what reads its format.
"""

from __future__ import annotations

import argparse
import sys
import typing
from pathlib import Path

from tasks.entry import Task, run_task
from tasks.evaluate import choose_version
from tunix_core import paths
from tunix_core.errors import ConfigError
from tunix_core.storage.leases import leased
from tunix_core.storage.policies import PolicyStore


def _export(task: Task) -> None:
    from tunix_core.pretrained.exporting import export_version
    from tunix_core.pretrained.loading import PolicyLoader

    arguments, model = task.arguments, task.config.model
    if arguments.max_shard_bytes < 1:
        raise ConfigError("--max-shard-bytes", arguments.max_shard_bytes, "at least 1", "Leave it out for 5 GiB.")
    policies = PolicyStore(task.store)
    version = choose_version(policies, arguments.version)
    with leased(task.store, [paths.policy(version)], reader=task.process):
        names = export_version(
            arguments.to,
            PolicyLoader(policies, model),
            model,
            version,
            context_tokens=task.config.actor.context_tokens,
            dtype=arguments.dtype,
            max_shard_bytes=arguments.max_shard_bytes,
        )
    task.log(f"version {version} in {arguments.to}: {', '.join(names)}")


def _configure(parser: argparse.ArgumentParser) -> None:
    from tunix_core.pretrained.exporting import ExportDtype

    parser.add_argument("--version", default="last", help="first, last or a number (%(default)s)")
    parser.add_argument("--to", type=Path, required=True, help="a missing or an empty folder")
    parser.add_argument("--dtype", choices=typing.get_args(ExportDtype), default="float32", help="(%(default)s)")
    parser.add_argument("--max-shard-bytes", type=int, default=5 * 2**30, help="split above it (%(default)s)")


def main(argv: list[str] | None = None) -> int:
    return run_task("export_model", _export, argv, configure=_configure)


if __name__ == "__main__":
    sys.exit(main())
