"""Penalties and biases of single requests: the target's own law under them, whoever runs beside."""

import json
from itertools import pairwise

import pytest
import torch
from domino_draft import DominoDrafter, Engine, Target, TreeOptions, estimate_memory, generate
from domino_draft.edits import Edits
from domino_draft.requests import Law, Sampling

from .conftest import tiny_model
from .test_cli import invoke
from .test_law import ALARM, g_test
from .test_sampling import CUDA, check_neighbours, texts_of

EDITS = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.9},
    {"frequency_penalty": 0.5, "temperature": 0.7},
    {"logit_bias": {3: 4.0, 17: -torch.inf}},
    {"repetition_penalty": 0.8, "logit_bias": {9: 2.5}, "temperature": 1.2, "top_k": 9},
]
FUSED = pytest.mark.parametrize("fused", [False, True], ids=["stock", "fused"])
DEVICE = pytest.mark.parametrize("device", ["cpu", CUDA])


def make(tiny_config, device="cpu", **config):
    torch.manual_seed(0)
    target = Target(tiny_model("Llama").to(device))
    return target, DominoDrafter(tiny_config(**config)).eval().to(device)


def edited(logits, prompt, output, repetition=1.0, presence=0.0, frequency=0.0, bias=None):
    """Logits [V] as defined: bias, then repetition, presence and frequency penalty."""
    logits = logits.clone()
    for token, added in (bias or {}).items():
        logits[token] += added
    for token in {*prompt, *output}:
        logits[token] *= repetition if logits[token] <= 0 else 1 / repetition
    for token in set(output):
        logits[token] -= presence + frequency * output.count(token)
    return logits


def definition(law):
    names = {"repetition_penalty": "repetition", "presence_penalty": "presence",
             "frequency_penalty": "frequency", "logit_bias": "bias"}  # fmt: skip
    return {names[name]: value for name, value in law.items() if name in names}


@torch.no_grad()
def greedy(target, prompt, count, **settings):
    """The argmax of the edited logits, one forward a token."""
    output = []
    for _ in range(count):
        ids = torch.tensor([[*prompt, *output]], device=target.device)
        logits = target.model(ids).logits[0, -1].double().cpu()
        output.append(int(edited(logits, prompt, output, **settings).argmax()))
    return output


@FUSED
@DEVICE
@pytest.mark.parametrize("kind", ["domino", "dflash"])
def test_greedy_text_is_the_edited_targets(tiny_config, device, fused, kind):
    """Requests of every kind at once, more than there are rows, so that rows move and are used
    again."""
    target, drafter = make(tiny_config, device, projector_type=kind)
    laws = [{n: v for n, v in law.items() if n != "temperature"} for law in EDITS]
    engine = Engine(target, drafter, max_batch=4, max_length=60, fused=fused)
    prompts = [[5, 6 + i, 6 + i, 9] for i in range(len(laws))]
    for i, law in enumerate(laws):
        engine.add(prompts[i], 12 + 5 * (i % 3), stop_token_ids=(), **law)
    texts = texts_of(engine, len(laws))
    plain = [greedy(target, prompt, len(text)) for prompt, text in zip(prompts, texts)]
    for i, law in enumerate(laws):
        wanted = greedy(target, prompts[i], len(texts[i]), **definition(law))
        assert texts[i] == wanted
        assert (wanted != plain[i]) == bool(law)


def test_repetition_penalty_and_bias_are_those_of_transformers(tiny_config):
    target, drafter = make(tiny_config)
    prompt = [5, 6, 6, 9]
    wanted = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=30, do_sample=False, repetition_penalty=1.3,
        sequence_bias={(3,): 2.0, (8,): -1.0},
    )[0, len(prompt) :]  # fmt: skip
    found = generate(
        target, drafter, [prompt], max_new_tokens=30, repetition_penalty=1.3,
        logit_bias={3: 2.0, 8: -1.0}, stop_token_ids=(),
    )  # fmt: skip
    assert found.sequences == [wanted.tolist()]


@FUSED
@DEVICE
def test_neighbours_change_nothing(tiny_config, device, fused):
    check_neighbours(*make(tiny_config, device), EDITS, fused, edited=True)


@FUSED
@DEVICE
def test_tokens_follow_the_edited_law(tiny_config, device, fused):
    """The third token, given the two before it."""
    law = {"presence_penalty": 1.5, "repetition_penalty": 1.2, "logit_bias": {3: 1.5}}
    target, drafter = make(tiny_config, device)
    engine = Engine(target, drafter, max_batch=64, max_length=40, fused=fused)
    first = greedy(target, [5, 6], 2)
    forced = {token: 60.0 for token in first}  # two tokens that are all but sure to come first
    law["logit_bias"] |= forced
    law["presence_penalty"] = 57.0
    for seed in range(2000):
        engine.add([5, 6], 3, seed=seed, temperature=1.5, stop_token_ids=(), **law)
    found = torch.tensor(texts_of(engine, 2000))
    pair = found[:, :2].mode(0).values
    found = found[(found[:, :2] == pair).all(1), 2]
    with torch.no_grad():
        logits = target.model(torch.tensor([[5, 6, *pair]], device=device)).logits[0, -1]
    logits = edited(logits.double().cpu(), [5, 6], pair.tolist(), **definition(law))
    wanted = (logits / 1.5).softmax(-1)
    counts = torch.bincount(found, minlength=61).double()
    assert len(found) > 500 and (wanted * len(found) > 8).sum() > 3
    assert g_test(counts, wanted, torch.arange(61)) > ALARM


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_is_banned_is_not_drafted(tiny_config, device):
    """A captured cycle drafts by the bias too."""
    target, drafter = make(tiny_config, device)
    for part in (None, range(40)):
        for kind in ("domino", "dflash"):
            drafter = make(tiny_config, device, projector_type=kind)[1]
            engine = Engine(
                target, drafter, max_batch=2, max_length=60, fused=True, draft_vocab=part
            )
            seen, chain = [], engine._fused._chain

            def watched(*args, chain=chain, seen=seen):
                seen.append(chain(*args)[0].clone())
                return seen[-1], None

            engine._fused._chain = watched
            only = {token: 50.0 for token in (7, 8, 30)}
            engine.add([5, 6], 12, logit_bias=only, stop_token_ids=())
            texts_of(engine, 1)
            assert set(torch.cat(seen).flatten().tolist()) <= {7, 8, 30}


