"""How a preparation is run: stages and what they commit, the processes that share them, progress, and upload."""
