"""gshare.tui: the terminal dashboard (a later issue)."""
