"""Supervised training from files: conversations, successes of a run, or preferences between answers.

    python -m tasks.fine_tune sft --data chats.jsonl --recipe lookup --to URI
    python -m tasks.fine_tune sft --data RUN_URI --recipe lookup --to URI           distils that run's successes
    python -m tasks.fine_tune dpo --data pairs.jsonl --recipe lookup --set start_uri=RUN_URI/policies/00000000 --to URI

Writes a run directory whose policy version 0 is the result. The same command again is fine, also after it was stopped;
other data or another configuration in the same directory is refused.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.entry import Task, run_task
from tasks.warm_start import publish_start
from tunix_core import paths
from tunix_core.config import RunConfig
from tunix_core.config_loading import load_recipe, parse_overrides
from tunix_core.errors import ConfigError, Interrupted, TunixError, report_error
from tunix_core.metrics import MetricRecorder
from tunix_core.storage.control import write_heartbeat
from tunix_core.storage.metrics_files import MetricFiles
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.run_directory import create_run, name_from_uri, read_run
from tunix_core.storage.store import open_store

if TYPE_CHECKING:
    from tunix_core.learner.examples import Example
    from tunix_core.learner.fine_tuning import Split
    from tunix_core.models.parameters import Params
    from tunix_core.tokenizer import Tokenizer


class _Source(NamedTuple):
    """One --data."""

    examples: list[Example]
    facts: dict[str, Any]
    """For `run.json`."""


def _read_source(data: str, method: str, min_reward: float, config: RunConfig, tokenizer: Tokenizer) -> _Source:
    from tunix_core.data import conversations, successes
    from tunix_core.environments.demonstrations import Demonstration
    from tunix_core.learner.examples import conversation_example, preference_example
    from tunix_core.pretrained.loading import same_tokenizer

    if data.endswith(".jsonl"):
        path = Path(data)
        if method == "dpo":
            examples = [preference_example(tokenizer, pair) for pair in conversations.read_preferences(path)]
        else:
            examples = [conversation_example(tokenizer, one) for one in conversations.read_conversations(path)]
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        return _Source(examples, {"name": path.name, "sha256": sha256, "num_examples": len(examples)})
    if method == "dpo":
        raise ConfigError("--data", data, "FILE.jsonl", "Trajectories are no pairs of answers.")
    if data.endswith(".parquet"):
        name, shards = Path(data).name, successes.shards_of_file(Path(data), vocab_size=config.model.vocab_size)
    else:
        store = open_store(data)
        theirs, _ = read_run(store)
        if not same_tokenizer(config.model, theirs.model):
            raise ConfigError(
                "--data", data, "a run with this recipe's tokenizer", "Its ids mean something else to this model."
            )
        name, shards = store.uri, successes.shards_of_run(store, vocab_size=config.model.vocab_size)
    found = successes.read_successes(shards, min_reward=min_reward)
    examples = [(Demonstration(tokens, mask),) for tokens, mask in found.rows]
    return _Source(
        examples, {"name": name, "sha256": found.sha256, "num_examples": len(examples), "left_out": found.left_out}
    )


def _start(config: RunConfig, method: str) -> tuple[Params, Params | None]:
    """What is trained, on the host, and the frozen base under it where that is adapters."""
    import jax
    import numpy as np

    from tunix_core.learner.supervised import start_parameters
    from tunix_core.learner.weights import load_start
    from tunix_core.pretrained.loading import pretrained_parameters

    if config.start_uri and config.model.lora_rank and method == "dpo":
        raise ConfigError(
            "start_uri",
            config.start_uri,
            "none for dpo with model.lora_rank",
            "Its reference is the base: make trained adapters a base with tunixctl export-model and import-model.",
        )
    pretrained = pretrained_parameters(config.model)
    if config.start_uri:
        start, base = load_start(config)[0], pretrained if config.model.lora_rank else None
    else:
        start, base = start_parameters(config, pretrained)
    return jax.tree.map(np.asarray, start), base


def _train(method: str, data: Split, task: Task) -> None:
    if PolicyStore(task.store).current() is not None:
        task.log("policy version 0 is published; nothing to do")
        return
    from tunix_core.distributed.compilation import enable_compilation_cache
    from tunix_core.learner.fine_tuning import fine_tune, preference_optimization, supervised_fine_tuning

    enable_compilation_cache()
    config = task.config
    started = time.monotonic()
    recorder = MetricRecorder(task.process)
    files = MetricFiles(task.store, recorder, incarnation=task.incarnation)

    def record(metrics: Any) -> None:
        recorder.record(**metrics)
        if task.interrupted.is_set():
            files.flush()
            raise Interrupted(
                f"{method}: stopped by a signal after step {metrics['step']}; the same command starts over"
            )

    def report(progress: dict[str, Any]) -> None:
        files.flush()
        write_heartbeat(task.store, task.process, {**progress, "seconds": round(time.monotonic() - started, 1)})
        shown = ("loss", "held_out_loss", "pair_accuracy", "pair_margin", "held_out_pair_accuracy")
        figures = "".join(f" {name} {progress[name]:.4f}" for name in shown if name in progress)
        task.log("{}: step {num_steps} of {total_steps}{}".format(method, figures, **progress))

    start, base = _start(config, method)
    how = (supervised_fine_tuning if method == "sft" else preference_optimization)(config)
    result = fine_tune(config, how, data, start=start, base=base, record=record, report=report)
    counts = {"num_examples": len(data.train), "num_held_out": len(data.held_out), "num_overlong": data.num_overlong}
    publish_start(task, result.params, {**result.figures, **counts, "num_steps": result.num_steps})
    task.log(f"{method}: {task.store.uri}/{paths.policy(0).rstrip('/')}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.fine_tune", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("method", choices=("sft", "dpo"), help="cross entropy, or direct preference optimisation")
    parser.add_argument(
        "--data",
        action="append",
        required=True,
        help="FILE.jsonl; sft also: a shard FILE.parquet, a run URI; repeatable",
    )
    parser.add_argument("--recipe", default="lookup", help="a shipped recipe or a .toml file (%(default)s)")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.FIELD=VALUE", help="repeatable")
    parser.add_argument("--to", required=True, help="URI of the run directory to write")
    parser.add_argument("--name", help="name of the run; by default the last part of its URI")
    parser.add_argument("--min-reward", type=float, help="of trajectories taken from shards (1)")
    return parser


def main(argv: list[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        from tunix_core.learner.fine_tuning import split
        from tunix_core.pretrained.loading import load_tokenizer

        if arguments.min_reward is not None and all(data.endswith(".jsonl") for data in arguments.data):
            raise ConfigError(
                "--min-reward", arguments.min_reward, "none without shards", "Conversations have no reward."
            )
        min_reward = 1.0 if arguments.min_reward is None else arguments.min_reward
        config = load_recipe(arguments.recipe, parse_overrides(arguments.set))
        store = open_store(arguments.to)
        name = paths.name("--name", arguments.name or name_from_uri(store.uri))
        tokenizer = load_tokenizer(config.model)
        sources = [_read_source(data, arguments.method, min_reward, config, tokenizer) for data in arguments.data]
        data = split([example for source in sources for example in source.examples], config)
        for source in sources:
            left_out = "".join(f", {count} {why}" for why, count in source.facts.get("left_out", {}).items() if count)
            print(f"{source.facts['name']}: {len(source.examples)} examples{left_out}", flush=True)
        print(
            f"{len(data.train)} to train on, {len(data.held_out)} held out, {data.num_overlong} over "
            f"learner.window_tokens = {config.learner.window_tokens} and left out",
            flush=True,
        )
        facts = {"method": arguments.method, "min_reward": min_reward, "data": [source.facts for source in sources]}
        create_run(store, config, run_id=name, extra={"fine_tune": facts})
    except TunixError as error:
        return report_error(error)
    return run_task(
        "fine_tune", functools.partial(_train, arguments.method, data), ["--run", arguments.to], process="fine_tune"
    )


if __name__ == "__main__":
    sys.exit(main())
