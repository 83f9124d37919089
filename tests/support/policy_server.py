"""A server of vLLM's and SGLang's dialects over our own decoder: `python -m tests.support.policy_server --folder F --port P`.

It really loads Hugging Face folders, really decodes with them, and really forgets them when it "restarts".
`POST /faults` with a JSON object sets what goes wrong next: a number is how often, true is for good.

    status: [code, times, retry_after]   answer generation with this code
    stall, reset, truncate               no answer; a reset connection; half a body
    lengths, nan, vocab                  one log probability too few; NaN; a token out of the vocabulary
    raw                                  log probabilities before the temperature
    idle_reload, failing_reload          reloads that change nothing; that fail
    key                                  wanted in each request
    step_seconds                         pause between dispatches
    dispatches                           only so many, until it is paused
    restart: seconds                     all connections break, nothing answers for so long, then the first weights again
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from aiohttp import web

from tunix_core.actor.dispatch import device_parameters
from tunix_core.actor.engine import Engine
from tunix_core.actor.policy_engine import Request
from tunix_core.actor.sampling import request_key
from tunix_core.config import ActorConfig, ModelConfig
from tunix_core.models import decoder, huggingface
from tunix_core.models.parameters import unflatten_parameters
from tunix_core.storage import multifile

NAME = "policy"
NO_STOP = -1
"""The engine ends no turn itself; the server cuts at each request's own stop ids."""


def read_folder(folder: Path) -> tuple[ModelConfig, Any]:
    config = huggingface.model_config(json.loads((folder / "config.json").read_text()))
    tensors: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= multifile.decode_tensors(path.read_bytes(), path.name)
    return config, unflatten_parameters(config, huggingface.from_hf(config, tensors, tensors.__getitem__))


@functools.partial(jax.jit, static_argnums=1)
def _scores(params: Any, model: ModelConfig, tokens: jax.Array, length: jax.Array) -> jax.Array:
    """Log probabilities `[C, V]` at temperature 1 of what follows each of `tokens [1, C]`."""
    positions = jnp.arange(tokens.shape[1])[None]
    segments = (positions < length).astype(jnp.int32)
    hidden = decoder.hidden_states(params, model, tokens, positions, segments)
    return jax.nn.log_softmax(decoder.head_logits(decoder.head_weight(params, model), model, hidden[0]))


@dataclasses.dataclass
class Job:
    """A request under way in a slot of the engine."""

    slot: int
    start: int
    max_tokens: int
    stops: frozenset[int]
    done: asyncio.Future[bool]  # whether it was aborted

    def cut(self, tokens: Sequence[int]) -> int:
        """How many of the drawn tokens are its answer; 0 while it goes on."""
        for number, token in enumerate(tokens[: self.max_tokens], 1):
            if token in self.stops:
                return number
        return self.max_tokens if len(tokens) >= self.max_tokens else 0


