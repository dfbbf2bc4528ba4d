// Last launch of verify_tree: the path and the token that follows it.
//
// A block owns 2048 tokens of the vocabulary of one request. Each finds the path from what the
// first launch has left at the nodes and races its tokens for the last one; the block that arrives
// last writes it. The first block writes the path. Bytes: one row a request; bound by latency.
#pragma once

#include "verify/tree_judge.cuh"

namespace domino {

struct SharedWalk {
  int16_t step[kMaxTreeNodes];
  uint8_t state[kMaxTreeNodes];  // status of a node
  int16_t path[kMaxTreeNodes];
  bool found[kMaxTreeNodes];  // traversal: a kept node in the subtree
  uint32_t status;
  int last;  // index of the last node of the path
};

// Fills walk->path, last and status. All threads of the block; synchronises.
__device__ inline void find_path(const TreeRequest& r, const NodeRecord* records,
                                 const SharedTree& tree, SharedWalk* walk) {
  const bool traversal = r.rule == TreeRule::kTraversal;
  if (threadIdx.x == 0) walk->status = tree.faults;
  if (traversal)
    for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) walk->found[n] = false;
  __syncthreads();
  for (int n = threadIdx.x; n < r.nodes; n += blockDim.x) {
    const NodeRecord& record = records[n];
    if (!traversal) {
      walk->step[n] = static_cast<int16_t>(record.step);
      walk->state[n] = static_cast<uint8_t>(record.status);
      continue;
    }
    if (record.status != 0) atomicOr(&walk->status, record.status);
    if (n == 0 || !(record.start > 0.0f) || !(r.child_coin(n) <= record.keep)) continue;
    for (int m = n; m > 0; m = tree.parent[m]) walk->found[m] = true;
  }
  __syncthreads();
  if (threadIdx.x < kWarpSize) {
    int n = 0, last = 0;
    for (;; ++last) {
      int step = -1;
      if (traversal) {
        tree.for_each_child(n, [&](int c, int, bool) {
          if (walk->found[c]) step = c;
          return step < 0;
        });
      } else {
        step = walk->step[n];
      }
      if (threadIdx.x == 0) walk->path[last] = static_cast<int16_t>(n);
      if (step < 0) break;
      n = step;
    }
    if (threadIdx.x == 0) walk->last = last;
  }
  __syncthreads();
  if (!traversal)
    for (int i = threadIdx.x; i <= walk->last; i += blockDim.x)
      if (const uint32_t status = walk->state[walk->path[i]]; status != 0)
        atomicOr(&walk->status, status);
  __syncthreads();
}

// This thread's best of tokens first .. first + kShare - 1. `skip`: a bit a token. By all threads.
__device__ inline Runner race_share(const TreeRequest& r, const TreeWorkspace& workspace,
                                    const SharedTree& tree, int n, const NodeRecord& record,
                                    TreeDraw kind, int64_t first, uint32_t* skip) {
  const int64_t at = r.b * r.p.width + n, end = min(first + kShare, r.p.vocab);
  const RowReader reader{r.target_row(n), static_cast<int>(r.p.vocab)};
  const NodeLaw law(record.stats, r.temperature,
                    r.filters().any(r.p.vocab) ? workspace.filters + at : nullptr);
  const RaceNoise noise{r.noise(), kind == TreeDraw::kPlain ? kBonusDraw : kResidualDraw, n};
  const bool dense = kind == TreeDraw::kResidual && r.p.draft_logits != nullptr;
  const bool pooled = kind == TreeDraw::kResidual && !dense;
  Runner best;
  if (pooled || kind == TreeDraw::kWithoutChildren) {
    for (int i = threadIdx.x; i < kShare / 32; i += blockDim.x) skip[i] = 0;
    __syncthreads();
    const auto mark = [&](int64_t x) {
      if (x < first || x >= end) return false;
      atomicOr(&skip[(x - first) / 32], 1u << (x - first) % 32);
      return true;
    };
    if (pooled) {
      const int32_t* ids = r.pool_ids(n);
      const LogitRow logits = r.pool_row(n);
      const RowLaw q(workspace.drafts[at], r.draft_temperature);
      for (int m = threadIdx.x; m < r.p.pool; m += blockDim.x) {
        const int64_t x = ids[m];
        if (!mark(x)) continue;
        const float logit = reader.at(x);
        const float weight =
            add_rn(law.probability(logit, x), -mul_rn(record.rho, q.probability(logits.at(m))));
        const NoiseWords words = noise.words(static_cast<uint32_t>(x / 4));
        best.meet(race_key(weight, words.word[x % 4], x), logit);
      }
    } else {
      for (int c = n + 1 + threadIdx.x; c < r.nodes; c += blockDim.x)
        if (tree.parent[c] == n) mark(tree.token[c]);
    }
    __syncthreads();
  }
  const int64_t mine = first + kGroup * threadIdx.x;
  const auto race = [&](auto weight) {
    const Runner other = race_groups(reader, mine, kShare, end, noise, weight);
    best.meet(other.key, other.logit);
  };
  if (dense) {
    const RowLaw q(workspace.drafts[at], r.draft_temperature);
    const LogitRow draft = r.draft_row(n);
    race([&](float logit, int64_t x) {
      return add_rn(law.probability(logit, x), -mul_rn(record.rho, q.probability(draft.at(x))));
    });
  } else if (pooled) {
    race([&](float logit, int64_t x) {
      const bool out = (skip[(x - first) / 32] >> (x - first) % 32 & 1) != 0;
      return out ? 0.0f : law.probability(logit, x);
    });
  } else if (kind == TreeDraw::kWithoutChildren) {
    race([&](float logit, int64_t x) {
      const bool out = (skip[(x - first) / 32] >> (x - first) % 32 & 1) != 0;
      return out ? 0.0f : law.weight(logit, x);
    });
  } else {
    race([&](float logit, int64_t x) { return law.weight(logit, x); });
  }
  return best;
}

