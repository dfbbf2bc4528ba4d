"""The loop: greedy output is the target's own, whatever is drafted; limits, stops, errors."""

import functools
import os

import numpy as np
import pytest
import torch
from domino_draft import DominoDrafter, Target, generate, greedy_report, smollm2, stream
from domino_draft.decode import Stats

from .conftest import FAMILIES, tiny_model

PROMPTS = [[5, 17, 3], [1], [40, 2, 8, 33, 21, 9, 60, 7], [12, 12, 30, 4, 4]]
NEW = 24


class Oracle:
    """Drafts the known continuations, with every `wrong`-th token replaced and gaps of -1."""

    feature_layers = ()
    default_drafts = 5
    max_drafts = 8

    def __init__(self, texts, wrong=4, gap=11, vocab=61):
        self.texts, self.wrong, self.gap, self.vocab = texts, wrong, gap, vocab

    def begin(self, target, rows, max_length):
        self.starts = {}
        return self

    def commit(self, features, counts, host_counts, first=0):
        assert features is None and counts.tolist() == list(host_counts)

    def propose(self, batch, num_drafts):
        assert batch.anchors.tolist() == [tokens[-1] for tokens in batch.tokens]
        out = []
        for row, tokens in zip(batch.requests, batch.tokens):
            self.starts.setdefault(row, len(tokens) - 1)  # the prompt's forward gave one token
            done = len(tokens) - self.starts[row]
            drafts = (self.texts[row][done : done + num_drafts] + [0] * num_drafts)[:num_drafts]
            for i in range(num_drafts):
                if (done + i) % self.wrong == self.wrong - 1:
                    drafts[i] = (drafts[i] + 1) % self.vocab
                if (done + i) % self.gap == self.gap - 1:
                    drafts[i] = -1
            out.append(drafts)
        return torch.tensor(out, device=batch.anchors.device)

    def select(self, rows):
        pass


@pytest.fixture(params=FAMILIES, scope="module")
def target(request):
    return Target(tiny_model(request.param))


@pytest.fixture(scope="module")
def reference(target):
    return [own_text(target.model, prompt, NEW) for prompt in PROMPTS]


def own_text(model, prompt, count):
    """The model's greedy text by transformers' generate, which must not take ids for padding."""
    ids = torch.tensor([prompt], device=model.device)
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=count
    )
    return out[0, len(prompt) :].tolist()


def assert_own_text(target, prompts, got, want):
    """Equal, or first different where the target's own two best logits are within 1e-4.

    In 16 bits rounding moves logits by more: there each text is judged by itself, token by token.
    """
    if target.model.dtype != torch.float32:
        reports = [greedy_report(target, prompt, g) for prompt, g in zip(prompts, got)]
        assert [len(g) for g in got] == [len(w) for w in want]
        assert not any(report.violations for report in reports), [*map(str, reports)]
        return
    ties = 0
    for prompt, g, w in zip(prompts, got, want):
        assert len(g) == len(w)
        at = next((i for i, (a, b) in enumerate(zip(g, w)) if a != b), None)
        if at is not None:
            with torch.no_grad():
                ids = torch.tensor([prompt + g[:at]], device=target.device)
                logits = target.model(ids).logits[0, -1]
            best = logits.topk(2)
            assert best.values[0] - best.values[1] < 1e-4, (prompt, at, g, w)
            assert {g[at], w[at]} == set(best.indices.tolist())
            ties += 1
    print(f"near ties: {ties} of {len(got)} texts")


