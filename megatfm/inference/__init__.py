"""A trained model at work: text by sampling or beam search, vectors of sentences, and evaluation."""
