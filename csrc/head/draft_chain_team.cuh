// draft_chain, team form: what chain_block does, on sm_90 for few batch rows and with an input
// table; formula, rounding points and score bits stand in draft_chain.h, and all bits are those of
// chain_block.
//
// All blocks are resident (the launch is cooperative, in clusters of 8, or of 16 where there are
// few rows: a step is bound by the instructions of a block). The first are teams, a cluster a batch
// row (team_role.cuh); the others hold W_hh, 32 units each (team_state.cuh). A step goes round
// inside the team, where each block tells all others through their shared memory
//
//   keys of y_j  -> its argmax; with the row of the input table and W_hh S_{j-1}: S_j
//   S_j          -> u = SiLU(W1h H + W1s S_j)
//   u            -> scores of its ids, its best key
//
// while S_j goes through L2 to the blocks with W_hh, and W_hh S_j comes back in time for the next
// step. A value of step j + 1 stands where that of step j did: whoever sends it has the keys of
// step j from all warps that score, which have u of step j from all blocks, which have S_j from
// all; so all have read what it replaces. S_j in L2 has two places, because only W_hh S_{j-1} says
// that S_{j-1} has been read.
//
// A warp waits for at most kPatience cycles (chain_exchange.cuh). Bound by latency: 0.17 us an
// exchange in the cluster, 1 us through L2 and back.
#pragma once

#include "head/team_role.cuh"
#include "head/team_state.cuh"

namespace domino {

static_assert(kTeamRows <= kCertainRows);  // no certificate of its rows is cut
constexpr uint32_t kSettling = 1 << 17;    // cycles, about 66 us: no message takes as long

// previous_launch_done() without letting the next one start.
__device__ __forceinline__ void await_previous_launch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// kSteps: MMAs that a part of the units takes; kRank: TeamRole; kTeam: blocks of a cluster.
template <class T, int kSteps, int kRank, int kTeam>
__global__ void __launch_bounds__(kTeamThreads, 1) chain_team(const __grid_constant__ TeamArgs p) {
  extern __shared__ __align__(128) char memory[];
  __shared__ int start[kTeamRows];  // the first draft of each row of the launch
  const int drafts = static_cast<int>(p.drafts), thread = static_cast<int>(threadIdx.x);

  const auto nothing_to_do = [&] {  // in any block: leave all as it is
    previous_launch_done();
    const bool pending = thread < p.teams && p.first_of(1)[p.row0 + thread] < p.row_done();
    return __syncthreads_or(pending) == 0;
  };
  bool ahead = false;  // weights come while the certificate ends, because it has found something
  if (p.restart) {
    allow_next_launch();  // which waits for this one, and mostly leaves at once as well
    const volatile uint32_t* const found = &p.control->found;
    ahead = __syncthreads_or(thread == 0 && *found != 0);
    if (!ahead && nothing_to_do()) return;
  }
  // no launch in front that still runs changes it, unless loads are ahead
  uint32_t epoch = p.control->epoch + 1;
  const auto exchange_of = [&] {
    return ChainExchange(p.exchange, static_cast<int>(p.units), static_cast<int>(p.rank), epoch);
  };
  ChainExchange exchange = exchange_of();
  const auto in_vain = [&] {
    if (!ahead) return false;
    if (nothing_to_do()) return true;
    epoch = *const_cast<const volatile uint32_t*>(&p.control->epoch) + 1;
    exchange = exchange_of();
    return false;
  };
  const auto gives_up = [&] {
    const volatile ChainControl* const control = p.control;
    const uint32_t aborted = control->aborted, mute = control->mute;  // both on their way at once
    return aborted != 0 || mute == blockIdx.x + 1;
  };
  // Between the loads of a role's weights and its steps: whether the block runs.
  const auto begin = [&] {
    cluster_arrive_relaxed();
    await_previous_launch();
    if (thread < kTeamRows) {
      int first = drafts;
      if (thread < p.teams) first = begin_row(p, p.restart, p.row0 + thread, blockIdx.x == 0);
      start[thread] = first;
    }
    const bool leaves = __syncthreads_or(gives_up());
    cluster_wait();
    return !leaves;
  };

  if (blockIdx.x < p.teams * kTeam) {
    TeamRole<T, kSteps, kRank, kTeam> role(p, memory);
    const bool first_state = !p.restart && p.temperature == nullptr && p.prefix > 0;
    role.load(exchange, first_state);
    if (in_vain()) return;
    const bool runs = begin();
    const int first = start[role.team];
    if (runs && first < drafts) role.run(exchange, first, first_state ? 1 : first, epoch);
  } else {
    const int unit0 = (blockIdx.x - p.teams * kTeam) * kStateUnits;
    StateRole<T, kSteps> role;
    role.load(p, memory, unit0);
    if (in_vain()) return;
    const bool runs = begin();
    allow_next_launch();  // with the blocks of teams
    exchange.clear_other((blockIdx.x - p.teams * kTeam) * kTeamThreads + thread,
                         (gridDim.x - p.teams * kTeam) * kTeamThreads);
    int from = drafts;
    if (runs && unit0 < p.units)
      for (int row = 0; row < p.teams; ++row) from = min(from, start[row]);
    if (from < drafts) role.run(p, exchange, memory, start, unit0, max(from - 1, 0), epoch);
  }
  cluster_arrive_relaxed();  // nobody sends to a block that has left
  const bool waited = !gives_up();
  cluster_wait();
  leave_chain(p.control);
  // A block that stayed silent or gave up has not waited for what it was sent. That may still be on
  // its way, and ends in a launch failure where it meets a block that has left.
  if (!waited)
    for (const uint32_t since = cycles(); cycles() - since < kSettling;) {
    }
}

}  // namespace domino
