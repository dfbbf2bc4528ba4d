"""Trees of drafts around their verification: building one, and keeping what was accepted."""

from typing import NamedTuple

import torch

from domino_kernels import _C
from domino_kernels.ops import checks
from domino_kernels.torch_library import check_status, define, target

_MAX_NODES = 1024
_MAX_CANDIDATES = 2048
_MASKS = {"none": 0, "bool": 1, "packed": 2, "full": 3}
_MAX_TENSORS = 16


class Tree(NamedTuple):
    """What build_tree writes. Behind the last node come pads: token and parent -1, depth 0."""

    tokens: torch.Tensor  # [B, N] int64, the root first
    parents: torch.Tensor  # [B, N] int32, -1 for the root
    index: torch.Tensor  # [B, N] int32: the candidate that a node is, -1 for the root
    depths: torch.Tensor  # [B, N] int32
    positions: torch.Tensor  # [B, N] int64: prefix + depth
    mask: torch.Tensor | None  # which nodes a node attends to: its ancestors and itself
    status: torch.Tensor  # [B] uint8: TreeStatus.BAD_TREE or 0


def _launch_build_tree(
    root, tokens, parents, scores, prefix, mask_kind,
    out_tokens, out_parents, out_index, out_depths, out_positions, mask, status,
):  # fmt: skip
    code = _C.build_tree(
        out_tokens=out_tokens.data_ptr(),
        out_parents=out_parents.data_ptr(),
        out_index=out_index.data_ptr(),
        out_depth=out_depths.data_ptr(),
        out_position=out_positions.data_ptr(),
        mask=0 if mask is None else mask.data_ptr(),
        status=status.data_ptr(),
        root=root.data_ptr(),
        tokens=tokens.data_ptr(),
        parents=parents.data_ptr(),
        scores=0 if scores is None else scores.data_ptr(),
        prefix=prefix.data_ptr(),
        batch=tokens.size(0),
        candidates=tokens.size(1),
        nodes=out_tokens.size(1),
        columns=0 if mask is None else mask.size(-1),
        tokens_stride=tokens.stride(0),
        parents_stride=parents.stride(0),
        scores_stride=0 if scores is None else scores.stride(0),
        mask_kind=mask_kind,
        **target(tokens),
    )
    check_status("build_tree", code)


_build_tree = define(
    "build_tree(Tensor root, Tensor tokens, Tensor parents, Tensor? scores, Tensor prefix, "
    "int mask_kind, Tensor(a!) out_tokens, Tensor(b!) out_parents, Tensor(c!) out_index, "
    "Tensor(d!) out_depths, Tensor(e!) out_positions, Tensor(f!)? mask, Tensor(g!) status) -> ()",
    _launch_build_tree,
)


