"""gshare.cli: the `gshare` command."""
