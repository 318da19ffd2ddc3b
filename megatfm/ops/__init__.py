"""Pure tensor functions, each a slow and readable reference beside its fast form."""
