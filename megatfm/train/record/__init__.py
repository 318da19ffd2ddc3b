"""What a run leaves on disk and shows to people: its directory, lock, metrics, messages and machines."""
