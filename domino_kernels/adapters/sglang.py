"""The verification functions of SGLang: outputs through accept_index over flat rows."""

import torch

from domino_kernels import verify_chain, verify_tree
from domino_kernels.adapters.noise import seeds_of_uniforms


def chain_speculative_sampling(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    """chain_speculative_sampling_triton: rejection sampling of a chain, results written in place.

    Args:
        predicts: [B * N] integers; predicts[row] becomes the token emitted after that flat row.
        accept_index: [B, >= N] integers; becomes the flat rows of the kept path, root first. What
            follows it is left as it is.
        accept_token_num: [B] integers; becomes the number of kept drafts.
        candidates: [B, N], the last verified token, then the drafts. -1 ends a chain.
        retrive_index: [B, N], the flat row of each candidate.
        retrive_next_token, retrive_next_sibling: accepted and ignored: a chain.
        uniform_samples: [B, N], uniform_samples_for_final_sampling: [B], float32: their bits seed
            the op's own noise.
        target_probs: [B, N, V], draft_probs: [B, >= N - 1, V]: row i judges candidate i + 1.
        threshold_single, threshold_acc: only 1: other thresholds change the output's law.
        deterministic: accepted and ignored.

    A request whose next row has no law keeps its drafts; predicts is not written for that row.
    """
    _check_thresholds("chain_speculative_sampling", threshold_single, threshold_acc)
    batch, slots = candidates.shape
    seeds = seeds_of_uniforms(uniform_samples_for_final_sampling, uniform_samples)
    result = verify_chain(
        target_probs.float().log(),
        candidates[:, 1:].long(),
        rule="token",
        temperature=torch.ones(batch, device=candidates.device),
        seed=seeds,
        block_start=torch.zeros_like(seeds),
        draft_logits=draft_probs[:, : slots - 1].float().log(),
    )
    outputs = predicts, accept_index, accept_token_num
    _write(outputs, retrive_index.long(), result.tokens, result.num_accepted, result.num_emitted)


def tree_parents(retrive_next_token, retrive_next_sibling):
    """[B, N] int32: the parent of each node of SGLang's first-child, next-sibling links; else -1.

    Links that point outside the tree or at themselves leave nodes without a parent; such nodes, and
    cycles, are never reached by verify_tree.
    """
    batch, nodes = retrive_next_token.shape
    node = torch.arange(nodes, device=retrive_next_token.device).expand(batch, nodes)

    def inverse(links):
        """The node whose link points at each node, -1 where none does."""
        links = links.long()
        links = links.where((links > 0) & (links < nodes), nodes)
        out = node.new_full((batch, nodes + 1), -1)
        return out.scatter(1, links, node)[:, :nodes]

    parent, before = inverse(retrive_next_token), inverse(retrive_next_sibling)
    for _ in range(max(nodes - 1, 1).bit_length()):  # to the first sibling, in doubling steps
        at = before.clamp_min(0)
        parent = parent.where(before < 0, parent.gather(1, at).where(parent < 0, parent))
        before = before.gather(1, at).where(before >= 0, before)
    return parent.int()


def tree_speculative_sampling_target_only(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
):
    """One coin a node decides among its children by their target mass; results in place.

    Args:
        predicts: [B * N] integers; predicts[row] becomes the token emitted after that flat row.
        accept_index: [B, D] integers; becomes the flat rows of the kept path, root first: at most
            D - 1 drafts of a path are kept, whatever the tree's depth.
        accept_token_num: [B] integers; becomes the number of kept drafts.
        candidates: [B, N] tokens, node 0 the last verified one; siblings are distinct, and parents
            stand before their children.
        retrive_index, retrive_next_token, retrive_next_sibling: [B, N]: flat row, first child and
            next sibling of each node, -1 for none.
        uniform_samples: [B, N], uniform_samples_for_final_sampling: [B], float32: their bits seed
            the op's own noise.
        target_probs: [B, N, V], after all filters.
        draft_probs: accepted and ignored; the original uses it as scratch memory.
        threshold_single, threshold_acc: only 1: other thresholds change the output's law.
        deterministic: accepted and ignored.

    Up to 1024 nodes, any number of siblings; links that run in circles end. A node whose row holds
    no law ends the path: predicts is not written for it.
    """
    _check_thresholds("tree_speculative_sampling_target_only", threshold_single, threshold_acc)
    seeds = seeds_of_uniforms(uniform_samples_for_final_sampling, uniform_samples)
    result = verify_tree(
        target_probs.float().log(),
        candidates.long(),
        tree_parents(retrive_next_token, retrive_next_sibling),
        rule="target_only",
        temperature=torch.ones(candidates.size(0), device=candidates.device),
        seed=seeds,
        block_start=torch.zeros_like(seeds),
    )
    rows = retrive_index.long().gather(1, result.path.long().clamp_min(0))
    outputs = predicts, accept_index, accept_token_num
    _write(outputs, rows, result.tokens, result.num_accepted, result.num_emitted)


def verify_tree_greedy(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """The path of the target's own choices; results in place.

    Args as above; target_predict: [B, N], the target's argmax after each node. Of siblings with one
    token the first by index counts. With logits at hand, domino_kernels.verify_tree takes them as
    they are.
    """
    parents = tree_parents(retrive_next_token, retrive_next_sibling).long()
    predict, tokens = target_predict.long(), candidates.long()
    batch, nodes = tokens.shape
    node = predict.new_zeros(batch, 1)
    path, length = [node], predict.new_zeros(batch, 1)
    going = torch.ones_like(node, dtype=torch.bool)
    for _ in range(min(accept_index.size(1), nodes) - 1):
        hit = (parents == node) & (tokens == predict.gather(1, node))
        going = going & hit.any(1, keepdim=True)
        node = hit.int().argmax(1, keepdim=True).where(going, node)
        length = length + going
        path.append(node)
    path = torch.cat(path, 1)
    rows = retrive_index.long().gather(1, path)
    outputs = predicts, accept_index, accept_token_num
    _write(outputs, rows, predict.gather(1, path), length[:, 0], length[:, 0] + 1)


def _check_thresholds(op, single, accumulated):
    for name, value in (("threshold_single", single), ("threshold_acc", accumulated)):
        if value != 1:
            raise ValueError(f"{op}: {name}: got {value}, expected 1: others are not lossless")


def _write(outputs, rows, tokens, num_accepted, num_emitted):
    """rows, tokens [B, n]: flat row and emitted token of each node of the path."""
    predicts, accept_index, accept_token_num = outputs
    # a path longer than accept_index is cut: the draft behind the cut is a token of the law
    most = accept_index.size(1)
    num_accepted, num_emitted = num_accepted.clamp(max=most - 1), num_emitted.clamp(max=most)
    slot = torch.arange(rows.size(1), device=rows.device)
    # of what is not emitted, the row of the root is written with the root's token again
    emitted = slot < num_emitted[:, None]
    old = predicts[rows]
    first = tokens[:, :1].to(predicts.dtype).where(emitted[:, :1], old[:, :1])
    predicts[rows.where(emitted, rows[:, :1])] = tokens.to(predicts.dtype).where(emitted, first)
    width = min(accept_index.size(1), rows.size(1))
    head = accept_index[:, :width]
    kept = (slot <= num_accepted[:, None])[:, :width]
    head.copy_(rows[:, :width].to(accept_index.dtype).where(kept, head))
    accept_token_num.copy_(num_accepted)
