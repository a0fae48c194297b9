"""What became of runs: read from their directories, summed up, drawn as one page. No torch, no network."""
