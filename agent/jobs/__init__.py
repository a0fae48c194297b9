"""Job spec, schedules, events and the other pure parts of a job (no torch, no I/O)."""
