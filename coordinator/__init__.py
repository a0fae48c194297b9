"""gshare.coordinator: many nodes: cluster configuration, their health, placement, attempts, the store."""
