"""Widgets of the dashboard, one a file."""
