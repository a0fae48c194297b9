"""gshare.coordinator: many nodes (cluster configuration today; the rest is a later issue)."""
