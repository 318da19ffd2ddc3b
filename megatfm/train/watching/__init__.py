"""What watches a run from beside it: hangs and deaths of ranks, collectives in flight, memory, profiles."""
