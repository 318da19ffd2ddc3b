"""Deduplication of the whole corpus: `[[dedup]]`, and identical texts before them.

Each method computes keys for every document (`methods`), the keys that go are found and marked (`first_occurrence`,
`clusters`), and documents are filtered by their marks (`runner`). All of it is divided into parts, which read and
write files.
"""
