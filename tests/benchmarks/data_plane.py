"""The data plane: shards against other formats and the machine's limits, queries, ingestion, the cost of a poll.

    python -m tests.benchmarks.data_plane [--part NAME …] [--quick] [--json FILE] [--check]

Everything is measured in this run. `--quick` takes a tenth of the rows and of the old shards.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from tests.benchmarks import ingest_rate, poll_cost, shard_encodings, shard_formats, shard_queries
from tests.benchmarks.parts import Part, run_parts

PARTS = {
    "formats": Part(shard_formats.measure, shard_formats.report),
    "encodings": Part(shard_encodings.measure, shard_encodings.report),
    "query": Part(shard_queries.measure, shard_queries.report),
    "ingest": Part(ingest_rate.measure, ingest_rate.report),
    "poll": Part(poll_cost.measure, poll_cost.report),
}


def main(argv: list[str] | None = None, parts: Mapping[str, Part] = PARTS) -> int:
    return run_parts("data_plane", parts, argv)


if __name__ == "__main__":
    sys.exit(main())
