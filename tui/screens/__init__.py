"""Screens of the dashboard, one a file."""
