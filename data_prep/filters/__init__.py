"""Filters and other steps that documents pass one at a time: `[[steps]]`. `base` has the registry; our modules are
imported when a config names one of their filters."""
