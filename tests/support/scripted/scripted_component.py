"""A light component of a run that plays a script: what a learner or an actor looks like from outside.

`python -m tests.support.scripted.scripted_component --run URI --process NAME --attempt N [--script JSON]`.
Without `--script`, the file that TUNIX_TEST_SCRIPTS names has one per process. It counts steps,
resuming after the last one it recorded (as a learner resumes from a checkpoint), beats its heart,
and ends as told:

seconds        of work in all (default 1); each step takes 0.1
crash_at       life -> step at which it kills itself with SIGKILL, or [step, exit code]
waits          go on until the stop object appears
ignores_stop   work on whatever the stop object says
ignores        signals to ignore, such as ["SIGTERM"]
completes_run  write the stop object `completed` when the work is done
publishes      policy version to publish at the end
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from tunix_core.errors import EXIT_INTERRUPTED
from tunix_core.storage import control
from tunix_core.storage.policies import PolicyStore
from tunix_core.storage.store import ObjectStore, open_store, read_json_or_none, write_json


def parse() -> tuple[argparse.Namespace, dict[str, Any]]:
    parser = argparse.ArgumentParser()
    for option in ("--run", "--process"):
        parser.add_argument(option, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--script", default=None)
    options = parser.parse_args()
    if options.script is not None:
        return options, json.loads(options.script)
    scripts = json.loads(Path(os.environ["TUNIX_TEST_SCRIPTS"]).read_text())
    seed = read_json_or_none(open_store(options.run), "run.json")["config"]["seed"]
    return options, scripts[str(seed)].get(options.process, {})


def begin_life(store: ObjectStore, process: str) -> int:
    key = f"scripted/{process}-lives.json"
    lives = (read_json_or_none(store, key) or {"lives": 0})["lives"] + 1
    group = Path("/proc/self/autogroup")
    life = {
        "lives": lives,
        "pid": os.getpid(),
        "cpus": sorted(os.sched_getaffinity(0)),
        "idle": os.sched_getscheduler(0) == os.SCHED_IDLE,
        "autogroup": group.read_text().strip() if group.exists() else "",
        "xla_threads": os.environ.get("NPROC"),
    }
    write_json(store, key, life)
    return int(lives)


def finish(store: ObjectStore, process: str, script: dict[str, Any]) -> int:
    if "publishes" in script:
        tensors = {"w": np.zeros(2, np.float32)}
        policies = PolicyStore(store)
        current = policies.current()
        policies.publish(
            script["publishes"],
            tensors,
            config={},
            parent=None if current is None else current.version,
            publisher=process,
            gate={},
        )
    if script.get("completes_run"):
        control.request_stop(store, reason="completed", source=process, failed=False)
    print("done", flush=True)
    return 0


def main() -> int:
    options, script = parse()
    store = open_store(options.run)
    stopped = False

    def on_term(_signum: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, on_term)
    for name in script.get("ignores", []):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    state = read_json_or_none(store, f"scripted/{options.process}.json") or {"steps": 0}
    life = begin_life(store, options.process)
    crash = script.get("crash_at", {}).get(str(life))
    num_steps = int(script.get("seconds", 1) * 10)
    print(f"{options.process} attempt {options.attempt} life {life} from step {state['steps']}", flush=True)
    while script.get("waits") or state["steps"] < num_steps:
        stop = None if script.get("ignores_stop") else control.read_stop(store)
        if stop is not None and not stop.failed:
            break
        if stopped or stop is not None:
            return EXIT_INTERRUPTED
        state["steps"] += 1
        write_json(store, f"scripted/{options.process}.json", state)
        progress = {"clock": state["steps"], "num_steps": num_steps, "reward_mean": 0.5}
        control.write_heartbeat(store, options.process, progress)
        if isinstance(crash, list) and state["steps"] == crash[0]:
            print("crashing on purpose", flush=True)
            return int(crash[1])
        if crash == state["steps"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    return finish(store, options.process, script)


if __name__ == "__main__":
    sys.exit(main())
