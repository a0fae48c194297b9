"""gshare.agent: everything that runs on one node."""