def drafters(tiny_config, texts):
    torch.manual_seed(11)
    lively = dict(emb_dim=16)
    made = {
        "none": None,
        "oracle": Oracle(texts),
        "domino": DominoDrafter(tiny_config(**lively)),
        "domino-plain": DominoDrafter(tiny_config(shift_label=False, **lively)),
        "dflash": DominoDrafter(tiny_config(projector_type="dflash", shift_label=True)),
        "dflash-plain-label": DominoDrafter(
            tiny_config(projector_type="dflash", shift_label=False)
        ),
        "sliding": DominoDrafter(
            tiny_config(
                layer_types=("full_attention", "sliding_attention"), sliding_window=4, block_size=6
            )
        ),
    }
    for drafter in made.values():
        if isinstance(drafter, DominoDrafter):
            with torch.no_grad():
                for p in drafter.parameters():
                    if p.dim() > 1:
                        p.mul_(10)
    return made


KINDS = [
    "none",
    "oracle",
    "domino",
    "domino-plain",
    "dflash",
    "dflash-plain-label",
    "sliding",
]


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_equals_the_target(target, reference, tiny_config, kind):
    drafter = drafters(tiny_config, reference)[kind]
    batch = generate(target, drafter, PROMPTS, max_new_tokens=NEW)
    assert_own_text(target, PROMPTS, batch.sequences, reference)
    assert batch.finish == ["length"] * 4 and batch.stats.tokens == 4 * NEW
    for row, prompt in enumerate(PROMPTS[:2]):
        if isinstance(drafter, Oracle):
            drafter = Oracle([reference[row]])
        alone = generate(target, drafter, [prompt], max_new_tokens=NEW)
        assert_own_text(target, [prompt], alone.sequences, [reference[row]])
        if kind.startswith("do"):
            # Padding and neighbours change neither the drafts nor what is kept of them.
            assert alone.stats.accepted[0] == batch.stats.accepted[row]
    emitted = [sum(lengths) for lengths in batch.stats.accepted]
    assert all(NEW - 1 <= n <= NEW - 1 + 8 for n in emitted)
    if kind == "oracle":
        assert batch.stats.accepted_length > 2
        assert all(set(lengths) != {1} for lengths in batch.stats.accepted)
    if kind == "none":
        assert batch.stats.accepted_length == 1 and batch.stats.cycles == NEW - 1


def test_perfect_drafts_are_all_kept(target, reference):
    oracle = Oracle(reference, wrong=10**6, gap=10**6)
    result = generate(target, oracle, PROMPTS, max_new_tokens=NEW, num_drafts=7)
    assert_own_text(target, PROMPTS, result.sequences, reference)
    assert result.stats.accepted[0][:2] == [8, 8]
    assert result.stats.cycles == 3  # 1 + 8 + 8 + 7


@pytest.mark.parametrize("num_drafts", [1, 2, 3])
def test_shorter_blocks(target, reference, tiny_config, num_drafts):
    drafter = drafters(tiny_config, reference)["domino"]
    result = generate(target, drafter, PROMPTS, max_new_tokens=NEW, num_drafts=num_drafts)
    assert_own_text(target, PROMPTS, result.sequences, reference)
    assert max(map(max, result.stats.accepted)) <= num_drafts + 1


def test_rows_end_at_their_stop_tokens(target, reference):
    """Every row stops at another time; what follows the stop token is never seen."""
    stops = {reference[0][6], reference[2][13]}
    want, finish = [], []
    for text in reference:
        at = next((i for i, token in enumerate(text) if token in stops), None)
        want.append(text if at is None else text[: at + 1])
        finish.append("length" if at is None else "stop")
    assert len({len(w) for w in want}) > 1
    for drafter in (None, Oracle(reference)):
        result = generate(target, drafter, PROMPTS, max_new_tokens=NEW, stop_token_ids=stops)
        assert result.sequences == want and result.finish == finish
        assert result.stats.tokens == sum(map(len, want))


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_never_past_max_new_tokens(target, reference, limit):
    result = generate(target, Oracle(reference, wrong=99), PROMPTS, max_new_tokens=limit)
    assert result.sequences == [text[:limit] for text in reference]
    assert result.finish == ["length"] * 4
    assert generate(target, None, PROMPTS[:1], max_new_tokens=1).stats.cycles == 0


