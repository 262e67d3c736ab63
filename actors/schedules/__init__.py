"""Schedules of pipelines: as data and as text, those published, their networks and previews."""
