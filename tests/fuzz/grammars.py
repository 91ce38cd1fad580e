"""Random JSON schemas, regular expressions and EBNF grammars, each with an independent check of the texts that it allows.

    python tests/fuzz/grammars.py [--count 300] [--seed 1]

A tiny random model answers a request for each of them. Every complete answer must be allowed by jsonschema, `re`, or the recognizer below.
Answers that the token limit ends are not checked.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import jsonschema

sys.path.append(str(Path(__file__).parents[1] / "builder"))

MAX_TOKENS = 400
LETTERS = "abcxyz019_é- "
Check = Callable[[str], bool]


class GuideCase(NamedTuple):
    """A guide's kind and text, and whether it allows a text."""

    kind: str
    text: str
    allows: Check


# JSON schemas.


def random_schema(random: Random, depth: int = 0) -> dict[str, Any]:
    """A schema whose values are of limited size."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "pattern"]
    kind = random.choice([*kinds, *(["array", "object", "object", "anyOf"] if depth < 3 else [])])
    match kind:
        case "string":
            low = random.randint(0, 3)
            return {"type": "string", "minLength": low, "maxLength": low + random.randint(0, 6)}
        case "pattern":
            return {"type": "string", "pattern": f"^{random_regex(random, 2)}$"}
        case "integer":
            low = random.randint(-200, 200)
            return {"type": "integer", "minimum": low, "maximum": low + random.randint(0, 3000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": random.randint(1, 50)}
        case "enum":
            return {"enum": random.sample(["a", 'q"\\\n', "é🎉", 1, -2, True, None, [1, "x"], {"k": 0}], random.randint(1, 4))}
        case "const":
            return {"const": random.choice(["fix", 7, False, None, {"a": [1]}])}
        case "array":
            low = random.randint(0, 2)
            schema = {"type": "array", "items": random_schema(random, depth + 1), "minItems": low, "maxItems": low + random.randint(0, 2)}
            if random.random() < 0.3:
                schema["prefixItems"] = [random_schema(random, depth + 2) for _ in range(low)]
            return schema
        case "object":
            names = random.sample(["a", "b c", "é", '"', "name", "x1"], random.randint(0, 4))
            properties = {name: random_schema(random, depth + 1) for name in names}
            required = [name for name in names if random.random() < 0.6]
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
        case "anyOf":
            return {"anyOf": [random_schema(random, depth + 1) for _ in range(random.randint(1, 3))]}
    return {"type": kind}


def schema_case(random: Random) -> GuideCase:
    schema = random_schema(random)
    if random.random() < 0.3:
        schema = {"type": "object", "properties": {"r": {"$ref": "#/$defs/d"}}, "required": ["r"], "$defs": {"d": schema}}
    validator = jsonschema.Draft202012Validator(schema)

    def allows(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except ValueError:
            return False

    return GuideCase("json_schema", json.dumps(schema), allows)


# Regular expressions.


def random_regex(random: Random, depth: int = 3) -> str:
    """An expression with the same meaning in `re` and xgrammar, whose texts are of limited length."""
    if depth == 0 or random.random() < 0.3:
        return random.choice([*"abz09", "é", r"\d", r"\w", "[a-c]", "[^a-z]", r"\.", r"\+", "[0-9é]", r"\s"])
    match random.randrange(4):
        case 0:
            return "".join(random_regex(random, depth - 1) for _ in range(random.randint(1, 3)))
        case 1:
            return "(" + "|".join(random_regex(random, depth - 1) for _ in range(random.randint(1, 3))) + ")"
        case 2:
            return f"({random_regex(random, depth - 1)}){random.choice(['?', '{0,2}', '{2}', '{1,3}'])}"
    return f"(?:{random_regex(random, depth - 1)})"


def regex_case(random: Random) -> GuideCase:
    text = random_regex(random)
    # The classes are those of JavaScript: \\d and \\w are ASCII, and \\s is not.
    compiled = re.compile(text.replace(r"\d", "[0-9]").replace(r"\w", "[A-Za-z0-9_]"))
    return GuideCase("regex", text, lambda answer: compiled.fullmatch(answer) is not None)


# EBNF. A rule is a tree: ("text", s), ("class", s), ("rule", name), ("all", parts), ("any", parts), ("repeat", part, low, high).


def random_rule(random: Random, rules: list[str], depth: int) -> tuple[Any, ...]:
    """A random right side of a rule, which refers to `rules` only."""
    if depth == 0 or random.random() < 0.25:
        options: list[tuple[Any, ...]] = [("text", "".join(random.choices(LETTERS, k=random.randint(1, 3)))), ("class", "a-c0-3")]
        return random.choice([*options, *(("rule", name) for name in rules)])
    parts = [random_rule(random, rules, depth - 1) for _ in range(random.randint(1, 3))]
    match random.randrange(3):
        case 0:
            return ("all", parts)
        case 1:
            return ("any", parts)
    low = random.randint(0, 2)
    return ("repeat", parts[0], low, low + random.randint(0, 2) or 1)


def written(rule: tuple[Any, ...]) -> str:
    """The rule in EBNF."""
    match rule:
        case ("text", text):
            return json.dumps(text, ensure_ascii=False)
        case ("class", text):
            return f"[{text}]"
        case ("rule", name):
            return str(name)
        case ("all", parts):
            return "(" + " ".join(map(written, parts)) + ")"
        case ("any", parts):
            return "(" + " | ".join(map(written, parts)) + ")"
        case ("repeat", part, low, high):
            return f"({written(part)}){{{low},{high}}}"
    raise AssertionError(rule)


def ends(rule: tuple[Any, ...], rules: dict[str, tuple[Any, ...]], text: str, at: int) -> set[int]:
    """The positions at which a text of the rule that begins at `at` can end."""
    match rule:
        case ("text", literal):
            return {at + len(literal)} if text.startswith(literal, at) else set()
        case ("class", _):
            return {at + 1} if text[at : at + 1] and text[at] in "abc0123" else set()
        case ("rule", name):
            return ends(rules[name], rules, text, at)
        case ("all", parts):
            positions = {at}
            for part in parts:
                positions = {end for start in positions for end in ends(part, rules, text, start)}
            return positions
        case ("any", parts):
            return {end for part in parts for end in ends(part, rules, text, at)}
        case ("repeat", part, low, high):
            positions, found = {at}, {at} if low == 0 else set()
            for number in range(1, high + 1):
                positions = {end for start in positions for end in ends(part, rules, text, start)}
                found |= positions if number >= low else set()
            return found
    raise AssertionError(rule)


def ebnf_case(random: Random) -> GuideCase:
    rules: dict[str, tuple[Any, ...]] = {}
    for number in range(random.randint(0, 3)):  # a rule refers to earlier ones, so that texts are of limited length
        rules[f"r{number}"] = random_rule(random, list(rules), 2)
    rules["root"] = random_rule(random, list(rules), 3)
    text = "\n".join(f"{name} ::= {written(rule)}" for name, rule in rules.items())
    return GuideCase("grammar", text, lambda answer: len(answer) in ends(rules["root"], rules, answer, 0))


CASES = (schema_case, regex_case, ebnf_case)


def random_cases(seed: int, count: int) -> list[GuideCase]:
    """`count` guides, of each kind in turn."""
    random = Random(seed)
    return [CASES[number % len(CASES)](random) for number in range(count)]


def make_engine(folder: Path) -> Path:
    """A tiny random Llama whose answers may have MAX_TOKENS tokens."""
    import tiny

    from stoker.base.config import Limits
    from stoker.builder.build import build
    from stoker.builder.config import BuildConfig

    checkpoint = tiny.save(tiny.model(max_position_embeddings=512), folder / "checkpoint")
    limits = Limits(max_batch_size=16, max_input_len=64, max_output_len=MAX_TOKENS, max_num_tokens=128, tokens_per_block=16)
    return build(checkpoint, folder / "engine", BuildConfig(device="cpu", limits=limits), verify="files").path


def run(engine: Path, cases: list[GuideCase]) -> tuple[Counter[str], list[str]]:
    """Answer a request for each guide. Returns the number of answers by outcome, and a description of each wrong answer."""
    from stoker import LLM
    from stoker.base.errors import RequestError
    from stoker.base.types import FinishReason, Guide, SamplingParams

    counts: Counter[str] = Counter()
    wrong = []
    with LLM(engine, device="cpu", kv_cache_tokens=16384, num_threads=1) as llm:
        for number, case in enumerate(cases):
            params = SamplingParams(max_tokens=MAX_TOKENS, temperature=1.0, seed=number, n=2, guide=Guide(case.kind, case.text))
            try:
                choices = llm.generate("the quick", params).choices
            except RequestError as error:
                counts[f"{case.kind} refused"] += 1
                assert str(error), case
                continue
            for choice in choices:
                if choice.finish_reason is not FinishReason.STOP:
                    counts[f"{case.kind} unfinished"] += 1
                elif case.allows(choice.text):
                    counts[f"{case.kind} valid"] += 1
                else:
                    counts[f"{case.kind} wrong"] += 1
                    wrong.append(f"{case.kind} {case.text}\n  allows not {choice.text!r}")
    return counts, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        counts, wrong = run(make_engine(Path(folder)), random_cases(args.seed, args.count))
    print("\n".join(wrong))
    print(", ".join(f"{name}: {number}" for name, number in sorted(counts.items())))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