def test_default_stop_tokens_are_the_models(target, reference):
    token = reference[0][4]
    target.model.generation_config.eos_token_id = token
    try:
        result = generate(target, None, PROMPTS[:1], max_new_tokens=NEW)
        everything = generate(target, None, PROMPTS[:1], max_new_tokens=NEW, stop_token_ids=())
    finally:
        target.model.generation_config.eos_token_id = None
    assert result.sequences[0] == reference[0][: reference[0].index(token) + 1]
    assert everything.sequences == reference[:1]


def test_stream_is_generate_in_pieces(target, reference):
    stats = Stats()
    chunks = list(stream(target, Oracle(reference), PROMPTS, max_new_tokens=NEW, stats=stats))
    for row in range(4):
        mine = [c for c in chunks if c.row == row]
        assert [t for c in mine for t in c.tokens] == reference[row]
        assert [c.finish for c in mine] == [None] * (len(mine) - 1) + ["length"]
        assert [len(c.tokens) for c in mine[1:-1]] == stats.accepted[row][:-1]
    assert stats.seconds >= stats.prefill_seconds > 0 and stats.tokens_per_second > 0
    first = next(stream(target, None, PROMPTS, max_new_tokens=NEW))
    assert (first.row, first.tokens) == (0, reference[0][:1])


def test_longest_prompt_that_fits(target, tiny_config):
    """The last block runs past the model's positions; that is cut, and harmless."""
    prompt = torch.arange(250).remainder(61).tolist()
    drafter = drafters(tiny_config, [])["domino"]
    result = generate(target, drafter, [prompt], max_new_tokens=6)
    assert_own_text(target, [prompt], result.sequences, [own_text(target.model, prompt, 6)])


def test_errors(target, tiny_config):
    def refused(error, message, prompts=([1, 2],), drafter=None, **kwargs):
        kwargs = {"max_new_tokens": 4} | kwargs
        with pytest.raises(error, match=message):
            stream(
                target, drafter, prompts, **kwargs
            )  # refused at the call, not at the first chunk

    domino = DominoDrafter(tiny_config())
    refused(ValueError, r"prompts\[1\]: got no tokens", [[1], []])
    refused(ValueError, "prompts: got", [])
    refused(ValueError, "prompts: got None", None)
    refused(TypeError, r"prompts\[0\]: got 1, expected a list of integers", [1, 2])
    refused(TypeError, r"prompts\[0\]: got \[1.5\], expected a list of integers", [[1.5]])
    refused(ValueError, r"prompts\[0\]: got 253 tokens .* at most 256", [[1] * 253])
    refused(ValueError, r"prompts\[0\]: got token 61, expected 0..60", [[61]])
    refused(ValueError, r"prompts\[0\]: got token -1", [[-1]])
    refused(TypeError, r"prompts\[0\]: got a string", ["hello"])
    refused(ValueError, "max_new_tokens: got 0", max_new_tokens=0)
    refused(TypeError, "max_new_tokens: got 1.5, expected an integer", max_new_tokens=1.5)
    refused(TypeError, "temperature: got None, expected numbers", temperature=None)
    refused(TypeError, "seed: got 0.5, expected integers", seed=0.5)
    refused(TypeError, r"seed: got \['a'\], expected integers", seed=["a"])
    refused(TypeError, "stop_token_ids: got 2, expected a list", stop_token_ids=2)
    refused(TypeError, "stop_token_ids: got '2', expected a list", stop_token_ids="2")
    refused(TypeError, "num_drafts: got 2.5, expected an integer", drafter=domino, num_drafts=2.5)
    refused(ValueError, "temperature: got -1", temperature=-1.0)
    refused(ValueError, "temperature: got nan", temperature=float("nan"))
    refused(ValueError, r"temperature: got 1e\+39, expected", temperature=1e39)
    refused(ValueError, "seed: got 2 values, expected 1", seed=[1, 2])
    refused(ValueError, "temperature: got 2 values", temperature=[0.5, 1.0])
    refused(ValueError, "num_drafts: got 5, expected 1..4", drafter=domino, num_drafts=5)
    refused(ValueError, "num_drafts: got 0, expected 1..4", drafter=domino, num_drafts=0)
    refused(ValueError, "num_drafts: got 3 and no drafter", num_drafts=3)
    other = DominoDrafter(tiny_config(vocab_size=64))
    refused(ValueError, "check_target: vocab_size: got 61", drafter=other)
    unnamed = DominoDrafter(tiny_config(mask_token_id=None))
    refused(ValueError, r"mask_token: got '<\|MASK\|>'", drafter=unnamed)


