"""From a corpus to batches: the order of rows, mixtures, packing of documents into rows, and the loader.

Read in this order: `order`, `sequences`, `bin_packing`, `row_store`, `packed_rows`, `packing_plan`, `dataset`,
`mixture`, `loader`.
"""
