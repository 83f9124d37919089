"""What a person sees of a run: terminal, report, and the Airflow service under it."""
