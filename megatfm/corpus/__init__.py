"""Corpora on disk or behind a URL: shards of tokenized documents, their indexes and the manifest, written and read.

Nothing here knows rows or batches: these are made of a corpus by `megatfm.data`.
"""
