"""The plugin that Airflow loads by its `airflow.plugins` entry point."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from plugins.operators import ReportLink


async def report_app(scope: Any, receive: Any, send: Any) -> None:
    """The page's application, imported on its first request: only the api-server ever needs it."""
    from plugins.report_page import app

    await app(scope, receive, send)


class TunixPlugin(AirflowPlugin):
    """A tab with each run's state or report, and a link to it on every task."""

    name = "tunix"
    fastapi_apps = [{"app": report_app, "url_prefix": "/tunix", "name": "Tunix run reports"}]  # noqa: RUF012
    external_views = [  # noqa: RUF012
        {
            "name": "Post-training",
            "href": "tunix/report?dag_id={DAG_ID}&run_id={RUN_ID}",
            "destination": "dag_run",
            "url_route": "tunix-report",
        }
    ]
    operator_extra_links = [ReportLink()]  # noqa: RUF012
