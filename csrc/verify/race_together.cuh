// The race of a team (team_race.cuh), its walk, and what is left to do of it where words leave that
// open (end_by_value.cuh).
#pragma once

#include "verify/end_by_value.cuh"
#include "verify/team_race.cuh"

namespace domino {

constexpr int kRacers = kJudge * kWarpSize;  // threads of a block
constexpr int kQuadsAhead = 4;               // of four tokens, of a thread
// words of a team's blocks, six a row at most: as many as collect_words() takes
static_assert(6 * kMostTeamRows <= kMostGreedyParts * kGreedyWarps);

// Writes what comes of a request whose walk is known to end in row `stop`, with `token`, and leaves
// its words at 0. By the warp that judges its last row.
__device__ __forceinline__ void end_walk(const ChainRequest& r, const RaceTeam& team,
                                         const TeamWords& heard, int stop, int64_t token,
                                         int64_t x) {
  const int lane = threadIdx.x % kWarpSize;
  const uint32_t low =
      static_cast<uint32_t>(__shfl_sync(kFullMask, heard.found.x, 2 * lane % kWarpSize));
  if (lane < 2 * team.rows)
    *reinterpret_cast<ulonglong2*>(team.verdicts + lane * 2) = ulonglong2{0, 0};
  write_walk(r, stop, token, x, low);
}

// Settles rows of the team by value until one of them stops. By the cluster of its last row; or,
// where the counts of a row do not tell its values apart (own), by that of the row, which settles
// it and does not race.
template <bool kDense>
static __device__ __noinline__ void end_apart(const VerifyChainParams& p, RowCluster cluster,
                                              int64_t b, int i, bool own, ListedBlock& block) {
  const int lane = threadIdx.x % kWarpSize;
  const bool judges = cluster.rank == cluster.size - 1 && threadIdx.x / kWarpSize == kJudge;
  const ChainRequest r(p, b);
  const auto team = RaceTeam::of(r, i, cluster);
  int row = i;
  const bool last_row = row == team.rows - 1;
  const bool waits = own;  // for the other blocks
  bool settles = own;
  TeamWords heard;
#pragma unroll 1
  for (;;) {
    if (settles) {
      const SettledRow settled = settle_by_value<false, kDense>(p, cluster, b, row, block);
      if (judges)
        store_verdict(team.verdicts + row * kVerdictWords,
                      row_word(settled.stops, settled.token, settled.status), 0.0f, 0.0f, 0.0f);
      if (own && threadIdx.x == 0) team.leave_key(kNotRaced);
      own = false;
      if (!last_row) return;
      cluster.sync();
    }
    row = heard.wait<false>(team, kMostPolls);
    if (row < 0) __trap();
    settles = (static_cast<uint32_t>(heard.word(row, 0)) & (kWordRaces | kWordOpen)) != 0;
    if (!settles) break;
  }
  cluster.meet();  // until here others look for the words, which end_walk() takes away
  if (!judges) return;
  if (waits) {
    bool missing;
    if (heard.wait<true>(team, kMostPolls) < 0) __trap();
    collect_words(team.keys, team.parts, &missing);
    if (missing) __trap();
  }
  const int64_t x = lane < r.rows - 1 ? r.draft_token(lane) : -1;
  end_walk(r, team, heard, row, static_cast<int64_t>(heard.word(row, 0) >> 32) - 1, x);
}

// What a block does once its part in the verdicts is done, and its threads do not look at other
// blocks' shared memory any more: the race for the token behind the walk, and the walk. block: free
// shared memory. By all threads of all blocks of the team.
template <bool kDense>
__device__ __forceinline__ void race_together(const VerifyChainParams& p, const ChainRequest& r,
                                              const RowCluster& cluster, const RaceTeam& team,
                                              int i, const BlockNoise& noise, TeamShared& s,
                                              ListedBlock& block) {
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const int64_t b = r.b;
  const int vocab = static_cast<int>(p.vocab);
  const bool judge = cluster.rank == cluster.size - 1 && warp == kJudge;
  const bool last_row = i == team.rows - 1;
  cluster.arrive();
  // worked out here, while others are waited for, and not where they are used
  float scale = law_scale(r.temperature), draft_scale = law_scale(r.draft_temperature);
  int first = team.part * team.share, last = first + team.count(vocab);
  asm volatile("" : "+f"(scale), "+f"(draft_scale), "+r"(first), "+r"(last));
  const bool collects = judge && last_row;
  TeamWords heard;
  int stop = -1;
  int64_t x = -1;  // a lane a draft
  if (warp == kJudge) {
    if (lane < r.rows - 1) x = r.draft_token(lane);
    stop = heard.wait<false>(team, collects ? kMostPolls : kPatience);
    EndOfWalk end{stop, 0, 0, -1, 0.0f, 0.0f, 0.0f};
    if (stop >= 0) {
      const unsigned long long word = heard.word(stop, 0);
      end = {stop,
             static_cast<uint32_t>(word),
             static_cast<uint32_t>(word >> 32),
             static_cast<int32_t>(__shfl_sync(kFullMask, x, stop)),
             __uint_as_float(static_cast<uint32_t>(heard.word(stop, 1))),
             __uint_as_float(static_cast<uint32_t>(heard.word(stop, 2))),
             __uint_as_float(static_cast<uint32_t>(heard.word(stop, 3)))};
    }
    if (lane == 0) s.end = end;
    asm volatile("barrier.cta.arrive 1, %0;" ::"n"(kCutThreads) : "memory");
    if (end.takes_pool(r))
      s.pooled.list(r, end.row, end.draft_law(draft_scale), first * 4, (last - first) * 4);
  } else {
    sync_some<1>(kCutThreads);
    const EndOfWalk end = s.end;
    unsigned long long key = kNoWinner;
    if (end.races()) {
      const auto* tokens = reinterpret_cast<const uint2*>(r.target_row(end.row).data);
      const uint2* draft = nullptr;  // row of q
      if (kDense && end.by_law()) draft = reinterpret_cast<const uint2*>(r.draft_row(end.row).data);
      uint2 ahead[kQuadsAhead], of_draft[kQuadsAhead];
      int from = first + warp * kWarpSize;
      const auto load = [&] {
#pragma unroll
        for (int n = 0; n < kQuadsAhead; ++n) {
          const int at = from + n * kRacers + lane;
          ahead[n] = of_draft[n] = {0xff80ff80u, 0xff80ff80u};
          if (at < last) ahead[n] = __ldg(tokens + at);
          if (kDense && draft != nullptr && at < last) of_draft[n] = __ldg(draft + at);
        }
      };
      load();  // ahead of what is to be known about the row
      const Purpose purpose = (end.how & kWordReplaces) != 0 ? kResidualDraw : kBonusDraw;
      TeamRace contest(end, scale, draft_scale, RaceNoise{noise, purpose, end.row}, &s.pooled);
#pragma unroll 1
      for (;;) {
#pragma unroll 1
        for (int at = from; at < min(last, from + kQuadsAhead * kRacers); at += kRacers) {
          contest.meet<kDense>((at + lane) * 4, ahead[0], of_draft[0]);
#pragma unroll
          for (int n = 1; n < kQuadsAhead; ++n) {
            ahead[n - 1] = ahead[n];
            of_draft[n - 1] = of_draft[n];
          }
        }
        from += kQuadsAhead * kRacers;
        if (from >= last) break;
        load();
      }
      key = contest.least();
    }
    if (lane == 0) s.keys[warp] = key;
    sync_some<2>(kRacers);
    if (warp == 0) {
      key = least_of_warp(lane < kJudge ? s.keys[lane] : kNoWinner);
      const bool raced = end.row >= 0 && !(end.takes_pool(r) && s.pooled.crowded());
      if (lane == 0) team.leave_key(!raced ? kNotRaced : key == kNoWinner ? kNoKey : ~key);
    }
  }
  if (!last_row) return cluster.wait();

  if (collects) {
    if (stop < 0 || heard.wait<true>(team, kMostPolls) < 0) __trap();
    bool missing;
    const unsigned long long best =
        greatest_of_warp(collect_words(team.keys, team.parts, &missing));
    if (missing) __trap();
    const unsigned long long first_word = heard.word(stop, 0);
    const uint32_t how = static_cast<uint32_t>(first_word);
    const bool races = (how & kWordRaces) != 0;
    const bool open = (how & kWordOpen) != 0 ||
                      (races && (best == kNotRaced || best == kNoKey || (~best & 1) != 0));
    if (lane < cluster.size)
      send_shared(shared_address_of(&s.go, lane), open ? 1 : 0,
                  shared_address_of(&s.go_here, lane));
    if (!open)
      end_walk(r, team, heard, stop,
               races ? static_cast<int64_t>(static_cast<uint32_t>(~best) >> 1)
                     : static_cast<int64_t>(first_word >> 32) - 1,
               x);
  }
  wait_for(&s.go_here);
  cluster.wait();
  if (s.go != 0) end_apart<kDense>(p, cluster, b, i, false, block);
}

}  // namespace domino
