"""Texts on which a converted tokenizer must agree with the original: words, code, several scripts, joined emoji, digits."""

PROBE_TEXTS = (
    "Hello world! The quick brown fox jumps over 13 lazy dogs.",
    "def f(x):\n    return x + 1\n",
    "naïve café, größer, Ελληνικά, русский, 你好世界, こんにちは",
    "👩‍👩‍👧 🇩🇪 1234567890",
)
