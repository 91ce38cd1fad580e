"""Coverage-guided fuzzing of one target with atheris, or of all: `make fuzz`, or for longer:

    python tests/fuzz/fuzz.py TARGET [--runs 20000] [--seed 1] [--keep]
    python tests/fuzz/fuzz.py all --runs 1000

Starts from the inputs in corpus/TARGET. An input that fails is written to .cache/fuzz/TARGET and named in the output; add it to the corpus
with the correction of the defect. --keep adds inputs that reach new code to .cache/fuzz/TARGET/corpus, which later runs use, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
WORK = HERE.parents[1] / ".cache" / "fuzz"
MAX_INPUT_BYTES = 8192  # more than the largest file of the corpus, because libFuzzer cuts longer ones
INPUT_LIMIT_S = 60  # an input that takes longer is a defect; libFuzzer measures the time of the clock, on a machine that may be busy
MEMORY_LIMIT_MIB = 2048
sys.path.insert(0, str(HERE))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--runs", type=int, default=20_000, help="number of inputs")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    if args.target == "all":
        return run_all(args)
    run_one(args)
    return 0


def run_all(args: argparse.Namespace) -> int:
    """Run each target in a process of its own, because libFuzzer ends its process. Returns 1 if one of them failed."""
    from targets import TARGETS

    failed = []
    for name in TARGETS:
        options = ["--runs", str(args.runs), "--seed", str(args.seed), *(["--keep"] if args.keep else [])]
        done = subprocess.run([sys.executable, __file__, name, *options], capture_output=True, text=True)
        lines = (done.stdout + done.stderr).splitlines()
        summary = next((line for line in reversed(lines) if line.startswith(("Done ", "#"))), "")
        print(f"{name}: {summary or 'no summary'}", flush=True)
        if done.returncode:
            failed.append(name)
            print("\n".join(lines[-60:]))
    print(f"{len(TARGETS) - len(failed)} passed, {len(failed)} failed")
    return 1 if failed else 0


def run_one(args: argparse.Namespace) -> None:
    """Fuzz one target. Does not return."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import atheris

    with atheris.instrument_imports(include=["stoker"], enable_loader_override=False):
        import targets

        run = targets.TARGETS[args.target]
        for seed in sorted((targets.CORPUS / args.target).iterdir())[:1]:
            run(seed.read_bytes())  # imports what the target imports
    folder = WORK / args.target
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    corpora = [*([folder / "corpus"] if args.keep else []), targets.CORPUS / args.target]
    flags = [
        f"-runs={args.runs}", f"-seed={args.seed}", f"-max_len={MAX_INPUT_BYTES}", f"-timeout={INPUT_LIMIT_S}",
        f"-rss_limit_mb={MEMORY_LIMIT_MIB}", f"-artifact_prefix={folder}/", "-print_final_stats=0",
    ]  # fmt: skip
    if not args.keep:
        corpora.insert(0, empty := folder / "unused")
        empty.mkdir(exist_ok=True)
        for old in empty.iterdir():
            old.unlink()
    atheris.Setup([sys.argv[0], *flags, *map(str, corpora)], run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