def test_unusable_logits_are_an_error():
    target = Target(tiny_model("Llama"))
    with torch.no_grad():
        target.model.lm_head.weight[3] = float("nan")
    with pytest.raises(ValueError, match="target logits of request 0"):
        generate(target, None, [[1, 2]], max_new_tokens=3)


def test_sampling_is_reproducible_and_independent_of_the_batch(target, reference, tiny_config):
    domino = drafters(tiny_config, [])["domino"]
    for make in (lambda texts: None, lambda texts: domino, Oracle):
        settings = dict(max_new_tokens=NEW, temperature=0.7)
        batch = generate(target, make(reference), PROMPTS, seed=5, **settings).sequences
        assert batch == generate(target, make(reference), PROMPTS, seed=5, **settings).sequences
        assert batch != generate(target, make(reference), PROMPTS, seed=6, **settings).sequences
        for row, prompt in enumerate(PROMPTS):
            alone = generate(target, make([reference[row]]), [prompt], seed=5 + row, **settings)
            assert alone.sequences == [batch[row]]
        listed = generate(target, make(reference), PROMPTS, seed=[5, 6, 7, 8], **settings)
        assert listed.sequences == batch
        # Rows finish at different times and leave; the others must not notice.
        stop = batch[1][3]
        cut = generate(
            target, make(reference), PROMPTS, seed=5, stop_token_ids=[stop], **settings
        ).sequences
        for mine, whole in zip(cut, batch):
            assert mine == (whole[: whole.index(stop) + 1] if stop in whole else whole)


def test_any_integer_is_a_seed():
    """64 bits count: a seed past int64 is the negative one of the same bits, the last one wraps."""
    target = Target(tiny_model("Llama"))
    settings = dict(max_new_tokens=8, temperature=0.9)

    def texts(seed, prompts=PROMPTS[:2]):
        return generate(target, None, prompts, seed=seed, **settings).sequences

    assert texts(2**63) == texts(-(2**63)) != texts(2**63 - 2)
    assert texts(2**64 + 3) == texts(3) == texts(np.int64(3)) == texts(torch.tensor([3, 4]))
    assert texts(2**63 - 1) == texts([2**63 - 1, -(2**63)])
    assert texts(-1) == texts([2**64 - 1, 0])


def test_shortest_calls_and_duplicates(target, reference, tiny_config):
    """One prompt token, one new token, the first token a stop, the same row three times."""
    made = drafters(tiny_config, reference[1:2])
    for kind in ("none", "oracle", "domino", "dflash-plain-label"):
        for prompt, text in zip(PROMPTS[:2], reference):
            one = generate(target, made[kind], [prompt], max_new_tokens=1)
            assert one.sequences == [text[:1]] and one.finish == ["length"]
            assert one.stats.accepted == [[]] and one.stats.accepted_length == 0
            stopped = generate(
                target, made[kind], [prompt], max_new_tokens=NEW, stop_token_ids=text[:1]
            )
            assert stopped.sequences == [text[:1]] and stopped.finish == ["stop"]
            assert stopped.stats.cycles == 0
    made["oracle"] = Oracle(reference[1:2] * 3)
    for kind in ("oracle", "domino", "sliding"):
        same = generate(target, made[kind], PROMPTS[1:2] * 3, max_new_tokens=NEW)
        assert same.sequences == reference[1:2] * 3
        assert same.stats.accepted[0] == same.stats.accepted[1] == same.stats.accepted[2]


