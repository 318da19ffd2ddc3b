"""Attention layers, registered in ATTENTIONS on import, together with the position encodings that they read."""

from megatfm.layers.attention import gqa as gqa
from megatfm.layers.attention import linformer as linformer
from megatfm.layers.attention import longformer as longformer
from megatfm.layers.attention import memory_compressed as memory_compressed
from megatfm.layers.attention import mla as mla
from megatfm.layers.attention import relative as relative
from megatfm.layers.attention import windowed as windowed
from megatfm.layers.attention.dot_product import ATTENTIONS as ATTENTIONS
