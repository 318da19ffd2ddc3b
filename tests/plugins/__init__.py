"""Packages as their authors would write them: no file of megatfm knows them."""
