"""Architectures by family, registered under the names of transformers' classes."""

from megatfm.convert.architectures import bert as bert
from megatfm.convert.architectures import deberta as deberta
from megatfm.convert.architectures import deepseek as deepseek
from megatfm.convert.architectures import gemma as gemma
from megatfm.convert.architectures import gpt as gpt
from megatfm.convert.architectures import llama as llama
from megatfm.convert.architectures import llava as llava
from megatfm.convert.architectures import modernbert as modernbert
from megatfm.convert.architectures import moe_decoders as moe_decoders
from megatfm.convert.architectures import sparse_encoders as sparse_encoders
from megatfm.convert.architectures import swin as swin
from megatfm.convert.architectures import t5 as t5
from megatfm.convert.architectures import task_heads as task_heads
from megatfm.convert.architectures import two_towers as two_towers
from megatfm.convert.architectures import vit as vit
from megatfm.convert.architectures import xlnet as xlnet
