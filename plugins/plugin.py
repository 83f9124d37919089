"""The plugin that Airflow loads by its `airflow.plugins` entry point."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin

from plugins.operators import ReportLink


class TunixPlugin(AirflowPlugin):
    """A page with each run's report, in the run's own tabs and behind a link on its tasks."""

    name = "tunix"
    operator_extra_links = [ReportLink()]  # noqa: RUF012  # Airflow's own convention
