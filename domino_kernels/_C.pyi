"""Pointers are tensor.data_ptr(), strides count elements, the result is a status (0 = ok).

device = -1 runs the CPU twin; otherwise the kernel is queued on `stream` of that CUDA device.
Field by field: csrc/<family>/<op>.h.
"""

F32: int
F16: int
BF16: int

def status_name(status: int) -> str: ...
def status_text(status: int) -> str: ...
def gru_step(
    *,
    out: int,
    x: int,
    state: int,
    w_ih: int,
    w_hh: int,
    batch: int,
    inputs: int,
    units: int,
    out_stride: int,
    x_stride: int,
    state_stride: int,
    dtype: int,
    device: int,
    stream: int,
) -> int: ...
def draft_chain(
    *,
    tokens: int,
    scores: int,
    workspace: int,
    base_logits: int,
    hidden: int,
    anchor: int,
    w_ih: int,
    w_hh: int,
    w1: int,
    w2: int,
    embedding: int,
    batch: int,
    drafts: int,
    first_slot: int,
    prefix: int,
    vocab: int,
    inputs: int,
    units: int,
    rank: int,
    base_batch_stride: int,
    base_slot_stride: int,
    hidden_batch_stride: int,
    hidden_slot_stride: int,
    dtype: int,
    base_dtype: int,
    device: int,
    stream: int,
) -> int: ...
def draft_chain_workspace(*, batch: int, drafts: int, units: int, rank: int) -> int: ...
def noise(
    *,
    out: int,
    seed: int,
    block_start: int,
    batch: int,
    count: int,
    i: int,
    purpose: int,
    kind: int,
    device: int,
    stream: int,
) -> int: ...
def verify_chain(
    *,
    tokens: int,
    num_accepted: int,
    num_emitted: int,
    chosen_logprob: int,
    status: int,
    workspace: int,
    target_logits: int,
    draft_tokens: int,
    temperature: int,
    seed: int,
    block_start: int,
    draft_logits: int,
    draft_temperature: int,
    cu_rows: int,
    batch: int,
    drafts: int,
    vocab: int,
    total_rows: int,
    target_batch_stride: int,
    target_row_stride: int,
    draft_tokens_stride: int,
    draft_batch_stride: int,
    draft_row_stride: int,
    target_dtype: int,
    draft_dtype: int,
    device: int,
    stream: int,
) -> int: ...