def test_a_stop_token_inside_an_accepted_block_ends_the_row_there(target, reference):
    text = reference[0]
    at = next(i for i in range(2, NEW) if text[i] not in text[:i] and i % 8 not in (0, 7))
    oracle = Oracle(reference[:1], wrong=10**6, gap=10**6)
    done = generate(
        target, oracle, PROMPTS[:1], max_new_tokens=NEW, num_drafts=7, stop_token_ids=[text[at]]
    )
    assert done.sequences == [text[: at + 1]] and done.finish == ["stop"]
    assert done.stats.tokens == at + 1 and sum(done.stats.accepted[0]) > at  # whole cycles


def test_a_stream_closed_early_leaves_nothing_behind(target, tiny_config):
    drafter = drafters(tiny_config, [])["domino"]
    chunks = stream(target, drafter, PROMPTS, max_new_tokens=NEW)
    for _ in range(6):
        next(chunks)
        assert not torch.is_inference_mode_enabled()
    chunks.close()
    assert not torch.is_inference_mode_enabled()
    assert not any(layer._forward_hooks for layer in target.layers)
    with pytest.raises(StopIteration):
        next(chunks)


def test_greedy_and_sampled_rows_in_one_batch(target, reference):
    temperatures = [0.0, 0.9, 0.0, 0.9]
    oracle = Oracle(reference)
    result = generate(target, oracle, PROMPTS, max_new_tokens=NEW, temperature=temperatures)
    for row in (0, 2):
        assert result.sequences[row] == reference[row]
    assert result.sequences[1] != reference[1]


@functools.cache
def cuda_texts(family):
    model = tiny_model(family).cuda()
    return [own_text(model, prompt, NEW) for prompt in PROMPTS]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_on_cuda(family, kind, tiny_config):
    target = Target(tiny_model(family).cuda())
    texts = cuda_texts(family)
    drafter = drafters(tiny_config, texts)[kind]
    if isinstance(drafter, DominoDrafter):
        drafter.cuda()
    for rows in (4, 1):
        got = generate(target, drafter, PROMPTS[:rows], max_new_tokens=NEW).sequences
        assert_own_text(target, PROMPTS, got, texts)
    settings = dict(max_new_tokens=NEW, temperature=0.7, seed=3)
    sampled = generate(target, drafter, PROMPTS, **settings).sequences
    assert sampled == generate(target, drafter, PROMPTS, **settings).sequences

    target = Target(target.model.to(torch.bfloat16))
    if isinstance(drafter, DominoDrafter):
        drafter.to(torch.bfloat16)
    got = generate(target, drafter, PROMPTS, max_new_tokens=NEW).sequences
    for prompt, output in zip(PROMPTS, got):
        report = greedy_report(target, prompt, output)
        print(report)
        assert report.violations == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_real_model(dtype):
    """SmolLM2-135M: fp32 equal to transformers' generate, bf16 without a violation.

    DOMINO_TEST_TARGET may name a folder that holds the model; otherwise it is fetched and cached.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = os.environ.get("DOMINO_TEST_TARGET") or smollm2.prepare()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    target = Target(model, AutoTokenizer.from_pretrained(folder))
    texts = ["def fibonacci(n):", "The capital of France is", "Q: 17 + 25 = ?\nA:"]
    prompts = [target.tokenizer(text)["input_ids"] for text in texts]
    want = [own_text(model, prompt, 12) for prompt in prompts]
    for drafter in (None, Oracle(want, wrong=5, vocab=target.vocab_size)):
        got = generate(target, drafter, texts, max_new_tokens=12).sequences
        if dtype == torch.float32:
            assert_own_text(target, prompts, got, want)
        for prompt, output in zip(prompts, got):
            report = greedy_report(target, prompt, output)
            print(report)
            assert report.violations == 0
