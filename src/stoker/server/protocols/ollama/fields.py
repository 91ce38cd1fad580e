"""The tables of request fields of Ollama's API. `docs/ollama.md` shows them."""

from __future__ import annotations

from stoker.base.fields.table import ANYTHING, FieldRow, FieldTable, accepted, no_effect, rejected
from stoker.base.fields.values import Flag, ListOf, MappingOf, Real, Text, Whole
from stoker.base.types import MAX_LOGPROBS, MAX_STOP_CHARS, MAX_STOP_STRINGS

MAX_TOKENS = 1 << 24
FLAG, OBJECT, NAME = Flag(), MappingOf(), Text(512)
_SERVER = "it is a setting of the server"
_NUMBER = Whole(-(1 << 31), 1 << 31)

BOTH: tuple[FieldRow, ...] = (
    accepted("model", NAME, "a name listed by /api/tags, with or without :latest; default: the first of them"),
    accepted("stream", FLAG, "one JSON object per line; false: one response; default true"),
    accepted("options", OBJECT, "the options below"),
    accepted("format", ANYTHING, '"json", or a JSON schema'),
    accepted("think", ANYTHING, "true or false turns thinking of the template on or off; low, medium or high is its reasoning_effort"),
    accepted("logprobs", FLAG, "log-probabilities of each token; default false"),
    accepted("top_logprobs", Whole(0, MAX_LOGPROBS), "and of this many best tokens; requires logprobs"),
    no_effect("keep_alive", ANYTHING, "the model stays loaded"),
    no_effect("truncate", FLAG, "a prompt that is too long is refused"),
    no_effect("shift", FLAG, "an answer ends at the longest sequence of the engine"),
)
CHAT_ONLY: tuple[FieldRow, ...] = (
    accepted("messages", ANYTHING, "role and content, thinking, tool_calls, tool_name; without messages, nothing is generated"),
    accepted("tools", ListOf(OBJECT, 128), "functions that the model may call"),
)
GENERATE_ONLY: tuple[FieldRow, ...] = (
    accepted("prompt", Text(), "a message of the user. Without a prompt, nothing is generated"),
    accepted("system", Text(), "a system message before the prompt"),
    accepted("raw", FLAG, "the prompt is used as it is, without the chat template; default false"),
    accepted("context", ListOf(Whole(0, 1 << 31), 1 << 22), "token ids of an earlier response, which precede the prompt"),
    rejected("suffix", "text is generated at the end only", ""),
    rejected("template", "a request cannot supply a template", "", alternative="Leave it out; the model's own template is used."),
    rejected("images", "the model reads text only", []),
)
OPTION_ROWS: tuple[FieldRow, ...] = (
    accepted("num_predict", Whole(-2, MAX_TOKENS), "maximum number of new tokens; 0 or below: what fits the engine; default 0"),
    accepted("temperature", Real(0, 100), "default 0.8; 0 is greedy decoding", "temperature"),
    accepted("top_k", Whole(0, MAX_TOKENS), "default 40; 0 disables it", "top_k"),
    accepted("top_p", Real(0, 1, above=True), "default 0.9", "top_p"),
    accepted("min_p", Real(0, 1), "default 0", "min_p"),
    accepted("seed", Whole(-(2**63), 2**64 - 1), "equal seeds give equal tokens", "seed"),
    accepted("stop", ListOf(Text(MAX_STOP_CHARS), MAX_STOP_STRINGS, or_one=True), "strings that end the answer", "stop"),
    accepted("repeat_penalty", Real(0.01, 100), "default 1", "repetition_penalty"),
    accepted("presence_penalty", Real(-2, 2), "default 0", "presence_penalty"),
    accepted("frequency_penalty", Real(-2, 2), "default 0", "frequency_penalty"),
    no_effect("repeat_last_n", _NUMBER, "penalties cover all tokens"),
    no_effect("num_ctx", _NUMBER, "the engine has a fixed length"),
    no_effect("num_keep", _NUMBER, "prompts are not shortened"),
    no_effect("num_batch", _NUMBER, _SERVER),
    no_effect("num_gpu", _NUMBER, _SERVER),
    no_effect("main_gpu", _NUMBER, _SERVER),
    no_effect("num_thread", _NUMBER, _SERVER),
    no_effect("numa", FLAG, _SERVER),
    no_effect("low_vram", FLAG, _SERVER),
    no_effect("f16_kv", FLAG, _SERVER),
    no_effect("logits_all", FLAG, _SERVER),
    no_effect("use_mmap", FLAG, _SERVER),
    no_effect("use_mlock", FLAG, _SERVER),
    no_effect("mirostat_tau", Real(0, 1e9), "mirostat is not supported"),
    no_effect("mirostat_eta", Real(0, 1e9), "mirostat is not supported"),
    rejected("mirostat", "it is not supported", 0, alternative="Use top_p or min_p."),
    rejected("typical_p", "typical sampling is not supported", 1, 1.0),
    rejected("tfs_z", "tail-free sampling is not supported", 1, 1.0),
    rejected("penalize_newline", "newlines are penalized as other tokens", True),
    rejected("vocab_only", "it is not supported", False),
    rejected("embedding_only", "the model generates text", False),
)
CHAT = FieldTable((*BOTH, *CHAT_ONLY))
GENERATE = FieldTable((*BOTH, *GENERATE_ONLY))
OPTIONS = FieldTable(OPTION_ROWS, noun="option")
SHOW = FieldTable(
    (
        accepted("model", NAME, "a name listed by /api/tags"),
        accepted("name", NAME, "the same as model"),
        no_effect("verbose", FLAG, "the response has no longer form"),
    )
)
