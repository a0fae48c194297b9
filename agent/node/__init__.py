"""The node's daemon: `gshare agent`. It runs attempts at jobs, keeps files by content, and says how it is."""
