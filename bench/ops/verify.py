"""Verification of drafted chains at the vocabularies of the public checkpoints.

Every row has a planted winner that takes all but about 1e-7 of its law. The draft is the winner up
to slot `accepted` and another token there, so any right verifier, sampled or not, accepts exactly
that many drafts and emits the winners: one gate serves ours and the peers. Laws are tested in
tests/losslessness, not here.
"""

import torch

from bench.registry import Case
from domino_kernels import VerifyResult, verify_chain, verify_chain_workspace

VOCABULARIES = {"smollm2": 49152, "qwen3": 151936}
BATCHES = (1, 4, 16, 64)
DRAFTS = 15
DTYPE = torch.bfloat16


def make_operands(vocab, batch, accepted, dense, seed, device):
    generator = torch.Generator(device).manual_seed(seed)
    wide = batch, DRAFTS + 1

    def rows(winner):
        logits = torch.randn(*winner.shape, vocab, generator=generator, device=device, dtype=DTYPE)
        return logits.scatter_(-1, winner[..., None], 30.0)

    winner = torch.randint(vocab, wide, generator=generator, device=device)
    drafts = winner[:, :DRAFTS].clone()
    if accepted < DRAFTS:
        drafts[:, accepted] = (drafts[:, accepted] + 1) % vocab
    out = VerifyResult(
        torch.empty(wide, dtype=torch.int64, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
        torch.empty(wide, device=device),
        torch.empty(batch, dtype=torch.uint8, device=device),
    )
    return {
        "target": rows(winner),
        "drafts": drafts,
        "temperature": torch.ones(batch, device=device),
        "seed": torch.arange(batch, device=device),
        "start": torch.full((batch,), 100, device=device),
        "draft": rows(drafts) if dense else None,
        "winner": winner,
        "out": out,
        "workspace": verify_chain_workspace(batch, DRAFTS, dense=dense, device=device),
    }


def ours_greedy(o):
    return verify_chain(o["target"], o["drafts"], out=o["out"], workspace=o["workspace"])


def ours_token(o):
    return verify_chain(
        o["target"],
        o["drafts"],
        rule="token",
        temperature=o["temperature"],
        seed=o["seed"],
        block_start=o["start"],
        draft_logits=o["draft"],
        out=o["out"],
        workspace=o["workspace"],
    )


def torch_greedy(o):
    best = o["target"].argmax(-1)
    kept = (best[:, :-1] == o["drafts"]).cumprod(-1).sum(-1)
    return best, kept


def torch_token(o):
    """The rule as it is usually written in Torch: whole softmaxes, then gathers."""
    temperature, x = o["temperature"][:, None, None], o["drafts"][..., None]
    p = (o["target"].float() / temperature).softmax(-1)
    if o["draft"] is None:
        q, q_x = torch.zeros_like(p[:, :-1]).scatter_(-1, x, 1.0), 1.0
    else:
        q = (o["draft"].float() / temperature).softmax(-1)
        q_x = q.gather(-1, x)[..., 0]
    p_x = p[:, :-1].gather(-1, x)[..., 0]
    kept = (torch.rand_like(p_x) * q_x <= p_x).cumprod(-1).sum(-1)
    at = kept[:, None, None].expand(-1, 1, p.size(-1))
    last = p.gather(1, at)[:, 0]
    inside = (kept < DRAFTS)[:, None]
    q_last = q.gather(1, at.clamp(max=DRAFTS - 1))[:, 0] * inside
    rest = (last - q_last).relu()
    drawn = (rest / torch.empty_like(rest).exponential_()).argmax(-1)
    tokens = torch.nn.functional.pad(o["drafts"], (0, 1))
    return tokens.scatter(1, kept[:, None], drawn[:, None]), kept


def check(operands, result):
    o = operands[0]
    tokens, kept = result[0], result[1]
    accepted = int((o["drafts"] == o["winner"][:, :-1]).int().cumprod(-1).sum(-1)[0])
    assert kept.tolist() == [accepted] * len(kept), f"accepted {kept.tolist()}, not {accepted}"
    emitted = tokens[:, : accepted + 1]
    wrong = int((emitted != o["winner"][:, : accepted + 1]).sum())
    assert wrong == 0, f"{wrong} emitted tokens are not the winners"


MODES = {  # case -> (ours, peer, dense)
    "greedy": (ours_greedy, torch_greedy, False),
    "token": (ours_token, torch_token, False),
    "token-dense": (ours_token, torch_token, True),
}


def verify_chain_case(mode, model, batch, accepted):
    ours, peer, dense = MODES[mode]
    vocab = VOCABULARIES[model]
    rows = accepted + 1 + (min(accepted + 1, DRAFTS) if dense else 0)  # rows that decide
    return Case(
        op="verify_chain",
        case=mode,
        params={"model": model, "accepted": accepted, "T": float(mode != "greedy")},
        shape={"V": vocab, "K": DRAFTS, "accepted": accepted},
        batch=batch,
        make=lambda seed, device: (make_operands(vocab, batch, accepted, dense, seed, device),),
        providers={"ours": ours, "torch": peer},
        check=check,
        bytes=batch * rows * vocab * DTYPE.itemsize,
    )


def cases():
    for mode in MODES:
        for model in VOCABULARIES:
            for accepted in (DRAFTS, 4):
                for batch in BATCHES:
                    yield verify_chain_case(mode, model, batch, accepted)
