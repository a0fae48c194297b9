"""The trainer process, its wire protocol and its clients."""
