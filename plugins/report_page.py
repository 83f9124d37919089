"""The page of one run inside Airflow's UI: its report once there is one, its state until then.

Served by the api-server to people who may read the DAG's runs. It shows what lies in the run
directory and changes nothing.
"""

from __future__ import annotations

import html
import time
from typing import Any

from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity
from airflow.api_fastapi.core_api.security import requires_access_dag
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import HTMLResponse

from plugins.runs import format_progress, run_uri, store_roots
from tunix_core import paths
from tunix_core.errors import ObjectMissing, StoreError
from tunix_core.storage import control
from tunix_core.storage.run_directory import read_run
from tunix_core.storage.store import ObjectStore, open_store

REFRESH_SECONDS = 5

HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}

# A report quotes what models and tools wrote: nothing in it may load, send or reach the session. The state
# page is not sandboxed: a browser would reload it without the session's cookie. It has no script.
REPORT_HEADERS = {
    **HEADERS,
    "Content-Security-Policy": f"{HEADERS['Content-Security-Policy']}; script-src 'unsafe-inline'; "
    "sandbox allow-scripts",
}

app = FastAPI(title="Tunix run reports", docs_url=None, redoc_url=None, openapi_url=None)


@app.get(
    "/report",
    response_class=HTMLResponse,
    dependencies=[Depends(requires_access_dag(method="GET", access_entity=DagAccessEntity.RUN))],
)
def report(dag_id: str, run_id: str) -> HTMLResponse:
    """The run's report, or the state of its processes while it has none."""
    try:
        store, details = find_run(dag_id, run_id)
        page = read_report(store)
        headers = REPORT_HEADERS
        if page is None:
            page = state_page(store, details)
            headers = {**HEADERS, "Refresh": str(REFRESH_SECONDS)}
    except StoreError as error:
        raise HTTPException(503, f"the store does not answer: {error}") from error
    return HTMLResponse(page, headers=headers)


def find_run(dag_id: str, run_id: str) -> tuple[ObjectStore, dict[str, Any]]:
    """The run directory of an Airflow run, whichever root it lies under.

    Raises:
        HTTPException: 404 when there is none.
    """
    for root in store_roots():
        store = open_store(run_uri(root, dag_id, run_id), roots=store_roots())
        try:
            config, details = read_run(store)
        except ObjectMissing:
            continue
        return store, {"recipe": config.recipe, "seed": config.seed, "num_steps": config.learner.num_steps, **details}
    raise HTTPException(404, f"no run directory belongs to {dag_id} / {run_id}")


def read_report(store: ObjectStore) -> str | None:
    """The newest HTML page under `reports/`, which is self-contained."""
    pages = [key for key in store.list_after(paths.REPORTS) if key.endswith(".html")]
    return store.get(pages[-1]).decode() if pages else None


def state_page(store: ObjectStore, details: dict[str, Any]) -> str:
    """A table of the run's processes with what they reported last."""
    beats = control.read_heartbeats(store)
    rows = []
    for name, record in sorted(control.read_processes(store).items()):
        own = [beat for key, beat in sorted(beats.items()) if key == name or key.rpartition("-")[0] == name]
        progress = "; ".join(format_progress(beat.progress) for beat in own)
        age = f"{time.time() - record.updated_at:.0f} s ago"
        state = record.state if record.exit_code is None else f"ended, exit code {record.exit_code}"
        cells = (name, state, str(record.attempt), record.host, age, progress or record.reason)
        rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
    stop = control.read_stop(store)
    ending = "" if stop is None else f"<p><b>Ending:</b> {html.escape(stop.reason)} (by {html.escape(stop.source)})</p>"
    facts = f"recipe {details['recipe']}, seed {details['seed']}, {details['num_steps']} steps"
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><title>Run</title>
<style>body{{font:14px/1.5 system-ui,sans-serif;margin:1.5rem;color:#1f2937;background:#fff}}
table{{border-collapse:collapse;width:100%}}td,th{{text-align:left;padding:.4rem .8rem;border-bottom:1px solid #e5e7eb}}
th{{color:#6b7280;font-weight:500}}td:last-child{{font-variant-numeric:tabular-nums}}</style>
<h2>Post-training</h2><p>{html.escape(facts)}<br><code>{html.escape(store.uri)}</code></p>{ending}
<table><tr><th>process</th><th>state</th><th>attempt</th><th>host</th><th>seen</th><th>progress</th></tr>
{"".join(rows)}</table><p>The report takes this page's place when the run has ended.</p></html>"""
