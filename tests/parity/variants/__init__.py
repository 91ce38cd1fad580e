"""Unusual settings of each row, beyond the cases that the whole build and server prove. They are compared in memory, which is quick."""

from variants.dense import DENSE
from variants.experts import EXPERTS
from variants.gpt import GPT_LIKE
from variants.multimodal import MULTIMODAL
from variants.publishers import PUBLISHERS
from variants.settings import Variants, natives
from variants.states import STATES

VARIANTS: Variants = natives(DENSE | GPT_LIKE | EXPERTS | STATES) | MULTIMODAL | PUBLISHERS
