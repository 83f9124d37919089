"""Imports a pretrained model: `python -m tasks.import_model --source FOLDER_OR_GGUF --to URI`.

Verifies every tensor, stores the files under the URI, and prints the recipe's [model] section.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from tunix_core.errors import TunixError, report_error


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tasks.import_model", description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a Hugging Face folder, or a .gguf file")
    parser.add_argument("--to", required=True, help="URI of the model folder, new or holding the same model")
    arguments = parser.parse_args(argv)
    from tunix_core.pretrained.importing import import_model
    from tunix_core.pretrained.model_folder import model_section
    from tunix_core.storage.store import open_store

    try:
        folder = import_model(arguments.source, open_store(arguments.to))
        print(f"{folder.store.uri}: {', '.join(folder.manifest['files'])}\nsha256 {folder.sha256}\n")
        print(model_section(folder.model_config()) + f'pretrained_uri = "{folder.store.uri}"')
    except TunixError as error:
        return report_error(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