// Grid: requests x splits.
__global__ void __launch_bounds__(kFinishThreads)
    tree_finish_kernel(const __grid_constant__ VerifyTreeParams p, int splits) {
  __shared__ SharedTree tree;
  __shared__ SharedWalk walk;
  __shared__ uint32_t skip[kShare / 32];
  __shared__ unsigned long long slots[kWarpSize];
  __shared__ bool is_last;
  const TreeWorkspace workspace(p);
  const int64_t b = blockIdx.x / splits;
  const int split = static_cast<int>(blockIdx.x % splits);
  const TreeRequest r(p, b);
  if (r.nodes > 0) tree.load(r);  // what the call was given; the rest comes from the other launches
  previous_launch_done();
  const NodeRecord* records = workspace.records + b * p.width;
  int last = -1, n = 0;
  TreeDraw kind = TreeDraw::kNone;
  NodeRecord record{};
  uint32_t status = r.faults;
  if (r.nodes > 0) {
    find_path(r, records, tree, &walk);
    last = walk.last;
    n = walk.path[last];
    record = records[n];
    status |= walk.status | record.stats.faults;
    if (record.stats.faults == 0) kind = draw_kind(r.rule, record);
    if (kind != TreeDraw::kNone && record.moved != 0 && record.keep == 0.0f)
      status |= kZeroResidual;
  }
  if (kind == TreeDraw::kNone && split != 0) return;
  int token =
      r.nodes > 0 && kind == TreeDraw::kNone && record.stats.faults == 0 ? record.stats.argmax : -1;
  const auto logprob = [&](int node, int64_t x) {
    return RowLaw(records[node].stats, r.temperature).log_probability(r.target_row(node).at(x));
  };

  if (split == 0) {  // all but the token that is still drawn
    const int accepted = last < 0 ? 0 : last;
    for (int i = threadIdx.x; i < p.width; i += blockDim.x) {
      const int64_t x = i < accepted ? tree.token[walk.path[i + 1]] : i == accepted ? token : -1;
      p.path[b * p.width + i] = i <= last ? walk.path[i] : -1;
      if (i == accepted && kind != TreeDraw::kNone) continue;
      p.out_tokens[b * p.width + i] = x;
      p.chosen_logprob[b * p.width + i] = x >= 0 ? logprob(walk.path[i], x) : 0.0f;
    }
    for (int m = threadIdx.x; m < r.nodes; m += blockDim.x)
      workspace.nodes[b * p.width + m].verdict = 0;
    if (threadIdx.x == 0) {
      p.num_accepted[b] = accepted;
      p.num_emitted[b] = accepted + (token >= 0 || kind != TreeDraw::kNone ? 1 : 0);
      if (kind == TreeDraw::kNone) p.status[b] = static_cast<uint8_t>(status);
    }
    if (kind == TreeDraw::kNone) return;
  }

  const auto log_law = [&](float logit) {
    return RowLaw(record.stats, r.temperature).log_probability(logit);
  };
  Runner mine = race_share(r, workspace, tree, n, record, kind, int64_t{split} * kShare, skip);
  unsigned long long best = block_reduce(mine.key, least_key, slots);
  RaceSlot* shares = workspace.slots + b * splits;
  if (best == kNoWinner ? threadIdx.x == 0 : mine.key == best)
    shares[split] = {best, best == kNoWinner ? 0.0f : log_law(mine.logit), 0};
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t* arrived = &workspace.requests[b].arrived;
    is_last = arrive(arrived, 1) == static_cast<unsigned>(splits) - 1;
    if (is_last) *arrived = 0;
  }
  __syncthreads();
  if (!is_last) return;

  mine.key = kNoWinner;
  float mine_logprob = 0.0f;
  for (int i = threadIdx.x; i < splits; i += blockDim.x) {
    const uint4 words = __ldcg(reinterpret_cast<const uint4*>(shares + i));
    const unsigned long long key = static_cast<unsigned long long>(words.y) << 32 | words.x;
    if (key < mine.key) {
      mine.key = key;
      mine_logprob = __uint_as_float(words.z);
    }
  }
  best = block_reduce(mine.key, least_key, slots);
  if (best == kNoWinner) {  // p without the children, or over q, is nothing up to rounding
    status |= kZeroResidual;
    for (int64_t first = 0; first < p.vocab; first += kShare) {
      const Runner other = race_share(r, workspace, tree, n, record, TreeDraw::kPlain, first, skip);
      mine.meet(other.key, other.logit);
    }
    best = block_reduce(mine.key, least_key, slots);
    mine_logprob = log_law(mine.logit);
  }
  if (mine.key == best) {
    p.out_tokens[b * p.width + last] = static_cast<int64_t>(best & 0xffffffffu);
    p.chosen_logprob[b * p.width + last] = mine_logprob;
    p.status[b] = static_cast<uint8_t>(status);
  }
}

}  // namespace domino
