from __future__ import annotations

import pytest
from small_tokenizers import small

from stoker.frontend.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(small("byte_level"), {"bos_token": "<s>", "eos_token": "</s>"}, {"eos_token_id": [2, 3]})
