"""What runs release for others to schedule on."""

from __future__ import annotations

from airflow.sdk import Asset

POLICY = Asset(name="policy", uri="x-tunix://policy")
"""A published policy version; an event's `extra` says `run_uri` and `version`."""