def _tree_shapes(batch, nodes, mask, columns):
    wide = (batch, nodes)
    masks = {
        "none": None,
        "bool": ((batch, nodes, nodes), torch.bool),
        "packed": ((batch, nodes, -(-nodes // 32)), torch.int32),
        "full": ((batch, nodes, columns), torch.bool),
    }
    return (
        (wide, torch.int64),
        (wide, torch.int32),
        (wide, torch.int32),
        (wide, torch.int32),
        (wide, torch.int64),
        masks[mask],
        ((batch,), torch.uint8),
    )


def build_tree(
    root,
    tokens,
    parents,
    *,
    prefix,
    num_nodes,
    scores=None,
    mask="bool",
    columns=None,
    out=None,
):
    """A tree for verify_tree out of drafted candidates, with all that the target's pass needs.

    Candidate c hangs on candidate parents[c] < c, or on the root with -1. With `scores` (a path's
    log-probability, say) the num_nodes - 1 best are taken; a candidate counts no more than what it
    hangs on, so the choice is a tree, and equal scores go to the lowest index. Without, it is the
    first num_nodes - 1. Nodes keep the order of their candidates, so siblings stay in the order in
    which they were drawn. A candidate whose parent is no earlier one is left out with all below it.

    Args:
        root: [B] int64, the last committed token. tokens: [B, C] int64. parents: [B, C] int32.
            C <= 2048.
        prefix: [B] int64: position of the root, and the number of cache columns in front of it.
        num_nodes: N, root included; 1 to 1024. Where candidates are fewer, pads follow.
        scores: [B, C] float32; NaN is the worst.
        mask: "bool" [B, N, N]; "packed" [B, N, ceil(N / 32)] int32, bit j % 32 of word j // 32;
            "full" [B, N, columns] bool: columns 0 .. prefix - 1 are seen by all, the nodes' own
            follow from column prefix on, what is behind them is not seen; "none".
        columns: of a full mask; at least prefix + N.
        out: Tree of contiguous tensors to write.

    Returns:
        Tree; `out` where given. Everything is decided on the device, in one launch.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: the choice of the best candidates after Li et al. 2406.16858 (EAGLE-2), section 4.2;
    masks and positions as SGLang's `build_tree_kernel_efficient` lays them out.
    """
    op = "build_tree"
    batch, count = checks.sizes(op, "tokens", tokens, "[B, C]")
    device = tokens.device
    checks.tensor(op, "tokens", tokens, (batch, count), torch.int64, device)
    checks.tensor(op, "parents", parents, (batch, count), torch.int32, device)
    checks.tensor(op, "root", root, (batch,), torch.int64, device)
    checks.tensor(op, "prefix", prefix, (batch,), torch.int64, device)
    checks.contiguous(op, "root", root)
    checks.contiguous(op, "prefix", prefix)
    if scores is not None:
        checks.tensor(op, "scores", scores, (batch, count), torch.float32, device)
    if count > _MAX_CANDIDATES:
        raise ValueError(f"{op}: tokens: got C = {count}, expected at most {_MAX_CANDIDATES}")
    checks.integer(op, "num_nodes", num_nodes, 1, _MAX_NODES)
    if not isinstance(mask, str) or mask not in _MASKS:
        raise ValueError(f"{op}: mask: got {mask!r}, expected one of {', '.join(_MASKS)}")
    if (columns is not None) != (mask == "full"):
        raise ValueError(f"{op}: columns: got {columns}, expected it with mask='full' alone")
    if columns is not None:
        checks.integer(op, "columns", columns, num_nodes, 2**31 - 1)
    shapes = _tree_shapes(batch, num_nodes, mask, columns)
    if out is None:
        made = (None if s is None else torch.empty(s[0], dtype=s[1], device=device) for s in shapes)
        out = Tree(*made)
    else:
        if not isinstance(out, Tree):
            raise TypeError(f"{op}: out: got {type(out).__name__}, expected a Tree")
        for name, value, shape in zip(Tree._fields, out, shapes):
            if shape is None:
                continue
            checks.tensor(op, f"out.{name}", value, shape[0], shape[1], device)
            checks.contiguous(op, f"out.{name}", value)
    _build_tree(
        root, tokens, parents, scores, prefix, _MASKS[mask],
        *out[:5], None if mask == "none" else out.mask, out.status,
    )  # fmt: skip
    return out


def _launch_compact_accepted(path, num_accepted, tensors, out):
    code = _C.compact_accepted(
        path=path.data_ptr(),
        num_accepted=num_accepted.data_ptr(),
        batch=path.size(0),
        width=path.size(1),
        nodes=tensors[0].size(1),
        inputs=[t.data_ptr() for t in tensors],
        outputs=[t.data_ptr() for t in out],
        bytes=[t[0, 0].numel() * t.element_size() if t.numel() else 0 for t in tensors],
        batch_strides=[t.stride(0) * t.element_size() for t in tensors],
        node_strides=[t.stride(1) * t.element_size() for t in tensors],
        **target(path),
    )
    check_status("compact_accepted", code)


_compact_accepted = define(
    "compact_accepted(Tensor path, Tensor num_accepted, Tensor[] tensors, Tensor(a!)[] out) -> ()",
    _launch_compact_accepted,
)


def compact_accepted(path, num_accepted, *tensors, out=None):
    """The accepted nodes' rows of some tensors, root first: out[b, i] = tensor[b, path[b, i]].

    Args:
        path: [B, W] int32, num_accepted: [B] int32, as verify_tree returns them. Entries rise; one
            that does not, or is no node, ends the path.
        tensors: up to 16 of shape [B, N, ...] and any dtype: tokens, hidden states, positions, ..;
            a node's row is contiguous.
        out: as many contiguous tensors [B, W, ...].

    Returns:
        A tuple of tensors [B, W, ...]; rows behind the path are zero. One launch for all.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: what SGLang and TensorRT-LLM do with `accept_index` after a tree was verified.
    """
    op = "compact_accepted"
    batch, width = checks.sizes(op, "path", path, "[B, W]")
    _check_path(op, path, num_accepted)
    if not 1 <= len(tensors) <= _MAX_TENSORS:
        raise ValueError(f"{op}: tensors: got {len(tensors)}, expected 1 to {_MAX_TENSORS}")
    for i, value in enumerate(tensors):
        name = f"tensors[{i}]"
        if not isinstance(value, torch.Tensor) or value.dim() < 2:
            raise TypeError(f"{op}: {name}: got {type(value).__name__}, expected a [B, N, ..]")
        shape = (batch, tensors[0].size(1), *value.shape[2:])
        if value.shape != shape:
            raise ValueError(f"{op}: {name}: got {list(value.shape)}, expected {list(shape)}")
        if value.device != path.device:
            raise ValueError(f"{op}: {name}: got {value.device}, expected {path.device}")
        if value.numel() and not value[0, 0].is_contiguous():
            raise ValueError(f"{op}: {name}: got strides {value.stride()}, expected whole rows")
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{op}: {name}: got a tensor that requires grad, expected none: the op has no "
                f"gradient (call it under torch.no_grad())"
            )
    if out is None:
        out = tuple(t.new_empty(batch, width, *t.shape[2:]) for t in tensors)
    else:
        if len(out) != len(tensors):
            raise ValueError(f"{op}: out: got {len(out)} tensors, expected {len(tensors)}")
        for i, (value, like) in enumerate(zip(out, tensors)):
            name = f"out[{i}]"
            checks.tensor(op, name, value, (batch, width, *like.shape[2:]), like.dtype, path.device)
            checks.contiguous(op, name, value)
    if tensors[0].size(1) == 0:  # no rows to read
        return tuple(value.zero_() for value in out)
    _compact_accepted(path, num_accepted, tensors, out)
    return tuple(out)


def _check_path(op, path, num_accepted):
    checks.tensor(op, "path", path, path.shape, torch.int32, path.device)
    checks.contiguous(op, "path", path)
    checks.tensor(op, "num_accepted", num_accepted, (path.size(0),), torch.int32, path.device)
    checks.contiguous(op, "num_accepted", num_accepted)


def _launch_kv_move(caches, path, num_accepted, start, page_table, nhd):
    first, size = caches[0], caches[0].element_size()
    slot_dim, head_dim = (1, 2) if nhd else (2, 1)
    paged = page_table is not None
    pages = page_table.size(1) if paged else 0
    page_size = first.size(slot_dim)
    code = _C.kv_move(
        path=path.data_ptr(),
        num_accepted=num_accepted.data_ptr(),
        start=start.data_ptr(),
        page_table=page_table.data_ptr() if paged else 0,
        batch=path.size(0),
        width=path.size(1),
        pages=pages,
        page_size=page_size,
        page_count=first.size(0),
        slots=pages * page_size if paged else page_size,
        heads=first.size(head_dim),
        bytes=first.size(3) * size,
        batch_stride=first.stride(0) * size,
        slot_stride=first.stride(slot_dim) * size,
        head_stride=first.stride(head_dim) * size,
        caches=[cache.data_ptr() for cache in caches],
        **target(path),
    )
    check_status("kv_move", code)


_kv_move = define(
    "kv_move(Tensor(a!)[] caches, Tensor path, Tensor num_accepted, Tensor start, "
    "Tensor? page_table, bool nhd) -> ()",
    _launch_kv_move,
)


def kv_move(caches, path, num_accepted, start, *, layout="NHD", page_table=None):
    """Moves the accepted nodes' keys and values to the front, in place, in all layers at once.

    The target has written node n of request b at cache slot start[b] + n. Afterwards slot
    start[b] + i holds what node path[b, i] had, i = 0 .. num_accepted[b]. Slots only move down, so
    source and destination may overlap.

    Args:
        caches: keys and values of every layer, all of one shape, dtype and strides, up to 384
            a launch; the last dimension contiguous.
            layout "NHD": [B, L, H, D], with a page table [P, page_size, H, D];
            "HND": [B, H, L, D], with a page table [P, H, page_size, D].
        path: [B, W] int32, num_accepted: [B] int32, as verify_tree returns them. Entries rise; one
            that does not, or whose slot does not exist, ends the request's move.
        start: [B] int64, slot of the root.
        page_table: [B, pages] int32: slot s lies in page page_table[b, s // page_size]. No page may
            belong to two requests beyond the root's slot.

    Raises:
        TypeError, ValueError: an argument does not fit.

    Source: what SGLang (`move_accept_tokens_to_target_kvcache`) and TensorRT-LLM
    (`updateKVBlockArrayDraftTokenLocation`) do, for any page size and for all layers in one launch.
    """
    op = "kv_move"
    batch, _ = checks.sizes(op, "path", path, "[B, W]")
    _check_path(op, path, num_accepted)
    device = path.device
    checks.tensor(op, "start", start, (batch,), torch.int64, device)
    checks.contiguous(op, "start", start)
    if layout not in ("NHD", "HND"):
        raise ValueError(f"{op}: layout: got {layout!r}, expected 'NHD' or 'HND'")
    if not isinstance(caches, (list, tuple, torch.Tensor)):
        raise TypeError(f"{op}: caches: got {type(caches).__name__}, expected a list of tensors")
    caches = list(caches)
    if not caches:
        raise ValueError(f"{op}: caches: got none, expected keys and values")
    checks.sizes(op, "caches[0]", caches[0], "[B, L, H, D]")
    first = caches[0]
    for i, cache in enumerate(caches):
        checks.tensor(op, f"caches[{i}]", cache, first.shape, first.dtype, device)
        if cache.stride() != first.stride():
            raise ValueError(
                f"{op}: caches[{i}]: got strides {cache.stride()}, expected {first.stride()}"
            )
    if page_table is None:
        if first.size(0) != batch:
            raise ValueError(f"{op}: caches[0]: got batch {first.size(0)}, expected {batch}")
    else:
        pages = checks.sizes(op, "page_table", page_table, "[B, pages]")[1]
        checks.tensor(op, "page_table", page_table, (batch, pages), torch.int32, device)
        checks.contiguous(op, "page_table", page_table)
    _kv_move(caches, path, num_accepted, start, page_table, layout == "NHD")