def test_only_batches_with_edits_look_at_them(tiny_config):
    target, drafter = make(tiny_config)
    engine = Engine(target, drafter, max_batch=3, max_length=60, fused=True)
    seen, queue = [], engine._fused.queue
    engine._fused.queue = lambda *a: (seen.append(a[-1]), queue(*a))[1]
    engine.add([5], 20, stop_token_ids=())
    engine.step()
    assert engine._edits is None
    engine.add([5], 6, presence_penalty=1.0, stop_token_ids=())
    texts_of(engine, 2)
    assert [b for a, b in pairwise([None, *seen]) if a != b] == [
        Law.GREEDY, Law.EDITED, Law.GREEDY,
    ]  # fmt: skip


@pytest.mark.gpu
def test_captures_leave_no_counts():
    edits = Edits(3, 100, torch.device("cuda"))
    edits.put(1, [Sampling(logit_bias=((4, 2.0),)), Sampling()], [[1, 33], [99]])
    edits.count(torch.tensor([[5, 5, -1], [7, -1, -1]], device="cuda"), 1)
    assert edits.output_counts.nonzero().tolist() == [[1, 5], [2, 7]]
    assert edits.output_counts[1, 5] == 2
    edits.select([2])
    assert edits.output_counts[0].nonzero().tolist() == [[7]]
    assert edits.state["prompt_mask"][:2].tolist() == [[0, 0, 0, 8], [2, 2, 0, 0]]


def test_memory(tiny_config):
    target, drafter = make(tiny_config)
    edits = Edits(3, target.vocab_size, torch.device("cpu"))
    plain = estimate_memory(target, drafter, 3, 40)
    found = estimate_memory(target, drafter, 3, 40, edited=True)
    assert found.total - plain.total == found.edits == sum(t.nbytes for t in edits.state.values())


def test_bad_edits(tiny_config):
    target, drafter = make(tiny_config)
    engine = Engine(target, None, max_batch=1, max_length=40)
    for law, error, message in (
        ({"repetition_penalty": 0}, ValueError, "repetition_penalty: got 0, expected above 0"),
        ({"presence_penalty": float("inf")}, ValueError, "presence_penalty: got inf"),
        ({"frequency_penalty": "x"}, TypeError, "frequency_penalty: got 'x', expected numbers"),
        ({"logit_bias": {61: 1.0}}, ValueError, r"logit_bias: got token 61, expected 0\.\.60"),
        ({"logit_bias": {"6": 1.0}}, ValueError, "logit_bias: got token '6'"),
        ({"logit_bias": {6: torch.inf}}, ValueError, "logit_bias: got inf, expected a number"),
        ({"logit_bias": [3.0]}, TypeError, "logit_bias: got .*expected tokens mapped to numbers"),
    ):
        with pytest.raises(error, match=f"add: {message}"):
            engine.add([5], 4, **law)
    assert engine.num_waiting == 0
    tree = TreeOptions(nodes=9, width=2, children=3, pool=20)
    engine = Engine(target, drafter, max_batch=1, max_length=40, tree=tree, fused=True)
    with pytest.raises(ValueError, match=r"add: penalties, logit_bias: got .*none with trees"):
        engine.add([5], 4, presence_penalty=1.0)
    with pytest.raises(ValueError, match=r"generate: penalties, logit_bias: got .*none with trees"):
        generate(target, drafter, [[5]], max_new_tokens=4, logit_bias={3: 1.0}, tree=tree)


def test_a_request_that_may_say_nothing_fails_alone(tiny_config):
    target, drafter = make(tiny_config)
    engine = Engine(target, drafter, max_batch=2, max_length=40)
    engine.add([5], 4, logit_bias=dict.fromkeys(range(61), -torch.inf))
    engine.add([5], 4, stop_token_ids=())
    chunks = list(engine)
    (failed,) = (c for c in chunks if c.request == 0)
    assert failed.finish == "error" and "no finite value" in str(failed.error)
    assert [t for c in chunks if c.request == 1 for t in c.tokens] == greedy(target, [5], 4)


def test_command(folders):
    common = ["--target", folders[0], "--drafter", folders[1], "--device", "cpu", "-n", 8, "--json"]
    say = lambda *more: json.loads(invoke("generate", "Hi", *common, *more).stdout)  # noqa: E731
    tokens = lambda *more: say(*more)["outputs"][0]["tokens"]  # noqa: E731
    plain = tokens()
    for option in ("--presence-penalty", "--frequency-penalty", "--repetition-penalty"):
        assert tokens(option, 30) != plain
        said = json.loads(invoke("chat", *common, option, 30, input="Hi\n").stdout)
        assert said["stats"]["tokens"] == 8
    assert set(tokens("--logit-bias", "3=99", "--logit-bias", f"{plain[0]}=-inf")) == {3}
    for bad in ("3", "x=1", "3=nan"):
        assert invoke("generate", "Hi", *common, "--logit-bias", bad).exit_code == 2
