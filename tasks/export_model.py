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
from tunix_core.errors import ConfigError
from tunix_core.storage.policies import PolicyStore


def _export(task: Task) -> None:
    from tunix_core.models import huggingface
    from tunix_core.models.parameters import flatten_parameters
    from tunix_core.pretrained.exporting import export_model
    from tunix_core.pretrained.loading import PolicyLoader, open_pretrained

    arguments, model = task.arguments, task.config.model
    if arguments.max_shard_bytes < 1:
        raise ConfigError("--max-shard-bytes", arguments.max_shard_bytes, "at least 1", "Leave it out for 5 GiB.")
    policies = PolicyStore(task.store)
    version = choose_version(policies, arguments.version)
    params = PolicyLoader(policies, model).load(version)
    folder = open_pretrained(model)
    names = export_model(
        arguments.to,
        model,
        flatten_parameters(params),
        hf_config=folder.hf_config()
        if folder
        else huggingface.hf_config(model, context_tokens=task.config.actor.context_tokens),
        texts=folder.texts() if folder else {},
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
