"""A light component of a run that plays a script: what a learner or an actor looks like from outside.

`python -m tests.support.scripted_component --run URI --process NAME --attempt N --script JSON`.
It counts steps, resuming after the last one it recorded (as a learner resumes from a checkpoint),
beats its heart, and ends as told:

seconds     of work in all (default 1); each step takes 0.1
crash_at    attempt -> step at which it kills itself with SIGKILL, or [step, exit code]
ends_run    write the stop object `completed` when the work is done
waits       go on until the stop object appears
ignores     signals to ignore, such as ["SIGTERM"]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time

from tunix_core.errors import EXIT_INTERRUPTED
from tunix_core.storage import control
from tunix_core.storage.store import open_store, read_json_or_none, write_json


def main() -> int:
    parser = argparse.ArgumentParser()
    for option in ("--run", "--process", "--script"):
        parser.add_argument(option, required=True)
    parser.add_argument("--attempt", type=int, required=True)
    options = parser.parse_args()
    script = json.loads(options.script)
    store = open_store(options.run)
    stopped = False

    def on_term(_signum: int, _frame: object) -> None:
        nonlocal stopped
        stopped = True

    signal.signal(signal.SIGTERM, on_term)
    for name in script.get("ignores", []):
        signal.signal(getattr(signal, name), signal.SIG_IGN)
    progress_key = f"scripted/{options.process}.json"
    lives_key = f"scripted/{options.process}-lives.json"
    state = read_json_or_none(store, progress_key) or {"steps": 0}
    lives = (read_json_or_none(store, lives_key) or {"lives": 0})["lives"] + 1
    write_json(store, lives_key, {"lives": lives, "pid": os.getpid(), "cpus": sorted(os.sched_getaffinity(0))})
    num_steps = int(script.get("seconds", 1) * 10)
    print(f"{options.process} attempt {options.attempt} life {lives} from step {state['steps']}", flush=True)
    while True:
        stop = control.read_stop(store)
        if stopped or (stop is not None and not script.get("ends_run")):
            return 0 if stop is not None and not stop.failed else EXIT_INTERRUPTED
        if state["steps"] >= num_steps and not script.get("waits"):
            break
        state["steps"] += 1
        write_json(store, progress_key, state)
        control.write_heartbeat(
            store, options.process, {"clock": state["steps"], "num_steps": num_steps, "reward": 0.5}
        )
        crash = script.get("crash_at", {}).get(str(lives))
        if isinstance(crash, list) and state["steps"] == crash[0]:
            print("crashing on purpose", flush=True)
            return int(crash[1])
        if crash == state["steps"]:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.1)
    if script.get("ends_run"):
        control.request_stop(store, reason="completed", source=options.process, failed=False)
    print("done", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