class PolicyServer:
    """One model, loaded from a folder and reloaded by request."""

    def __init__(self, folder: Path, context_tokens: int, num_slots: int) -> None:
        self._first = folder
        self._context = context_tokens
        self.model, params = read_folder(folder)
        self._actor = ActorConfig(
            num_slots=num_slots,
            context_tokens=context_tokens,
            max_turn_tokens=context_tokens,
            decode_rows=num_slots,
            decode_steps=2,
            prefill_rows=4,
            prefill_tokens=8,
            swap_policy="immediate",
        )
        self._engine = Engine(self.model, self._actor, device_parameters(params), 0, end_of_turn=NO_STOP)
        self._params = params
        self.faults: dict[str, Any] = {}
        self.seen: dict[str, int] = {}
        self._jobs: list[Job] = []
        self._slots = asyncio.Semaphore(num_slots)
        self._ready = asyncio.Event()
        self._resumed = asyncio.Event()
        self._resumed.set()
        self.version = "default"
        self._scores(np.zeros(2, np.int32))  # compiled before the first request

    # -- the model -----------------------------------------------------------------------------

    def load(self, folder: Path) -> None:
        model, params = read_folder(folder)
        assert model == self.model, "another model"
        self._engine.swap(device_parameters(params), self._engine.version + 1)
        self._params = params

    def _scores(self, ids: np.ndarray) -> np.ndarray:
        padded = np.zeros((1, self._context), np.int32)
        padded[0, : len(ids)] = ids
        return np.asarray(_scores(self._params, self.model, padded, np.int32(len(ids))))[: len(ids)]

    async def decode_forever(self) -> None:
        while True:
            if not self._jobs:
                self._ready.clear()
                await self._ready.wait()
            await asyncio.sleep(self.faults.get("step_seconds", 0.0))
            if not self._engine.busy:
                continue
            if (left := self.faults.get("dispatches")) is not None:
                if left == 0:
                    await asyncio.sleep(0.01)
                    continue
                self.faults["dispatches"] = left - 1
            ended = {end.slot for end in await self._engine.advance()}
            for job in list(self._jobs):
                if job.cut(self._drawn(job)) or job.slot in ended:
                    self._finish(job, aborted=False)

    def _drawn(self, job: Job) -> list[int]:
        return self._engine.transcripts.tokens[
            job.slot, job.start : self._engine.transcripts.lengths[job.slot]
        ].tolist()

    def _finish(self, job: Job, *, aborted: bool) -> None:
        self._jobs.remove(job)
        if not job.done.done():
            job.done.set_result(aborted)

    async def generate(
        self, ids: list[int], *, max_tokens: int, temperature: float, seed: int, stops: Sequence[int]
    ) -> tuple[list[int], list[float], bool]:
        await self._resumed.wait()
        async with self._slots:
            slot = self._engine.acquire(Request(key=request_key("server", seed), temperature=temperature))
            job = Job(slot, len(ids), max_tokens, frozenset(stops), asyncio.get_running_loop().create_future())
            try:
                self._engine.begin_turn(slot, ids)
                self._jobs.append(job)
                self._ready.set()
                aborted = await job.done
                drawn = self._drawn(job)
                drawn = drawn[: job.cut(drawn) or len(drawn)]
                values = self._engine.transcripts.logprobs[slot, job.start : job.start + len(drawn)].tolist()
                if self.faults.get("raw"):
                    rows = self._scores(np.array([*ids, *drawn], np.int32))
                    values = [float(rows[job.start + i - 1, token]) for i, token in enumerate(drawn)]
                return drawn, values, aborted
            finally:
                if job in self._jobs:
                    self._jobs.remove(job)
                self._engine.release(slot)

    def probe(self, ids: list[int], temperature: float, top: int) -> tuple[list[float], dict[int, float]]:
        rows = self._scores(np.array(ids, np.int32))
        scale = 1.0 if self.faults.get("raw") else temperature
        last = np.asarray(jax.nn.log_softmax(rows[-1] / scale))
        best = np.argsort(-last)[:top]
        return [float(rows[i, token]) for i, token in enumerate(ids[1:])], {int(t): float(last[t]) for t in best}

    def abort_all(self) -> None:
        for job in list(self._jobs):
            self._finish(job, aborted=True)

    # -- faults --------------------------------------------------------------------------------

    def take(self, name: str) -> bool:
        """Whether a counted fault strikes now."""
        left = self.faults.get(name, 0)
        if left is True:
            return True
        self.faults[name] = max(0, left - 1)
        return left > 0

    async def set_faults(self, request: web.Request) -> web.Response:
        self.faults = await request.json()
        return web.json_response({"seen": self.seen})

    async def tell_faults(self, _request: web.Request) -> web.Response:
        return web.json_response(self.faults)

    @web.middleware
    async def guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.seen[request.path] = self.seen.get(request.path, 0) + 1
        key = self.faults.get("key")
        if request.path != "/faults" and key and request.headers.get("Authorization") != f"Bearer {key}":
            return web.json_response({"error": "unauthorized"}, status=401)
        if request.path not in ("/v1/completions", "/generate"):
            return await handler(request)
        code, times, retry_after = self.faults.get("status", (0, 0, ""))
        if times:
            self.faults["status"] = (code, times - 1, retry_after)
            headers = {"Retry-After": str(retry_after)} if retry_after else {}
            return web.json_response({"error": "too much"}, status=code, headers=headers)
        if self.take("stall"):
            await asyncio.sleep(3600)
        if self.take("reset"):
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        answer = await handler(request)
        if self.take("truncate"):
            cut = web.StreamResponse(
                headers={"Content-Length": str(len(answer.body)), "Content-Type": "application/json"}
            )
            await cut.prepare(request)
            await cut.write(answer.body[: len(answer.body) // 2])
            assert request.transport is not None
            request.transport.close()
            return cut
        return answer

    def spoil(self, tokens: list[int], values: list[float]) -> None:
        """What a broken server would make of an answer."""
        if self.take("lengths"):
            values.pop()
        if self.take("nan"):
            values[-1] = float("nan")
        if self.take("vocab"):
            tokens[-1] = self.model.vocab_size

    def reload(self, folder: str) -> None:
        if self.take("failing_reload"):
            raise web.HTTPInternalServerError(text="no such folder")
        if not self.take("idle_reload"):
            self.load(Path(folder))

    # -- vLLM ----------------------------------------------------------------------------------

    async def completions(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["return_token_ids"] is True
        assert body["ignore_eos"] is True
        if body["model"] != NAME:
            return web.json_response({"error": "no such model"}, status=404)
        ids, top = body["prompt"], body["logprobs"]
        choice: dict[str, Any] = {"index": 0, "text": "", "prompt_token_ids": ids, "prompt_logprobs": None}
        if body.get("prompt_logprobs") is not None:
            prompt, best = self.probe(ids, body["temperature"], top)
            choice["prompt_logprobs"] = [
                None, *({str(t): {"logprob": v, "rank": 1}} for t, v in zip(ids[1:], prompt, strict=True))
            ]  # fmt: skip
            token = next(iter(best))
            tokens, values, aborted = [token], [best[token]], False
            tops = [{f"token_id:{t}": v for t, v in best.items()}]
        else:
            tokens, values, aborted = await self.generate(
                ids, max_tokens=body["max_tokens"], temperature=body["temperature"], seed=body["seed"],
                stops=body["stop_token_ids"],
            )  # fmt: skip
            self.spoil(tokens, values)
            tops = [{f"token_id:{t}": v} for t, v in zip(tokens, values, strict=False)]
        stopped = bool(tokens) and tokens[-1] in body["stop_token_ids"]
        choice |= {
            "token_ids": tokens,
            "logprobs": {"tokens": [f"token_id:{t}" for t in tokens], "token_logprobs": values, "top_logprobs": tops},
            "finish_reason": "abort" if aborted else "stop" if stopped else "length",
        }
        return web.json_response({"model": NAME, "choices": [choice]})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        body = await request.json()
        assert body["method"] == "reload_weights"
        self.reload(body["kwargs"]["weights_path"])
        return web.json_response({"results": [None]})

    # -- SGLang --------------------------------------------------------------------------------

    async def sglang_generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        how, ids = body["sampling_params"], body["input_ids"]
        meta: dict[str, Any] = {"weight_version": self.version}
        if "logprob_start_len" in body:
            prompt, best = self.probe(ids, how["temperature"], body["top_logprobs_num"])
            token = next(iter(best))
            tokens, values, aborted = [token], [best[token]], False
            meta["input_token_logprobs"] = [[None, ids[0], None]] + [
                [v, t, None] for t, v in zip(ids[1:], prompt, strict=True)
            ]
            meta["output_top_logprobs"] = [[[v, t, None] for t, v in best.items()]]
        else:
            tokens, values, aborted = await self.generate(
                ids, max_tokens=how["max_new_tokens"], temperature=how["temperature"], seed=how["sampling_seed"],
                stops=how["stop_token_ids"],
            )  # fmt: skip
            self.spoil(tokens, values)
        stopped = bool(tokens) and tokens[-1] in how["stop_token_ids"]
        meta |= {
            "weight_version": self.version,
            "output_token_logprobs": [[v, t, None] for t, v in zip(tokens, values, strict=False)],
            "finish_reason": {"type": "abort" if aborted else "stop" if stopped else "length"},
        }
        return web.json_response({"text": "", "output_ids": tokens, "meta_info": meta})

    async def update_weights_from_disk(self, request: web.Request) -> web.Response:
        body = await request.json()
        try:
            self.reload(body["model_path"])
        except web.HTTPException as error:
            return web.json_response({"success": False, "message": error.text}, status=400)
        return web.json_response({"success": True, "message": "", "num_paused_requests": 0})

    # -- both ----------------------------------------------------------------------------------

    async def models(self, _request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": NAME, "max_model_len": self._context}]})

    async def tell_version(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def set_version(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["new_version"]
        return web.json_response({"success": True})

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode") or (await request.json())["mode"]
        assert mode == "abort"
        self._resumed.clear()
        self.abort_all()
        self.faults.pop("dispatches", None)
        return web.json_response({"status": "paused"})

    async def resume(self, _request: web.Request) -> web.Response:
        self._resumed.set()
        return web.json_response({"status": "resumed"})

    async def done(self, _request: web.Request) -> web.Response:
        return web.json_response({"success": True})

    def forget(self) -> None:
        """As a new process would be."""
        self._resumed.set()
        self.abort_all()
        self.version = "default"
        self.load(self._first)

    def application(self) -> web.Application:
        app = web.Application(middlewares=[self.guard], client_max_size=2**26)
        app.add_routes(
            [
                web.post("/faults", self.set_faults),
                web.get("/faults", self.tell_faults),
                web.get("/v1/models", self.models),
                web.post("/v1/completions", self.completions),
                web.get("/weight_info", self.tell_version),
                web.post("/collective_rpc", self.collective_rpc),
                web.post("/reset_prefix_cache", self.done),
                web.post("/pause", self.pause),
                web.post("/resume", self.resume),
                web.post("/generate", self.sglang_generate),
                web.get("/model_info", self.tell_version),
                web.post("/update_weights_from_disk", self.update_weights_from_disk),
                web.post("/pause_generation", self.pause),
                web.post("/continue_generation", self.resume),
                web.post("/update_weight_version", self.set_version),
            ]
        )
        return app


async def serve(server: PolicyServer, port: int) -> None:
    decoding = asyncio.ensure_future(server.decode_forever())
    while True:
        # aiohttp takes no time as no limit, and would wait for a connection that came in last and asks for nothing.
        runner = web.AppRunner(server.application(), shutdown_timeout=0.05, handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", port, reuse_address=True)
        await site.start()
        print(f"serving on {port}", flush=True)
        while not (seconds := server.faults.pop("restart", 0)):
            if decoding.done():
                decoding.result()
            await asyncio.sleep(0.02)
        await site.stop()
        for connection in list(runner.server.connections if runner.server else []):
            connection.force_close()
        server.forget()
        await runner.cleanup()
        await asyncio.sleep(seconds)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--slots", type=int, default=16)
    arguments = parser.parse_args()
    server = PolicyServer(arguments.folder, arguments.context, arguments.slots)
    asyncio.run(serve(server, arguments.port))


if __name__ == "__main__":
    main()
