"""The page that shows a prepared corpus: what came in, what was dropped and why, what came out."""
