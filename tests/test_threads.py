"""Calls from several threads: the same bits, and the GIL is free while a CPU twin runs."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from domino_kernels import HeadWeights, draft_chain, verify_chain


def test_threads_do_not_meet(generator):
    def draw(*shape):
        return torch.randn(shape, generator=generator)

    head = HeadWeights(draw(24, 16), draw(24, 8), draw(6, 24), draw(500, 6), draw(500, 16))
    jobs = []
    for _ in range(8):
        anchor = torch.randint(500, (2,), generator=generator)
        jobs.append((draw(2, 16, 500), draw(2, 16, 16), anchor, draw(2, 16, 500)))

    def run(job):
        base, hidden, anchor, logits = job
        drafts = draft_chain(base, hidden, anchor, head)
        sampling = dict(temperature=torch.ones(2), seed=anchor, block_start=anchor)
        return torch.cat((drafts, verify_chain(logits, drafts, rule="token", **sampling).tokens), 1)

    expected = [run(job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for got, want in zip(pool.map(run, jobs), expected):
                assert torch.equal(got, want)


def test_gil_is_free_during_a_call():
    """With the GIL held, this thread could not wake between the call's start and its end."""
    logits, drafts = torch.zeros(16, 1, 1 << 20), torch.empty(16, 0, dtype=torch.int64)
    entered, left = threading.Event(), threading.Event()

    def call():
        entered.set()
        verify_chain(logits, drafts)
        left.set()

    thread = threading.Thread(target=call)
    thread.start()
    entered.wait()
    awake = 0
    while not left.is_set():
        time.sleep(0.001)
        awake += 1
    thread.join()
    assert awake >= 5
